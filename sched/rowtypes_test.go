package sched

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset"
	"helios/dataset/stripe"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/simd"
	"helios/internal/testing/wide"
	"helios/internal/units"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	hierspec "helios/sched/tiers/hier/spec"
	"helios/sched/tiers/static"
)

// odd has rows that no type stores in a whole number of words without padding but float32.
var odd = graphSpec{nodes: 1500, dim: 33, degree: 6}

// as loads the dataset again with rows of a type, and returns what training must see of them.
func (s *ssdSet) as(t testing.TB, d *dataset.Dataset, feat []byte, rt rowtype.Type) []byte {
	t.Helper()
	r, err := stripe.Load(context.Background(), d, s.ssds, stripe.LoadOptions{RowType: rt.String()})
	require.NoError(t, err)
	require.Equal(t, rt.RowBytes(d.Meta.Dim), r.RowBytes)
	src := hostmem.View[float32](feat)
	out := make([]byte, len(feat))
	dst := hostmem.View[float32](out)
	row := make([]byte, rt.RowBytes(d.Meta.Dim))
	for v := 0; v < len(src); v += d.Meta.Dim {
		scale, err := rt.Encode(row, src[v:v+d.Meta.Dim])
		require.NoError(t, err)
		rt.Decode(simd.Generic, dst[v:v+d.Meta.Dim], row, scale)
	}
	return out
}

// For each type of rows, every mode, stack, cache, pipeline and number of workers trains on the
// same rows, to the same parameters; those of types that lose precision differ from float32's.
func TestRowTypesEveryWay(t *testing.T) {
	variants := append([]variant{}, sameWays[1:8]...)
	variants = append(variants, variant{"checked", modePipe(static.ModeHelios, plan.PipelineIntra,
		func(c *plan.Config) { c.CheckReads = plan.ChecksOn }), 2, 2},
		variant{"few bytes of tiers", modePipe(static.ModeHelios, plan.DefaultPipeline,
			func(c *plan.Config) {
				c.GPUCache, c.CPUCache = units.Budget{Bytes: 10_000}, units.Budget{Bytes: 20_001}
			}), 2, 1}, dynamicWays[1], dynamicWays[2])
	shapes := []graphSpec{odd, tiny}
	if wide.Lean() {
		shapes, variants = shapes[:1], []variant{variants[0], variants[4], variants[6], variants[7]}
	}
	shas := map[string]string{}
	for _, g := range shapes {
		d, feat := g.open(t)
		sets := map[int]*ssdSet{}
		for _, rt := range rowtype.Types() {
			var first record
			feats := map[int][]byte{}
			for i, v := range variants {
				if sets[v.ssds] == nil {
					sets[v.ssds] = bind(t, d, v.ssds, "")
				}
				if feats[v.ssds] == nil {
					feats[v.ssds] = sets[v.ssds].as(t, d, feat, rt)
				}
				cfg := small()
				cfg.Epochs, cfg.RowType = 1, rt.String()
				v.set(&cfg)
				r := train(t, context.Background(), cfg, d, feats[v.ssds], sets[v.ssds], v.workers,
					report.Observer{})
				name := fmt.Sprintf("%d features of %s, %s", g.dim, rt, v.name)
				require.NoError(t, r.err, name)
				require.Equal(t, rt.String(), r.res.RowDType)
				require.EqualValues(t, rt.RowBytes(g.dim), r.res.RowBytes)
				if i == 0 {
					first = r
				}
				require.Equal(t, first.res.ParamsSHA256, r.res.ParamsSHA256, name)
				require.Equal(t, first.res.Epochs[0].Loss, r.res.Epochs[0].Loss, name)
				require.Equal(t, first.res.TestAcc, r.res.TestAcc, name)
				require.Equal(t, first.blocks, r.blocks, name)
				if v.name == "few bytes of tiers" { // budgets are in stored bytes
					row := r.res.RowBytes
					require.Equal(t, 10_000/row*row, r.res.GPUCacheBytes, name)
					require.Equal(t, 20_001/row*row, r.res.CPUCacheBytes, name)
				}
				if v.name != "mmap prefetch" && i > 0 { // a model of it counts faults
					model := playVirtual(t, cfg, d, "a100-p5510x12", v.ssds)
					require.Equal(t, r.res.GPUCacheBytes, model.GPUCacheBytes, name)
					require.Equal(t, rt.String(), model.RowDType)
					require.Equal(t, r.res.Epochs[0].RowsSSD, model.Epochs[0].RowsSSD, name)
					require.Equal(t, r.res.Epochs[0].BytesSSD, model.Epochs[0].BytesSSD, name)
				}
			}
			key := fmt.Sprint(g.dim, first.res.ParamsSHA256)
			require.Empty(t, shas[key], "%s trains to the parameters of another type", rt)
			shas[key] = rt.String()
		}
	}
}

// TestScalesWithoutObservers: mega-batches look the scales of int8 rows up by their own numbers of
// nodes where nobody asks for the dataset's, and train to the same parameters: those of every other
// mode where a mega-batch is the whole graph.
func TestScalesWithoutObservers(t *testing.T) {
	d, feat := odd.open(t)
	s := bind(t, d, 2, "")
	narrow := s.as(t, d, feat, rowtype.Int8)
	run := func(cfg plan.Config) *report.Result {
		t.Helper()
		cfg.Epochs = 1
		r := trainSeveral(t, context.Background(), cfg, d, s, report.Observer{})
		require.NoError(t, r.err)
		require.EqualValues(t, 4*odd.nodes, r.res.ScaleBytes)
		return r.res
	}
	in := small()
	in.Mode = static.ModeInmem
	want := run(in)
	whole := onMega(t, 1, 0)
	whole.StaticNodes = hierspec.NoShare
	require.Equal(t, want.ParamsSHA256, run(whole).ParamsSHA256)

	parts := onMega(t, 12, 4)
	parts.Epochs = 1
	res := run(parts)
	require.Positive(t, res.Mega.StaticRows)
	require.Greater(t, res.Mega.MegaBatches, 1)
	seen := train(t, context.Background(), parts, d, narrow, s, 2, report.Observer{})
	require.NoError(t, seen.err)
	require.Equal(t, seen.res.ParamsSHA256, res.ParamsSHA256)
}

// TestRowTypeMismatch: --row-dtype and checkpoints hold a run to a type.
func TestRowTypeMismatch(t *testing.T) {
	d, feat := odd.open(t)
	s := bind(t, d, 2, "")
	narrow := s.as(t, d, feat, rowtype.Int8)
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir, cfg.RowType = 1, t.TempDir(), "float16"
	r := train(t, context.Background(), cfg, d, narrow, s, 2, report.Observer{})
	require.ErrorContains(t, r.err,
		"option row-dtype float16: the SSDs hold rows of int8; run \"heliosctl load")
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	cfg.RowType = "float8"
	r = train(t, context.Background(), cfg, d, narrow, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "option row-dtype: unknown row dtype")

	cfg.RowType = ""
	r = train(t, context.Background(), cfg, d, narrow, s, 2, report.Observer{})
	require.NoError(t, r.err)
	cfg.Epochs, cfg.Resume = 2, true
	r = train(t, context.Background(), cfg, d, narrow, s, 2, report.Observer{})
	require.NoError(t, r.err)
	whole := cfg
	whole.CheckpointDir, whole.Resume = "", false
	require.Equal(t, train(t, context.Background(), whole, d, narrow, s, 2,
		report.Observer{}).res.ParamsSHA256, r.res.ParamsSHA256, "resumed to the bit")

	half := s.as(t, d, feat, rowtype.Float16)
	cfg.Epochs = 3
	r = train(t, context.Background(), cfg, d, half, s, 2, report.Observer{})
	require.ErrorContains(t, r.err, "was made with row-dtype int8, the SSDs hold rows of float16")
	require.Equal(t, errs.Usage, errs.ClassOf(r.err))
	// Evaluation takes what is there: the model is float32.
	dev, err := cuda.NewHost(cuda.HostOptions{})
	require.NoError(t, err)
	said := ""
	ev, err := Evaluate(context.Background(), plan.Config{}, prepare.Inputs{Dev: dev, Dataset: d,
		SSDs: s.ssds}, cfg.CheckpointDir, "test",
		report.Observer{Note: func(s errs.Text) { said += s.String() }})
	require.NoError(t, err)
	require.Contains(t, said, "was trained on rows of int8, these are of float16")
	require.Equal(t, "float16", ev.RowDType)
	require.EqualValues(t, 68, ev.RowBytes)
	require.NoError(t, dev.Close())
}
