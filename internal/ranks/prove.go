package ranks

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"helios/internal/errs"
)

// Two ranks prove to each other that they know the secret of the run before either says anything of
// it. Both send a random number. The one that came proves first, by the HMAC of both numbers, so
// that a stranger who comes hears nothing but a random number; then the one that listens. Each
// message after that, up to the list of ranks, carries the HMAC of its bytes under a key of both
// numbers: a job, size, rank or address that was changed on its way is noticed.
//
// A run without a secret does the same with an empty one, which proves nothing.
//
// Data is neither encrypted nor proven: who can change packets between the ranks can change it.

const (
	nonceBytes = 32
	// The fewest bytes of a secret: a stranger who has listened can try words.
	secretBytes = 16
	// MaxSecret is the most bytes of a secret, with the space around it.
	MaxSecret = 4096
)

var (
	errSecret = errors.New("it does not know this run's secret")
	errEarly  = errors.New("it hangs up before it has sent a number")
)

// proven is a connection whose two ends know the secret.
type proven struct {
	net.Conn
	key []byte
	// The kinds of this end's text, and of the other's.
	mine, theirs string
}

func mac(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		_, _ = h.Write(p) // no hash fails
	}
	return h.Sum(nil)
}

// prove makes each end of a connection sure of the other one. came: this end did.
func (g *overTCP) prove(ctx context.Context, c net.Conn, came bool, deadline time.Time) (*proven,
	error) {
	if err := c.SetDeadline(deadline); err != nil {
		return nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })()
	mine := make([]byte, nonceBytes)
	_, _ = rand.Read(mine) // it does not fail
	var theirs []byte
	err := send(c, kindNonce, mine)
	if err == nil {
		theirs, err = expect(c, kindNonce, nonceBytes)
	}
	switch {
	case ctx.Err() == nil && hungUp(err):
		return nil, fmt.Errorf("%w (%w)", errEarly, err)
	case err != nil:
		return nil, err
	case len(theirs) != nonceBytes:
		return nil, fmt.Errorf("a random number of %d bytes comes, it has %d", len(theirs), nonceBytes)
	}
	p := &proven{Conn: c, mine: "came", theirs: "listens"}
	both := [][]byte{[]byte("heliosctl ranks"), mine, theirs}
	if !came {
		p.mine, p.theirs = p.theirs, p.mine
		both[1], both[2] = theirs, mine
	}
	p.key = mac(g.o.Secret, both...)
	if came {
		if err := send(c, kindProof, mac(p.key, []byte(p.mine))); err != nil {
			return nil, err
		}
	}
	proof, err := expect(c, kindProof, sha256.Size)
	if came && ctx.Err() == nil && hungUp(err) {
		// A rank that is killed now does so, too: this is no mistake of the user's for sure.
		return nil, errs.New(errs.Failed,
			"hangs up when this rank proves that it knows the run's secret; give all ranks the same one, by $HELIOS_RANK_SECRET or {rank-secret-file}, and each run a MASTER_PORT of its own (%w)",
			err)
	}
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(proof, mac(p.key, []byte(p.theirs))) {
		return nil, errSecret
	}
	if !came {
		if err := send(c, kindProof, mac(p.key, []byte(p.mine))); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func send(c net.Conn, kind uint8, b []byte) error {
	head := header{kind: kind, total: uint64(len(b))}.encode(b)
	_, err := c.Write(append(head[:], b...))
	return err
}

// expect reads a message of a kind.
func expect(c net.Conn, kind uint8, limit int) ([]byte, error) {
	f, b, err := readFrame(c, nil, limit)
	if err == nil && f.kind != kind {
		err = fmt.Errorf("a message of kind %d comes where one of kind %d should", f.kind, kind)
	}
	return b, err
}

func (p *proven) sendHello(h hello) error {
	b, err := json.Marshal(h)
	if err != nil {
		return err
	}
	if err := p.SetWriteDeadline(time.Now().Add(helloTime)); err != nil {
		return err
	}
	return send(p, kindHello, append(mac(p.key, []byte(p.mine), b), b...))
}

func (p *proven) receiveHello(ctx context.Context, deadline time.Time) (h hello, err error) {
	if err := p.SetReadDeadline(deadline); err != nil {
		return h, err
	}
	defer context.AfterFunc(ctx, func() { _ = p.SetReadDeadline(time.Now()) })()
	b, err := expect(p, kindHello, helloBytes)
	if err != nil {
		return h, err
	}
	if len(b) < sha256.Size || !hmac.Equal(b[:sha256.Size], mac(p.key, []byte(p.theirs),
		b[sha256.Size:])) {
		return h, errs.New(errs.Device, "its first message was changed on its way")
	}
	return h, json.Unmarshal(b[sha256.Size:], &h)
}

// CheckSecret returns a secret without the space around it, and refuses one that is too short.
func CheckSecret(text []byte) ([]byte, error) {
	s := bytes.TrimSpace(text)
	if len(s) < secretBytes || len(text) > MaxSecret {
		return nil, errs.New(errs.Usage,
			"a secret of ranks has %d to %d bytes, this one has %d; \"openssl rand -hex 32\" makes one",
			secretBytes, MaxSecret, len(s))
	}
	// A file of zeros, as a full disk or a crash leaves it, is no secret: HMAC takes it for none.
	if bytes.Count(s, s[:1]) == len(s) {
		return nil, errs.New(errs.Usage,
			"a secret of %d equal bytes is none; \"openssl rand -hex 32\" makes one", len(s))
	}
	return s, nil
}
