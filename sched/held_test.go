package sched

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/errs"
	"helios/sched/checkpoint"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// stopped is a run of small that was stopped in its second epoch, and what goes on from it.
func stopped(t *testing.T) (cfg plan.Config, run func(cfg plan.Config) (record, string)) {
	t.Helper()
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg = small()
	cfg.Epochs, cfg.CheckpointDir, cfg.Run = 2, t.TempDir(), "run-1"
	run = func(cfg plan.Config) (record, string) {
		notes := ""
		r := train(t, context.Background(), cfg, d, feat, s, 2,
			report.Observer{Note: func(n errs.Text) { notes += n.String() + "\n.String()" }})
		return r, notes
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := train(t, ctx, cfg, d, feat, s, 2, report.Observer{Step: func(stage string, done, _ int) {
		if stage == "epoch 2" && done == 3 {
			cancel()
		}
	}})
	require.Equal(t, errs.Interrupted, errs.ClassOf(r.err), "%v", r.err)
	return cfg, run
}

// A position that the checksum vouches for and that can't be: refused by name, never a nil pointer
// or other parameters.
func TestCheckpointPositionsAreBounded(t *testing.T) {
	cfg, run := stopped(t)
	path := filepath.Join(cfg.CheckpointDir, checkpointName)
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	f, err := checkpoint.Decode(whole)
	require.NoError(t, err)
	good := f.Metadata
	var pos position
	require.NoError(t, json.Unmarshal([]byte(good["helios.position"]), &pos))
	require.Equal(t, 1, pos.Epoch)
	require.GreaterOrEqual(t, pos.Batch, 3)
	cfg.Resume = true
	position := func(epoch, batch int, adam int64) string {
		return fmt.Sprintf(`{"epoch":%d,"batch":%d,"adam_step":%d}`, epoch, batch, adam)
	}
	partialOf := func(n int) string {
		var p map[string]any
		require.NoError(t, json.Unmarshal([]byte(good["helios.partial"]), &p))
		p["batches"] = n
		b, err := json.Marshal(p)
		require.NoError(t, err)
		return string(b)
	}
	for name, c := range map[string]struct {
		change map[string]string
		want   string
	}{
		"another batch": {map[string]string{"helios.position": position(1, pos.Batch-1,
			pos.AdamStep)}, "does not agree with the figures"},
		"a batch beyond": {map[string]string{"helios.position": position(1, 1<<20, pos.AdamStep)},
			"does not agree with the figures"},
		"all of it beyond": {map[string]string{"helios.position": position(1, 1<<20, pos.AdamStep),
			"helios.partial": partialOf(1 << 20)}, "is beyond the"},
		"adam step": {map[string]string{"helios.position": position(1, pos.Batch,
			pos.AdamStep+1)}, "Adam step"},
		"epoch": {map[string]string{"helios.position": position(2, pos.Batch,
			pos.AdamStep)}, "history of 1 epochs"},
		"negative": {map[string]string{"helios.position": position(1, -1, pos.AdamStep)},
			"no position"},
		"best in the future": {map[string]string{"helios.best": `{"epoch":1,"acc":0.5}`},
			"best epoch 2"},
		"no best": {map[string]string{"helios.best": `{"epoch":-1,"acc":0}`},
			"best epoch 0"},
		"accuracy": {map[string]string{"helios.best": `{"epoch":0,"acc":1.5}`},
			"best accuracy"},
		"history": {
			map[string]string{"helios.epochs": strings.Replace(good["helios.epochs"], `"epoch":1`,
				`"epoch":4`, 1)}, "names epoch 4"},
		"not JSON": {map[string]string{"helios.partial": "{"}, "helios.partial"},
		"fanout of no hop": {
			map[string]string{"helios.config": strings.Replace(good["helios.config"], `"fanout":[`,
				`"fanout":[],"x":[`, 1)}, "no model"},
		"a format to come": {map[string]string{"helios.format": fmt.Sprint(stateFormat + 1)},
			"format"},
		"a format of no digit": {map[string]string{"helios.format": "x"}, "format"},
	} {
		f.Metadata = maps.Clone(good)
		for k, v := range c.change {
			require.NotEqual(t, good[k], v, name)
			f.Metadata[k] = v
		}
		require.NoError(t, checkpoint.Save(path, f))
		r, _ := run(cfg)
		require.ErrorContains(t, r.err, c.want, name)
		require.ErrorContains(t, r.err, path, name)
	}
	// Of a file of this version whose checksum is not there, since a bit of its name flipped.
	bad := []byte(strings.Replace(string(whole), "helios.file_crc32c", "helios.fime_crc32c", 1))
	require.NoError(t, os.WriteFile(path, bad, 0o644))
	r, _ := run(cfg)
	require.Equal(t, errs.Device, errs.ClassOf(r.err))
	require.ErrorContains(t, r.err, "the checksum of format 3 is missing")
	require.NoError(t, os.WriteFile(path, whole, 0o644))
	r, notes := run(cfg)
	require.NoError(t, r.err)
	require.NotContains(t, notes, "older version")
}

// olderFormat writes a checkpoint as version 2 did: without the names of version 3, and the
// tensors' checksum alone.
func olderFormat(t *testing.T, path string) {
	t.Helper()
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	var data []byte
	head := map[string]any{}
	for _, x := range f.Tensors {
		head[x.Name] = map[string]any{"dtype": x.DType, "shape": x.Shape,
			"data_offsets": []int{len(data), len(data) + len(x.Data)}}
		data = append(data, x.Data...)
	}
	for _, k := range []string{"helios.run", "helios.dataset_name", "helios.written"} {
		require.Contains(t, f.Metadata, k)
		delete(f.Metadata, k)
	}
	f.Metadata["helios.format"] = "2"
	f.Metadata["helios.data_crc32c"] = fmt.Sprintf("%08x",
		crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)))
	head["__metadata__"] = f.Metadata
	h, err := json.Marshal(head)
	require.NoError(t, err)
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
	require.NoError(t, os.WriteFile(path, append(append(b, h...), data...), 0o644))
}

// A checkpoint of version 2 goes on to the same parameters, with a word that its header proves
// nothing, and is then one of version 3.
func TestResumeOfAnOlderVersion(t *testing.T) {
	cfg, run := stopped(t)
	path := filepath.Join(cfg.CheckpointDir, checkpointName)
	olderFormat(t, path)
	// which they did not have
	require.NoError(t, os.Remove(filepath.Join(cfg.CheckpointDir, bestName)))
	held, err := HeldIn(cfg.CheckpointDir)
	require.NoError(t, err)
	require.NoError(t, held.Damage)
	require.Contains(t, held.String(), "epoch 2, batch ")
	cfg.Resume = true
	r, notes := run(cfg)
	require.NoError(t, r.err)
	require.Equal(t, 1, strings.Count(notes, "its header has no checksum"), notes)
	straight := cfg
	straight.Resume, straight.CheckpointDir = false, ""
	want, _ := run(straight)
	require.Equal(t, want.res.ParamsSHA256, r.res.ParamsSHA256)
	f, err := checkpoint.Load(path)
	require.NoError(t, err)
	require.True(t, f.Sealed)
	require.FileExists(t, filepath.Join(cfg.CheckpointDir, bestName))
}

// A folder that holds a checkpoint is another run's: nothing is written there unless it is asked
// for.
func TestHeldCheckpointIsNotReplaced(t *testing.T) {
	cfg, run := stopped(t)
	path, best := filepath.Join(cfg.CheckpointDir, checkpointName), filepath.Join(cfg.CheckpointDir,
		bestName)
	read := func() string {
		a, err := os.ReadFile(path)
		require.NoError(t, err)
		b, err := os.ReadFile(best)
		require.NoError(t, err)
		return string(a) + string(b)
	}
	before := read()
	refused := func(want string) {
		t.Helper()
		r, _ := run(cfg)
		require.Equal(t, errs.Refused, errs.ClassOf(r.err), "%v", r.err)
		require.ErrorContains(t, r.err, want)
	}
	cfg.Model = "gcn" // whatever run comes
	refused("holds sage of dataset g, epoch 2, batch ")
	refused(", written 20")
	require.Equal(t, before, read())
	held, err := HeldIn(cfg.CheckpointDir)
	require.NoError(t, err)
	require.Equal(t, "run-1", held.Run)
	require.Len(t, held.Epochs, 1)
	// Damaged, or the best alone: refused as well.
	require.NoError(t, os.Rename(path, path+".away"))
	refused("holds sage of dataset g, 1 epochs done")
	require.NoError(t, os.WriteFile(path, []byte("rot"), 0o644))
	refused("can't be read")

	cfg.Overwrite, cfg.Run = true, "run-2"
	r, _ := run(cfg)
	require.NoError(t, r.err)
	for _, p := range []string{path, best} {
		f, err := checkpoint.Load(p)
		require.NoError(t, err)
		require.Equal(t, "run-2", f.Metadata["helios.run"], p)
		require.Contains(t, f.Metadata["helios.config"], `"gcn"`, p)
	}
	held, err = HeldIn(t.TempDir())
	require.NoError(t, err)
	require.Nil(t, held)
}

// The best and the last epoch's parameters can be had apart, from the folder and from the best
// one's own file; another dataset's checkpoint is refused unless that is meant.
func TestWhichParametersOfWhichDataset(t *testing.T) {
	d, feat := tiny.open(t)
	s := bind(t, d, 1, "")
	cfg := small()
	cfg.Epochs, cfg.CheckpointDir, cfg.LR, cfg.Dropout, cfg.Overwrite = 4, t.TempDir(), 0.1,
		0.9, true
	var r record
	for cfg.Seed = 1; ; cfg.Seed++ { // until one whose last epoch is not its best
		require.Less(t, cfg.Seed, uint64(10))
		if r = train(t, context.Background(), cfg, d, feat, s, 2,
			report.Observer{}); r.res.BestEpoch < cfg.Epochs {
			break
		}
	}
	require.NoError(t, r.err)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	in := prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}
	notes := ""
	obs := report.Observer{Note: func(n errs.Text) { notes += n.String() + "\n.String()" }}
	eval := func(c plan.Config, path, split string) (*report.EvalResult, error) {
		notes = ""
		c.HotnessDir = plan.NoFolder
		return Evaluate(context.Background(), c, in, path, split, obs)
	}
	last, err := eval(plan.Config{LastParameters: true}, cfg.CheckpointDir, "val")
	require.NoError(t, err)
	require.Equal(t, r.res.ParamsSHA256, last.ParamsSHA256)
	require.Equal(t, cfg.Epochs, last.Epoch)
	require.Equal(t, *r.res.Epochs[cfg.Epochs-1].ValAcc, *last.Accuracy)
	best, err := eval(plan.Config{}, cfg.CheckpointDir, "val")
	require.NoError(t, err)
	require.Equal(t, r.res.BestEpoch, best.Epoch)
	require.NotEqual(t, last.ParamsSHA256, best.ParamsSHA256)
	own, err := eval(plan.Config{}, filepath.Join(cfg.CheckpointDir, bestName), "val")
	require.NoError(t, err)
	require.Equal(t, best.ParamsSHA256, own.ParamsSHA256)
	require.Equal(t, best.Accuracy, own.Accuracy)
	_, err = eval(plan.Config{LastParameters: true}, filepath.Join(cfg.CheckpointDir,
		bestName), "val")
	require.ErrorContains(t, err, "option parameters last")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.Empty(t, notes)

	was := d.Meta.UUID
	defer func() { d.Meta.UUID = was }()
	for _, uuid := range []string{"another", ""} {
		d.Meta.UUID = uuid
		_, err = eval(plan.Config{}, cfg.CheckpointDir, "test")
		require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
		other := (*OtherDataset)(nil)
		require.ErrorAs(t, err, &other)
		require.Equal(t, was, other.Was)
		_, err = Predict(context.Background(), plan.Config{}, in, cfg.CheckpointDir, []int64{1},
			report.Outputs{}, func(report.Prediction) error { return nil }, obs)
		require.ErrorAs(t, err, &other)
		_, err = eval(plan.Config{OtherDataset: true}, cfg.CheckpointDir, "test")
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(notes, "was trained on"), notes)
	}
	d.Meta.Dim++
	defer func() { d.Meta.Dim-- }()
	_, err = eval(plan.Config{OtherDataset: true}, cfg.CheckpointDir, "test")
	require.Equal(t, errs.Usage, errs.ClassOf(err), "other dimensions are an error either way")
}

// FuzzState: metadata of any content under a right checksum gives a state that a run can stand at,
// or an error.
func FuzzState(f *testing.F) {
	const config = `{"dataset":"u","edges":1,"in_dim":4,"classes":2,"model":"sage","fanout":[2],"batch-size":4,"hidden":8,"lr":0.1}`
	f.Add(config, `{"epoch":0,"batch":1,"adam_step":1}`, `{"batches":1}`, `[]`,
		`{"epoch":-1,"acc":0}`)
	f.Add(config, `{"epoch":1,"batch":0,"adam_step":3}`, `{"batches":0}`,
		`[{"epoch":1,"batches":3}]`, `{"epoch":0,"acc":0.5}`)
	f.Add(config, `{"epoch":1,"batch":8,"adam_step":11}`, `{"batches":8}`,
		`[{"epoch":1,"batches":3}]`, `{"epoch":0,"acc":0.5}`)
	f.Add("null", "null", "null", "null", "null")
	f.Fuzz(func(t *testing.T, config, position, partial, epochs, best string) {
		st, err := decodeState("x", &checkpoint.File{Sealed: true, Metadata: map[string]string{
			"helios.format": "3", "helios.config": config, "helios.position": position,
			"helios.partial": partial, "helios.epochs": epochs, "helios.best": best,
		}})
		if err != nil || st.Print.Batch > 1<<20 {
			return
		}
		const nodes = 10
		if n := prepare.Batches(nodes, st.Print.Batch); st.misplaced(nodes) == "" &&
			(st.Batch < 0 || st.Batch > n || st.AdamStep != int64(st.Epoch*n+st.Batch) ||
				len(st.Epochs) != st.Epoch) {
			t.Fatalf("accepted: %+v", st)
		}
	})
}
