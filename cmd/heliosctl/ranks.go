package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"helios/internal/errs"
	"helios/internal/ranks"
	"helios/internal/ui"
	"helios/sched"
)

// rankArgs say how the processes of one run meet.
type rankArgs struct {
	wait       time.Duration `option:"rank-timeout" range:"1s.." group:"Ranks" use:"aside" shown:"5m to meet, then 10m" arg:"TIME" usage:"TIME that a process waits for the slowest one of its run (of torchrun, srun or mpirun), and for all to come"`
	library    string        `option:"mpi" group:"Ranks" use:"aside" shown:"that of mpirun, by its usual name" arg:"FILE" usage:"MPI library FILE under mpirun"`
	secretFile string        `option:"rank-secret-file" group:"Ranks" use:"aside" shown:"$HELIOS_RANK_SECRET" arg:"FILE" usage:"FILE with the secret that all processes of the run know, which is needed where other machines reach MASTER_ADDR"`
	insecure   bool          `option:"rank-insecure" group:"Ranks" use:"aside" usage:"let processes on other machines join without a secret: whoever reaches the port can take part"`
	listen     string        `option:"rank-listen" group:"Ranks" use:"aside" shown:"MASTER_ADDR, or all with a secret where it is another machine's" arg:"ADDRESS[:PORT]" usage:"ADDRESS[:PORT] at which rank 0 listens for the others"`
}

// secretTimeout bounds the wait for a pipe with the secret. Tests shorten it.
var secretTimeout = time.Minute

// secretVar holds the secret of the ranks where no file does.
const secretVar = "HELIOS_RANK_SECRET"

// secret returns the secret of the processes of a run; nil for none.
func (a *rankArgs) secret(note func(string)) ([]byte, error) {
	from, text := "$"+secretVar, []byte(os.Getenv(secretVar))
	if a.secretFile != "" {
		from = a.secretFile
		// A pipe that nobody writes to must not block the run.
		f, err := os.OpenFile(from, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, errs.With(errs.Usage, errs.Errorf("{rank-secret-file}: %w", err))
		}
		defer func() { _ = f.Close() }()                     // it is read only
		_ = f.SetReadDeadline(time.Now().Add(secretTimeout)) // a regular file has no deadline
		if text, err = io.ReadAll(io.LimitReader(f, ranks.MaxSecret+1)); err != nil {
			return nil, errs.With(errs.Usage, errs.Errorf("{rank-secret-file}: %w", err))
		}
		if i, err := f.Stat(); err == nil && i.Mode().IsRegular() && i.Mode()&0o077 != 0 {
			note(from + " holds the secret, and other users may read or write it; run chmod 600 " + from)
		}
	} else if len(text) == 0 {
		return nil, nil
	}
	secret, err := ranks.CheckSecret(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	if a.insecure {
		return nil, errs.New(errs.Usage,
			"{rank-insecure}: there is a secret in %s; leave one of the two out", from)
	}
	return secret, nil
}

// oneProcess refuses a verb that a launcher has started several times at once.
func (e *env) oneProcess() error {
	l, err := ranks.FromEnv(os.LookupEnv)
	if err != nil || l == nil || l.Size == 1 {
		return err
	}
	return errs.New(errs.Usage,
		"this runs in one process, and its launcher started %d (%s=%d); start it once, or with RANK=0 and WORLD_SIZE=1 in each that is to run by itself",
		l.Size, l.By, l.Size)
}

// joinRanks brings this process together with the others of its run; nil where it is alone. Rank 0
// alone speaks and writes: the others say why they fail, and nothing else.
func (t *trainer) joinRanks(ctx context.Context) (ranks.Group, error) {
	l, err := ranks.FromEnv(os.LookupEnv)
	if err != nil {
		return nil, err
	}
	if name := t.given(&t.ranks.library); name != "" && (l == nil || l.MPI == "") {
		return nil, errs.New(errs.Usage,
			"%v %s: no mpirun started this process; start it with mpirun, or leave it out",
			errs.Key(name), t.ranks.library)
	}
	a := &t.ranks
	name := t.given(&a.secretFile, &a.insecure, &a.listen)
	if name != "" && (l == nil || l.MPI != "") {
		return nil, errs.New(errs.Usage,
			"%v is for several processes that meet over TCP, and this is none of them (RANK and WORLD_SIZE are not set, and torchrun or srun did not start it); leave it out",
			errs.Key(name))
	}
	if l == nil {
		return nil, nil
	}
	if l.Note != "" {
		t.plainNote(l.Note)
	}
	if l.Size == 1 {
		return nil, nil
	}
	secret, err := a.secret(t.plainNote)
	if err != nil {
		return nil, err
	}
	g, err := ranks.Join(ctx, *l, ranks.Options{Join: a.wait, Wait: a.wait, Library: a.library,
		Secret:   secret,
		Insecure: a.insecure, Listen: a.listen, Note: t.plainNote})
	if err != nil {
		return nil, err
	}
	t.cfg.Rank, t.cfg.Ranks = g.Rank(), g.Size()
	if err := t.takeLocal(l.Local, t.cfg.Replicas); err != nil {
		leaveRanks(g, &err)
		return nil, err
	}
	if g.Rank() > 0 {
		logJSON := t.env.ui.LogJSON
		t.env.ui = ui.New(io.Discard, os.Stderr)
		t.env.ui.Quiet, t.env.ui.LogJSON = true, logJSON
		t.results, t.timeline, t.serve, t.explain = "", "", "", false
	}
	return g, nil
}

// leaveRanks ends a run of several processes: where this one fails it tells the others, and where
// another one failed first its cause is the error.
func leaveRanks(g ranks.Group, err *error) {
	together := errors.Is(*err, sched.ErrTogether)
	if *err != nil && !together {
		if first := g.Err(); first != nil {
			*err = first
		} else {
			g.Abort(*err)
		}
	}
	if cerr := g.Close(); *err == nil {
		*err = cerr
	}
	if *err != nil && g.Rank() > 0 {
		*err = fmt.Errorf("rank %d: %w", g.Rank(), *err)
	}
}
