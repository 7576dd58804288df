package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/stripe"
	"helios/gpuio"
	hcli "helios/internal/cli"
	"helios/internal/errs"
)

func unloadCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "unload",
		Usage:     "forget a dataset on the bound SSDs, so that its room there is free",
		ArgsUsage: "DATASET",
		Description: "DATASET is its folder, or its name or UUID as ssds lists them, or SERIAL:SLOT where its superblocks\n" +
			"on an SSD are lost. Its rows, checksums and pages on the SSDs are forgotten; the\n" +
			"folder and the SSDs' other datasets stay. It is refused while somebody reads it.",
	}, 1, hcli.Of[unloadArgs](), runUnload)
}

// unloadArgs holds the options of unload.
type unloadArgs struct{ ssdArgs }

// unloaded is the result of "unload --json".
type unloaded struct {
	UUID string   `json:"uuid,omitempty"`
	SSDs []string `json:"ssds"`
}

func runUnload(ctx context.Context, e *env, a *unloadArgs) (err error) {
	what := e.c.Args().First()
	if what == "" {
		return errs.New(errs.Usage,
			"unload needs a DATASET; \"heliosctl ssds\" lists those on the SSDs")
	}
	set, err := (&ssdOpener{env: e, ssdArgs: a.ssdArgs}).open(ctx)
	if err != nil {
		return whenStopped(err, "nothing was unloaded: run it again")
	}
	defer closing(&err, set.Close)
	if serial, slot, ok := lostSlot(set, what); ok {
		if err := stripe.UnloadSlot(ctx, set.SSDs, serial, slot); err != nil {
			return err
		}
		e.ui.Printf("slot %d of %s is free", slot, serial)
		return e.ui.Event("result", unloaded{SSDs: []string{serial}})
	}
	id, err := datasetNamed(ctx, set, what)
	if err != nil {
		return err
	}
	from, err := stripe.Unload(ctx, set.SSDs, id)
	if err != nil {
		return whenStopped(err, "run it again: it forgets what is left")
	}
	e.ui.Printf("%s is unloaded from %s", what, strings.Join(from, ", "))
	return e.ui.Event("result", unloaded{id.String(), from})
}

// lostSlot reads SERIAL:SLOT of a bound SSD.
func lostSlot(set *ssdSet, what string) (serial string, slot int, ok bool) {
	serial, number, _ := strings.Cut(what, ":")
	slot, err := strconv.Atoi(number)
	return serial, slot, err == nil && slices.ContainsFunc(set.SSDs, func(s *gpuio.SSD) bool {
		return strings.TrimSpace(s.Ctrl.Serial()) == serial
	})
}

// datasetNamed finds a dataset on SSDs by its folder, its name or its UUID.
func datasetNamed(ctx context.Context, set *ssdSet, what string) (id uuid.UUID, err error) {
	folder := false
	if fi, serr := os.Stat(what); serr == nil && fi.IsDir() {
		d, err := dataset.Open(what)
		if err != nil {
			return id, err
		}
		if id, folder = d.UUID(), true; d.Close() != nil {
			return id, errs.New(errs.Failed, "%s: it cannot be closed", what)
		}
	}
	var all []string
	found := map[uuid.UUID]bool{}
	for _, s := range set.SSDs {
		there, _, err := stripe.Contents(ctx, s)
		if err != nil {
			continue // it holds none
		}
		for _, c := range there {
			name := fmt.Sprintf("%s (%s)", c.Name, c.UUID)
			if !slices.Contains(all, name) {
				all = append(all, name)
			}
			if folder && c.UUID == id || !folder && (c.Name == what || c.UUID.String() == what) {
				found[c.UUID] = true
			}
		}
	}
	list := strings.Join(all, ", ")
	if list == "" {
		list = "none"
	}
	switch len(found) {
	case 0:
		return id, errs.New(errs.Usage, "no bound SSD holds a dataset %s; they hold: %s", what, list)
	case 1:
		for id := range found {
			return id, nil
		}
	}
	return id, errs.New(errs.Usage, "%d datasets are called %s: choose one by its UUID, of %s",
		len(found), what, list)
}
