package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/urfave/cli/v2"

	"helios/internal/bound"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/fileid"
	"helios/internal/state"
)

func unbindCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "unbind-ssds",
		Usage:     "give SSDs back: NVMe controllers to the kernel's driver; files stay unless --delete is given",
		ArgsUsage: "[SSD…]",
		Description: "NVMe SSDs need root; their data stays as it is. Without names all SSDs are given back: all NVMe SSDs\n" +
			"of the machine, where root asks, and those behind software controllers in the list of whoever asks.",
	}, 1<<20, hcli.Of[unbindArgs]().Without("fault").Says("ssds",
		"which `SSD[,SSD…]`, by name, path, serial or PCI address (default: all)"), runUnbind)
}

type unbindArgs struct {
	ssdArgs
	delete bool `option:"delete" usage:"remove the files that bind-ssds created, and only those"`
}

func runUnbind(ctx context.Context, e *env, o *unbindArgs) error {
	want := append(o.names, e.c.Args().Slice()...)
	u := &unbinder{e, o}
	records, own, err := u.splitUnbind(want)
	if err != nil {
		return err
	}
	if len(want) == 0 && len(records) > 0 && !e.machine.Root() {
		e.ui.Note(
			"NVMe SSDs stay bound (%s): only root unbinds them, with \"sudo heliosctl unbind-ssds\"",
			recordNames(records))
		records = nil
	}
	if len(own) > 0 || len(want) == 0 {
		if err := u.unbindOwn(ctx, own, len(want) == 0); err != nil {
			return err
		}
	}
	if len(records) > 0 {
		return u.unbindControllers(ctx, records)
	}
	return nil
}

// unbinder gives SSDs back.
type unbinder struct {
	*env
	*unbindArgs
}

// unbindOwn gives software SSDs back.
func (u *unbinder) unbindOwn(ctx context.Context, want []string, all bool) error {
	var done []unboundSoftware
	any := false
	err := u.store.Update(ctx, func(st *state.State) error {
		any = len(st.SSDs)+len(st.Unfinished) > 0
		own := &state.State{SSDs: slices.DeleteFunc(slices.Clone(st.SSDs),
			func(d state.SSD) bool { return d.Kind == state.KindVFIO })}
		if !all && len(want) == 0 {
			return nil
		}
		chosen, err := choose(own, want)
		if err != nil {
			return err
		}
		all := make([]string, len(chosen))
		for i, d := range chosen {
			all[i] = d.Name
		}
		lease, err := u.store.Acquire("heliosctl unbind-ssds", all...)
		if err != nil {
			return err
		}
		defer lease.Release()
		if err := u.unusedFiles(ctx, chosen); err != nil {
			return err
		}
		for _, d := range chosen {
			r := unboundSoftware{SSD: d}
			if u.delete && d.Created {
				if r.Deleted, err = removeCreated(d); err != nil {
					return err
				}
			}
			st.SSDs = slices.DeleteFunc(st.SSDs, func(o state.SSD) bool { return o.Name == d.Name })
			done = append(done, r)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, r := range done {
		if err := u.showUnboundSoftware(r); err != nil {
			return err
		}
	}
	if !any {
		u.ui.Printf("no SSD is bound")
	}
	return nil
}

// unusedFiles refuses to delete files that another list, or another machine, has in use.
func (u *unbinder) unusedFiles(ctx context.Context, chosen []state.SSD) error {
	created := slices.DeleteFunc(slices.Clone(chosen), func(d state.SSD) bool {
		return !u.delete || !d.Created
	})
	o := &bound.Opener{Store: u.store, Note: u.plainNote, Machine: &u.machine.Machine}
	return o.Unused(ctx, created)
}

func (u *unbinder) showUnboundSoftware(r unboundSoftware) error {
	switch {
	case r.Deleted:
		u.ui.Printf("%s: unbound, %s deleted", r.Name, r.Path)
	case r.Kind == state.KindComputed:
		u.ui.Printf("%s: unbound; it stored nothing", r.Name)
	case r.Created && r.Kind == state.KindRAM && !u.delete:
		u.ui.Printf("%s: unbound; %s still takes memory, remove it when its data is not needed",
			r.Name, r.Path)
	default:
		u.ui.Printf("%s: unbound, %s stays", r.Name, r.Path)
	}
	return u.ui.Event("unbound", r)
}

// choose finds the SSDs of want, all when it is empty. An SSD that is named twice is an error: the
// user counts on one more than there is.
func choose(st *state.State, want []string) ([]state.SSD, error) {
	if len(want) == 0 {
		return slices.Clone(st.SSDs), nil
	}
	var out []state.SSD
	called := map[string]string{}
	for _, w := range want {
		d, err := st.Find(w)
		if err != nil {
			return nil, errs.New(errs.Usage, "{ssds}: %w", err)
		}
		if before, twice := called[d.Name]; twice {
			return nil, errs.New(errs.Usage,
				"{ssds} names SSD %s twice, as %q and %q; name each once", d.Name, before, w)
		}
		called[d.Name] = w
		out = append(out, d)
	}
	return out, nil
}

// removeCreated removes the file that bind-ssds created, unless another one took its name.
func removeCreated(d state.SSD) (bool, error) {
	fi, err := os.Lstat(d.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	s, ok := fi.Sys().(*syscall.Stat_t)
	// A file system gives the number of a file that is gone to the next one.
	if !ok || !fi.Mode().IsRegular() || fi.Size() != d.Bytes ||
		(fileid.ID{Device: uint64(s.Dev), Inode: s.Ino}).Differs(d.ID) != "" {
		return false, errs.New(errs.Refused,
			"%s is not the file that bind-ssds created for %s; unbind without {delete} and look at it",
			d.Path, d.Name)
	}
	if err := os.Remove(d.Path); err != nil {
		return false, err
	}
	return true, nil
}

// allocated returns what a file takes up on its disk; sparse files take less than their size.
func allocated(fi fs.FileInfo) int64 {
	if s, ok := fi.Sys().(*syscall.Stat_t); ok {
		return s.Blocks * 512
	}
	return fi.Size()
}

// unboundSoftware is a software SSD that was unbound.
type unboundSoftware struct {
	state.SSD
	Deleted bool `json:"deleted"` // its file
}
