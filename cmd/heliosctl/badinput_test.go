package main

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/npy"
	"helios/nvme/proxy"
)

// array writes an .npy file of float32, float64 or int64 values.
func array(t *testing.T, path string, shape []int64, values any) {
	t.Helper()
	h := npy.Header{Shape: shape}
	switch values.(type) {
	case []float32:
		h.DType = npy.Float32
	case []float64:
		h.DType = npy.DType{Kind: 'f', Size: 8}
	case []int64:
		h.DType = npy.Int64
	default:
		t.Fatalf("%T", values)
	}
	b, err := npy.EncodeHeader(h)
	require.NoError(t, err)
	var buf bytes.Buffer
	buf.Write(b)
	require.NoError(t, binary.Write(&buf, binary.LittleEndian, values))
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, buf.Bytes(), 0o644))
}

// arrays writes a good folder of arrays: 6 nodes in a ring, 4 features, 2 classes.
func arrays(t *testing.T, dir string) {
	t.Helper()
	f := make([]float32, 24)
	for i := range f {
		f[i] = float32(i)
	}
	array(t, dir+"/features.npy", []int64{6, 4}, f)
	array(t, dir+"/labels.npy", []int64{6}, []int64{0, 1, 0, 1, 0, 1})
	array(t, dir+"/edge_index.npy", []int64{2, 6}, []int64{0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 0})
}

func truncate(t *testing.T, path string, drop int64) {
	t.Helper()
	fi, err := os.Stat(path)
	require.NoError(t, err)
	require.NoError(t, os.Truncate(path, fi.Size()-drop))
}

func mustAbs(t *testing.T, path string) string {
	t.Helper()
	abs, err := filepath.Abs(path)
	require.NoError(t, err)
	return abs
}

type badCase struct {
	name    string
	prepare func(t *testing.T)
	args    string
	code    int
	want    []string // parts of the error line
	absent  string   // must not be there afterwards
}

func runBad(t *testing.T, cases []badCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			isolate(t)
			if c.prepare != nil {
				c.prepare(t)
			}
			args := strings.Fields(c.args)
			verb := args[0]
			if verb == "import" || verb == "bench" {
				verb += " " + args[1]
			}
			fails(t, hc(t, args...), c.code, verb, c.want...)
			if c.absent != "" {
				require.NoFileExists(t, c.absent)
				require.NoDirExists(t, c.absent)
			}
			left, err := filepath.Glob("*.partial*")
			require.NoError(t, err)
			hidden, err := filepath.Glob(".*.partial*")
			require.NoError(t, err)
			require.Empty(t, append(left, hidden...), "partial output stays")
		})
	}
}

func TestBadArrays(t *testing.T) {
	with := func(change func(t *testing.T)) func(*testing.T) {
		return func(t *testing.T) { arrays(t, "in"); change(t) }
	}
	nan := math.NaN()
	args := "import npy --in in --out g"
	runBad(t, []badCase{
		{"truncated features", with(func(t *testing.T) { truncate(t, "in/features.npy", 7) }), args,
			2, []string{"features.npy"}, "g"},
		{"truncated edges", with(func(t *testing.T) { truncate(t, "in/edge_index.npy", 8) }), args,
			2, []string{"edge_index.npy"}, "g"},
		{"header cut off", with(func(t *testing.T) { truncate(t, "in/labels.npy", 130) }), args, 2,
			[]string{"labels.npy"}, "g"},
		{"features of one dimension",
			with(
				func(
					t *testing.T) {
					array(t, "in/features.npy", []int64{24}, make([]float32, 24))
				}), args, 2, []string{"features.npy"}, "g"},
		{"features of three dimensions",
			with(
				func(
					t *testing.T) {
					array(t, "in/features.npy", []int64{6, 2, 2}, make([]float32, 24))
				}), args, 2, []string{"features.npy", "shape", "(nodes, dim)"}, "g"},
		{"labels of two dimensions",
			with(func(t *testing.T) { array(t, "in/labels.npy", []int64{3, 2}, make([]int64, 6)) }),
			args, 2, []string{"labels.npy", "shape"}, "g"},
		{"edges of three rows",
			with(
				func(
					t *testing.T) {
					array(t, "in/edge_index.npy", []int64{3, 4}, make([]int64, 12))
				}), args, 2, []string{"edge_index.npy", "shape"}, "g"},
		{"NaN labels",
			with(
				func(
					t *testing.T) {
					array(t, "in/labels.npy", []int64{6}, []float64{0, 1, nan, 1, 0, 1})
				}), args, 2, []string{"labels.npy", "unlabelled-ok"}, "g"},
		{"fractional labels",
			with(
				func(
					t *testing.T) {
					array(t, "in/labels.npy", []int64{6}, []float64{0, 1, 0.5, 1, 0, 1})
				}), args, 2, []string{"labels.npy"}, "g"},
		{"node number beyond the nodes", with(func(t *testing.T) {
			array(t, "in/edge_index.npy", []int64{2, 2}, []int64{0, 1, 1, 6})
		}), args, 2, []string{"edge_index.npy", "6"}, "g"},
		{"negative node number", with(func(t *testing.T) {
			array(t, "in/edge_index.npy", []int64{2, 2}, []int64{0, -3, 1, 2})
		}), args, 2, []string{"edge_index.npy", "-3"}, "g"},
		{"fewer labels than features",
			with(func(t *testing.T) { array(t, "in/labels.npy", []int64{5}, make([]int64, 5)) }),
			args, 2, []string{"labels.npy", "5", "6"}, "g"},
		{"no such folder", nil, args, 2, []string{"in", "no such file"}, "g"},
		{"no edges",
			with(func(t *testing.T) { require.NoError(t, os.Remove("in/edge_index.npy")) }), args,
			2, []string{"edge_index"}, "g"},
		{"not an array",
			with(
				func(
					t *testing.T) {
					require.NoError(t, os.WriteFile("in/labels.npy", []byte("hello, world"), 0o644))
				}), args, 2, []string{"labels.npy"}, "g"},
		{"text in an edge list", func(t *testing.T) {
			require.NoError(t, os.WriteFile("e.csv", []byte("0,1\n1,x\n"), 0o644))
		}, "import edges --in e.csv --out g", 2, []string{"e.csv", "2"}, "g"},
		{"negative id in the first edge", func(t *testing.T) {
			require.NoError(t, os.WriteFile("e.csv", []byte("1,-2\n0,1\n"), 0o644))
		}, "import edges --in e.csv --out g", 2, []string{"e.csv:1", "-2"}, "g"},
		{"text in the first edge", func(t *testing.T) {
			require.NoError(t, os.WriteFile("e.csv", []byte("1,x\n0,1\n"), 0o644))
		}, "import edges --in e.csv --out g", 2, []string{"e.csv:1", "x"}, "g"},
		{"no input", nil, "import npy --in none --out g", 2,
			[]string{"--in", "none", "name what is there"}, "g"},
		{"no labels file", with(func(*testing.T) {}), "import npy --in in --labels none --out g", 2,
			[]string{"--labels", "none", "name what is there"}, "g"},
		{"no package index", nil, "import debian --in none --out g", 2,
			[]string{"--in", "none", "name what is there"}, "g"},
		{"fractions", with(func(*testing.T) {}), args + " --train-fraction 0.9 --val-fraction 0.9",
			2, []string{"--train-fraction 0.9", "--val-fraction 0.9"}, "g"},
		{"output is there", with(func(t *testing.T) { require.NoError(t, os.Mkdir("g", 0o755)) }),
			args, 4, []string{"g already exists", "--out"}, ""},
		{"no output", with(func(*testing.T) {}), "import npy --in in", 2, []string{"--out"}, ""},
	})
}

func TestBadDatasetsAndSSDs(t *testing.T) {
	gen := func(t *testing.T, name, seed string) {
		ok(t, "generate", "--nodes", "600", "--classes", "3", "--dim", "16", "--seed", seed,
			"--out", name)
	}
	two := func(t *testing.T) {
		gen(t, "g", "1")
		ok(t, "bind-ssds", "--proxy", "a.img,b.img", "--size", "4MiB")
		ok(t, "load", "g")
	}
	runBad(t, []badCase{
		{"no dataset", nil, "train", 2, []string{"--dataset"}, ""},
		{"two datasets", nil, "train g --dataset h", 2, []string{"--dataset h", "g"}, ""},
		{"not a dataset", func(t *testing.T) { require.NoError(t, os.Mkdir("g", 0o755)) },
			"train g", 2, []string{"g", "dataset.yaml"}, ""},
		{"no such dataset", nil, "load g", 2, []string{"g", "generate"}, ""},
		{"no SSDs", func(t *testing.T) { gen(t, "g", "1") }, "load g", 2,
			[]string{"bind-ssds"}, ""},
		{"features cut short",
			func(t *testing.T) { gen(t, "g", "1"); truncate(t, "g/features.npy", 4) }, "load g", 5,
			[]string{"features.npy", "restore the file"}, ""},
		{"topology cut short", func(t *testing.T) { two(t); truncate(t, "g/indices.npy", 4) },
			"train g", 5, []string{"indices.npy", "restore the file"}, ""},
		{"not loaded", func(t *testing.T) {
			gen(t, "g", "1")
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
		}, "train g --ssds ssd0", 5, []string{"ssd0", "load"}, ""},
		{"part of the dataset gone",
			func(t *testing.T) { two(t); require.NoError(t, os.Remove("g/labels.npy")) }, "train g",
			5, []string{"g/labels.npy is missing", "import the dataset again"}, ""},
		{"checkpoint folder is a file", func(t *testing.T) {
			two(t)
			require.NoError(t, os.WriteFile("ck", nil, 0o644))
		}, "train g --checkpoint ck", 2, []string{"--checkpoint", "ck", "can be written"}, ""},
		{"rows beyond the layout", two, "bench io --row-bytes 32MiB", 2,
			[]string{"--row-bytes", "16MiB"}, ""},
		{"coalescing where there is none in bench", two, "bench io --io-stack mmap --coalesce 64KiB",
			2, []string{"--coalesce 64KiB", "mmap"}, ""},
		{"coalescing where there is none", two, "train g --io-stack sync --coalesce 64KiB", 2,
			[]string{"--coalesce", "sync", "--io-stack async"}, ""},
		{"stripe left out", two, "train g --ssds ssd0", 2, []string{"stripe 1 is missing",
			"--ssds leaves out ssd1: add the SSDs that hold it"}, ""},
		{"stripe left out in verify", two, "verify g --ssds b.img", 2,
			[]string{"stripe 0 is missing", "--ssds leaves out ssd0"}, ""},
		{"missing stripe", func(t *testing.T) { two(t); ok(t, "unbind-ssds", "ssd1") }, "train g",
			5, []string{"stripe 1 is missing", "bind the SSD that holds it or run"}, ""},
		{"an SSD twice", two, "train g --ssds ssd0,ssd1,ssd0", 2,
			[]string{"--ssds names SSD ssd0 twice", "name each once"}, ""},
		{"an SSD twice under two names", two, "load g --ssds a.img,ssd0", 2,
			[]string{`--ssds names SSD ssd0 twice, as "a.img" and "ssd0"`}, ""},
		{"an SSD twice to unbind", two, "unbind-ssds ssd0 ssd0", 2,
			[]string{"names SSD ssd0 twice"}, ""},
		{"superblock of another dataset", func(t *testing.T) { two(t); gen(t, "h", "2") },
			"train h --mode cpu", 3, []string{"the bound SSDs do not hold it"}, ""},
		{"superblock of another dataset on a named SSD", func(t *testing.T) { two(t); gen(t, "h", "2") },
			"train h --ssds ssd0", 4, []string{"ssd0"}, ""},
		{"load where another dataset leaves no room", func(t *testing.T) {
			two(t)
			ok(t, "generate", "--nodes", "31500", "--dim", "32", "--classes", "3", "--out", "h")
		}, "load h", 4, []string{"ssd0", `"g"`, "free in one piece", "heliosctl unload", "--force"}, ""},
		{"unload of nothing", two, "unload", 2, []string{"needs a DATASET"}, ""},
		{"unload of what is not there", two, "unload h", 2, []string{"they hold: g ("}, ""},
		{"training without labels", func(t *testing.T) {
			require.NoError(t, os.WriteFile("e.csv", []byte("0,1\n1,2\n"), 0o644))
			ok(t, "import", "edges", "--in", "e.csv", "--out", "g", "--feature-fn", "random")
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "1MiB")
		}, "train g", 2, []string{"g has no labels", "--labels"}, ""},
		{"load over a file system", func(t *testing.T) {
			gen(t, "g", "1")
			img := make([]byte, 4<<20)
			copy(img[1024+0x38:], "\x53\xef")
			require.NoError(t, os.WriteFile("fs.img", img, 0o644))
			ok(t, "bind-ssds", "--proxy", "fs.img")
		}, "load g", 4, []string{"ssd0", "ext2/3/4"}, ""},
		{"SSDs too small", func(t *testing.T) {
			ok(t, "generate", "--nodes", "30000", "--classes", "3", "--dim", "64", "--out", "g")
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "4MiB")
		}, "load g", 2, []string{"ssd0", "too small"}, ""},
		{"damaged data", func(t *testing.T) {
			two(t)
			f, err := os.OpenFile("a.img", os.O_RDWR, 0)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte("damage"), 1<<20+100)
			require.NoError(t, err)
			require.NoError(t, f.Close())
		}, "verify g", 5, []string{"ssd0"}, ""},
		{"damaged data on one SSD", func(t *testing.T) {
			two(t)
			f, err := os.OpenFile("b.img", os.O_RDWR, 0)
			require.NoError(t, err)
			_, err = f.WriteAt([]byte("damage"), 1<<20+100)
			require.NoError(t, err)
			require.NoError(t, f.Close())
			require.Contains(t, ok(t, "verify", "--ssds", "proxy:"+mustAbs(t, "a.img")), "good")
		}, "verify --ssds ssd1", 5, []string{"ssd1"}, ""},
		{"backing file gone", func(t *testing.T) { two(t); require.NoError(t, os.Remove("b.img")) },
			"train g", 5, []string{"ssd1", "b.img"}, ""},
		{"backing file shorter", func(t *testing.T) { two(t); truncate(t, "b.img", 4096) },
			"train g", 5, []string{"ssd1", "b.img"}, ""},
		{"unknown SSD", two, "train g --ssds ssd7", 2, []string{"--ssds", "ssd7", "ssd0, ssd1"},
			""},
		{"CPU cache beyond memory", two, "train g --cpu-cache 9000TiB", 2,
			[]string{"--cpu-cache"}, ""},
		{"GPU cache beyond memory", two, "train g --gpu-cache 9000TiB", 2,
			[]string{"--gpu-cache"}, ""},
		{"a rung without queues", two, "train g --io-stack cpu --memory-rung pinned", 2,
			[]string{"--memory-rung pinned", "stack cpu"}, ""},
		{"p2p without a GPU", two, "train g --device host --memory-rung p2p", 3,
			[]string{"p2p", "host device"}, ""},
		{"precision without a GPU", two, "train g --device host --precision tf32", 3,
			[]string{"--precision tf32", "--device cuda"}, ""},
		{"a BLAS without a GPU", two, "train g --device host --blas libcublas.so", 3,
			[]string{"--blas libcublas.so", "--device cuda"}, ""},
		{"more replicas than shards", two, "train g --device host --replicas 3 --shards 2", 2,
			[]string{"--replicas 3", "--shards 2"}, ""},
		{"more replicas than workers", two, "train g --device host --replicas 3 --workers 2", 2,
			[]string{"--replicas 3", "2 workers", "--workers 3"}, ""},
		{"more modelled replicas than shards", two,
			"train g --clock virtual --hardware a100-p5510x12 --replicas 3 --shards 2", 2,
			[]string{"--replicas 3", "--shards 2"}, ""},
		{"NCCL without a GPU", two, "train g --device host --replicas 2 --workers 2 --reduce nccl", 3,
			[]string{"--reduce nccl", "--device cuda"}, ""},
		{"NCCL for one replica", two, "train g --device host --reduce nccl", 2,
			[]string{"--reduce nccl", "--replicas"}, ""},
		{"another sum", two, "train g --replicas 2 --reduce ring", 2,
			[]string{"--reduce", "ring", "tree", "nccl"}, ""},
		{"a list of GPUs without replicas", two, "train g --device cuda:0,cuda:1", 2,
			[]string{"--device cuda:0,cuda:1", "--replicas"}, ""},
		{"a list of GPUs and other replicas", two,
			"train g --device cuda:0,cuda:1 --replicas 3", 2, []string{"2 GPUs", "--replicas is 3"},
			""},
		{"a GPU twice", two, "train g --device cuda:1,cuda:1 --replicas 2", 2,
			[]string{"GPU 1 twice"}, ""},
		{"a list with a host", two, "train g --device cuda:1,host --replicas 2", 2,
			[]string{"cuda:0,cuda:2"}, ""},
		{"no checkpoint", two, "eval g --checkpoint none", 2, []string{"none", "train"}, ""},
		{"checkpoint is a text", func(t *testing.T) {
			two(t)
			require.NoError(t, os.WriteFile("ck", []byte("hello"), 0o644))
		}, "eval g --checkpoint ck", 5, []string{"ck"}, ""},
		{"node beyond the dataset", func(t *testing.T) {
			two(t)
			ok(t, "train", "g", "--epochs", "1", "--checkpoint", "ck", "--quiet")
		}, "predict g --checkpoint ck --nodes 600 --csv p.csv", 2, []string{"node 600"}, "p.csv"},
	})
}

func TestBadFlags(t *testing.T) {
	runBad(t, []badCase{
		{"unknown flag", nil, "train --gpu-cach 5% g", 2,
			[]string{"--gpu-cach;", "--gpu-cache"}, ""},
		{"unknown mode", nil, "train g --mode helois", 2,
			[]string{"--mode", "helois", "did you mean helios"}, ""},
		{"unknown stack", nil, "train g --io-stack asynk", 2,
			[]string{"--io-stack", "did you mean async"}, ""},
		{"bad --on-ssd-failure", nil, "train g --on-ssd-failure retry", 2,
			[]string{"--on-ssd-failure", "retry=N"}, ""},
		{"bad --coalesce", nil, "eval g --checkpoint ck --coalesce some", 2,
			[]string{"--coalesce", "auto"}, ""},
		{"virtual clock without hardware", nil, "train g --clock virtual", 2,
			[]string{"--clock virtual", "--hardware", "a100-p5510x12"}, ""},
		{"unknown hardware", nil, "train g --clock virtual --hardware abacus", 2,
			[]string{"abacus", "a100-p5510x12"}, ""},
		{"hardware without the virtual clock", nil, "train g --hardware host", 2,
			[]string{"--hardware", "--clock virtual"}, ""},
		{"no SSDs on the virtual clock", nil,
			"train g --clock virtual --hardware host --ssd-count 0", 2,
			[]string{"--ssd-count"}, ""},
		{"checkpoint on the virtual clock", nil,
			"train g --clock virtual --hardware host --checkpoint ck", 2,
			[]string{"--checkpoint", "--clock virtual"}, "ck"},
		{"unknown clock", nil, "train g --clock sun", 2, []string{"--clock", "wall, virtual"}, ""},
		{"timeline in no folder", nil, "train g --timeline no/where.json", 2,
			[]string{"--timeline", "folder"}, "no/where.json"},
		{"unknown pipeline", nil, "train g --pipeline shallow", 2,
			[]string{"--pipeline", "deep"}, ""},
		{"no GPU to train on",
			func(
				t *testing.T) {
				ok(t, "generate", "--nodes", "50", "--classes", "2", "--out", "g")
			}, "train g --device cuda --checkpoint ck", 3, []string{"--device cuda", "train",
				"no CUDA driver", "install"}, "ck"},
		{"no GPU to evaluate on",
			func(
				t *testing.T) {
				ok(t, "generate", "--nodes", "50", "--classes", "2", "--out", "g")
			}, "eval g --device cuda:1 --checkpoint ck", 3, []string{"--device cuda:1", "eval",
				"no CUDA driver"}, ""},
		{"unknown rung", nil, "train g --memory-rung peer", 2,
			[]string{"--memory-rung", "p2p"}, ""},
		{"unknown device", nil, "train g --device gpu", 2, []string{"--device", "gpu", "cuda"}, ""},
		{"misspelt device", nil, "bench io --device cuad", 2,
			[]string{"cuad", "did you mean cuda"}, ""},
		{"no number of a GPU", nil, "bench io --device cuda:one", 2,
			[]string{"cuda:one", "cuda:0"}, ""},
		{"a GPU below 0", nil, "bench io --device cuda:-1", 2, []string{"cuda:-1"}, ""},
		{"bad budget", nil, "train g --gpu-cache lots", 2, []string{"--gpu-cache", "lots",
			"256MiB"}, ""},
		{"budget over 100%", nil, "train g --cpu-cache 120%", 2,
			[]string{"--cpu-cache", "120%"}, ""},
		{"bad fanout", nil, "train g --fanout ten,ten", 2, []string{"--fanout", "ten"}, ""},
		{"zero epochs", nil, "train g --epochs 0", 2, []string{"--epochs 0"}, ""},
		{"zero batch", nil, "train g --batch-size 0", 2, []string{"--batch-size 0"}, ""},
		{"negative workers",
			func(
				t *testing.T) {
				ok(t, "generate", "--nodes", "50", "--classes", "2", "--out", "g")
			}, "train g --workers -1", 2, []string{"--workers -1"}, ""},
		{"bad operator", nil, "train g --sm-budget shuffle=2", 2,
			[]string{"--sm-budget", "shuffle"}, ""},
		{"checkpoint-every alone", nil, "train g --checkpoint-every 5", 2,
			[]string{"--checkpoint DIR"}, ""},
		{"bad fault", func(t *testing.T) {
			ok(t, "generate", "--nodes", "50", "--classes", "2", "--out", "g")
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "1MiB")
		}, "train g --fault explode(op=read)", 2, []string{"--fault", "explode"}, ""},
		{"second argument", nil, "train g h", 2, []string{`"h"`}, ""},
		{"config file", nil, "train --config no.yaml", 2, []string{"--config", "no.yaml"}, ""},
		{"percent sign forgotten", nil, "train g --gpu-cache 5", 2,
			[]string{"--gpu-cache", "write 5% or 5B"}, ""},
		{"fault key", func(t *testing.T) {
			ok(t, "generate", "--nodes", "50", "--classes", "2", "--out", "g")
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "1MiB")
		}, "train g --fault error(opp=read)", 2, []string{"--fault", "opp",
			"keys are op, lba"}, ""},
		{"more than the disk", nil, "generate --nodes 4000000000 --dim 65536 --out g", 1,
			[]string{"--out g", "free", "lower --nodes"}, "g"},
		{"no nodes", nil, "generate --out g", 2, []string{"--nodes"}, "g"},
		{"negative nodes", nil, "generate --nodes -5 --out g", 2, []string{"--nodes"}, "g"},
		{"unknown kind", nil, "generate --kind smb --nodes 10 --out g", 2,
			[]string{"--kind", "did you mean sbm"}, "g"},
		{"no such SSD by address", nil, "bind-ssds 0000:3b:00.0", 2,
			[]string{"0000:3b:00.0", "not found", "--proxy"}, ""},
		{"no such SSD by name", nil, "bind-ssds /dev/nvme0n1", 2,
			[]string{"/dev/nvme0n1", "not found", "--proxy"}, ""},
		{"an SSD as a file", nil, "bind-ssds --proxy /dev/nvme0", 2, []string{"--proxy /dev/nvme0",
			"VFIO", "sudo heliosctl bind-ssds /dev/nvme0"}, ""},
		{"a file as an SSD",
			func(t *testing.T) { require.NoError(t, os.WriteFile("a.img", nil, 0o600)) },
			"bind-ssds a.img", 2, []string{"a.img", "--proxy a.img"}, ""},
		{"two kinds at once", nil, "bind-ssds nvme0 --proxy a.img --size 1MiB", 2,
			[]string{"--proxy", "one after the other"}, "a.img"},
		{"flag of the other kind", nil, "bind-ssds --proxy a.img --size 1MiB --dry-run", 2,
			[]string{"--dry-run", "NVMe"}, "a.img"},
		{"all and some", nil, "bind-ssds nvme0 --all-unused", 2, []string{"--all-unused"}, ""},
		{"all of none", nil, "bind-ssds --all-unused", 3, []string{"no NVMe controller",
			"--proxy"}, ""},
		{"no SSD", nil, "bind-ssds", 2, []string{"--proxy"}, ""},
		{"no size", nil, "bind-ssds --proxy a.img", 2, []string{"a.img", "--size"}, "a.img"},
		{"odd size", nil, "bind-ssds --proxy a.img --size 1000001", 2, []string{"--size", "4096"},
			"a.img"},
		{"odd block", nil, "bind-ssds --proxy a.img --size 1MiB --lba 520", 2,
			[]string{"--lba 520"}, "a.img"},
		{"size of a file that is there", func(t *testing.T) {
			require.NoError(t, os.WriteFile("a.img", make([]byte, 1<<20), 0o644))
		}, "bind-ssds --proxy a.img --size 2MiB", 4, []string{"a.img", "--size"}, ""},
		{"a folder", nil, "bind-ssds --proxy .", 2, []string{"neither a file nor a block device"},
			""},
		{"all or nothing", nil, "bind-ssds --proxy a.img,/dev/null --size 1MiB", 2,
			[]string{"/dev/null"}, "a.img"},
		{"twice the same", nil, "bind-ssds --proxy a.img,./a.img --size 1MiB", 2,
			[]string{"./a.img", "twice"}, "a.img"},
		{"a hard link twice", func(t *testing.T) {
			require.NoError(t, os.WriteFile("a.img", make([]byte, 1<<20), 0o644))
			require.NoError(t, os.Link("a.img", "b.img"))
		}, "bind-ssds --proxy a.img,b.img", 2, []string{"b.img", "twice"}, ""},
		{"a hard link of a bound one", func(t *testing.T) {
			ok(t, "bind-ssds", "--proxy", "a.img", "--size", "1MiB")
			require.NoError(t, os.Link("a.img", "b.img"))
		}, "bind-ssds --proxy b.img", 2, []string{"b.img", "bound already as ssd0",
			"unbind-ssds ssd0"}, ""},
		{"no folder", nil, "bind-ssds --proxy none/a.img --size 1MiB", 2,
			[]string{"--proxy none/a.img", "no folder", "make it"}, ""},
		{"unbind nothing known", nil, "unbind-ssds ssd5", 2, []string{"ssd5", "bind-ssds"}, ""},
		{"bench without SSDs", nil, "bench io --ssd-count 1", 2, []string{"bind-ssds"}, ""},
		{"bench with odd stack", nil, "bench io --io-stack fast", 2, []string{"--io-stack", "fast"}, ""},
	})
}

func TestUnbindKeepsOtherFiles(t *testing.T) {
	isolate(t)
	require.NoError(t, os.WriteFile("mine.img", bytes.Repeat([]byte("data"), 1<<18), 0o644))
	ok(t, "bind-ssds", "--proxy", "mine.img,new.img,swapped.img", "--size", "1MiB")
	before, err := os.ReadFile("mine.img")
	require.NoError(t, err)
	// A file that took the name of a created one is not ours to delete.
	require.NoError(t, os.Rename("swapped.img", "away.img"))
	require.NoError(t, os.WriteFile("swapped.img", make([]byte, 1<<20), 0o644))
	fails(t, hc(t, "unbind-ssds", "--delete", "--ssds", "swapped.img"), 4, "unbind-ssds",
		"swapped.img")
	ok(t, "unbind-ssds", "swapped.img")
	// Nor is one that got its number too, as file systems give it again.
	ok(t, "bind-ssds", "--proxy", "again.img", "--size", "1MiB")
	require.NoError(t, os.WriteFile("again.img", []byte("precious"), 0o644)) // the same inode
	fails(t, hc(t, "unbind-ssds", "--delete", "--ssds", "again.img"), 4, "unbind-ssds", "again.img")
	ok(t, "unbind-ssds", "again.img")
	// Nor is one that a process of another list uses.
	bus, err := proxy.Open(proxy.Config{Path: "new.img"})
	require.NoError(t, err)
	fails(t, hc(t, "unbind-ssds", "--delete", "--ssds", "new.img"), 4, "unbind-ssds", "in use by")
	require.FileExists(t, "new.img")
	require.NoError(t, bus.Close())
	ok(t, "unbind-ssds", "--delete")
	require.NoFileExists(t, "new.img")
	require.FileExists(t, "swapped.img")
	after, err := os.ReadFile("mine.img")
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// mounted runs script in a mount namespace where ./m is a tmpfs of 3 MiB, with heliosctl as $HC.
// It skips where namespaces prove to be forbidden.
func mounted(t *testing.T, script string) outcome {
	t.Helper()
	isolate(t)
	require.NoError(t, os.Mkdir("m", 0o755))
	flags := "-m"
	if os.Getuid() != 0 {
		flags = "-Urm"
	}
	probe := exec.Command("unshare", flags, "sh", "-c",
		"mount -t tmpfs -o size=3m none m && touch m/x")
	if out, err := probe.CombinedOutput(); err != nil {
		t.Skipf("a private tmpfs is forbidden here: %v %s", err, out)
	}
	c := child(t)
	c.Path, c.Args = "/usr/bin/env", []string{"env", "unshare", flags, "sh", "-c",
		"mount -t tmpfs -o size=3m none m || exit 99\n" + script}
	c.Env = append(c.Env, "HC="+os.Args[0])
	return finishChild(t, c)
}

func TestFullDisk(t *testing.T) {
	for _, c := range []struct {
		name, script, verb string
		codes              []int
		want               string
	}{
		{"generate",
			`"$HC" generate --nodes 20000 --classes 4 --dim 64 --out m/g --quiet; rc=$?; [ -e m/g ] && exit 98; [ -z "$(ls -A m)" ] || exit 97; exit $rc`,
			"generate", []int{1}, "m/g"},
		{"import",
			`{ echo src,dst; i=0; while [ $i -lt 200000 ]; do echo "$i,$((i+1))"; i=$((i+1)); done; } >e.csv; "$HC" import edges --in e.csv --out m/g --feature-fn random --quiet; rc=$?; [ -z "$(ls -A m)" ] || exit 97; exit $rc`,
			"import edges", []int{1}, "m/g"},
		{"bind",
			`"$HC" bind-ssds --proxy m/a.img --size 16MiB; rc=$?; [ -z "$(ls -A m)" ] || exit 97; exit $rc`,
			"bind-ssds", []int{1}, "m/a.img"},
		{"load onto a sparse file",
			`"$HC" generate --nodes 20000 --classes 4 --dim 64 --out g --quiet >/dev/null && truncate -s 16M m/a.img && "$HC" bind-ssds --buffered --proxy m/a.img >/dev/null && "$HC" load g --quiet`,
			"load", []int{1, 5}, "ssd0"},
		{"checkpoint",
			`"$HC" generate --nodes 2000 --classes 4 --dim 64 --out g --quiet >/dev/null && "$HC" bind-ssds --proxy a.img --size 4MiB >/dev/null && "$HC" load g --quiet >/dev/null && head -c 3100000 /dev/zero >m/fill && "$HC" train g --fanout 2,2 --checkpoint m/ck --quiet --json >/dev/null; rc=$?; ls m/ck | grep -v lock >&2; exit $rc`,
			"train", []int{1}, "m/ck"},
		{"results", `head -c 3145728 /dev/zero >m/fill; "$HC" version --json >/dev/full`, "version",
			[]int{1}, "no space left"},
		{"state",
			`head -c 3145728 /dev/zero >m/fill; "$HC" bind-ssds --state m --proxy a.img --size 1MiB; rc=$?; [ -e a.img ] && exit 98; exit $rc`,
			"bind-ssds", []int{1, 2}, "m"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := mounted(t, c.script)
			require.Contains(t, c.codes, r.code, "%+v", r)
			fails(t, r, r.code, c.verb, c.want)
			require.Regexp(t, "no space|free space", r.errOut)
		})
	}
}

func TestReadOnlyFolder(t *testing.T) {
	ro := "mount -o remount,ro none m || exit 99\n"
	for _, c := range []struct{ name, script, verb string }{
		{"generate", `"$HC" generate --nodes 100 --classes 4 --out m/g`, "generate"},
		{"import", `echo 0,1 >e.csv; "$HC" import edges --in e.csv --out m/g --feature-fn random`, "import edges"},
		{"bind", `"$HC" bind-ssds --proxy m/a.img --size 1MiB`, "bind-ssds"},
		{"state", `"$HC" bind-ssds --state m/s --proxy a.img --size 1MiB`, "bind-ssds"},
		{"checkpoint",
			`"$HC" generate --nodes 500 --classes 4 --out g >/dev/null && "$HC" bind-ssds --proxy a.img --size 4MiB >/dev/null && "$HC" load g >/dev/null && "$HC" train g --checkpoint m/ck >/dev/null`,
			"train"},
		{"results", `"$HC" train g --results m/r.jsonl`, "train"},
	} {
		t.Run(c.name, func(t *testing.T) {
			fails(t, mounted(t, ro+c.script), 2, c.verb, "m/", "read-only file system")
		})
	}
}
