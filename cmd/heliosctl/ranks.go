package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/urfave/cli/v2"

	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/ranks"
	"helios/internal/ui"
	"helios/sched"
)

// rankArgs say how the processes of one run meet.
type rankArgs struct {
	wait    time.Duration
	library string
}

func rankOptions() hcli.Options[rankArgs] {
	return hcli.Options[rankArgs]{
		hcli.Duration(&cli.DurationFlag{Name: "rank-timeout", DefaultText: "10m",
			Usage: "`TIME` that a process waits for the slowest one of its run (RANK and WORLD_SIZE, or mpirun)"},
			func(a *rankArgs) *time.Duration { return &a.wait }).Checked(func(a *rankArgs,
			_ string) error {
			if a.wait < time.Second {
				return errs.New(errs.Usage, "--rank-timeout %s is below 1s", a.wait)
			}
			return nil
		}),
		hcli.Text(&cli.StringFlag{Name: "mpi", DefaultText: "that of mpirun, by its usual name",
			Usage: "MPI library `FILE` under mpirun"},
			func(a *rankArgs) *string { return &a.library }),
	}
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
			"--%s %s: no mpirun started this process; start it with mpirun, or leave the option out",
			name, t.ranks.library)
	}
	if l == nil || l.Size == 1 {
		return nil, nil
	}
	g, err := ranks.Join(ctx, *l, ranks.Options{Job: os.Getenv("TORCHELASTIC_RUN_ID"),
		Wait: t.ranks.wait, Library: t.ranks.library, Note: t.note})
	if err != nil {
		return nil, err
	}
	t.cfg.Rank, t.cfg.Ranks = g.Rank(), g.Size()
	if err := t.takeLocal(l.Local, t.cfg.Replicas); err != nil {
		leaveRanks(g, &err)
		return nil, err
	}
	if g.Rank() > 0 {
		t.env.ui = ui.New(io.Discard, os.Stderr)
		t.env.ui.Quiet = true
		t.results, t.timeline, t.metrics, t.explain = "", "", "", false
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
