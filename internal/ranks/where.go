package ranks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"helios/internal/errs"
)

// lookup asks the system for a name's addresses; tests have names of their own.
var lookup = net.DefaultResolver.LookupNetIP

// addresses looks a name up, IPv4 first.
func addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	all, err := lookup(ctx, "ip", host)
	for dns := (*net.DNSError)(nil); errors.As(err, &dns) && !dns.IsNotFound && ctx.Err() == nil; {
		select { // the name's server may come back, as that of a cluster that starts does
		case <-ctx.Done():
		case <-time.After(time.Second):
			all, err = lookup(ctx, "ip", host)
		}
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "the address of %s is not known here: %w", host, err)
	}
	for i := range all {
		all[i] = all[i].Unmap()
	}
	slices.SortStableFunc(all, func(a, b netip.Addr) int {
		return cmp.Compare(a.BitLen(), b.BitLen())
	})
	return all, nil
}

// noMaster returns the error where the address of the first rank's machine is not known.
func noMaster(err error) error {
	return fmt.Errorf("%w; set MASTER_ADDR to the address of rank 0's machine for all ranks", err)
}

func loopback(all []netip.Addr) bool {
	return !slices.ContainsFunc(all, func(a netip.Addr) bool { return !a.IsLoopback() })
}

// mayMeet refuses an address that others reach where ranks would believe anybody.
func (o Options) mayMeet(where string, all []netip.Addr) error {
	if loopback(all) || len(o.Secret) > 0 || o.Insecure {
		return nil
	}
	return errs.New(errs.Refused,
		"ranks meet at %s, which other machines reach, and share no secret: anybody there could take a rank's place; give all ranks the same secret by $HELIOS_RANK_SECRET or {rank-secret-file}, or allow it by {rank-insecure} in a network of your own",
		where)
}

// listen opens the port at which the others find the first rank: at the address that all know.
// Where that is none of this machine, or other machines do not reach it, the port is of all
// addresses, if a secret keeps strangers out.
func (g *overTCP) listen(ctx context.Context) (net.Listener, error) {
	host, port, err := net.SplitHostPort(g.l.Master)
	if err != nil {
		return nil, err
	}
	if g.o.Listen != "" {
		return g.listenAt(ctx, port)
	}
	all, err := addresses(ctx, host)
	if err != nil {
		return nil, noMaster(err)
	}
	inside, secret := loopback(all), len(g.o.Secret) > 0
	shown := host
	if !isLiteral(host) {
		shown = fmt.Sprintf("%s (%s)", host, listed(all))
	}
	why := "not reached from other machines"
	if !inside || !g.othersCome(host) {
		listener, err := openOne(ctx, all, port)
		switch {
		case err == nil:
			if err := g.o.mayMeet("MASTER_ADDR="+shown, all); err != nil {
				_ = listener.Close()
				return nil, err
			}
			if inside && (g.l.Nodes > 1 || g.l.Nodes == 0 && !isLiteral(host) && host != "localhost") {
				g.o.note(fmt.Sprintf(
					"rank 0 listens at MASTER_ADDR=%s, %s; where ranks run there, give all of them its address in their network, or the same secret (rank-secret-file), with which it listens at all addresses",
					shown, why))
			}
			return listener, nil
		case !errors.Is(err, syscall.EADDRNOTAVAIL):
			return nil, err
		case !secret:
			return nil, errs.New(errs.Usage,
				"MASTER_ADDR=%s is no address of rank 0's machine, %s: give all ranks one that is, name where rank 0 listens by {rank-listen}, or give all ranks a secret ({rank-secret-file}), with which it listens at all addresses",
				shown, hostname())
		}
		why = "no address of this machine, " + hostname()
	}
	g.o.note(fmt.Sprintf("MASTER_ADDR=%s is %s: rank 0 listens at all addresses, port %s", shown,
		why, port))
	return open(ctx, ":"+port)
}

func isLiteral(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// othersCome reports whether ranks of other machines may come, though MASTER_ADDR, host, is
// loopback here.
func (g *overTCP) othersCome(host string) bool {
	return len(g.o.Secret) > 0 && (g.l.Nodes > 1 || g.l.Nodes == 0 && !isLiteral(host))
}

// listenAt opens the port that option rank-listen names.
func (g *overTCP) listenAt(ctx context.Context, port string) (net.Listener, error) {
	host := g.o.Listen
	if !isLiteral(host) && strings.Contains(host, ":") {
		var err error
		if host, port, err = net.SplitHostPort(host); err != nil {
			return nil, errs.New(errs.Usage, "{rank-listen} %q is no ADDRESS or ADDRESS:PORT",
				g.o.Listen)
		}
	}
	all := []netip.Addr{netip.IPv6Unspecified()}
	if host != "" {
		var err error
		if all, err = addresses(ctx, host); err != nil {
			return nil, errs.New(errs.Usage, "{rank-listen}: %w", err)
		}
	}
	if err := g.o.mayMeet(g.o.Listen, all); err != nil {
		return nil, err
	}
	if host == "" {
		return open(ctx, ":"+port)
	}
	listener, err := openOne(ctx, all, port)
	if errors.Is(err, syscall.EADDRNOTAVAIL) {
		err = errs.New(errs.Usage, "{rank-listen} %s is no address of rank 0's machine, %s (%w)",
			g.o.Listen, hostname(), err)
	}
	return listener, err
}

func listed(all []netip.Addr) string {
	var texts []string
	for _, a := range all {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ", ")
}

// openOne opens a port at the first of some addresses that is this machine's.
func openOne(ctx context.Context, all []netip.Addr, port string) (l net.Listener, err error) {
	for _, a := range all {
		l, err = open(ctx, net.JoinHostPort(a.String(), port))
		if !errors.Is(err, syscall.EADDRNOTAVAIL) {
			break
		}
	}
	return l, err
}

func open(ctx context.Context, address string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, errs.New(errs.Usage,
			"%s is in use, by another run or program; give another MASTER_PORT (%w)", address, err)
	case err != nil && !errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, errs.New(errs.Usage, "rank 0 cannot listen at %s (%w)", address, err)
	}
	return l, err
}

// waiting says, while ranks meet, what this one waits for.
type waiting struct {
	mu   sync.Mutex
	what string
	stop chan struct{}
	done chan struct{}
}

// between is the time after which a waiting rank says so again.
const between = 30 * time.Second

func (g *overTCP) startWaiting() *waiting {
	w := &waiting{stop: make(chan struct{}), done: make(chan struct{})}
	began := time.Now()
	go func() {
		defer close(w.done)
		for next := g.o.Patience; ; next = between {
			select {
			case <-w.stop:
				return
			case <-time.After(next):
			}
			w.mu.Lock()
			what := w.what
			w.mu.Unlock()
			g.o.note(fmt.Sprintf("rank %d of %d waits for %s (%v of %v)", g.l.Rank, g.l.Size, what,
				time.Since(began).Round(time.Second), g.o.Join))
		}
	}()
	return w
}

// set changes what is waited for.
func (w *waiting) set(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.what = what
}

func (w *waiting) end() {
	close(w.stop)
	<-w.done
}
