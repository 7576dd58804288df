package main

import (
	"fmt"
	"strconv"
	"time"

	"helios/internal/outfile"
	"helios/internal/timeline"
	"helios/internal/units"
	"helios/sched/report"
)

// timelineFile is the file of --timeline; without the flag its recorder is nil, which records
// nothing.
type timelineFile struct {
	rec  *timeline.Recorder
	file *outfile.File
}

func openTimeline(o *outputs, path, clock string) (*timelineFile, error) {
	f, err := o.create("timeline", path)
	if f == nil || err != nil {
		return &timelineFile{}, err
	}
	return &timelineFile{rec: timeline.New(f, clock), file: f}, nil
}

// close keeps the file also when the run failed: what happened until then is what one wants to see.
func (t *timelineFile) close() error {
	if t.rec == nil {
		return nil
	}
	return t.file.Commit(t.rec.Close())
}

// ioRows are the lines of a summary about a run's reads.
func ioRows(io report.IOResult) [][]string {
	rows := modelRow(io)
	if l := io.Latency; l != nil {
		us := func(v float64) string {
			d := time.Duration(v * float64(time.Microsecond))
			unit := time.Duration(1) // three digits
			for d/unit >= 1000 {
				unit *= 10
			}
			return d.Round(unit).String()
		}
		rows = append(rows,
			[]string{"read latency",
				fmt.Sprintf("median %s, 99%% within %s, 99.9%% within %s, longest %s", us(l.P50),
					us(l.P99), us(l.P999), us(l.Max))})
	}
	if len(io.SSDs) > 1 && io.Balance > 0 {
		rows = append(rows,
			[]string{"SSD balance", fmt.Sprintf("the busiest of %d SSDs had %.2f times the mean",
				len(io.SSDs), io.Balance)})
	}
	if io.Coalesced > 0 {
		rows = append(rows, []string{"coalesced", units.FormatCount(float64(io.Coalesced)) +
			" rows shared a command with another"})
	}
	if io.NotInPlace != "" {
		rows = append(rows, []string{"not in place", "rows for the GPU's memory took a copy: " +
			io.NotInPlace})
	}
	if io.Mismatch > 0 {
		rows = append(rows,
			[]string{"checksums",
				fmt.Sprintf("%d rows came with a wrong checksum and were read again", io.Mismatch)})
	}
	return rows
}

// showSSDs prints what each SSD did; without trouble the columns of errors are left out.
func showSSDs(e *env, io report.IOResult) {
	if len(io.SSDs) == 0 {
		return
	}
	var rows [][]string
	troubled := false
	for _, s := range io.SSDs {
		troubled = troubled || s.Troubled()
	}
	header := []string{"SSD", "commands", "bytes"}
	if troubled {
		header = append(header, "errors", "timeouts", "retries", "aborts", "new queues", "resets",
			"foreign", "state")
	}
	for _, s := range io.SSDs {
		row := []string{s.Name, strconv.FormatInt(s.Commands, 10), units.FormatBytes(s.Bytes)}
		if troubled {
			for _, n := range []int64{s.Errors, s.Timeouts, s.Retries, s.Aborts, s.Recreated,
				s.Resets, s.Foreign} {
				row = append(row, strconv.FormatInt(n, 10))
			}
			row = append(row, map[bool]string{true: "in use", false: "given up"}[s.GivenUp == ""])
		}
		rows = append(rows, row)
	}
	e.ui.Table(header, rows)
	for _, s := range io.SSDs {
		if s.GivenUp != "" {
			e.ui.Printf("%s: %s", s.Name, s.GivenUp)
		}
	}
}

// showTrouble shows the SSDs' statistics of a run that failed, where one of them was in trouble.
func showTrouble(e *env, io report.IOResult, out *results) {
	for _, s := range io.SSDs {
		if s.Troubled() {
			out.event("io", io)
			showSSDs(e, io)
			return
		}
	}
}
