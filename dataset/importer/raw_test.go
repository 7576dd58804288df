package importer

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/datasettest"
	"helios/dataset/npy"
)

// The graph of import_test.go's goodView as headerless files.
var (
	rawIndptr  = []int64{0, 1, 2, 5, 5, 6}
	rawIndices = []int64{1, 0, 0, 3, 3, 4}
	rawFeat    = []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}
)

func le(t testing.TB, v any) []byte {
	var b bytes.Buffer
	require.NoError(t, binary.Write(&b, binary.LittleEndian, v))
	return b.Bytes()
}

func as[T int32 | uint32 | int64 | float32 | float64](v []int64) (out []T) {
	for _, x := range v {
		out = append(out, T(x))
	}
	return out
}

const ginexConf = `{"num_nodes": 5, "indptr_shape": [6], "indptr_dtype": "int64", "indices_shape": [6], "indices_dtype": "int64", "features_shape": [5, 2],
	"features_dtype": "float32", "labels_shape": [5, 1], "labels_dtype": "float32", "num_classes": 3}`

// rawFolder is a folder of each layout.
func rawFolder(t testing.TB, layout string) map[string][]byte {
	labels := []int64{0, 1, 2, 1, 0}
	feat := le(t, rawFeat)
	switch layout {
	case "ginex":
		return map[string][]byte{"conf.json": []byte(ginexConf), "indptr.dat": le(t, rawIndptr),
			"indices.dat":  le(t, rawIndices),
			"features.dat": feat, "labels.dat": le(t, as[float32](labels))}
	case "diskgnn":
		return map[string][]byte{
			"conf.json": []byte(
				`{"num_nodes": 5, "features_shape": [5, 2], "features_dtype": "float32", "labels_shape": [5], "labels_dtype": "torch.float32", "num_classes": 3, "label_offset": 0}`),
			"features.npy": feat, "labels.npy": datasettest.Arr{DT: "<f4", Shape: []int64{5},
				Data: as[float32](labels)}.Bytes(t),
			"ptr.npy": datasettest.Arr{DT: "<i8", Shape: []int64{6}, Data: rawIndptr}.Bytes(t),
			"idx.npy": datasettest.Arr{DT: "<i8", Shape: []int64{6}, Data: rawIndices}.Bytes(t)}
	case "legion": // CSR: 0→1 2, 1→0, 3→2 2, 4→4
		return map[string][]byte{"edge_src": le(t, []int64{0, 2, 3, 3, 5, 6}),
			"edge_dst": le(t, []int32{1, 2, 0, 2, 2, 4}), "features": feat,
			"labels":      le(t, as[int32](labels)),
			"trainingset": le(t, []int32{4, 1}), "validationset": le(t, []int32{0}),
			"testingset": le(t, []int32{2, 3})}
	case "gnnlab":
		return map[string][]byte{
			"meta.txt": []byte(
				"NUM_NODE\t5\nNUM_EDGE\t6\nFEAT_DIM\t2\nNUM_CLASS\t3\nNUM_TRAIN_SET\t2\nNUM_VALID_SET\t1\nNUM_TEST_SET\t2\n"),
			"indptr.bin":  le(t, as[uint32](rawIndptr)),
			"indices.bin": le(t, as[uint32](rawIndices)), "feat.bin": feat,
			"label.bin":     le(t, labels),
			"train_set.bin": le(t, []uint32{1, 4}), "valid_set.bin": le(t, []uint32{0}),
			"test_set.bin": le(t, []uint32{3, 2})}
	}
	return map[string][]byte{"indptr.bin": le(t, rawIndptr),
		"indices.bin": le(t, as[uint32](rawIndices)), "features.bin": feat,
		"labels.bin": le(t, labels)}
}

func writeFolder(t testing.TB, files map[string][]byte) string {
	dir := t.TempDir()
	for n, b := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, n), b, 0o644))
	}
	return dir
}

func writeSplits(t testing.TB) string {
	return writeFolder(t, map[string][]byte{"train.txt": []byte("1\n4\n"),
		"valid.txt": []byte("0\n"), "test.txt": []byte("2\n3\n")})
}

func TestImportRaw(t *testing.T) {
	for _, layout := range RawLayouts {
		for name, change := range map[string]func(dir string, files map[string][]byte,
			o *RawOptions){
			"as it is": func(string, map[string][]byte, *RawOptions) {},
			"named": func(_ string, _ map[string][]byte,
				o *RawOptions) {
				o.Layout = layout
			},
			"with the numbers": func(_ string, _ map[string][]byte, o *RawOptions) {
				o.Nodes, o.Edges, o.Dim = 5, 6, 2
			},
			"float16": func(_ string, files map[string][]byte, o *RawOptions) {
				half := []byte{}
				for _, h := range []uint16{0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600,
					0x4700, 0x4800, 0x4880} {
					half = binary.LittleEndian.AppendUint16(half, h)
				}
				for n, b := range files {
					if bytes.Equal(b, le(t, rawFeat)) {
						files[n] = half
					}
				}
				o.RowDType = "float16"
			},
			"a header after all": func(_ string, files map[string][]byte, _ *RawOptions) {
				for n, b := range files {
					if bytes.Equal(b, le(t, rawFeat)) {
						files[n] = datasettest.Arr{DT: "<f4", Shape: []int64{5, 2},
							Data: rawFeat}.Bytes(t)
					}
				}
			},
		} {
			t.Run(layout+"/"+name, func(t *testing.T) {
				files := rawFolder(t, layout)
				o := RawOptions{Options: Options{Output: Output{Out: filepath.Join(t.TempDir(),
					"d")}}}
				if layout == "ginex" || layout == "diskgnn" || layout == "plain" {
					o.SplitDir = writeSplits(t)
				}
				if layout == "plain" {
					o.Nodes, o.LabelDType, o.Dim = 5, "int64", 2
				}
				change("", files, &o)
				o.In = writeFolder(t, files)
				if layout == "diskgnn" {
					o.Indptr, o.Indices = filepath.Join(o.In, "ptr.npy"),
						filepath.Join(o.In, "idx.npy")
				}
				require.NoError(t, Raw(context.Background(), o))
				require.Equal(t, goodView, viewOf(t, o.Out))
			})
		}
	}
	// The other direction, 64 bits, no features, no labels, new splits.
	files := rawFolder(t, "gnnlab")
	for _, n := range []string{"indptr", "indices", "train_set", "valid_set", "test_set"} {
		files[n+"64.bin"] = le(t, map[string][]int64{"indptr": rawIndptr, "indices": rawIndices,
			"train_set": {1, 4}, "valid_set": {0}, "test_set": {2, 3}}[n])
		delete(files, n+".bin")
	}
	delete(files, "feat.bin")
	o := RawOptions{Options: Options{Input: Input{In: writeFolder(t, files)},
		Output: Output{Out: filepath.Join(t.TempDir(), "d")}}}
	o.Lists = "out"
	err := Raw(context.Background(), o)
	require.ErrorContains(t, err, "comes without features")
	datasettest.RequireUsage(t, err)
	o.FeatureFn = RandomFeatures
	require.NoError(t, Raw(context.Background(), o))
	v := viewOf(t, o.Out)
	require.Equal(t, []int64{0, 2, 3, 3, 5, 6}, v.indptr)
	require.Equal(t, []int64{1, 4}, v.train)
	require.Equal(t, 2, datasettest.Open(t, o.Out).Meta.Dim, "as meta.txt has it")
}

func TestImportRawRefuses(t *testing.T) {
	type m = map[string][]byte
	type opt = *RawOptions
	put := func(name string, b []byte) func(m, opt) { return func(f m, _ opt) { f[name] = b } }
	drop := func(name string) func(m, opt) { return func(f m, _ opt) { delete(f, name) } }
	cut := func(name string) func(m,
		opt) {
		return func(f m, _ opt) { f[name] = f[name][:len(f[name])-1] }
	}
	for name, c := range map[string]struct {
		layout string
		change func(m, opt)
		want   string
	}{
		"offsets cut": {"ginex", cut("indptr.dat"),
			"indptr.dat: shape (6,) of <i8 needs 48 bytes"},
		"neighbours cut": {"ginex", cut("indices.dat"),
			"indices.dat: shape (6,) of <i8 needs 48 bytes"},
		"features cut": {"ginex", cut("features.dat"),
			"features.dat: shape (5, 2) of <f4 needs 40 bytes from offset 0 on, the file has 39"},
		"more features": {"ginex", put("features.dat", make([]byte, 80)), "needs 40 bytes"},
		"labels cut": {"ginex", cut("labels.dat"),
			"labels.dat: shape (5,) of <f4 needs 20"},
		"no labels of classes": {"ginex", put("labels.dat", le(t, []float32{0, 1, 2.5, 0, 0})),
			"labels.dat: label 2.5 of node 2"},
		"conf cut": {"ginex", put("conf.json", []byte(ginexConf[:40])),
			"conf.json: byte 40: unexpected end"},
		"conf of other shape": {"ginex",
			put("conf.json", bytes.Replace([]byte(ginexConf), []byte("[6]"), []byte("[7]"), 1)),
			"conf.json: indptr_shape is [7], num_nodes is 5"},
		"conf of other type": {"ginex",
			put("conf.json", bytes.Replace([]byte(ginexConf), []byte(`"int64"`),
				[]byte(`"complex64"`), 1)), "conf.json: indptr_dtype: element type"},
		"a neighbour far off": {"ginex", put("indices.dat", le(t, []int64{1, 0, 0, 3, 9, 4})),
			"indices.dat: "},
		"offsets that fall": {"ginex", put("indptr.dat", le(t, []int64{0, 1, 5, 2, 5, 6})),
			"indptr.dat: offset 2 at position 3 does not rise"},
		"offsets not from 0": {"ginex", put("indptr.dat", le(t, []int64{1, 1, 2, 5, 5, 6})),
			"indptr.dat: offset 1 at position 0"},
		"torch splits": {"ginex", put("split_idx.pth", []byte("PK")),
			"split_idx.pth is in PyTorch's own format"},
		"torch labels": {"plain", func(f m, o opt) { o.Labels = "labels.pt" }, "option labels"},
		"no graph": {"diskgnn", func(m, opt) {},
			"DiskGNN leaves the graph in DGL's or OGB's own files"},
		"no conf of a number": {"gnnlab", put("meta.txt", []byte("NUM_NODE five\n")),
			`meta.txt:1: "NUM_NODE five"`},
		"no number of nodes": {"gnnlab", put("meta.txt", []byte("NUM_EDGE 6\n")),
			"meta.txt: no NUM_NODE"},
		"neither 4 nor 8": {"gnnlab", put("indptr.bin", make([]byte, 30)),
			"indptr.bin: 30 bytes; shape (6,) needs 24 of type <u4 or 48 of type <i8"},
		"edges of another size": {"gnnlab", put("indices.bin", make([]byte, 28)),
			"indices.bin: 28 bytes; shape (6,)"},
		"split of another size": {"gnnlab", put("train_set.bin", make([]byte, 12)),
			"train_set.bin: 12 bytes; shape (2,)"},
		"split of a far node": {"gnnlab", put("train_set.bin", le(t, []uint32{1, 5})),
			"train_set.bin: "},
		"one split is missing": {"gnnlab", drop("valid_set.bin"), "has no val split"},
		"other nodes": {"gnnlab", func(_ m, o opt) { o.Nodes = 6 },
			"option nodes 6: the configuration in"},
		"offsets of 4 bytes": {"legion", put("edge_src", le(t, []int32{0, 2, 3, 3, 5, 6, 6})),
			"edge_src: 28 bytes are no whole numbers of type <i8"},
		"other vertices": {"legion",
			put("meta_config", []byte("/data/ 8000 6 6 2 2 1 2 1 1")),
			"edge_src: shape (7,) of <i8 needs 56 bytes"},
		"meta_config is short": {"legion", put("meta_config", []byte("/data/ 8000 5")),
			"meta_config: field 3 of 3"},
		"odd features": {"legion", cut("features"),
			"features: 39 bytes are no rows of <f4 for 5 nodes"},
		"no offsets": {"plain", drop("indptr.bin"),
			"has no indptr (looked for indptr, indptr.bin"},
		"nodes not known": {"plain", func(_ m, o opt) { o.Nodes = 0 },
			"indptr.bin: 48 bytes can be 6 offsets of 8 bytes or 12 of 4; give option nodes or option index-dtype"},
		"dim not known": {"plain", func(_ m, o opt) { o.Dim = 0 },
			"features.bin: 40 bytes for 5 nodes can be rows of more than one type; give option dim or option raw-dtype"},
		"labels' type unknown": {"plain", func(_ m, o opt) { o.LabelDType = "" },
			"labels.bin: a raw file does not tell integers from floats"},
		"other layout": {"plain", func(_ m, o opt) { o.Layout = "graphs4all" },
			`option layout "graphs4all" is not known`},
		"other lists": {"plain", func(_ m, o opt) { o.Lists = "both" },
			`option lists "both"`},
		"other type": {"plain", func(_ m, o opt) { o.IndexDType = "int128" },
			"option index-dtype: element type"},
		"header of other shape": {"plain",
			put("features.bin", datasettest.Arr{DT: "<f4", Shape: []int64{5, 1},
				Data: rawFeat[:5]}.Bytes(t)), "features.bin has shape (5, 1), (5, 2) are needed"},
	} {
		t.Run(name, func(t *testing.T) {
			files := rawFolder(t, c.layout)
			o := RawOptions{Options: Options{Output: Output{Out: filepath.Join(t.TempDir(), "d")}}}
			if c.layout == "plain" {
				o.Nodes, o.LabelDType, o.Dim = 5, "int64", 2
			}
			c.change(files, &o)
			o.In = writeFolder(t, files)
			err := Raw(context.Background(), o)
			datasettest.RequireUsage(t, err)
			require.ErrorContains(t, err, c.want)
			require.NoDirExists(t, o.Out)
		})
	}
	require.Equal(t, npy.Int64, func() npy.DType { d, _ := rawDType("torch.long"); return d }())
	// A path in PyTorch's format, by flag.
	files := rawFolder(t, "plain")
	files["y.pt"] = []byte("PK")
	o := RawOptions{Options: Options{Input: Input{In: writeFolder(t, files)}, Nodes: 5,
		Output: Output{Out: filepath.Join(t.TempDir(), "d")}}}
	o.Labels = filepath.Join(o.In, "y.pt")
	err := Raw(context.Background(), o)
	datasettest.RequireUsage(t, err)
	require.ErrorContains(t, err,
		fmt.Sprintf(
			`%s is in PyTorch's own format, which can hold any code and is not read; run in Python: numpy.save("labels.npy", torch.load("y.pt").numpy())`,
			o.Labels))
}
