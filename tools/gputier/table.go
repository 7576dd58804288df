package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"helios/internal/units"
)

// table returns what run.sh prints last: the steps, then throughput by SSDs, stack and blocks.
func (r *runner) table() string {
	var out strings.Builder
	what := "the machine's libcuda"
	if r.res.Library != "" {
		what = r.res.Library + " (NOT the machine's libcuda)"
	}
	fmt.Fprintf(&out, "\ngpu tier on %s, %d CPUs, %s, %.0f s\n\n", r.res.Host, r.res.CPUs, what,
		r.res.Seconds)
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "step\tstatus\tseconds\t")
	for _, s := range r.res.Steps {
		fmt.Fprintf(w, "%s\t%s\t%.1f\t%s\n", s.Name, s.Status, s.Seconds, s.Detail)
	}
	if err := w.Flush(); err != nil { // of a strings.Builder
		panic(err)
	}
	r.showTraining(&out)
	for _, t := range r.tables {
		out.WriteString(t)
	}
	r.sweeps(&out)
	return out.String()
}

// sweeps shows I/O per second by blocks, a line for each number of SSDs, latency and stack, with
// the blocks that reach the plateau and the ratio of the stacks at equal blocks.
func (r *runner) sweeps(out *strings.Builder) {
	type key struct {
		latency float64
		device  string
		ssds    int
		serving int
	}
	type line struct {
		stack string
		iops  map[int]float64
	}
	var order []key
	groups := map[key][]*line{}
	limits := map[key]float64{}
	var blocks []int
	for _, b := range r.rows {
		if !b.Audited {
			continue
		}
		device := "CPU"
		if strings.HasPrefix(b.Device, "cuda:") {
			device = "GPU"
		}
		k := key{b.Latency, device, b.SSDs, b.Serving}
		if groups[k] == nil {
			order = append(order, k)
		}
		i := slices.IndexFunc(groups[k], func(l *line) bool { return l.stack == b.Stack })
		if i < 0 {
			groups[k] = append(groups[k], &line{b.Stack, map[int]float64{}})
			i = len(groups[k]) - 1
		}
		groups[k][i].iops[b.Blocks] = b.IOPS
		limits[k] = max(limits[k], b.ServeIOPS)
		if !slices.Contains(blocks, b.Blocks) {
			blocks = append(blocks, b.Blocks)
		}
	}
	if len(order) == 0 {
		return
	}
	slices.Sort(blocks)
	fmt.Fprintf(out, "\nreads per second by blocks of %d threads\n\n", r.rows[0].Threads)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "latency\tdevice\tSSDs\tserving CPUs\ttheir limit\tstack\t")
	for _, b := range blocks {
		fmt.Fprintf(w, "%d\t", b)
	}
	fmt.Fprintf(w, "%.0f %% at\t\n", 100*plateauShare)
	for _, k := range order {
		var async, sync *line
		for _, l := range groups[k] {
			best, plateau := 0.0, 0
			for _, v := range l.iops {
				best = max(best, v)
			}
			fmt.Fprintf(w, "%.0f us\t%s\t%d\t%d\t%s\t%s\t", k.latency, k.device, k.ssds, k.serving,
				count(limits[k]), l.stack)
			for _, b := range blocks {
				v, ok := l.iops[b]
				if plateau == 0 && v >= plateauShare*best {
					plateau = b
				}
				if !ok {
					fmt.Fprint(w, "\t")
					continue
				}
				fmt.Fprintf(w, "%s\t", count(v))
			}
			fmt.Fprintf(w, "%d\t\n", plateau)
			switch l.stack {
			case "async":
				async = l
			case "sync":
				sync = l
			}
		}
		if async == nil || sync == nil {
			continue
		}
		fmt.Fprint(w, "\t\t\t\t\tasync/sync\t")
		for _, b := range blocks {
			if async.iops[b] > 0 && sync.iops[b] > 0 {
				fmt.Fprintf(w, "%.2f", async.iops[b]/sync.iops[b])
			}
			fmt.Fprint(w, "\t")
		}
		fmt.Fprint(w, "\t\n")
	}
	if err := w.Flush(); err != nil {
		panic(err)
	}
}

// plateauShare is the share of the best rate that counts as having reached it, as in iobench.
const plateauShare = 0.98

// count rounds what units would show with all its digits.
func count(v float64) string { return units.FormatCount(math.Round(v)) }
