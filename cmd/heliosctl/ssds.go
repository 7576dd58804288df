package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset/stripe"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/ui"
	"helios/internal/units"
	"helios/nvme"
	"helios/nvme/proxy"
)

func ssdsCommand() *cli.Command {
	return verb(&cli.Command{
		Name:        "ssds",
		Usage:       "list the bound SSDs and all NVMe controllers: what they are, how they are, what is on them, who has them",
		ArgsUsage:   "[SSD…]",
		Description: "Controllers that the kernel has are asked through its driver, which lets only root see their health,\ntheir content and what has them open. Health and counters come from each controller's SMART log. Those of a software controller\ncount from its power-on, which is the start of the command that uses it.\n\nPages of packed mini-batches and of layouts by part that lie beside a dataset are listed with it, by the identity of their pack;\n--remove-pages forgets those of one on all bound SSDs, or on those that are named, and leaves the rows alone.",
	}, 1<<20, hcli.Of[ssdsArgs]().Without("fault").Says("ssds",
		"which `SSD[,SSD…]`, by name, path, serial or PCI address (default: all, and all NVMe controllers)"),
		runSSDs)
}

// ssdsArgs holds the options of ssds.
type ssdsArgs struct {
	ssdArgs
	remove []string `option:"remove-pages" arg:"ID[,ID…]" usage:"remove the pages of these packs of mini-batches, by their ID[,ID…], and list nothing"` // packs
}

// inspector finds out what SSDs are and how they are.
type inspector struct{ *env }

// ssdReport is a line of "ssds --json".
type ssdReport struct {
	state.SSD
	place
	Model       string       `json:"model,omitempty"`
	Firmware    string       `json:"firmware,omitempty"`
	Health      string       `json:"health"` // "good", or what is wrong
	SMART       *smartReport `json:"smart,omitempty"`
	Allocated   int64        `json:"allocated_bytes"` // what the backing file takes up now
	Dataset     string       `json:"dataset,omitempty"`
	DatasetUUID string       `json:"dataset_uuid,omitempty"`
	Stripe      *int         `json:"stripe,omitempty"`  // from 0, as in every message
	Stripes     int          `json:"stripes,omitempty"` // of the dataset
	RowDType    string       `json:"row_dtype,omitempty"`
	RowBytes    int          `json:"row_bytes,omitempty"`
	Loaded      bool         `json:"loaded"` // the load was finished
	Pages       []pagesLine  `json:"pages,omitempty"`
	// all datasets there; the keys above are of the first
	Datasets []heldLine `json:"datasets,omitempty"`
	Free     int64      `json:"free_bytes,omitempty"` // in one piece, beside datasets
	Content  string     `json:"content"`              // for people
	// what is lost of the second superblock and of the checksum tables, where rows may be whole
	Damage []string `json:"damage,omitempty"`
	InUse  bool     `json:"in_use"` // by another heliosctl
}

// heldLine is a dataset on an SSD.
type heldLine struct {
	Name     string `json:"name"`
	UUID     string `json:"uuid"`
	Stripe   int    `json:"stripe"`
	Stripes  int    `json:"stripes"`
	RowDType string `json:"row_dtype"`
	RowBytes int    `json:"row_bytes"`
	Bytes    int64  `json:"bytes"` // here, with checksums and pages
	Loaded   bool   `json:"loaded"`
}

// pagesLine is a store of pages beside a dataset.
type pagesLine struct {
	Pack      string `json:"pack"`
	Pages     int64  `json:"pages"` // on all its SSDs
	PageBytes int64  `json:"page_bytes"`
	Bytes     int64  `json:"bytes"` // here, checksums left out
	Finished  bool   `json:"finished"`
}

type smartReport struct {
	CriticalWarning  uint8  `json:"critical_warning"`
	TemperatureK     int    `json:"temperature_k"`
	AvailableSpare   uint8  `json:"available_spare_percent"`
	PercentageUsed   uint8  `json:"percentage_used"`
	DataUnitsRead    string `json:"data_units_read"`
	DataUnitsWritten string `json:"data_units_written"`
	HostReads        string `json:"host_reads"`
	HostWrites       string `json:"host_writes"`
	MediaErrors      string `json:"media_errors"`
	UnsafeShutdowns  string `json:"unsafe_shutdowns"`
}

func runSSDs(ctx context.Context, e *env, o *ssdsArgs) error {
	if len(o.remove) > 0 {
		o.names = append(o.names, e.c.Args().Slice()...)
		return removePages(ctx, e, o)
	}
	want := append(o.names, e.c.Args().Slice()...)
	i := &inspector{e}
	bound, others, err := i.listed(want)
	if err != nil {
		return err
	}
	var rows, controllers [][]string
	var bad, next []string
	for _, d := range bound {
		r, err := i.inspect(ctx, d)
		if err != nil {
			if ctx.Err() != nil {
				return err
			}
			r.Health, r.Content = ui.OneLine(err.Error()), "unknown"
			if d.Kind == state.KindVFIO && errs.ClassOf(err) == errs.Capability {
				// who may not use it may still list it
				r.Health, r.Next = "not permitted", ui.OneLine(err.Error())
			} else {
				bad = append(bad, d.Name)
			}
		}
		if err := e.ui.Event("ssd", r); err != nil {
			return err
		}
		rows = append(rows, []string{r.Name, r.Kind, r.Serial, units.FormatBytes(r.Bytes),
			strconv.Itoa(r.LBABytes), modelName(d), r.Health, r.Content, r.Path})
		if d.Kind == state.KindVFIO {
			controllers = append(controllers, controllerRow(r))
		}
		next = appendNext(next, r)
	}
	for k := range others {
		r := i.describe(ctx, &others[k])
		if err := e.ui.Event("ssd", r); err != nil {
			return err
		}
		controllers = append(controllers, controllerRow(r))
		next = appendNext(next, r)
	}
	switch {
	case len(rows) > 0:
		e.ui.Columns(ssdColumns, rows)
	case len(want) == 0:
		e.ui.Printf("no SSD is bound in %s; bind some with \"heliosctl bind-ssds\"", e.store.Dir())
	}
	if len(controllers) > 0 {
		e.ui.Printf("NVMe controllers:")
		slices.SortStableFunc(controllers,
			func(a, b []string) int { return strings.Compare(a[0], b[0]) })
		e.ui.Table([]string{"PCI", "device", "driver", "model", "serial", "size", "LBA", "health",
			"dataset", "held by", "IOMMU group", "NUMA", "link"}, controllers)
	}
	for _, l := range modelLines(bound) {
		e.ui.Printf("%s", l)
	}
	for _, l := range next {
		e.ui.Printf("%s", l)
	}
	if len(bad) > 0 {
		return errs.New(errs.Device, "%s could not be read; the list has the reasons",
			strings.Join(bad, ", "))
	}
	return nil
}

func appendNext(lines []string, r ssdReport) []string {
	if r.Next == "" {
		return lines
	}
	return append(lines, r.Name+": "+r.Next)
}

// inspect brings one SSD up and reads its SMART log and superblock.
func (i *inspector) inspect(ctx context.Context, d state.SSD) (r ssdReport, err error) {
	r = ssdReport{SSD: d}
	if d.Kind == state.KindVFIO {
		if err := i.inspectController(d, &r); err != nil {
			return r, err
		}
	} else if fi, err := os.Stat(d.Path); err == nil && d.Kind != state.KindComputed {
		r.Allocated = allocated(fi)
	}
	opener := &ssdOpener{env: i.env, listing: true}
	set, err := opener.openThese(ctx, []state.SSD{d})
	var other *proxy.ReplacedError
	if errs.ClassOf(err) == errs.Refused && !errors.As(err, &other) {
		r.InUse, r.Health, r.Content = true, "in use", "in use by another heliosctl"
		return r, nil
	}
	if err != nil {
		return r, err
	}
	defer closing(&err, set.Close)
	s := set.SSDs[0]
	r.Model, r.Firmware = s.Ctrl.Model(), s.Ctrl.Firmware()
	if err := opener.opener().CheckPaths(set.Set); err != nil {
		r.HeldBy = append(r.HeldBy, err.Error())
	}
	log, err := s.Ctrl.SMART(ctx)
	if err != nil {
		return r, err
	}
	r.SMART, r.Health = smart(log), health(log, d.Kind == state.KindComputed)
	all, free, err := stripe.Contents(ctx, s)
	if err != nil && !errors.Is(err, stripe.ErrNoSuperblock) {
		return r, err
	}
	r.content(all, free)
	for _, c := range all {
		r.Damage = append(r.Damage, c.Lost...)
	}
	if len(r.Damage) > 0 {
		r.Content += ", damaged"
		r.Next = fmt.Sprintf(
			"%s; \"heliosctl verify\" finds what else is lost, and \"heliosctl load\" writes all of it anew",
			strings.Join(r.Damage, "; "))
	}
	if len(all) == 0 {
		marks, err := stripe.ForeignContent(ctx, s)
		if err != nil {
			return r, err
		}
		if len(marks) > 0 {
			r.Content = "no dataset, but " + strings.Join(marks, ", ")
		}
	}
	return r, nil
}

func smart(log nvme.SMARTLog) *smartReport {
	return &smartReport{
		CriticalWarning: log.CriticalWarning, TemperatureK: log.Temperature(),
		AvailableSpare: log.AvailableSpare, PercentageUsed: log.PercentageUsed,
		DataUnitsRead: log.DataUnitsRead.String(), DataUnitsWritten: log.DataUnitsWritten.String(),
		HostReads: log.HostReads.String(), HostWrites: log.HostWrites.String(),
		MediaErrors: log.MediaErrors.String(), UnsafeShutdowns: log.UnsafeShutdowns.String(),
	}
}

// content fills in the datasets on an SSD, and the room beside them.
func (r *ssdReport) content(all []stripe.Content, free int64) {
	if r.Content = "none"; len(all) == 0 {
		return
	}
	var alike [][]string // the stripes of entries that differ in nothing else
	var rests, texts []string
	for i := range all {
		sb := &all[i].Superblock
		rest := r.dataset(sb)
		if n := len(rests); n == 0 || all[i-1].UUID != sb.UUID || rests[n-1] != rest {
			alike, rests = append(alike, nil), append(rests, rest)
		}
		last := &alike[len(alike)-1]
		*last = append(*last, strconv.Itoa(sb.StripeIndex))
	}
	for i, rest := range rests {
		texts = append(texts, fmt.Sprintf(rest, strings.Join(alike[i], ", ")))
	}
	first := r.Datasets[0]
	r.Dataset, r.DatasetUUID, r.Stripe, r.Stripes = first.Name, first.UUID, &first.Stripe,
		first.Stripes
	r.RowDType, r.RowBytes, r.Loaded = first.RowDType, first.RowBytes, first.Loaded
	r.Free = free
	r.Content = strings.Join(texts, "; ") + "; " + units.FormatBytes(free) + " free"
}

// dataset fills in one stripe, and returns it in words, with %s for its number.
func (r *ssdReport) dataset(sb *stripe.Superblock) string {
	d := heldLine{Name: sb.Name, UUID: sb.UUID.String(), Stripe: sb.StripeIndex,
		Stripes: sb.StripeCount, RowDType: sb.RowType.String(), RowBytes: sb.RowBytes,
		Bytes: sb.Bytes(), Loaded: sb.State == stripe.StateComplete}
	r.Datasets = append(r.Datasets, d)
	text := fmt.Sprintf("%s, stripe %%s of %d, rows of %d B (%s)",
		strings.ReplaceAll(d.Name, "%", "%%"), d.Stripes, d.RowBytes, d.RowDType)
	if !d.Loaded {
		text += ", load unfinished"
	}
	for _, x := range sb.Pages.All() {
		l := pagesLine{Pack: x.ID.String(), Pages: x.Pages, PageBytes: x.PageBytes,
			Bytes: x.LBAs * int64(sb.LBABytes), Finished: x.State == stripe.StateComplete}
		r.Pages = append(r.Pages, l)
		text += fmt.Sprintf(", pages of pack %s (%s)", l.Pack, units.FormatBytes(l.Bytes))
		if !l.Finished {
			text += " unfinished"
		}
	}
	return text
}

// health is the SMART log in words (NVMe base specification, Get Log Page 02h).
// readOnly is for an SSD that is meant to be.
func health(l nvme.SMARTLog, readOnly bool) string {
	var bad []string
	if l.CriticalWarning == nvme.WarnReadOnly && l.MediaErrors == (nvme.Uint128{}) && readOnly {
		return "good, read-only"
	}
	for i, w := range []string{"spare below threshold", "temperature out of range",
		"reliability degraded", "read-only", "volatile memory backup failed"} {
		if l.CriticalWarning&(1<<i) != 0 {
			bad = append(bad, w)
		}
	}
	if l.MediaErrors != (nvme.Uint128{}) {
		bad = append(bad, l.MediaErrors.String()+" media errors")
	}
	if len(bad) == 0 {
		return "good"
	}
	return strings.Join(bad, ", ")
}
