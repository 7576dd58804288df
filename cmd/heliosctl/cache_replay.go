package main

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cache/replay"
	"helios/cache/trace"
	"helios/internal/errs"
	"helios/internal/outfile"
	"helios/internal/units"
)

func cacheReplayCommand() *cli.Command {
	return &cli.Command{
		Name:      "replay",
		Usage:     "play a run's recorded accesses on other policies, sizes, lines and windows",
		ArgsUsage: "[TRACE]",
		Description: "Reads what \"train --trace FILE\" has written, and no dataset and no SSD. For each cache: the share of rows that need\n" +
			"no SSD, bytes read, and how far that is from the optimum: for policies of lines that come and go, Belady's MIN with\n" +
			"bypass of the same size (no policy reads fewer lines); for static, the pass's own hottest rows (oracle).\n" +
			"--check plays what the run itself had and holds it against the run's own counters: every number must be equal.\n" +
			"Bytes count a command for each line, not what merging reads of adjacent rows saves.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "trace", Usage: "the recorded run, a `FILE`; may also be given as an argument"},
			&cli.StringFlag{Name: "policies", DefaultText: "all", Usage: "`NAME[,NAME…]`: " + strings.Join(replay.Policies(), ", ")},
			&cli.StringFlag{Name: "sizes", Value: "1%,5%,10%,20%", Usage: "GPU tiers `SIZE[,SIZE…]`: a share of the features, bytes, or 5000lines"},
			&cli.StringFlag{Name: "line", DefaultText: "the run's", Usage: "lines of the dynamic policies `SIZE[,SIZE…]`: row, or bytes such as 4096"},
			&cli.StringFlag{Name: "window", DefaultText: "the run's", Usage: "coming batches whose lines stay `N[,N…]`: of the policies that know no future"},
			&cli.StringFlag{Name: "cpu-cache", DefaultText: "the run's", Usage: "constant CPU buffer of the hottest rows, a `SIZE` or share; static: rows after those in the GPU tier"},
			&cli.BoolFlag{Name: "check", Usage: "hold a replay of the run's own cache against its counters, and play others only where flags about them are given"},
			&cli.BoolFlag{Name: "passes", Usage: "show every epoch and evaluation, not only their sum"},
			&cli.IntFlag{Name: "workers", DefaultText: "one per CPU", Usage: "caches that are played at once"},
			&cli.StringFlag{Name: "csv", Usage: "also write a line for each cache and pass to `FILE`"},
			&cli.StringFlag{Name: "plot", Usage: "also draw hits and bytes by size into `FILE`, a web page that needs no other"},
			resultsFlag(), overwriteFlag(),
		},
		Action: action(1, runCacheReplay),
	}
}

func runCacheReplay(ctx context.Context, e *env) (err error) {
	path, arg := e.c.String("trace"), e.c.Args().First()
	switch {
	case path != "" && arg != "" && path != arg:
		return errs.New(errs.Usage, "two traces, --trace %s and %s; give one", path, arg)
	case path == "" && arg == "":
		return errs.New(errs.Usage, "no trace; give what \"heliosctl train --trace FILE\" has written with --trace FILE")
	case path == "":
		path = arg
	}
	r, err := trace.Open(path)
	if err != nil {
		return err
	}
	defer closing(&err, r.Close)
	e.outputs().Reads("the trace", path)
	// alone: nothing but the run's own cache.
	alone := e.c.Bool("check") && !slices.ContainsFunc([]string{"policies", "sizes", "line", "window", "cpu-cache", "passes", "workers", "csv", "plot"}, e.c.IsSet)
	var c replay.Config
	if !alone {
		if c, err = e.replayConfig(r); err != nil {
			return err
		}
	}
	files := map[string]*outfile.File{}
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Discard())
		}
	}()
	for _, name := range []string{"csv", "plot"} {
		if files[name], err = e.createOutput(name); err != nil {
			return err
		}
	}
	out, err := e.openResults()
	if err != nil {
		return err
	}
	defer out.end(&err)

	h, totals := r.Header(), r.Totals()
	e.ui.Printf("%s: %s (%d rows of %s), mode %s, policy %s, %d mini-batches, %s row accesses",
		path, h.Name, h.Rows, units.FormatBytes(h.RowBytes), h.Mode, h.Policy, totals.Batches, units.FormatCount(float64(totals.Rows)))
	wrong := 0
	if e.c.Bool("check") {
		if wrong, err = e.replayCheck(ctx, r, out); err != nil {
			return whenStopped(err, "nothing was written: run it again")
		}
	}
	if !alone {
		res, err := replay.Run(ctx, r, c)
		if err != nil {
			return whenStopped(err, "nothing was written: run it again")
		}
		e.showReplay(res, out)
		if !e.c.IsSet("policies") && !totals.Hotness {
			e.ui.Note("static is left out: the trace has no hotness of rows, as the run had no static tier, or one for all rows")
		}
		if f := files["csv"]; f != nil {
			if err := f.Commit(replayCSV(f, res)); err != nil {
				return err
			}
		}
		if f := files["plot"]; f != nil {
			if err := f.Commit(replayPlot(f, res)); err != nil {
				return err
			}
		}
	}
	if wrong > 0 {
		return errs.New(errs.Failed, "%s: in %d passes the replay does not come to what the run counted; please report it with the trace", path, wrong)
	}
	return nil
}

// replayConfig reads the flags. What is not given is the run's.
func (e *env) replayConfig(r *trace.Reader) (c replay.Config, err error) {
	h := r.Header()
	c = replay.Config{Workers: e.c.Int("workers"), Progress: e.ui.Progress, CPURows: -1}
	if e.c.IsSet("workers") && c.Workers < 1 {
		return c, errs.New(errs.Usage, "--workers %d: give at least 1", c.Workers)
	}
	if c.Policies, err = list("policies", e.c.String("policies")); err != nil {
		return c, err
	}
	if c.Policies == nil {
		for _, p := range replay.Policies() {
			if p != replay.Static || r.Totals().Hotness {
				c.Policies = append(c.Policies, p)
			}
		}
	}
	for _, p := range c.Policies {
		if !slices.Contains(replay.Policies(), p) {
			return c, errs.New(errs.Usage, "unknown --policies %q; %s", p, meant(p, replay.Policies(), "choose of "+strings.Join(replay.Policies(), ", ")))
		}
	}
	sizes, err := list("sizes", e.c.String("sizes"))
	if err != nil {
		return c, err
	}
	for _, s := range sizes {
		size, err := replay.ParseSize(s)
		if err != nil {
			return c, fmt.Errorf("--sizes: %w", err)
		}
		c.Sizes = append(c.Sizes, size)
	}
	lines, err := list("line", e.c.String("line"))
	if err != nil {
		return c, err
	}
	for _, s := range lines {
		if s == "row" {
			c.Lines = append(c.Lines, replay.LineRow)
			continue
		}
		n, err := units.ParseBytes(s)
		if err != nil || n < 1 || n > 1<<24 {
			return c, errs.New(errs.Usage, "--line %s: give row, or bytes up to 16MiB such as 4096", s)
		}
		c.Lines = append(c.Lines, n)
	}
	if lines == nil {
		c.Lines = []int64{replay.LineRow}
		if h.RowsPerLine > 1 {
			c.Lines[0] = h.LineBytes
		}
	}
	windows, err := list("window", e.c.String("window"))
	if err != nil {
		return c, err
	}
	for _, s := range windows {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > 64 {
			return c, errs.New(errs.Usage, "--window %s: give numbers of batches from 0 to 64", s)
		}
		c.Windows = append(c.Windows, n)
	}
	if windows == nil {
		c.Windows = []int{int(h.Window)}
	}
	if e.c.IsSet("cpu-cache") {
		b, err := units.ParseBudget(e.c.String("cpu-cache"))
		if err != nil {
			return c, errs.New(errs.Usage, "--cpu-cache: %w", err)
		}
		if c.CPURows = b.Bytes / h.RowBytes; b.Percent != 0 {
			c.CPURows = int64(b.Percent / 100 * float64(h.Rows))
		}
	}
	return c, nil
}

// replayCheck shows the run beside its replay, and says in how many passes they differ.
func (e *env) replayCheck(ctx context.Context, r *trace.Reader, out *results) (wrong int, err error) {
	all, err := replay.Check(ctx, r, e.ui.Progress)
	if err != nil {
		return 0, err
	}
	var rows [][]string
	compared := 0
	for _, c := range all {
		out.event("check", c)
		verdict := "equal"
		switch {
		case !c.Compared:
			verdict = "not compared: the run stopped in this pass"
		case !c.Equal:
			verdict = "DIFFERENT"
			wrong++
		case !c.Bytes:
			verdict = "equal (bytes not compared: rows share LBAs, or the page cache reads)"
		}
		if c.Compared {
			compared++
		}
		name := fmt.Sprintf("%s %d", c.Kind, c.Epoch+1)
		rows = append(rows, append([]string{name, "run"}, checkCells(c.Live)...), append([]string{"", "replay"}, append(checkCells(c.Replayed), verdict)...))
	}
	e.ui.Table([]string{"pass", "", "batches", "gpu", "cpu", "ssd", "bytes", "inserted", "evicted", "bypassed", ""}, rows)
	if compared == 0 {
		return 0, errs.New(errs.Failed, "the trace %s holds no finished pass to compare with", r.Path())
	}
	e.ui.Printf("%d of %d passes are equal to the run", compared-wrong, compared)
	return wrong, nil
}

func checkCells(c replay.Counts) []string {
	var out []string
	for _, n := range []int64{c.Batches, c.RowsGPU, c.RowsCPU, c.RowsSSD, c.BytesSSD, c.Inserted, c.Evicted, c.Bypassed} {
		out = append(out, strconv.FormatInt(n, 10))
	}
	return out
}

func lineText(p replay.Play) string {
	if p.RowsPerLine == 1 {
		return "row"
	}
	return strconv.FormatInt(p.LineBytes, 10)
}

func (e *env) showReplay(res *replay.Result, out *results) {
	var rows [][]string
	row := func(p replay.Play, x replay.Pass) []string {
		cells := []string{p.Policy, strconv.Itoa(p.Window), lineText(p), fmt.Sprintf("%.3g %%", 100*p.Share), strconv.FormatInt(p.Lines, 10)}
		if e.c.Bool("passes") {
			name := x.Kind
			if x.Epoch >= 0 {
				name += " " + strconv.Itoa(x.Epoch+1)
			}
			cells = append(cells, name)
		}
		metadata := ""
		if p.MetadataBytes > 0 {
			metadata = fmt.Sprintf("%.1f", float64(p.MetadataBytes)/float64(max(p.Lines, 1)))
		}
		return append(cells, fmt.Sprintf("%.2f %%", 100*x.HitRatio), fmt.Sprintf("%.2f %%", 100*x.GPUHitRatio), units.FormatBytes(x.BytesSSD),
			fmt.Sprintf("%.2f", x.GapPoints), fmt.Sprintf("%.3f", x.ReadsOverOptimum), metadata)
	}
	for _, p := range res.Plays {
		out.event("play", p)
		if e.c.Bool("passes") {
			for _, x := range p.Passes {
				rows = append(rows, row(p, x))
			}
		}
		rows = append(rows, row(p, p.Total))
	}
	header := []string{"policy", "window", "line", "size", "lines"}
	if e.c.Bool("passes") {
		header = append(header, "pass")
	}
	e.ui.Table(append(header, "hits", "in GPU", "from SSDs", "gap (points)", "reads/optimum", "metadata B/line"), rows)
	for _, text := range gapNotes(res) {
		e.ui.Printf("%s", text)
	}
	if res.CPURows > 0 {
		e.ui.Printf("constant CPU buffer: %d rows (%s)", res.CPURows, units.FormatBytes(res.CPURows*res.Header.RowBytes))
	}
	out.event("result", map[string]any{"trace": res.Trace, "header": res.Header, "totals": res.Totals, "cpu_rows": res.CPURows, "plays": len(res.Plays)})
}

// gapNotes say what the gaps are from, by what was played.
func gapNotes(res *replay.Result) (notes []string) {
	still, moving, several := false, false, false
	for _, p := range res.Plays {
		if p.Policy == replay.Static || p.Policy == replay.Oracle {
			still = true
			continue
		}
		moving = true
		several = several || p.RowsPerLine > 1
	}
	if moving {
		notes = append(notes, "gap and reads/optimum of policies whose lines come and go: from belady of the same size, which begins empty, as they do")
	}
	if several {
		notes = append(notes, "with several rows a line belady is what reads the fewest lines: others may find a few more rows (a gap below 0), and read more")
	}
	if still {
		text := "gap and reads/optimum of static: from oracle, each pass's own hottest rows"
		if moving {
			text += "; both are filled before the first access, which is not counted, so they may show more hits than belady"
		}
		notes = append(notes, text)
	}
	return notes
}

// replayCSV writes a line for each pass of each cache, and one for their sum.
func replayCSV(w io.Writer, res *replay.Result) error {
	out := csv.NewWriter(w)
	rows := [][]string{{"policy", "window", "line_bytes", "rows_per_line", "lines", "cache_bytes", "share", "cpu_rows", "pass", "epoch", "batches", "rows",
		"rows_gpu", "rows_cpu", "rows_ssd", "accesses", "reads", "bytes_ssd", "inserted", "evicted", "bypassed",
		"hit_ratio", "gpu_hit_ratio", "optimum_hit_ratio", "gap_points", "reads_over_optimum", "metadata_bytes"}}
	for _, p := range res.Plays {
		for _, x := range append(slices.Clone(p.Passes), p.Total) {
			row := []string{p.Policy, strconv.Itoa(p.Window)}
			for _, n := range []int64{p.LineBytes, p.RowsPerLine, p.Lines, p.CacheBytes} {
				row = append(row, strconv.FormatInt(n, 10))
			}
			epoch := ""
			if x.Epoch >= 0 {
				epoch = strconv.Itoa(x.Epoch + 1)
			}
			row = append(row, number(p.Share), strconv.FormatInt(p.CPURows, 10), x.Kind, epoch)
			for _, n := range []int64{x.Batches, x.Rows, x.RowsGPU, x.RowsCPU, x.RowsSSD, x.Accesses, x.Reads, x.BytesSSD, x.Inserted, x.Evicted, x.Bypassed} {
				row = append(row, strconv.FormatInt(n, 10))
			}
			for _, f := range []float64{x.HitRatio, x.GPUHitRatio, x.OptimumHitRatio, x.GapPoints, x.ReadsOverOptimum} {
				row = append(row, number(f))
			}
			rows = append(rows, append(row, strconv.FormatInt(p.MetadataBytes, 10)))
		}
	}
	return out.WriteAll(rows)
}

func number(f float64) string { return strconv.FormatFloat(f, 'g', 8, 64) }
