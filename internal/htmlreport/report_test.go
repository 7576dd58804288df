package htmlreport

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"math"
	"net/http/httptest"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// read reads lines as a file of a name.
func read(t *testing.T, name string, lines ...string) *Source {
	t.Helper()
	s, err := Read(strings.NewReader(strings.Join(lines, "\n")+"\n"), name)
	require.NoError(t, err)
	return s
}

func page(t *testing.T, sources ...*Source) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, Write(&b, sources, "v1"))
	return b.String()
}

// trainRun is a file of a run of two epochs.
func trainRun(t *testing.T, mode string, seed int, losses ...float64) *Source {
	t.Helper()
	lines := []string{fmt.Sprintf(
		`{"event":"begin","run":"r","verb":"train","command":["heliosctl","train","g","--mode","%s","--seed","%d","--results","x%d"],"dataset_name":"g","time":"2026-01-02T03:04:05Z"}`,
		mode, seed, seed)}
	for i, l := range losses {
		lines = append(lines, fmt.Sprintf(
			`{"event":"epoch","epoch":%d,"seconds":%d,"loss":%g,"val_acc":0.5,"rows_gpu":10,"rows_cpu":20,"rows_ssd":70,"bytes_ssd":1048576,"stage_seconds":{"sample":0.25,"train":0.5,"complete":1,"novel":0.125},"cpu":{"batches":10,"seconds":0.04,"parts":[{"stage":"train","operator":"product","seconds":0.02},{"stage":"software SSDs","operator":"io_uring_enter","seconds":0.006},{"stage":"train","operator":"mean","seconds":0.004}],"unaccounted_seconds":0.01,"idle_seconds":0.05}}`,
			i+1, 2+i, l))
	}
	return read(t, fmt.Sprintf("%s-%d.jsonl", mode, seed), append(lines, fmt.Sprintf(
		`{"event":"result","mode":"%s","seed":%d,"test_acc":0.75,"params_sha256":"0123456789abcdef","peak_memory_bytes":2097152}`,
		mode, seed), `{"event":"end","run":"r","whole":true}`)...)
}

// judgedRun is a file of a run with all that a test and a schedule tell.
func judgedRun(t *testing.T) *Source {
	t.Helper()
	return read(t, "judged.jsonl",
		`{"event":"begin","run":"r","verb":"train","command":["heliosctl","train","j"],"dataset_name":"j"}`,
		`{"event":"epoch","epoch":1,"seconds":1,"loss":2,"val_acc":0.5,"val_loss":1.5,"lr":0.01,"grad_norm":3}`,
		`{"event":"epoch","epoch":2,"seconds":1,"loss":1,"val_acc":0.6,"val_loss":1.25,"lr":0.005,"grad_norm":2}`,
		`{"event":"result","mode":"inmem","seed":7,"best_epoch":2,"test_acc":0.75,"params_sha256":"01","test_metrics":{"nodes":6,"accuracy":0.5,"classes":[{"class":0,"nodes":4},{"class":1,"name":"papers","nodes":2}],"confusion":[[3,1],[0,2]],"curves":[{"class":1,"fpr":[0,0.25,1],"recall":[0,1,1],"precision":[1,0.66667]}]}}`,
		`{"event":"end","run":"r","whole":true}`)
}

// A test's matrix and curves are drawn, and the lines of validation, rate and gradients.
func TestJudgedRun(t *testing.T) {
	s, tested, err := train([]*Source{judgedRun(t)})
	require.NoError(t, err)
	byTitle := map[string]figure{}
	for _, f := range append(s.Figures, tested.Figures...) {
		byTitle[f.Title] = f
	}
	require.Equal(t, []series{{Name: "inmem, training", Points: []point{single(1, 2), single(2, 1)}},
		{Name: "inmem, validation", Hue: 1, Dash: 1, Points: []point{single(1, 1.5), single(2, 1.25)}}},
		byTitle["Loss by epoch"].Series)
	require.Equal(t, []series{{Name: "inmem, validation", Hue: 1, Dash: 1,
		Points: []point{single(1, 0.5), single(2, 0.6)}}, {Name: "inmem, test", Hue: 2, Dash: 2,
		Marks: true, Points: []point{single(2, 0.75)}}}, byTitle["Accuracy by epoch"].Series,
		"the test is a mark at the best epoch")
	require.Equal(t, []point{single(1, 0.01), single(2, 0.005)},
		byTitle["Learning rate by epoch"].Series[0].Points)
	require.Equal(t, []point{single(1, 3), single(2, 2)},
		byTitle["Gradients by epoch"].Series[0].Points)
	m := byTitle["Confusion: inmem"]
	require.Equal(t, table{Head: []string{"", "0", "1"}, Rows: [][]string{{"class 0", "3", "1"},
		{"1 papers", "0", "2"}}}, m.values())
	require.Equal(t, []point{single(0, 0), single(0.25, 1), single(1, 1)},
		byTitle["ROC curves: inmem"].Series[0].Points)
	require.Equal(t, []point{single(0, 1), single(1, 0.66667)},
		byTitle["Precision by recall: inmem"].Series[0].Points, "as many as both lists have")
}

// The output of --json has no lines around it: its last event says that a run came to its end, and
// nobody knows whether two of them are alike.
func TestPlainOutput(t *testing.T) {
	epoch, result := `{"event":"epoch","epoch":1,"loss":2}`, `{"event":"result","mode":"cpu","dataset":"g"}`
	whole := read(t, "a.json", epoch, result)
	require.True(t, whole.Ended && whole.Whole)
	cut := read(t, "b.json", epoch)
	require.False(t, cut.Ended)
	p := page(t, whole, cut)
	require.Equal(t, 2, strings.Count(p, "<td>train</td>"))
	require.Contains(t, p, "<td>whole</td>")
	require.Contains(t, p, "<td>not ended</td>")
	s, _, err := train([]*Source{whole, read(t, "c.json", epoch, result)})
	require.NoError(t, err)
	require.Equal(t, "Training on g", s.Title)
	require.Len(t, s.Figures[0].Series, 2)
	for verb, lines := range map[string][2]string{
		"compare": {`{"event":"run","variant":"a"}`, `{"event":"compare","dataset":"g"}`},
		"plan":    {`{"event":"point","key":"ssds","value":"1"}`, `{"event":"sweep"}`},
	} {
		require.Equal(t, verb, read(t, "x", lines[0]).Verb)
		require.False(t, read(t, "x", lines[0]).Ended, verb)
		require.True(t, read(t, "x", lines[0], lines[1]).Whole, verb)
	}
	require.Contains(t, page(t, read(t, "io", ioLine("async", 1, 512, 1))), "plain events mark no end")
}

// The results of eval have a matrix, curves and classes, as those of a test.
func TestEvaluation(t *testing.T) {
	p := page(t, read(t, "e.jsonl", `{"event":"begin","verb":"eval"}`,
		`{"event":"result","mode":"cpu","model":"gat","split":"val","metrics":{"nodes":3,"accuracy":0.5,"balanced_accuracy":0.5,"classes":[{"class":0,"nodes":1},{"class":1,"nodes":2,"recall":0.25}],"confusion":[[1,0],[1,1]],"curves":[{"class":1,"fpr":[0,1],"recall":[0,1],"precision":[1,1]}]}}`,
		`{"event":"end","whole":true}`))
	for _, want := range []string{"Evaluation on val: e.jsonl", "Confusion: gat cpu",
		"ROC curves: gat cpu", "Scores by class: gat cpu", "<td>0.2500</td>"} {
		require.Contains(t, p, want)
	}
}

// Runs that differ by their seed are one line with a band; others are lines beside it.
func TestSeedsAreABand(t *testing.T) {
	s, _, err := train([]*Source{trainRun(t, "helios", 1, 3, 1), trainRun(t, "helios", 2, 4, 2),
		trainRun(t, "helios", 3, 3.5, 2.5), trainRun(t, "cpu", 1, 9, 8)})
	require.NoError(t, err)
	f := s.Figures[0]
	require.Equal(t, "Loss by epoch", f.Title)
	require.Equal(t, []series{
		{Name: "helios, training", Points: []point{{1, 3.5, 3, 4}, {2, 2, 1, 2.5}}},
		{Name: "cpu, training", Hue: 1, Points: []point{{1, 9, 9, 9}, {2, 8, 8, 8}}},
	}, f.Series)
	require.Contains(t, f.Note, "bands")
	require.Equal(t, table{Head: []string{"epoch", "helios, training", "cpu, training"}, Rows: [][]string{
		{"1", "3.5 (3–4)", "9"}, {"2", "2 (1–2.5)", "8"}}}, f.values())
	require.Equal(t, "50.0 %", s.Figures[1].values().Rows[0][1])
	require.Equal(t, "Time by epoch", s.Figures[2].Title)
	// Only the second epoch, and a stage that nobody knew comes behind the known ones.
	require.Equal(t, bar{Name: "helios", Parts: []part{{"sample", 0.25}, {"complete", 1},
		{"train", 0.5}, {"novel", 0.125}}}, s.Figures[3].Bars[0])
	require.Equal(t, []part{{"GPU tier", 0.1}, {"CPU tier", 0.2}, {"SSDs", 0.7}},
		s.Figures[4].Bars[1].Parts)
	require.Equal(t, []part{{"train", 2.4}, {"software SSDs", 0.6}, {"unaccounted", 1}, {"idle", 5}},
		s.Figures[5].Bars[0].Parts)
	require.Equal(t, [][]string{{"train", "product", "2000", "50.0 %"},
		{"software SSDs", "io_uring_enter", "600", "15.0 %"}, {"train", "mean", "400", "10.0 %"},
		{"unaccounted", "Go's scheduler, launches, the rest", "1000", "25.0 %"},
		{"idle", "of the processors that the process may use", "5000", "–"}}, s.Tables[1].Rows)
	require.Equal(t, []string{"helios", "1", "2", "3 s", "1", "50.0 %", "75.0 %", "1 MiB", "2 MiB",
		"0123456789ab…"}, s.Tables[0].Rows[0])
}

// A run has its model's name before its mode's, and the one dataset of all stands above.
func TestRunsAreNamed(t *testing.T) {
	of := func(mode, model, dataset string) *Source {
		s := read(t, model, fmt.Sprintf(`{"event":"begin","verb":"train","dataset_name":"%s",`+
			`"arguments":["train","--mode=%s","--model=%s"]}`, dataset, mode, model),
			`{"event":"epoch","epoch":1,"seconds":1,"train_acc":0.5,"val_acc":0.25}`,
			fmt.Sprintf(`{"event":"result","mode":"%s","model":"%s"}`, mode, model))
		return s
	}
	s, _, err := train([]*Source{of("helios", "sage", "g"), of("cpu", "gat", "g")})
	require.NoError(t, err)
	require.Equal(t, "Training on g", s.Title)
	var names []string
	for _, x := range s.Figures[0].Series {
		names = append(names, x.Name)
	}
	require.Equal(t, []string{"sage helios, training", "gat cpu, training",
		"sage helios, validation", "gat cpu, validation"}, names)
	s, _, err = train([]*Source{of("helios", "sage", "g"), of("cpu", "gat", "h")})
	require.NoError(t, err)
	require.Equal(t, "Training", s.Title)
}

// Axes have units in which their largest value is a number for people.
func TestUnitsOfAxes(t *testing.T) {
	for _, c := range []struct {
		label   string
		largest float64
		want    string
		scaled  float64
	}{{"µs", 90000, "ms", 90}, {"latency, µs", 90, "latency, µs", 90}, {"seconds", 0.1, "ms", 100},
		{"seconds", 7200, "hours", 2}, {"cpu-cache, MiB", 0.03125, "cpu-cache, KiB", 32},
		{"GiB/s", 0.25, "MiB/s", 256}, {"million reads/s", 0.05, "thousand reads/s", 50}, {"epoch", 9000, "epoch", 9000},
		{"ms of all processors", 9000, "ms of all processors", 9000}} {
		f := figure{Kind: kindSpans, X: axis{Label: c.label},
			Bars: []bar{{Name: "a", Value: c.largest, Lo: c.largest, Hi: c.largest}}}
		f.rescale()
		require.Equal(t, c.want, f.X.Label)
		require.InDelta(t, c.scaled, f.Bars[0].Value, 1e-9, c.label)
		require.Equal(t, []string{"", c.want}, f.values().Head, "one repeat has no span")
		lines := figure{Kind: kindLines, Y: axis{Label: c.label},
			Series: []series{{Points: []point{single(1, c.largest)}}}}
		lines.rescale()
		require.Equal(t, c.want, lines.Y.Label)
		require.InDelta(t, c.scaled, lines.Series[0].Points[0].Hi, 1e-9, c.label)
		require.Equal(t, 1.0, lines.Series[0].Points[0].X)
	}
}

// A stage has one colour on the page; other parts have those that are left.
func TestHues(t *testing.T) {
	of := func(names ...string) map[string]int {
		var b bar
		for _, n := range names {
			b.Parts = append(b.Parts, part{Name: n})
		}
		f := figure{Kind: kindStacks, Bars: []bar{b}}
		return f.hues()
	}
	require.Equal(t, map[string]int{"sample": 0, "train": 7, "link": 1}, of("link", "train", "sample"))
	require.Equal(t, map[string]int{"train": 7, "GPU tier": 0}, of("GPU tier", "train"))
}

// Runs of one mode are told apart by the options that not all of them have.
func TestOptionsTellRunsApart(t *testing.T) {
	of := func(extra ...string) *Source {
		s := trainRun(t, "helios", 1, 2)
		s.Command = append(s.Command, extra...)
		return s
	}
	s, _, err := train([]*Source{of("--gpu-cache=5%"), of("--gpu-cache", "10%", "--no-eval"),
		of("--gpu-cache", "10%")})
	require.NoError(t, err)
	var names []string
	for _, x := range s.Figures[0].Series {
		names = append(names, x.Name)
	}
	require.Equal(t, []string{"helios gpu-cache 5%, training",
		"helios gpu-cache 10% no-eval, training", "helios gpu-cache 10%, training"}, names)
}

// Settled arguments tell the same, however they were typed.
func TestArgumentsBeforeTheCommand(t *testing.T) {
	of := func(arguments ...string) *Source {
		s := trainRun(t, "helios", 1, 2)
		s.Command, s.arguments = []string{"heliosctl", "train", "--residual", "g"}, arguments
		return s
	}
	s, _, err := train([]*Source{of("train", "--residual=true", "--metrics=:1", "--seed=1", "--", "g"),
		of("train", "--residual=true", "--seed=2", "--rank-timeout=1s", "--", "g"),
		of("train", "--seed=2", "--", "g")})
	require.NoError(t, err)
	require.Len(t, s.Figures[0].Series, 2)
	require.Equal(t, "helios residual true, training", s.Figures[0].Series[0].Name)
}

// A run that went on is one run by the flags that it went on with, and is as whole as its end.
func TestResumedRun(t *testing.T) {
	begin := `{"event":"begin","verb":"train","arguments":["train","--epochs=1","--","g"]}`
	resume := `{"event":"resume","verb":"train","arguments":["train","--epochs=2","--","g"]}`
	end := `{"event":"end","whole":true}`
	s := read(t, "run", begin, end, resume)
	require.False(t, s.Ended || s.Whole)
	require.Equal(t, []string{"epochs 2", "g"}, s.options())
	require.True(t, read(t, "run", begin, end, resume, end).Whole)
}

func ioLine(stack string, ssds, rowBytes int, iops float64) string {
	return fmt.Sprintf(
		`{"ssds":%d,"blocks":32,"row_bytes":%d,"stack":"%s","depth":256,"iops":%g,"bytes_per_second":%g,"p50_us":90,"p99_us":120,"p999_us":130,"audited":true,"modelled":true,"bound_iops":%g,"latency_histogram":[{"up_to_us":90,"count":3},{"up_to_us":120,"count":1}]}`,
		ssds, rowBytes, stack, iops, iops*float64(rowBytes), 2*iops)
}

// The axis is the setting by which measurements differ most, SSDs before others, and the limit is
// drawn.
func TestReadsBySSDs(t *testing.T) {
	begin := `{"event":"begin","verb":"bench io","command":["heliosctl","bench","io"]}`
	s, err := benchIO(read(t, "io", begin, ioLine("async", 1, 4096, 1<<18),
		ioLine("async", 2, 4096, 1<<19), ioLine("cpu", 1, 4096, 1<<17), ioLine("cpu", 2, 4096, 1<<18),
		`{"kind":"summary","ssds":2}`))
	require.NoError(t, err)
	f := s.Figures[0]
	require.Equal(t, "Throughput by SSDs", f.Title)
	require.Equal(t, []series{
		{Name: "async", Points: []point{single(1, 1), single(2, 2)}},
		{Name: "cpu", Points: []point{single(1, 0.5), single(2, 1)}},
		{Name: "limit of SSDs and link", Limit: true,
			Points: []point{single(1, 1.5), single(2, 3)}},
	}, f.Series)
	require.Contains(t, s.Note, "Modelled")
	h := s.Figures[len(s.Figures)-1]
	require.Equal(t, "Latencies", h.Title)
	require.Equal(t, []point{single(90, 0.75), single(120, 1)}, h.Series[0].Points)
	require.Len(t, s.Tables[0].Rows, 4)
	require.Equal(t, "50.0 %", s.Tables[0].Rows[0][7])

	s, err = benchIO(read(t, "io", begin, ioLine("async", 1, 512, 1), ioLine("async", 1, 4096, 1)))
	require.NoError(t, err)
	require.Equal(t, "Throughput by row bytes", s.Figures[0].Title)
	require.True(t, s.Figures[0].X.Log)
}

func compareFile(t *testing.T) *Source {
	t.Helper()
	s := start("compare", "g", "2026-01-02T03:04:05Z", []string{"heliosctl", "compare"})
	require.NoError(t, s.keep("run", map[string]any{"variant": "helios", "losses": []float64{2, 1},
		"stage_seconds": map[string]float64{"train": 0.5}}))
	require.NoError(t, s.keep("compare", map[string]any{"dataset": "g", "device": "host",
		"base": "helios", "hardware": "a100", "notes": []string{"a note."},
		"variants": []map[string]any{{"name": "helios", "io_stack": "async", "pipeline": "deep",
			"epoch_seconds": span{2, 1, 3}, "ratio": span{1, 1, 1}, "rows_gpu": 1, "rows_ssd": 3,
			"bottleneck": "the SSDs"}}}))
	return s
}

func TestComparison(t *testing.T) {
	s, err := compare(compareFile(t))
	require.NoError(t, err)
	require.Equal(t, []bar{{Name: "helios", Value: 2, Lo: 1, Hi: 3}}, s.Figures[0].Bars)
	require.Equal(t, []part{{"train", 0.5}}, s.Figures[1].Bars[0].Parts)
	require.Equal(t, []point{single(1, 2), single(2, 1)}, s.Figures[3].Series[0].Points)
	require.Contains(t, s.Note, "Modelled")
	require.Contains(t, s.Note, "A note.")
	require.Contains(t, s.Figures[0].Note, "whiskers")
	require.Equal(t, "1", s.Tables[0].Rows[0][2], "a ratio of one value has no span")
	require.Equal(t, "2 (1–3)", span{2, 1, 3}.text())
}

// Limits far above all results are told of and not drawn.
func TestFarLimits(t *testing.T) {
	s, err := benchIO(read(t, "io", `{"event":"begin","verb":"bench io"}`,
		`{"ssds":1,"stack":"async","row_bytes":1024,"iops":1048576,"bytes_per_second":1073741824,"ssd_bound_iops":2097152,"link_bound_iops":1073741824,"bound_iops":2097152,"audited":true}`,
		`{"ssds":2,"stack":"async","row_bytes":1024,"iops":1048576,"bytes_per_second":1073741824,"ssd_bound_iops":2097152,"link_bound_iops":1073741824,"bound_iops":2097152,"audited":true}`))
	require.NoError(t, err)
	require.Equal(t, []series{{Name: "async", Points: []point{single(1, 1), single(2, 1)}},
		{Name: "limit of the SSDs", Limit: true, Points: []point{single(1, 2), single(2, 2)}}},
		s.Figures[0].Series)
	require.Equal(t, "Far above and not drawn: limit of the link (1024 GiB/s).", s.Figures[0].Note)
	require.Equal(t, "50.0 %", s.Tables[0].Rows[0][7])
}

// Where nothing is swept, stacks are bars, each with its limit.
func TestReadsOfOnePoint(t *testing.T) {
	s, err := benchIO(read(t, "io", `{"event":"begin","verb":"bench io"}`,
		ioLine("async", 1, 4096, 1<<18), ioLine("cpu", 1, 4096, 1<<17)))
	require.NoError(t, err)
	require.Equal(t, "Throughput", s.Figures[0].Title)
	require.Equal(t, []bar{{Name: "async", Value: 1, Lo: 1, Hi: 1, Limit: 2},
		{Name: "cpu", Value: 0.5, Lo: 0.5, Hi: 0.5, Limit: 1}}, s.Figures[0].Bars)
	require.Zero(t, s.Figures[2].Bars[0].Limit, "of latency")
}

// planFile is a sweep of the number of SSDs, or one plan.
func planFile(t *testing.T, lines ...string) *Source {
	t.Helper()
	return read(t, "plan.jsonl", append([]string{
		`{"event":"begin","verb":"plan","command":["heliosctl","plan"]}`}, lines...)...)
}

func planPoint(event, head, bottleneck string, seconds float64) string {
	return fmt.Sprintf(
		`{"event":"%s",%s"modelled":true,"mode":"helios","hardware":"a100","ssd_count":2,"seconds":%g,"bottleneck":"%s","stall":0.5,"busy_seconds":{"train":1,"link":0.5},"rows_gpu":1,"rows_cpu":1,"rows_ssd":2,"bytes_ssd":1048576,"ssd_bytes_per_second":2e9,"preparation_seconds":{"load":1,"fill":2},"disk_bytes":{"features":1048576},"gpu_memory_bytes":{"cache":1048576},"cpu_memory_bytes":{},"cost":{"epoch":0.25},"notes":["a note"]`,
		event, head, seconds, bottleneck)
}

// A sweep is a line with marks for the bottleneck; a plan alone is a bar, and what would halve it.
func TestPlans(t *testing.T) {
	row := func(n, bottleneck string, seconds float64) string {
		return planPoint("point", `"key":"ssds","value":"`+n+`",`, bottleneck, seconds) + "}"
	}
	s, err := plans(planFile(t, row("1", "the SSDs", 4), row("2", "the SSDs", 2),
		row("4", "the link", 1.5), `{"event":"sweep","key":"ssds"}`))
	require.NoError(t, err)
	require.Equal(t, "Time of an epoch by ssds", s.Figures[0].Title)
	require.Equal(t, []series{
		{Name: "epoch", Points: []point{single(1, 4), single(2, 2), single(4, 1.5)}},
		{Name: "limit: the SSDs", Marks: true, Points: []point{single(1, 4), single(2, 2)}},
		{Name: "limit: the link", Marks: true, Points: []point{single(4, 1.5)}},
	}, s.Figures[0].Series)
	require.Equal(t, "Modelled: no epoch was run. a note.", s.Note)
	require.Equal(t, bar{Name: "ssds 2", Parts: []part{{"train", 1}, {"link", 0.5}}},
		s.Figures[1].Bars[1])
	require.Equal(t, []string{"ssds 1", "4", "the SSDs", "50.0 %", "0", "1 MiB", "2", "3", "1 MiB",
		"1 MiB", "–", "0.25"}, s.Tables[0].Rows[0])

	s, err = plans(planFile(t, planPoint("plan", "", "the SSDs", 2)+
		`,"halving":{"doubled":[{"what":["SSDs"],"seconds":1.25,"gain":1.6,"bottleneck":"the link"}],"steps":[{"what":["SSDs","link"],"seconds":1,"gain":2}]}}`))
	require.NoError(t, err)
	require.Equal(t, []bar{{Name: "helios on a100, 2 SSDs", Value: 2, Lo: 2, Hi: 2}},
		s.Figures[0].Bars)
	require.Equal(t, []bar{{Name: "SSDs", Value: 1.6, Lo: 1.6, Hi: 1.6}}, s.Figures[1].Bars)
	require.Equal(t, [][]string{{"SSDs", "1.25", "1.6", "the link"},
		{"step 1: SSDs, link", "1", "2", ""}}, s.Tables[1].Rows)
	// Budgets are sizes; names are bars.
	s, err = plans(planFile(t, planPoint("point", `"key":"cpu-cache","value":"1GiB",`, "x", 1)+"}"))
	require.NoError(t, err)
	require.Equal(t, "cpu-cache, MiB", s.Figures[0].X.Label)
	require.Equal(t, 1024.0, s.Figures[0].Series[0].Points[0].X)
	s, err = plans(planFile(t, planPoint("point", `"key":"mode","value":"gids",`, "x", 1)+"}"))
	require.NoError(t, err)
	require.Equal(t, "mode gids", s.Figures[0].Bars[0].Name)
}

// A verb without figures of its own is told in tables.
func TestOtherVerbs(t *testing.T) {
	p := page(t, read(t, "b", `{"event":"begin","verb":"cache hotness","command":[]}`,
		`{"rate":1.5,"ok":true,"list":[1]}`, `{"rate":2,"name":"x"}`))
	for _, want := range []string{"cache hotness: b", `<th scope="col">rate</th>`, "<td>true</td>",
		"<td>x</td>", "not ended"} {
		require.Contains(t, p, want)
	}
	require.NotContains(t, p, `<th scope="col">list</th>`)
}

func TestBadFiles(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", "empty"}, {"no JSON", "{}\nepoch 1\n{}", "line 2: no JSON object"},
		{"an array", "[1]\n", "no JSON object"},
		{"a huge line", strings.Repeat("x", 17<<20), "a line of more than"},
		{"many values", `{"event":"a","v":[` + strings.Repeat("1,", 1<<20+1) + "1]}", "values"},
		{"deep", `{"event":"a","v":` + strings.Repeat("[", 1<<20), "no JSON object"},
		{"no number", `{"event":"a","v":NaN}`, "no JSON object"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read(strings.NewReader(c.text), "file")
			require.ErrorContains(t, err, c.want)
			require.Regexp(t, "give a file that option results", err.Error())
			require.Equal(t, errs.Usage, errs.ClassOf(err))
		})
	}
	cut, err := Read(strings.NewReader("{\"event\":\"epoch\",\"epoch\":1}\n{\"event\":\"ep"), "cut")
	require.NoError(t, err)
	require.Contains(t, page(t, cut), "its last line is cut off")
	_, _, err = train([]*Source{read(t, "odd", `{"event":"epoch","epoch":"one"}`)})
	require.ErrorContains(t, err, `odd: an event "epoch"`)
	require.ErrorContains(t, Write(&strings.Builder{}, []*Source{read(t, "b",
		`{"event":"begin","verb":"train"}`, `{"event":"end"}`)}[:0], "v"), "no results")
}

// all is a file of each kind, with a name that wants to be markup.
func all(t *testing.T) []*Source {
	t.Helper()
	evil := read(t, `</script><script>bad()</script>`,
		`{"event":"begin","verb":"compare","dataset_name":"<b>","command":["</script><img src=x onerror=bad()>"]}`)
	require.NoError(t, evil.keep("compare", map[string]any{"dataset": "</script><b>",
		"variants": []map[string]any{{"name": "</script><script>bad()</script>",
			"epoch_seconds": span{1, 1, 1}}, {"name": strings.Repeat("long name ", 12),
			"epoch_seconds": span{2, 1, 3}, "rows_ssd": 1}}}))
	return []*Source{judgedRun(t), trainRun(t, "helios", 1, 3, 1), trainRun(t, "helios", 2, 4, 2),
		trainRun(t, "cpu", 1, 2, 2), compareFile(t), evil,
		read(t, "io.jsonl", `{"event":"begin","verb":"bench io","command":[]}`,
			ioLine("async", 1, 4096, 5e5), ioLine("async", 2, 4096, 9e5)),
		read(t, "other.jsonl", `{"event":"begin","verb":"doctor","command":[]}`,
			`{"rate":1.5}`),
		planFile(t,
			planPoint("point", `"key":"ssds","value":"1",`, "the SSDs", 3)+"}",
			planPoint("point", `"key":"ssds","value":"2",`, "the link", 2)+"}")}
}

// The page needs nothing from elsewhere, and no text of the data is markup in it.
func TestPageStandsAlone(t *testing.T) {
	p := page(t, all(t)...)
	require.Less(t, len(p), 2<<20)
	body := strings.Replace(p, plotScript, "", 1)
	require.NotEqual(t, p, body)
	require.NotRegexp(t, `(?i)\bsrc=["']?|href="[^#]|@import|url\(|https?://`,
		strings.ReplaceAll(body, "img src=x", ""))
	require.NotRegexp(t, `fetch\(|XMLHttpRequest|WebSocket|importScripts`, p)
	require.Equal(t, 3, strings.Count(strings.ToLower(p), "<script"))
	require.Equal(t, 3, strings.Count(strings.ToLower(p), "</script"))
	require.NotContains(t, body, "<img")
	// Each figure has its values in a table, which needs no script.
	require.Equal(t, strings.Count(p, "<figure"), strings.Count(p, "<summary>Values</summary>"))
}

// Text and lines can be told from what is behind them: WCAG 2.2, 1.4.3 (4.5) and 1.4.11 (3).
func TestContrast(t *testing.T) {
	root := regexp.MustCompile(`(?s):root \{(.*?)\}`).FindAllStringSubmatch(pageStyle, -1)
	require.Len(t, root, 2, "light and dark")
	for i, theme := range root {
		colours := map[string]float64{}
		for _, m := range regexp.MustCompile(`--(\w+): #([0-9a-f]{6});`).FindAllStringSubmatch(
			theme[1], -1) {
			colours[m[1]] = luminance(t, m[2])
		}
		require.GreaterOrEqual(t, len(colours), 14)
		for name, l := range colours {
			a, b := max(l, colours["back"])+0.05, min(l, colours["back"])+0.05
			switch {
			case name == "text" || name == "muted" || name == "link":
				require.GreaterOrEqual(t, a/b, 4.5, "theme %d, --%s", i, name)
			case name != "back" && name != "line":
				require.GreaterOrEqual(t, a/b, 3.0, "theme %d, --%s", i, name)
			}
		}
	}
}

// luminance is the relative luminance of a colour.
func luminance(t *testing.T, hex string) float64 {
	t.Helper()
	sum := 0.0
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		v, err := strconv.ParseUint(hex[2*i:2*i+2], 16, 8)
		require.NoError(t, err)
		c := float64(v) / 255
		if c <= 0.04045 {
			c /= 12.92
		} else {
			c = math.Pow((c+0.055)/1.055, 2.4)
		}
		sum += weight * c
	}
	return sum
}

// The script's own parts are those of the bundle.
func TestBundleHasWhatThePageUses(t *testing.T) {
	entry, err := os.ReadFile("../../tools/plotbundle/entry.js")
	require.NoError(t, err)
	exports := regexp.MustCompile(`export \{(.*)\}`).FindStringSubmatch(string(entry))
	require.NotNil(t, exports)
	have := map[string]bool{}
	for _, name := range strings.Split(exports[1], ", ") {
		have[name] = true
	}
	used := map[string]bool{}
	for _, m := range regexp.MustCompile(`Plot\.(\w+)`).FindAllStringSubmatch(pageScript, -1) {
		used[m[1]] = true
	}
	require.Equal(t, have, used)
}

// The page's policy lets its own scripts run and nothing else, whatever the results say.
func TestPolicy(t *testing.T) {
	for _, text := range []string{`</script><script>alert(1)</script>`, `<!--<script>`, "\u2028alert(1)\u2029",
		`" onmouseover="alert(1)`, `' onload='alert(1)`, `{{.Title}}`, "\x00\x1b[2J</ScRiPt >",
		`javascript:alert(1)`, `'; script-src * 'unsafe-eval'`, `]]><img src=x onerror=alert(1)>`} {
		quoted, err := json.Marshal(text)
		require.NoError(t, err)
		q := string(quoted)
		p := page(t, read(t, text, `{"event":"begin","verb":"train","dataset_name":`+q+`,"time":`+q+
			`,"command":["heliosctl","train",`+q+`],"arguments":["train","--mode=`+q[1:]+`]}`,
			`{"event":"epoch","epoch":1,"loss":0.5,"seconds":1,"train_acc":0.5}`,
			`{"event":"end","whole":false,"reason":`+q+`}`),
			read(t, "other", `{"event":"begin","verb":`+q+`,"command":[]}`, `{"rate":1.5,`+q+`:`+q+`}`))
		head, body, _ := strings.Cut(p, "</head>")
		policy := html.UnescapeString(regexp.MustCompile(
			`http-equiv="Content-Security-Policy" content="([^"]*)"`).FindStringSubmatch(head)[1])
		require.Contains(t, policy, "default-src 'none'; ")
		require.NotContains(t, policy, "unsafe-eval")
		require.NotRegexp(t, `script-src[^;]*unsafe`, policy)
		scripts := regexp.MustCompile(`(?is)<script[^>]*>(.*?)</script`).FindAllStringSubmatch(body, -1)
		require.Len(t, scripts, 3, text)
		for _, s := range scripts {
			sum := sha256.Sum256([]byte(s[1]))
			require.Contains(t, policy, "'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"'")
		}
		rest := regexp.MustCompile(`(?is)<script.*?</script>`).ReplaceAllString(body, "")
		require.NotRegexp(t, `(?i)<img|<[a-z]+[^<>]*\son[a-z]+=`, rest)
	}
}

// start begins a source of events that were never in a file; keep adds one.
func start(verb, dataset, time string, command []string) *Source {
	return &Source{Name: dataset, Verb: verb, Command: command, Dataset: dataset, Time: time,
		Ended: true, Whole: true}
}

// keep adds an event as it stands in a file of results.
func (s *Source) keep(event string, v any) error {
	text, err := json.Marshal(v)
	if err == nil {
		s.lines = append(s.lines, line{event, text})
	}
	return err
}

// Files of one plan each are compared where they are of one graph, and none stands in for another.
func TestPlansTogether(t *testing.T) {
	plan := func(name, graph, mode string) *Source {
		s, err := Read(strings.NewReader(`{"event":"plan","mode":"`+mode+`","hardware":"h","ssd_count":2,`+
			`"seconds":1,"graph":{"name":"`+graph+`"},"halving":{"doubled":[{"what":["ssds"],"gain":2}]}}`), name)
		require.NoError(t, err)
		return s
	}
	sources := []*Source{plan("a", "g", "helios"), plan("b", "g", "cpu"), plan("c", "other", "cpu"),
		plan("d", "g", "cpu")}
	sections, err := digest(sources)
	require.NoError(t, err)
	var titles []string
	for _, s := range sections {
		titles = append(titles, fmt.Sprint(s.Title, " ", len(s.Figures[0].Bars)))
	}
	require.Equal(t, []string{"Plan: a, b 2", "Plan: c 1", "Plan: d 1"}, titles)
	require.Equal(t, "Twice as much of each: helios on h, 2 SSDs", sections[0].Figures[1].Title)
	require.Equal(t, "a", sources[0].Name, "the list of files stays")
}

// A page that follows a long run gets what is new, the whole at the end, and bytes in proportion to
// the page.
func TestLiveIsLinear(t *testing.T) {
	live := NewLive("g", "v1")
	lines, sent, last := "-1", 0, 0
	ask := func() (news struct {
		Lines int
		Page  string
	}) {
		w := httptest.NewRecorder()
		live.ServeHTTP(w, httptest.NewRequest("GET", "/live?lines="+lines, nil))
		sent += w.Body.Len()
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &news))
		if news.Page != "" {
			last = w.Body.Len()
		}
		lines = strconv.Itoa(news.Lines)
		return news
	}
	write := func(format string, args ...any) {
		_, err := fmt.Fprintf(live, format+"\n", args...)
		require.NoError(t, err)
	}
	write(`{"event":"begin","run":"r","verb":"train","dataset_name":"j"}`)
	for i := range 400 {
		write(`{"event":"epoch","epoch":%d,"seconds":1,"loss":2}`, i+1)
		if page := ask().Page; i < 10 {
			require.NotEmpty(t, page, "a short run is drawn at each epoch")
		}
	}
	require.Less(t, sent, 30*last)
	write(`{"event":"end","run":"r","whole":true}`)
	require.Equal(t, 402, ask().Lines)
	require.Empty(t, ask().Page, "nothing is new")
	lines = "9999" // it followed another run
	require.NotEmpty(t, ask().Page)
}
