package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"helios/cache/replay"
	"helios/cache/trace"
	"helios/gpuio"
	hcli "helios/internal/cli"
	"helios/internal/errs"
	"helios/internal/units"
)

func cacheReplayCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "replay",
		Usage:     "play a run's recorded accesses on other policies, sizes, lines and windows",
		ArgsUsage: "[TRACE]",
		Description: "Reads what \"train --trace FILE\" has written, and no dataset and no SSD. For each cache: the share of rows that need\n" +
			"no SSD, bytes read, and how far that is from the optimum: for policies of lines that come and go, Belady's MIN with\n" +
			"bypass of the same size (no policy reads fewer lines); for static, the pass's own hottest rows (oracle).\n" +
			"--check plays what the run itself had and holds it against the run's own counters: every number must be equal.\n" +
			"Bytes count a command for each line, not what merging reads of adjacent rows saves.",
	}, 1, hcli.Of[replayArgs](), runCacheReplay)
}

// replayArgs holds the options of "cache replay". Of policies, lines and windows nil is the run's.
type replayArgs struct {
	outputs
	trace        string        `option:"trace" use:"input" arg:"FILE" usage:"the recorded run, a FILE; may also be given as an argument"`
	policies     []string      `option:"policy" oneof:"@replay-policies" was:"policies" use:"setting" shown:"all" arg:"NAME[,NAME…]" usage:"NAME[,NAME…]"`
	sizes        []replay.Size `option:"sizes" default:"1%,5%,10%,20%" arg:"SIZE[,SIZE…]" usage:"GPU tiers SIZE[,SIZE…]: a share of the features, bytes, or 5000lines"`
	lines        []int64       `option:"cache-line" was:"line" shown:"the run's" arg:"SIZE[,SIZE…]" usage:"lines of the dynamic policies SIZE[,SIZE…]: row, or bytes such as 4096"`
	windows      []int         `option:"window" shown:"the run's" arg:"N[,N…]" usage:"coming batches whose lines stay N[,N…]: of the policies that know no future"`
	directories  []string      `option:"directory" oneof:"@directories" use:"setting" shown:"the run's" arg:"NAME[,NAME…]" usage:"directories of the policies that know no future NAME[,NAME…]"`
	superbatches []int         `option:"superbatch" shown:"1000" arg:"N[,N…]" usage:"mini-batches N[,N…] whose rows policy superbatch knows at once"`
	cpuCache     units.Budget  `option:"cpu-cache" shown:"the run's" arg:"SIZE" usage:"constant CPU buffer of the hottest rows, a SIZE or share; static: rows after those in the GPU tier; superbatch: a tier that it moves rows to and from"`
	check        bool          `option:"check" use:"setting" usage:"hold a replay of the run's own cache against its counters, and play others only where flags about them are given"`
	passes       bool          `option:"passes" use:"setting" usage:"show every epoch and evaluation, not only their sum"`
	workers      int           `option:"workers" shown:"one per CPU" usage:"caches that are played at once"`
}

// SetOption reads lists of sizes and numbers.
func (a *replayArgs) SetOption(name, text string) (done bool, err error) {
	switch name {
	case "sizes":
		a.sizes, err = parseList(name, text, "a size such as 5%", func(s string) (replay.Size, error) {
			size, err := replay.ParseSize(s)
			if err != nil {
				err = errs.Errorf("{sizes}: %w", err)
			}
			return size, err
		})
	case "cache-line":
		a.lines, err = parseList(name, text, "row or bytes", parseLine)
	case "window":
		a.windows, err = parseList(name, text, "a number", parseWithin(name, "batches", 0, 64))
	case "superbatch":
		a.superbatches, err = parseList(name, text, "a number",
			parseWithin(name, "mini-batches", 1, 1<<20))
	default:
		return false, nil
	}
	return true, err
}

func parseLine(s string) (int64, error) {
	if s == "row" {
		return replay.LineRow, nil
	}
	n, err := units.ParseBytes(s)
	if err != nil || n < 1 || n > 1<<24 {
		return 0, errs.New(errs.Usage,
			"{cache-line} %s: give row, or bytes up to 16MiB such as 4096", s)
	}
	return n, nil
}

// replayer plays recorded accesses.
type replayer struct {
	*env
	*replayArgs
}

func runCacheReplay(ctx context.Context, e *env, a *replayArgs) (err error) {
	y := &replayer{e, a}
	path, err := y.path()
	if err != nil {
		return err
	}
	r, err := trace.Open(path)
	if err != nil {
		return err
	}
	defer closing(&err, r.Close)
	// alone: nothing but the run's own cache.
	alone := a.check && e.given(&a.policies, &a.sizes, &a.lines, &a.windows, &a.superbatches,
		&a.cpuCache, &a.passes, &a.workers) == ""
	var c replay.Config
	if !alone {
		if c, err = y.config(r); err != nil {
			return err
		}
	}
	out, err := a.openResults(e)
	if err != nil {
		return err
	}
	defer out.end(&err)

	h, totals := r.Header(), r.Totals()
	e.ui.Printf("%s: %s (%d rows of %s), mode %s, policy %s, %d mini-batches, %s row accesses",
		path, h.Name, h.Rows, units.FormatBytes(h.RowBytes), h.Mode, h.Policy, totals.Batches,
		units.FormatCount(float64(totals.Rows)))
	wrong := 0
	if a.check {
		if wrong, err = y.compare(ctx, r, out); err != nil {
			return whenStopped(err, "nothing was written: run it again")
		}
	}
	if !alone {
		if err := y.play(ctx, r, c, out); err != nil {
			return err
		}
	}
	if wrong > 0 {
		return errs.New(errs.Failed,
			"%s: in %d passes the replay does not come to what the run counted; please report it with the trace",
			path, wrong)
	}
	return nil
}

// path returns the trace's file.
func (y *replayer) path() (string, error) {
	path, arg := y.trace, y.c.Args().First()
	switch {
	case path != "" && arg != "" && path != arg:
		return "", errs.New(errs.Usage, "two traces, {trace} %s and %s; give one", path, arg)
	case path == "" && arg == "":
		return "", errs.New(errs.Usage,
			"no trace; give what \"heliosctl train --trace FILE\" has written with {trace} FILE")
	}
	return cmp.Or(path, arg), nil
}

// play replays the trace with all caches that were asked for.
func (y *replayer) play(ctx context.Context, r *trace.Reader, c replay.Config, out *results) error {
	res, err := replay.Run(ctx, r, c)
	if err != nil {
		return whenStopped(err, "nothing was written: run it again")
	}
	y.show(res, out)
	if y.given(&y.policies) == "" && !r.Totals().Hotness {
		y.ui.Note(
			"static is left out: the trace has no hotness of rows, as the run had no static tier, or one for all rows")
	}
	return nil
}

// config completes what was asked for with what the run had.
func (y *replayer) config(r *trace.Reader) (c replay.Config, err error) {
	h := r.Header()
	c = replay.Config{Policies: y.policies, Sizes: y.sizes, Lines: y.lines, Windows: y.windows,
		Directories:  y.directories,
		Superbatches: y.superbatches, Workers: y.workers, Progress: y.ui.Progress, CPURows: -1}
	if y.given(&y.workers) != "" && c.Workers < 1 {
		return c, errs.New(errs.Usage, "{workers} %d: give at least 1", c.Workers)
	}
	if c.Policies == nil {
		for _, p := range replay.Policies() {
			if p != replay.Static || r.Totals().Hotness {
				c.Policies = append(c.Policies, p)
			}
		}
	}
	if c.Lines == nil {
		c.Lines = []int64{replay.LineRow}
		if h.RowsPerLine > 1 {
			c.Lines[0] = h.LineBytes
		}
	}
	if c.Windows == nil {
		c.Windows = []int{int(h.Window)}
	}
	if y.given(&y.cpuCache) != "" {
		b := y.cpuCache
		if c.CPURows = b.Bytes / h.RowBytes; b.Percent != 0 {
			c.CPURows = int64(b.Percent / 100 * float64(h.Rows))
		}
	}
	return c, nil
}

// compare shows the run beside its replay, and says in how many passes they differ.
func (y *replayer) compare(ctx context.Context, r *trace.Reader, out *results) (wrong int,
	err error) {
	all, err := replay.Check(ctx, r, gpuio.AnyStack([]string{r.Header().IOStack},
		func(s *gpuio.Stack) bool { return !s.Queued }), y.ui.Progress)
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
		rows = append(rows, append([]string{name, "run"}, checkCells(c.Live)...),
			append([]string{"", "replay"}, append(checkCells(c.Replayed), verdict)...))
	}
	y.ui.Table([]string{"pass", "", "batches", "gpu", "cpu", "ssd", "bytes", "inserted", "evicted",
		"bypassed", ""}, rows)
	if compared == 0 {
		return 0, errs.New(errs.Failed, "the trace %s holds no finished pass to compare with",
			r.Path())
	}
	y.ui.Printf("%d of %d passes are equal to the run", compared-wrong, compared)
	return wrong, nil
}

func checkCells(c replay.Counts) []string {
	var out []string
	for _, n := range []int64{c.Batches, c.RowsGPU, c.RowsCPU, c.RowsSSD, c.BytesSSD, c.Inserted,
		c.Evicted, c.Bypassed} {
		out = append(out, strconv.FormatInt(n, 10))
	}
	return out
}

// lookAheadText returns how many mini-batches a policy knows: of its window, or of its superbatch.
func lookAheadText(p replay.Play) string {
	switch {
	case p.Policy == replay.Belady:
		return "all"
	case p.Superbatch > 0:
		return strconv.Itoa(p.Superbatch)
	}
	return strconv.Itoa(p.Window)
}

func lineText(p replay.Play) string {
	if p.RowsPerLine == 1 {
		return "row"
	}
	return strconv.FormatInt(p.LineBytes, 10)
}

func (y *replayer) show(res *replay.Result, out *results) {
	var rows [][]string
	row := func(p replay.Play, x replay.Pass) []string {
		cells := []string{p.Policy, cmp.Or(p.Directory, "-"), lookAheadText(p), lineText(p),
			fmt.Sprintf("%.3g %%", 100*p.Share), strconv.FormatInt(p.Lines, 10)}
		pass := ""
		if y.passes {
			if pass = x.Kind; x.Epoch >= 0 {
				pass += " " + strconv.Itoa(x.Epoch+1)
			}
		}
		metadata := ""
		if p.MetadataBytes > 0 {
			metadata = fmt.Sprintf("%.1f", float64(p.MetadataBytes)/float64(max(p.Lines, 1)))
		}
		return append(cells, pass, fmt.Sprintf("%.2f %%", 100*x.HitRatio),
			fmt.Sprintf("%.2f %%", 100*x.GPUHitRatio), strconv.FormatInt(x.Promoted, 10),
			strconv.FormatInt(x.Demoted, 10), units.FormatBytes(x.BytesSSD),
			fmt.Sprintf("%.2f", x.GapPoints), fmt.Sprintf("%.3f", x.ReadsOverOptimum), metadata)
	}
	for _, p := range res.Plays {
		out.event("play", p)
		if y.passes {
			for _, x := range p.Passes {
				rows = append(rows, row(p, x))
			}
		}
		rows = append(rows, row(p, p.Total))
	}
	y.ui.Columns(replayColumns, rows)
	for _, text := range gapNotes(res) {
		y.ui.Printf("%s", text)
	}
	if res.CPURows > 0 {
		y.ui.Printf("CPU tier: %d rows (%s)", res.CPURows,
			units.FormatBytes(res.CPURows*res.Header.RowBytes))
	}
	out.event("result", replayLine{res.Trace, res.Header, res.Totals, res.CPURows, len(res.Plays)})
}

// replayLine is the result of "cache replay", whose plays have lines of their own.
type replayLine struct {
	Trace   string       `json:"trace"`
	Header  trace.Header `json:"header"`
	Totals  trace.Totals `json:"totals"`
	CPURows int64        `json:"cpu_rows"`
	Plays   int          `json:"plays"`
}

// gapNotes say what the gaps are from, by what was played.
func gapNotes(res *replay.Result) (notes []string) {
	still, moving, several, planned := false, false, false, false
	for _, p := range res.Plays {
		if p.Policy == replay.Static || p.Policy == replay.Oracle {
			still = true
			continue
		}
		moving = true
		several = several || p.RowsPerLine > 1
		planned = planned || p.Superbatch > 0
	}
	if moving {
		notes = append(notes,
			"gap and reads of policies whose lines come and go: from belady of the same size, which begins empty, as they do")
	}
	if planned && res.CPURows > 0 {
		notes = append(notes,
			"superbatch moves lines between the GPU and the CPU tier: its optimum is belady of both sizes together; others have a constant CPU buffer")
	}
	if several {
		notes = append(notes,
			"with several rows a line belady is what reads the fewest lines: others may find a few more rows (a gap below 0), and read more")
	}
	if still {
		text := "gap and reads of static: from oracle, each pass's own hottest rows"
		if moving {
			text += "; both are filled before the first access, which is not counted, so they may show more hits than belady"
		}
		notes = append(notes, text)
	}
	return notes
}
