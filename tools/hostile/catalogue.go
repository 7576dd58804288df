package main

import (
	"archive/zip"
	"bytes"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

const (
	npyIn   = "import npy --in in --out out"
	edgesIn = "import edges --in in/edges.csv --out out --nodes 5 --feature-fn random --dim 4"
	secret  = "s3cr3t-of-another-file"
)

// catalogue is every hostile input. A reader that takes a new format gets its cases here.
func catalogue() []hostileCase {
	return slices.Concat(arrayCases(), splitCases(), archiveCases(), edgeCases(), pickleCases(),
		graphboltCases(), typedCases(), otherFormats(), degreeCases(), datasetCases(),
		partitionCases(), fileCases(), resultCases(), profileCases())
}

// one is a case that changes a single file of others.
func one(name, args, file string, content any, base map[string]any) hostileCase {
	return hostileCase{name: name, args: args, files: with(base, map[string]any{file: content}),
		names: filepath.Base(file)}
}

func sorted(m map[string]any) []string { return slices.Sorted(maps.Keys(m)) }

func arrayCases() (all []hostileCase) {
	good := arrays()
	headers := map[string]any{
		"empty": "", "magic only": "\x93NUMPY",
		"no dict":        "\x93NUMPY\x01\x00\x10\x000123456789abcdef",
		"version 9":      "\x93NUMPY\x09\x00\x10\x00aaaaaaaaaaaaaaaa",
		"header of 4 GB": "\x93NUMPY\x02\x00\xff\xff\xff\xff", "negative shape": head("<f4",
			"(-5, 1)"), "shape of 2^62": head("<f4", "(4611686018427387904, 4)"),
		"shape overflows": head("<f4", "(4294967296, 4294967296, 4)"),
		"65 dims":         head("<f4", "("+strings.Repeat("1, ", 65)+")"),
		"objects":         head("|O", "(5, 1)"), "strings": head("<U5", "(5, 1)"),
		"records": head("[('a', '<i4')]", "(5,)"), "cut": npy("<f4", "(5, 1)", 1, 2),
		"other rows": npy("<f4", "(4, 1)", 1, 2, 3, 4), "no columns": head("<f4", "(5, 0)"),
		"no rows of 2^36": head("<f4", "(68719476736, 0)"), "lfs": lfs,
		"zero bytes": strings.Repeat("\x00", 4096), "text": "1\n2\n3\n",
	}
	for _, n := range sorted(headers) {
		all = append(all, one("npy features: "+n, npyIn, "in/features.npy", headers[n], good),
			one("npy edges: "+n, npyIn, "in/edge_index.npy", headers[n], good))
		if n != "other rows" {
			all = append(all, one("npy train: "+n, npyIn, "in/train.npy", headers[n], good))
		}
	}
	for _, k := range []struct {
		name, file string
		content    any
	}{
		{"1e300", "in/features.npy", npy("<f8", "(5, 1)", 1, 1e300, 3, 4, 5)},
		{"edge beyond the nodes", "in/edge_index.npy", npy("<i8", "(2, 3)", 0, 1, 9, 1, 2, 3)},
		{"edge below 0", "in/edge_index.npy", npy("<i8", "(2, 3)", 0, 1, -1, 1, 2, 3)},
		{"label 2^40", "in/labels.npy", npy("<i8", "(5,)", 0, 1<<40, 1, 0, 1)},
		{"label 0.5", "in/labels.npy", npy("<f8", "(5,)", 0, .5, 1, 0, 1)},
		{"node twice in a split", "in/test.npy", npy("<i8", "(2,)", 3, 3)},
		{"node in two splits", "in/test.npy", npy("<i8", "(2,)", 0, 3)},
		{"split of floats", "in/test.npy", npy("<f8", "(2,)", 3, 4)},
		{"features of 2^18+1", "in/features.npy", sparse(head("<f4", "(5, 262145)"), 8<<20)},
	} {
		all = append(all, one("npy: "+k.name, npyIn, k.file, k.content, good))
	}
	huge := func(n int64, width int64, descr string) special {
		return sparse(head(descr, fmt.Sprintf("(%d,)", n)), 128+n*width)
	}
	labels := map[string]any{"in/labels.npy": huge(4e9, 1, "|i1"), "in/edge_index.npy": npy("<i8",
		"(2, 1)", 0, 1)}
	all = append(all,
		hostileCase{name: "npy: sparse labels of 4e9",
			args: npyIn + " --memory 256MiB --feature-fn hash", files: labels, names: "labels.npy"},
		hostileCase{name: "npy: sparse labels of 4e9, no --memory",
			args: npyIn + " --feature-fn hash", files: labels, names: "labels.npy"},
		hostileCase{name: "npy: sparse split of 4e9 ids", args: npyIn,
			files: with(good, map[string]any{"in/train.npy": huge(4e9, 8, "<i8")}),
			names: "train.npy"},
		hostileCase{name: "npy: sparse features of 4 TB", args: npyIn,
			files: map[string]any{"in/features.npy": sparse(head("<f4", "(16777216, 65536)"),
				4<<40+128), "in/labels.npy": huge(16777216, 1, "|i1"),
				"in/edge_index.npy": npy("<i8", "(2, 1)", 0, 1)}, names: "features"},
		hostileCase{name: "npy: --nodes 2^36",
			args:  npyIn + " --nodes 68719476736 --feature-fn hash --unlabelled-ok",
			files: map[string]any{"in/edge_index.npy": npy("<i8", "(2, 1)", 0, 1)},
			names: "68719476736"},
	)
	return all
}

func splitCases() (all []hostileCase) {
	bare := with(arrays(), map[string]any{"in/train.npy": nil, "in/val.npy": nil,
		"in/test.npy": nil})
	masks := func(prefix, suffix, descr, shape string) map[string]any {
		out := map[string]any{}
		for i, s := range []string{"train", "val", "test"} {
			v := make([]float64, 50)
			for k := range 10 {
				v[5*k+i] = 1
			}
			if shape == "(5,)" {
				v = v[:5]
			}
			out["in/"+prefix+s+suffix+".npy"] = npy(descr, shape, v...)
		}
		return out
	}
	ten := with(bare, masks("", "_masks", "|b1", "(10, 5)"))
	all = append(all,
		hostileCase{name: "splits: ten masks, none chosen", args: npyIn, files: ten,
			names: "--split-index 0 to 9"},
		hostileCase{name: "splits: ten masks, number 10", args: npyIn + " --split-index 10",
			files: ten, names: "--split-index 10"},
		hostileCase{name: "splits: ten masks, number 3", args: npyIn + " --split-index 3",
			files: ten, note: "memory at most"},
		hostileCase{name: "splits: ten masks in an archive",
			args:  "import npy --in a.npz --out out",
			files: map[string]any{"a.npz": npz(ten, zip.Deflate)}, names: "a.npz:train_masks"},
		hostileCase{name: "splits: (5, 7) masks of 10", args: npyIn,
			files: with(bare, masks("", "_masks", "|b1", "(7, 7)")), names: "train_masks.npy"},
		hostileCase{name: "splits: a mask of integers", args: npyIn,
			files: with(bare, masks("", "_mask", "<i8", "(5,)")), note: "memory at most"},
		hostileCase{name: "splits: no index for one", args: npyIn + " --split-index 0",
			files: arrays(), names: "--split-index 0"},
		hostileCase{name: "splits: under another name", args: npyIn,
			files: with(bare, masks("my_", "_ids", "<i8", "(5,)")), names: "my_test_ids"},
		hostileCase{name: "splits: fold.npy", args: npyIn,
			files: with(bare, map[string]any{"in/fold.npy": npy("<i8", "(5,)", 0, 1, 2, 3, 4)}),
			names: "fold"},
		hostileCase{name: "splits: split_idx.pt", args: npyIn,
			files: with(bare, map[string]any{"in/split_idx.pt": "PK"}), names: "split_idx.pt"},
		hostileCase{name: "splits: train alone", args: npyIn,
			files: with(bare, map[string]any{"in/train.npy": npy("<i8", "(2,)", 0, 1)}),
			names: "split"},
		hostileCase{name: "splits: none at all is said", args: npyIn, files: bare,
			note: "at random"},
		hostileCase{name: "arrays: edge_weight is said", args: npyIn,
			files: with(arrays(), map[string]any{"in/edge_weight.npy": npy("<f8", "(3,)", 1, 2,
				3)}), note: "edge_weight.npy"},
		hostileCase{name: "arrays: edge_weight in an archive is said",
			args: "import npy --in a.npz --out out",
			files: map[string]any{"a.npz": npz(with(arrays(),
				map[string]any{"in/edge_weight.npy": npy("<f8", "(3,)", 1, 2, 3)}), zip.Store)},
			note: "edge_weight"},
		hostileCase{name: "arrays: years are said", args: npyIn,
			files: with(arrays(), map[string]any{"in/years.npy": npy("<i8", "(5,)", 1, 2, 3, 4,
				5)}), note: "years"},
		hostileCase{name: "arrays: --map of nothing", args: npyIn + " --map nothing=train",
			files: arrays(), names: "nothing"},
		hostileCase{name: "arrays: --map to nothing", args: npyIn + " --map train=nothing",
			files: arrays(), names: "nothing"},
	)
	return all
}

func archiveCases() (all []hostileCase) {
	const in = "import npy --in a.npz --out out"
	good := npz(arrays(), zip.Deflate)
	twice := func() []byte {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		for range 2 {
			w, err := z.Create("features.npy")
			if err == nil {
				_, err = w.Write(npy("<f4", "(5, 1)", 1, 2, 3, 4, 5))
			}
			if err != nil {
				panic(err)
			}
		}
		if err := z.Close(); err != nil {
			panic(err)
		}
		return b.Bytes()
	}
	bomb := append(head("|i1", "(300000000,)"), make([]byte, 300000000)...)
	for name, b := range map[string]any{
		"empty": "", "text": "no archive", "cut": good[:len(good)/2],
		"no directory": good[:len(good)-22], "lfs": lfs, "a member twice": twice(),
		"no member": npz(map[string]any{}, zip.Store), "bit flipped": flip(good, len(good)/3),
		"directory flipped": flip(good, len(good)-100),
	} {
		all = append(all, hostileCase{name: "npz: " + name, args: in,
			files: map[string]any{"a.npz": b}, names: "a.npz"})
	}
	for i := 40; i < len(good)-200 && len(all) < 24; i += len(good) / 14 {
		all = append(all, hostileCase{name: fmt.Sprintf("npz: cut at %d", i), args: in,
			files: map[string]any{"a.npz": good[:i]}, names: "a.npz"})
	}
	return append(all,
		hostileCase{name: "npz: bomb of labels", args: in + " --memory 64MiB --feature-fn hash",
			files: map[string]any{"a.npz": npz(map[string]any{"in/labels.npy": bomb,
				"in/edge_index.npy": npy("<i8", "(2, 1)", 0, 1)}, zip.Deflate)},
			names: "a.npz:labels"},
		hostileCase{name: "npz: header lies about the length", args: in,
			files: map[string]any{"a.npz": npz(with(arrays(),
				map[string]any{"in/features.npy": head("<f4", "(5, 100000)")}), zip.Deflate)},
			names: "a.npz:features"},
	)
}

func flip(b []byte, at int) []byte {
	b = bytes.Clone(b)
	b[at] ^= 0x10
	return b
}

func edgeCases() (all []hostileCase) {
	for _, c := range []struct{ name, text string }{
		{"empty", ""}, {"no edge", "src,dst\n"}, {"binary", "\x00\x01\x02\x03\n"},
		{"one column", "1\n2\n"}, {"weights", "0,1,0.5\n1,2,0.7\n"},
		{"weights and times", "0 1 1 1082040961\n"},
		{"id 2^62", "0,4611686018427387904\n"},
		{"id of 30 digits", "0,123456789012345678901234567890\n"}, {"negative", "0,-1\n"},
		{"hex", "0x1,2\n"}, {"float", "0.0,1.0\n"}, {"beyond", "0,7\n"},
		{"lfs", lfs}, {"letters", "a,b\nc,d\n"}, {"endless line", strings.Repeat("1", 17<<20)},
		{"escapes", "\x1b[2J\x1b]0;x\x07\n"}, {"nul ids", "1\x002\n"}, {"word", "0,1 x\n"},
		{"open quote", "src,dst\n\"0,1\n1,2\n"}, {"quotes without end", strings.Repeat("\"\n", 1<<20)},
		{"METIS of 2^40 nodes", "1099511627776 1 011 1000\n1\n"}, {"METIS of many weights", "4 4 011 99999999999\n1 2\n"},
		{"KONECT of 2^62 nodes", "% asym unweighted\n% 1 4611686018427387904 1\n1 9\n"},
	} {
		all = append(all, one("edges: "+c.name, edgesIn, "in/edges.csv", c.text, nil))
	}
	lists := map[string]any{"in/edges.csv": "0,1\n1,2\n"}
	z := "import edges --in in/edges.csv.gz --out out --nodes 5 --feature-fn random --dim 4"
	good := gz(strings.Repeat("0,1\n", 1000))
	folder := "import edges --in in --out out"
	labels := map[string]any{"in/edges.csv": "0,1\n1,2\n", "in/labels.csv": "0\n1\n0\n",
		"in/features.csv": "1\n2\n3\n"}
	return append(all,
		hostileCase{name: "edges: weights, ignored when asked", args: edgesIn + " --ignore-columns",
			files: map[string]any{"in/edges.csv": "0,1,0.5\n1,2,0.7\n"}, note: "memory at most"},
		hostileCase{name: "edges gz: cut", args: z,
			files: map[string]any{"in/edges.csv.gz": good[:len(good)-9]}, names: "edges.csv.gz"},
		hostileCase{name: "edges gz: no gzip", args: z,
			files: map[string]any{"in/edges.csv.gz": "\x1f\x8b\b\x00no"}, names: "edges.csv.gz"},
		hostileCase{name: "edges gz: Parquet within", args: z,
			files: map[string]any{"in/edges.csv.gz": gz("PAR1\x15\x04")}, names: "Parquet"},
		hostileCase{name: "edges gz: flipped", args: z,
			files: map[string]any{"in/edges.csv.gz": flip(good, len(good)-6)},
			names: "edges.csv.gz"},
		hostileCase{name: "edges gz: one line of 64 MiB", args: z,
			files: map[string]any{"in/edges.csv.gz": gz(strings.Repeat("1", 64<<20))},
			names: "edges.csv.gz"},
		hostileCase{name: "edges: id 2^36-1 without --nodes",
			args:  "import edges --in in/edges.csv --out out --feature-fn random --dim 262144",
			files: map[string]any{"in/edges.csv": "0,68719476735\n"}, names: "68719476735"},
		hostileCase{name: "edges: label of node 2^35", args: folder,
			files: with(lists, map[string]any{"in/labels.csv": "34359738368,1\n"}),
			names: "labels.csv"},
		hostileCase{name: "edges: label of node 2^35, --nodes 2^36",
			args:  folder + " --nodes 68719476736",
			files: with(lists, map[string]any{"in/labels.csv": "34359738368,1\n"}),
			names: "labels.csv"},
		hostileCase{name: "edges: labels of 3 columns", args: folder,
			files: with(lists, map[string]any{"in/labels.csv": "0,1,2\n"}), names: "labels.csv"},
		hostileCase{name: "edges: feature 1e300", args: folder,
			files: with(lists, map[string]any{"in/features.csv": "1\n1e300\n3\n"}),
			names: "features.csv"},
		hostileCase{name: "edges: feature nan", args: folder,
			files: with(lists, map[string]any{"in/features.csv": "1\nnan\n3\n"}),
			names: "features.csv"},
		hostileCase{name: "edges: ragged features", args: folder,
			files: with(lists, map[string]any{"in/features.csv": "1\n1,2\n3\n"}),
			names: "features.csv"},
		hostileCase{name: "edges: a split beside them", args: folder,
			files: with(labels, map[string]any{"in/train.csv": "0\n"}), names: "train.csv"},
		hostileCase{name: "edges: a file beside them is said", args: folder,
			files: with(labels, map[string]any{"in/years.csv": "0\n"}), note: "years.csv"},
		hostileCase{name: "edges: split of two columns", args: folder + " --splits sp",
			files: with(labels, map[string]any{"sp/train.csv": "0,1\n", "sp/val.csv": "1\n",
				"sp/test.csv": "2\n"}), names: "train.csv"},
	)
}

func pickleCases() (all []hostileCase) {
	const in = "import planetoid --in in --out out"
	good := planetoid()
	const p = "\x80\x02"
	nest := "K\x01" + strings.Repeat("q\x00h\x00\x86", 60)
	encode := "c_codecs\nencode\nq\x00X" + u32(1<<20) + strings.Repeat("a", 1<<20) +
		"q\x01X\x06\x00\x00\x00latin1q\x02\x86q\x03" + strings.Repeat("0h\x00h\x03R", 1<<20) + "."
	csr := matrix(4, 2, pickled("|i1", "\x00\x00\x00\x00\x00", 5), pickled("<i4", "", 0),
		pickled("<f4", "", 0))
	arr := pickled("|i1", strings.Repeat("\x00", 1<<20), 1<<20) + "q\x05"
	none := pickled("<i4", "", 0) + "q\x070"
	many := arr + "0" + none + "cscipy.sparse.csr\ncsr_matrix\nq\x060" +
		strings.Repeat("h\x06)\x81}(U\x06_shapeJ"+u32(1<<20-1)+
			"K\x02\x86U\x06indptrh\x05U\x07indicesh\x07U\x04datah\x07ub0", 40000) + "N."
	for _, c := range []struct{ name, text string }{
		{"empty", ""}, {"lfs", lfs}, {"protocol 5", "\x80\x05N."},
		{"os.system", p + "cos\nsystem\nU\x02ls\x85R."},
		{"eval", p + "c__builtin__\neval\nU\x011\x85R."},
		{"60 levels of (x, x) as a shape",
			p +
				"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + nest + "\x85cnumpy\ndtype\nU\x02i4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x00tb."},
		{"60 levels of (x, x)", p + nest + "."},
		{"60 levels of (x, x) as csr shape",
			p + "cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shape" + nest + "K\x01\x86ub."},
		{"8 M of TUPLE1", p + "K\x01" + strings.Repeat("\x85", 8<<20) + "."},
		{"8 M of TUPLE1 as a shape", p + "cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shapeK\x01" +
			strings.Repeat("\x85", 8<<20) + "K\x01\x86ub."},
		{"a list in itself", p + "]q\x00h\x00a."}, {"_codecs.encode again and again", p + encode},
		{"csr_matrix again and again", p + many},
		{"memo again and again", p + "K\x01q\x00" + strings.Repeat("h\x00", 4<<20) + "."},
		{"marks", p + strings.Repeat("(", 8<<20) + "."},
		{"lists", p + strings.Repeat("]", 8<<20) + "."},
		{"popped values", p + strings.Repeat("N0", 4<<20) + "."},
		{"string of 4 GB", p + "T\xff\xff\xff\xff"},
		{"string of 2^63", "\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"},
		{"no class", p + csr + "0."}, {"rows 2^31", p + matrix(0xffffffff, 2, pickled("<i4", "", 0),
			pickled("<i4", "", 0), pickled("<f4", "", 0)) + "."},
		{"cols 2^31", p + matrix(0, 0x7fffffff, pickled("<i4", words(0), 1), pickled("<i4", "", 0),
			pickled("<f4", "", 0)) + "."},
		{"array of 2^31 rows of nothing", p + pickled("<i4", "", 0x7fffffff, 0) + "."},
		{"array of 40 dims", p + pickled("<i4", words(1), slices.Repeat([]uint32{1}, 40)...) + "."},
		{"text protocol", "(lp0\nI1\na."}, {"escapes", p + "c\x1b[2J\n\x1b[31m\n."},
		{"name of 200 bytes", p + "c" + strings.Repeat("x", 200) + "\ny\n."},
	} {
		all = append(all, one("pickle x: "+c.name, in, "in/ind.toy.x", c.text, good))
	}
	for _, c := range []struct{ name, text string }{
		{"neighbour is nested", p + "}(K\x00](" + nest + "eu."},
		{"key is nested", p + "}(" + nest + "]u."},
		{"neighbour 2^31", p + "}(K\x00](J\xff\xff\xff\x7feu."}, {"a tuple", p + "K\x01\x85."},
		{"neighbour is 8 M of TUPLE1", p + "}(K\x00](K\x01" + strings.Repeat("\x85",
			8<<20) + "eu."},
	} {
		all = append(all, one("pickle graph: "+c.name, in, "in/ind.toy.graph", c.text, good))
	}
	second := map[string]any{}
	for n, f := range good {
		second[strings.Replace(n, "toy", "two", 1)] = f
	}
	return append(all,
		one("planetoid: one-hot of 7s", in, "in/ind.toy.ally",
			p+pickled("<i4", words(7, 7, 7, 7, 7, 7), 3, 2)+".", good),
		one("planetoid: test.index of 2^60", in, "in/ind.toy.test.index",
			"1152921504606846976\n", good),
		one("planetoid: test.index is a pipe", in, "in/ind.toy.test.index", special(fifo), good),
		one("planetoid: x is a pipe", in, "in/ind.toy.x", special(fifo), good),
		hostileCase{name: "planetoid: two datasets", args: in, files: with(good, second),
			names: "toy, two"},
		hostileCase{name: "planetoid: two datasets, one named", args: in + " --name two",
			files: with(good, second), note: "memory at most"},
	)
}

func graphboltCases() (all []hostileCase) {
	const in = "import graphbolt --in in --out out"
	meta := func(num, edges, feat, seeds string) string {
		return "dataset_name: x\ngraph:\n  nodes: [{num: " + num +
			"}]\n  edges: [{format: csv, path: " + edges +
			"}]\nfeature_data: [{domain: node, name: feat, format: numpy, path: " + feat +
			"}]\ntasks: [{name: t, train_set: [{data: [{name: seeds, format: numpy, path: " +
			seeds + "}, {name: labels, format: numpy, path: labels.npy}]}]}]\n"
	}
	files := map[string]any{"in/edges.csv": "0,1\n1,2\n", "in/feat.npy": npy("<f4", "(5, 1)", 1, 2,
		3, 4, 5), "in/seeds.npy": npy("<i8", "(2,)", 0, 1), "in/labels.npy": npy("<i8",
		"(2,)", 0, 1),
		"secret.csv": secret + "\n", "secret.npy": npy("<f4", "(5, 1)", 1, 2, 3, 4, 5),
		"in/link.csv": linkTo("../secret.csv")}
	add := func(name, yaml, names string) {
		all = append(all, hostileCase{name: "graphbolt: " + name, args: in,
			files: with(files, map[string]any{"in/metadata.yaml": yaml}), names: names,
			secret: secret})
	}
	for _, n := range []string{"68719476736", "9223372036854775807", "-1", "0", "1e30",
		"99999999999999999999", "[5]", "x", "!!binary aaaa", "4"} {
		add("num "+n, meta(n, "edges.csv", "feat.npy", "seeds.npy"), "in/")
	}
	for _, e := range []string{"../secret.csv", "/etc/passwd", "link.csv", "./../in/../secret.csv",
		"../../../../../../etc/shadow", "/dev/zero", "/proc/self/environ", "nothing.csv", ".", "''",
		"\"\\e[2J\""} {
		add("edges in "+e, meta("5", e, "feat.npy", "seeds.npy"), "metadata.yaml")
	}
	for _, e := range []string{"../secret.npy", "/etc/hostname", "/dev/zero", "edges.csv",
		"nothing.npy"} {
		add("features in "+e, meta("5", "edges.csv", e, "seeds.npy"), "in/")
	}
	bomb := "a: &a [x, x, x, x, x, x, x, x, x]\n"
	for c := 'b'; c < 'k'; c++ {
		bomb += fmt.Sprintf("%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n", c, c, c-1,
			c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	add("alias bomb", bomb+"graph: *j\n", "metadata.yaml")
	add("alias to itself", "graph: &a {nodes: *a}\n", "metadata.yaml")
	add("100,000 levels", "graph: "+strings.Repeat("[", 100000), "metadata.yaml")
	add("500,000 items", "graph: ["+strings.Repeat("1,", 500000)+"]", "metadata.yaml")
	add("2 MiB", "# "+strings.Repeat("x", 2<<20), "metadata.yaml")
	add("empty", "", "metadata.yaml")
	add("a list", "[1, 2]", "metadata.yaml")
	add("null entries",
		"graph: {nodes: [null], edges: [null]}\nfeature_data: [null]\ntasks: [null]\n",
		"metadata.yaml")
	add("lfs", lfs, "metadata.yaml")
	add("10,000 names", "graph: {nodes: ["+
		strings.Repeat("{type: aaaaaaaaaaaaaaaaaaaaaaaaaaaa, num: 1},", 10000)+
		"], edges: [{type: x}]}", "metadata.yaml")
	big := with(files, map[string]any{"in/metadata.yaml": meta("68719476736", "edges.csv",
		"feat.npy", "seeds.npy"), "in/feat.npy": head("<f4", "(68719476736, 0)")})
	all = append(all,
		hostileCase{name: "graphbolt: num 2^36, features (2^36, 0)", args: in, files: big,
			names: "feat.npy"},
		hostileCase{name: "graphbolt: num 2^36, --feature-fn", args: in + " --feature-fn hash",
			files: big, names: "metadata.yaml"},
		hostileCase{name: "graphbolt: outside, allowed",
			args: in + " --allow-outside --unlabelled-ok",
			files: with(files, map[string]any{"in/metadata.yaml": meta("5", "edges.csv",
				"../secret.npy", "seeds.npy"), "in/val.npy": npy("<i8", "(1,)", 2)}),
			note: "memory at most"},
		one("graphbolt: edges are a pipe", in, "in/edges.csv", special(fifo),
			with(files, map[string]any{"in/metadata.yaml": meta("5", "edges.csv", "feat.npy",
				"seeds.npy")})),
		one("graphbolt: metadata is a pipe", in, "in/metadata.yaml", special(fifo), files),
		one("graphbolt: seeds twice", in, "in/seeds.npy", npy("<i8", "(3,)", 1, 1, 2),
			with(files, map[string]any{"in/metadata.yaml": meta("5", "edges.csv", "feat.npy",
				"seeds.npy")})),
	)
	return all
}

func otherFormats() (all []hostileCase) {
	add := func(name, args, names string, files map[string]any) {
		all = append(all, hostileCase{name: name, args: args, files: files, names: names})
	}
	for name, text := range map[string]string{"empty": "", "no banner": "1 1 1\n",
		"vector":       "%%MatrixMarket vector array real general\n",
		"rows 2^62":    "%%MatrixMarket matrix coordinate pattern general\n4611686018427387904 4611686018427387904 1\n1 1\n",
		"rows 2^36":    "%%MatrixMarket matrix coordinate pattern general\n68719476736 68719476736 1\n1 1\n",
		"entries 2^60": "%%MatrixMarket matrix coordinate pattern general\n3 3 1152921504606846976\n1 1\n",
		"row 0":        "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n0 1\n",
		"row 4":        "%%MatrixMarket matrix coordinate pattern general\n3 3 1\n4 1\n",
		"not square":   "%%MatrixMarket matrix coordinate pattern general\n3 4 1\n1 1\n",
		"lfs":          lfs, "comments only": "%%MatrixMarket matrix coordinate pattern general\n" +
			strings.Repeat("%\n", 1<<20), "escapes": "%%MatrixMarket \x1b[2J \x1b[2J a b\n"} {
		add("mtx: "+name, "import mtx --in m.mtx --out out --feature-fn random --dim 262144", "m.mtx",
			map[string]any{"m.mtx": text})
	}
	add("mtx: values are said", "import mtx --in m.mtx --out out --feature-fn random --dim 4", "",
		map[string]any{"m.mtx": "%%MatrixMarket matrix coordinate real general\n3 3 1\n1 2 0.5\n"})
	all[len(all)-1].note = "no edge weights"
	dgl := func(b ...byte) []byte {
		return append([]byte("\x3f\xa1\xb4\x96\xf0\x40\x5e\xdd"), b...)
	}
	magic := []byte("\x3f\xa1\xb4\xf0\x46\xff\x2e\xdd")
	filled := append(append(bytes.Clone(magic), 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 255,
		255, 255, 255, 255, 255, 255, 127), make([]byte, 5000)...)
	oneGraph := append(append(bytes.Clone(magic), 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1,
		0, 0, 0, 0, 0, 0, 0), make([]byte, 5000)...)
	for name, b := range map[string]any{"empty": "", "text": "not a graph",
		"other magic": dgl(1, 2, 3), "magic only": magic, "2^63 graphs": filled, "zeros": oneGraph,
		"lfs": lfs, "pipe": special(fifo), "sparse 1 TB": sparse(oneGraph, 1<<40)} {
		add("dgl: "+name, "import dgl --in g.bin --out out", "g.bin", map[string]any{"g.bin": b})
	}
	ogb := func(change map[string]any) map[string]any {
		return with(map[string]any{"in/raw/edge.csv.gz": gz("0,1\n1,2\n"),
			"in/raw/num-node-list.csv.gz": gz("3\n"), "in/raw/num-edge-list.csv.gz": gz("2\n"),
			"in/raw/node-feat.csv.gz":  gz("1\n2\n3\n"),
			"in/raw/node-label.csv.gz": gz("0\n1\n0\n")}, change)
	}
	const ogbIn = "import ogb --in in --out out"
	for name, c := range map[string][2]any{"2^36 nodes": {"num-node-list", "68719476736\n"},
		"1e300 nodes": {"num-node-list", "1e300\n"}, "nan nodes": {"num-node-list", "nan\n"},
		"two graphs": {"num-node-list", "3\n3\n"}, "2^60 edges": {"num-edge-list",
			"1152921504606846976\n"},
		"1e300 feature": {"node-feat", "1\n1e300\n3\n"},
		"three columns": {"edge", "0,1,2\n1,2,3\n"}, "label text": {"node-label", "a\nb\nc\n"},
		"labels cut": {"node-label", "0\n"}} {
		file := "in/raw/" + c[0].(string) + ".csv.gz"
		add("ogb: "+name, ogbIn, "raw/", ogb(map[string]any{file: gz(c[1].(string))}))
	}
	add("ogb: edges are lfs", ogbIn, "edge.csv.gz", ogb(map[string]any{"in/raw/edge.csv.gz": lfs}))
	add("ogb: edges are a pipe", ogbIn, "edge.csv.gz",
		ogb(map[string]any{"in/raw/edge.csv.gz": special(fifo)}))
	add("ogb: master.csv of quotes", ogbIn, "master.csv",
		ogb(map[string]any{"in/master.csv": "\"" + strings.Repeat("x\n", 1<<20)}))
	add("ogb: other files are said", ogbIn, "",
		ogb(map[string]any{"in/raw/edge-feat.csv.gz": gz("1\n2\n")}))
	all[len(all)-1].note = "edge-feat.csv.gz"

	props := func(kv string) string {
		return "graphclass=it.unimi.dsi.webgraph.BVGraph\nversion=0\nnodes=5\narcs=4\nwindowsize=7\nmaxrefcount=3\nminintervallength=4\nzetak=3\n" + kv + "\n"
	}
	for _, kv := range []string{"nodes=9223372036854775807", "nodes=68719476736", "nodes=-1",
		"arcs=9223372036854775807", "windowsize=2147483647", "maxrefcount=-9",
		"minintervallength=1", "zetak=99", "graphclass=" + strings.Repeat("x", 60000),
		"compressionflags=" + strings.Repeat("OUTDEGREES_DELTA|", 3000) + "x", "version=7"} {
		name, _, _ := strings.Cut(kv, "=")
		add(fmt.Sprintf("webgraph: %s=%.12s", name, kv[len(name)+1:]),
			"import webgraph --in g.graph --out out --feature-fn random --dim 262144", "g.",
			map[string]any{"g.graph": strings.Repeat("\xa5", 64), "g.properties": props(kv)})
	}
	add("webgraph: properties of 2 MiB", "import webgraph --in g.graph --out out", "g.properties",
		map[string]any{"g.graph": "x", "g.properties": strings.Repeat("#\n", 1<<20)})
	add("webgraph: graph is a pipe", "import webgraph --in g --out out", "g.graph",
		map[string]any{"g.graph": special(fifo), "g.properties": props("")})
	add("webgraph: zeros", "import webgraph --in g.graph --out out", "g.graph",
		map[string]any{"g.graph": strings.Repeat("\x00", 1<<20),
			"g.properties": props("nodes=1000000\narcs=100000000")})
	add("webgraph: lfs", "import webgraph --in g.graph --out out", "g.properties",
		map[string]any{"g.graph": "x", "g.properties": lfs})

	bare := map[string]any{"in/indptr": npy("<i8", "(6,)", 0, 1, 2, 2, 2, 2)[64:],
		"in/indices":  "\x00\x00\x00\x00\x01\x00\x00\x00",
		"in/features": strings.Repeat("\x00", 20), "in/labels": "\x00\x01\x02\x01\x00"}
	const bareIn = "import npy --in in --out out --dim 1 --types features=float32,indices=uint32,"
	for name, c := range map[string]struct {
		args  string
		files map[string]any
	}{
		"offsets of other width": {"indptr=int32,labels=uint8", nil},
		"labels of other width":  {"indptr=int64,labels=int32", nil},
		"no such type":           {"indptr=int64,labels=int" + strings.Repeat("8", 100000), nil},
		"no such array":          {"indptr=int64,labels=uint8,weights=int8", nil},
		"dim 2^62":               {"indptr=int64,labels=uint8 --dim 4611686018427387904", nil},
		"map leads out":          {"indptr=int64,labels=uint8 --map ../../etc/passwd=labels", nil},
		"nodes 2^35":             {"indptr=int64,labels=uint8 --nodes 34359738368", nil},
		"labels are a pipe": {"indptr=int64,labels=uint8",
			map[string]any{"in/labels": special(fifo)}},
		"features of 4 TB": {"indptr=int64,labels=uint8",
			map[string]any{"in/features": sparse([]byte{0}, 4<<40)}},
		"offsets of 4 TB": {"indptr=int64,labels=uint8",
			map[string]any{"in/indptr": sparse([]byte{0}, 4<<40)}},
		"indices are lfs": {"indptr=int64,labels=uint8", map[string]any{"in/indices": lfs}},
		"offsets all 2^63": {"indptr=int64,labels=uint8",
			map[string]any{"in/indptr": strings.Repeat("\xff", 48)}},
	} {
		add("bare arrays: "+name, bareIn+c.args, "", with(bare, c.files))
	}
	for _, f := range []struct{ verb, dir string }{{"igb", "in/processed/paper__cites__paper"},
		{"mag240m", "in/processed/paper___cites___paper"}} {
		p := map[string]any{f.dir + "/edge_index.npy": lfs, "in/processed/paper/node_feat.npy": lfs,
			"in/processed/paper/node_label_19.npy": lfs, "in/processed/paper/node_label.npy": lfs,
			"in/processed/paper/node_year.npy": lfs}
		add(f.verb+": all lfs", "import "+f.verb+" --in in --out out", "node_", p)
		big := sparse(head("|i1", "(60000000000,)"), 60000000128)
		add(f.verb+": sparse labels of 6e10", "import "+f.verb+
			" --in in --out out --feature-fn hash", "node_label",
			with(p, map[string]any{"in/processed/paper/node_label.npy": big,
				"in/processed/paper/node_label_19.npy": big}))
	}
	debian := func(name, file string, content any) {
		add("debian: "+name, "import debian --in "+file+" --out out", file,
			map[string]any{file: content})
	}
	debian("250,000 continuation lines", "Packages", "Package: a\nDescription: x\n"+
		strings.Repeat(" some more words\n", 250000)+"\n\x00no field\n")
	debian("empty", "Packages", "")
	debian("binary", "Packages", strings.Repeat("\x00\xff", 4096))
	debian("line of 8 MiB", "Packages", "Package: "+strings.Repeat("x", 8<<20))
	debian("dictionary of 3 GiB", "Packages.xz",
		"\xfd7zXZ\x00\x00\x01\x69\x22\xde\x36\x02\x00\x21\x01\x27\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	debian("dictionary of 3 GiB, right checksums", "Packages.xz", xzHead(0x27))
	debian("no xz", "Packages.xz", "no xz")
	debian("no lz4", "Packages.lz4", "no lz4")
	debian("lfs", "Packages", lfs)
	debian("pipe", "Packages", special(fifo))
	return all
}

// degreeCases are files of degrees, and results of runs to calibrate by.
func degreeCases() (all []hostileCase) {
	files := map[string]any{
		"a pipe": special(fifo), "a folder": special(folder), "a device": linkTo("/dev/zero"),
		"a link to nowhere": linkTo("nowhere"), "a socket": special(socket), "empty": "", "lfs": lfs,
		"no edge": "0 7\n", "no node": "7 0\n", "one number": "7\n", "three numbers": "1 2 3\n",
		"negative": "5 -1\n", "nodes 2^62": "1 4611686018427387904\n",
		"degree 2^62": "4611686018427387904 1\n", "nodes 2^63": "1 9223372036854775808\n",
		"a sum of nodes beyond": strings.Repeat("1 1099511627776\n", 2),
		"a sum of edges beyond": "1099511627776 1099511627776\n",
		"not a number":          "NaN 1\n", "a fraction": "1.5 2\n", "hexadecimal": "0x10 2\n",
		"a line of 1 MiB":  strings.Repeat("9", 1<<20),
		"blanks of 1 MiB":  "1 2" + strings.Repeat(" ", 1<<20) + "x\n",
		"binary":           strings.Repeat("\x00\xff", 4096),
		"gzip":             gz("1 2\n"),
		"6 million lines":  strings.Repeat("1 1\n", 6_000_000),
		"sparse of 1 TiB":  sparse([]byte("1 2\n"), 1<<40),
		"sparse of 64 MiB": sparse([]byte("1 2\n"), 64<<20),
	}
	for _, n := range sorted(files) {
		all = append(all, hostileCase{name: "degrees: " + n,
			args:  "plan --degrees d.txt --hardware host --mode cpu --fanout 2 --batch-size 4",
			files: map[string]any{"d.txt": files[n]}, names: "d.txt"})
	}
	files = map[string]any{"a pipe": special(fifo), "a device": linkTo("/dev/zero"),
		"a folder": special(folder), "empty": "", "lfs": lfs, "no json": "{\n",
		"no begin": `{"event":"epoch"}` + "\n", "a list": "[]\n",
		"begin alone":      `{"event":"begin","verb":"train","settings":{"clock":"wall"}}` + "\n",
		"settings of text": `{"event":"begin","settings":7}` + "\n",
		"no epoch": `{"event":"begin","verb":"train","settings":{"clock":"wall"}}` + "\n" +
			`{"event":"end","whole":true}` + "\n",
		"a line of 64 MiB": strings.Repeat("9", 64<<20)}
	for _, n := range sorted(files) {
		all = append(all, hostileCase{name: "calibrate: " + n,
			args:  "plan set --hardware host --mode cpu --calibrate r.jsonl",
			files: map[string]any{"r.jsonl": files[n]}, names: "r.jsonl"})
	}
	return all
}

// partitionCases are files of partitions: whole heads by their checksum that tell lies, and others.
func partitionCases() (all []hostileCase) {
	const uuid = "7d444840-9dc0-11d1-b245-5ffdce74fad2"
	whole := func(nodes, edges, parts, block int64, of string) string {
		line := fmt.Sprintf(`{"partition":1,"dataset":%q,"nodes":%d,"edges":%d,"parts":%d,"block":%d}`,
			of, nodes, edges, parts, block)
		return fmt.Sprintf("%s\n%08x\n", line,
			crc32.Checksum([]byte(line), crc32.MakeTable(crc32.Castagnoli)))
	}
	files := map[string]any{
		"a pipe": special(fifo), "a folder": special(folder), "a device": linkTo("/dev/zero"),
		"empty": "", "lfs": lfs, "text": "0\n1\n", "a head without end": `{"partition":1,` +
			strings.Repeat(" ", 1<<20), "no json": "{\"partition\":\n00000000\n",
		"nodes 2^32-2":     whole(1<<32-2, 1, 2, 64<<10, uuid),
		"nodes 2^62":       whole(1<<62, 1, 2, 64<<10, uuid),
		"nodes -1":         whole(-1, 1, 2, 64<<10, uuid),
		"parts 2^40":       whole(400, 1, 1<<40, 64<<10, uuid),
		"blocks of 0":      whole(400, 1, 2, 0, uuid),
		"blocks of 2^62":   whole(400, 1, 2, 1<<62, uuid),
		"a uuid of a page": whole(400, 1, 2, 64<<10, strings.Repeat("7", 4096)),
		"sparse":           sparse([]byte(whole(1<<30, 1, 2, 64<<10, uuid)), 4<<30+1<<18+4096),
	}
	for _, n := range sorted(files) {
		all = append(all, hostileCase{name: "partition: " + n,
			args:  "partition set --in x.partition",
			files: map[string]any{"x.partition": files[n]}, names: "x.partition"})
	}
	return all
}

func datasetCases() (all []hostileCase) {
	train := "train set --model gcn --epochs 1 --mode mmap"
	verify := "cache hotness set --hotness degree"
	for _, verb := range []struct{ name, args string }{{"hotness", verify}, {"train", train}} {
		for _, f := range []string{"features.npy", "indptr.npy", "indices.npy", "labels.npy",
			"train.npy", "dataset.yaml"} {
			for what, content := range map[string]any{"a pipe": special(fifo), "empty": "",
				"lfs": lfs, "a folder": special(folder), "a device": linkTo("/dev/zero"),
				"a shape of 2^62": head("<i8", "(4611686018427387904,)")} {
				if verb.name == "train" && what != "a pipe" && what != "a device" {
					continue
				}
				all = append(all, hostileCase{name: "dataset, " + verb.name + ": " + f + " is " +
					what, args: verb.args, files: map[string]any{"set/" + f: content}, names: f})
			}
		}
	}
	yaml := func(name, text string) {
		all = append(all, hostileCase{name: "dataset.yaml: " + name, args: verify,
			files: map[string]any{"set/dataset.yaml": text}, names: "dataset.yaml"})
	}
	meta := func(kv string) string {
		lines := map[string]string{"nodes": "400", "edges": "1", "dim": "4", "classes": "2",
			"train": "1", "val": "1", "test": "1", "dtype": "float32"}
		k, v, _ := strings.Cut(kv, ": ")
		lines[k] = v
		text := "format: 1\nname: x\nuuid: 7d444840-9dc0-11d1-b245-5ffdce74fad2\n"
		for _, k := range slices.Sorted(maps.Keys(lines)) {
			text += k + ": " + lines[k] + "\n"
		}
		return text
	}
	for _, kv := range []string{"nodes: 9223372036854775807", "nodes: -1",
		"edges: 9223372036854775807", "edges: -5", "dim: 99999999", "dim: -1", "classes: -1",
		"classes: 99999999999999999999", "train: -1", "train: 9223372036854775807",
		"dtype: float99", "nodes: [1]", "nodes: {a: b}", "feature_fn: hash:-1"} {
		yaml(kv, meta(kv))
	}
	bomb := "format: 1\na: &a [x, x, x, x, x, x, x, x, x]\n"
	for c := 'b'; c < 'k'; c++ {
		bomb += fmt.Sprintf("%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n", c, c, c-1,
			c-1, c-1, c-1, c-1, c-1, c-1, c-1, c-1)
	}
	yaml("alias bomb", bomb+"class_names: *j\n")
	yaml("100,000 levels", strings.Repeat("[", 100000))
	yaml("2 MiB", "# "+strings.Repeat("x", 2<<20))
	yaml("a list", "[1]")
	config := func(name string, content any) {
		all = append(all, hostileCase{name: "--config: " + name, args: "train set --config c.yaml",
			files: map[string]any{"c.yaml": content}, names: "c.yaml"})
	}
	config("a pipe", special(fifo))
	config("a device", linkTo("/dev/zero"))
	config("a folder", special(folder))
	config("alias bomb", strings.Replace(bomb, "format: 1\n", "", 1))
	config("alias to itself", "model: &a [*a]\n")
	config("100,000 levels", strings.Repeat("[", 100000))
	config("unknown key", strings.Repeat("x", 5000)+": 1\n")
	config("huge number", "epochs: 99999999999999999999999\n")
	config("negative", "batch: -5\n")
	config("mapping", "epochs: {a: 1}\n")
	config("lfs", lfs)
	hot := func(name string, content any) {
		all = append(all, hostileCase{name: "hotness list: " + name,
			args: "cache hotness set --hotness ./hot.txt", files: map[string]any{"hot.txt": content},
			names: "hot.txt"})
	}
	hot("a pipe", special(fifo))
	hot("a device", linkTo("/dev/zero"))
	hot("node 2^60", "1152921504606846976\n")
	hot("line of 1 MiB", strings.Repeat("9", 1<<20))
	hot("no number", secret+strings.Repeat("x", 60000)+"\n")
	hot("empty", "")
	hot("shape of 2^62", head("<i8", "(4611686018427387904,)"))
	hot("lfs", lfs)
	return all
}

func fileCases() (all []hostileCase) {
	kinds := []struct {
		name    string
		content any
	}{{"a pipe", special(fifo)}, {"a socket", special(socket)}, {"a device", linkTo("/dev/zero")},
		{"a folder", special(folder)}, {"a link to nowhere", linkTo("nowhere")},
		{"a link to itself",
			special(func(p string) error { return os.Symlink(filepath.Base(p), p) })}}
	for _, k := range kinds {
		for _, f := range []string{"features", "labels", "train"} {
			if k.name == "a folder" && f == "labels" || strings.HasPrefix(k.name, "a link") &&
				f != "features" {
				continue
			}
			all = append(all, one("npy "+f+": "+k.name, npyIn, "in/"+f+".npy", k.content, arrays()))
		}
		all = append(all, one("edges: "+k.name, edgesIn, "in/edges.csv", k.content, nil),
			one("npz: "+k.name, "import npy --in a.npz --out out", "a.npz", k.content, nil),
			one("mtx: "+k.name, "import mtx --in m.mtx --out out", "m.mtx", k.content, nil))
	}
	for i := range all {
		if strings.HasPrefix(all[i].name, "npy ") && strings.HasSuffix(all[i].name, "a folder") {
			all[i].names = "in has no"
		}
	}
	return all
}

// typedCases are graphs of several types: every array of each layout spoilt in every way, ids of
// another type's range, names that are paths, and more relations than there can be.
func typedCases() (all []hostileCase) {
	const paper, author = "(4, 2)", "(3, 2)"
	edge := func(shape string, v ...float64) []byte { return npy("<i8", shape, v...) }
	igbh := map[string]any{
		"in/processed/paper/node_feat.npy":     npy("<f4", paper, 1, 2, 3, 4, 5, 6, 7, 8),
		"in/processed/author/node_feat.npy":    npy("<f4", author, 1, 2, 3, 4, 5, 6),
		"in/processed/paper/node_label_19.npy": npy("<i8", "(4,)", 0, 1, 0, 1),
		"in/processed/paper__cites__paper/edge_index.npy": edge("(3, 2)",
			0, 1, 2, 3, 3, 0),
		"in/processed/paper__written_by__author/edge_index.npy": edge("(3, 2)",
			0, 1, 2, 2, 3, 0),
	}
	mag := map[string]any{
		"in/meta.pt":                        torchDict("paper", 4, "author", 3, "institution", 1),
		"in/processed/paper/node_feat.npy":  npy("<f4", paper, 1, 2, 3, 4, 5, 6, 7, 8),
		"in/processed/paper/node_label.npy": npy("<f8", "(4,)", 0, 1, 0, 1),
		"in/processed/paper/node_year.npy":  npy("<i8", "(4,)", 2017, 2018, 2019, 2020),
		"in/processed/paper___cites___paper/edge_index.npy": edge("(2, 3)",
			0, 1, 2, 3, 3, 0),
		"in/processed/author___writes___paper/edge_index.npy": edge("(2, 3)",
			0, 1, 2, 3, 3, 0),
		"in/processed/author___affiliated_with___institution/edge_index.npy": edge("(2, 3)",
			0, 1, 2, 0, 0, 0),
	}
	bolt := map[string]any{"in/p.npy": npy("<f4", paper, 1, 2, 3, 4, 5, 6, 7, 8),
		"in/a.npy": npy("<f4", author, 1, 2, 3, 4, 5, 6), "in/cites.npy": edge("(2, 2)", 0, 1, 2, 3),
		"in/writes.npy": edge("(2, 2)", 0, 2, 2, 3), "in/seeds.npy": edge("(2,)", 0, 1),
		"in/labels.npy": edge("(2,)", 0, 1)}
	meta := func(node, cites, writes, file string) string {
		return "dataset_name: x\ngraph:\n  nodes: [{type: paper, num: 4}, {type: " + node +
			", num: 3}]\n  edges: [{type: '" + cites + "', format: numpy, path: cites.npy}, {type: '" +
			writes + "', format: numpy, path: " + file + "}]\n" +
			"feature_data: [{domain: node, type: paper, name: feat, format: numpy, path: p.npy}, " +
			"{domain: node, type: " + node + ", name: feat, format: numpy, path: a.npy}]\n" +
			"tasks: [{name: t, train_set: [{type: paper, data: [{name: seeds, format: numpy, " +
			"path: seeds.npy}, {name: labels, format: numpy, path: labels.npy}]}]}]\n"
	}
	const cites, writes = "paper:cites:paper", "author:writes:paper"
	bolt["in/metadata.yaml"] = meta("author", cites, writes, "writes.npy")
	layouts := []struct {
		name, args string
		files      map[string]any
	}{
		{"igbh", "import igbh --in in --out out --classes 19", igbh},
		{"mag240m --hetero", "import mag240m --hetero --in in --out out --fill " +
			"author=mean:rev_writes,institution=mean:affiliated_with", mag},
		{"typed graphbolt", "import graphbolt --in in --out out", bolt},
	}
	bad := map[string]any{
		"empty": "", "magic only": "\x93NUMPY", "lfs": lfs, "a pipe": special(fifo),
		"a folder": special(folder), "a device": linkTo("/dev/zero"),
		"no dict":        "\x93NUMPY\x01\x00\x10\x000123456789abcdef",
		"header of 4 GB": "\x93NUMPY\x02\x00\xff\xff\xff\xff",
		"negative shape": head("<i8", "(-5, 2)"),
		"2^62 rows":      head("<i8", "(4611686018427387904, 2)"),
		"overflow":       head("<i8", "(4294967296, 4294967296, 4)"),
		"65 dims":        head("<i8", "("+strings.Repeat("1, ", 65)+")"),
		"objects":        head("|O", "(3, 2)"), "strings": head("<U5", "(3, 2)"),
		"three columns": edge("(2, 3, 1)", 0, 1, 2, 3, 3, 0),
		"cut":           head("<i8", "(3, 2)"), "2^36 rows of none": head("<f4", "(68719476736, 0)"),
		"text": "0 1\n1 2\n",
	}
	for _, l := range layouts {
		for _, file := range sorted(l.files) {
			if strings.HasSuffix(file, ".yaml") || strings.HasSuffix(file, ".pt") {
				continue
			}
			for _, n := range sorted(bad) {
				c := one(l.name+": "+strings.TrimPrefix(file, "in/")+": "+n, l.args, file, bad[n],
					l.files)
				if n == "a folder" {
					c.names = "author" // the type has no rows then
				}
				if n != "a folder" || strings.HasSuffix(file, "author/node_feat.npy") {
					all = append(all, c)
				}
			}
		}
	}
	for name, content := range map[string][]byte{
		"ids of the other type": edge("(1, 2)", 0, 3), "ids beyond both": edge("(1, 2)", 9, 0),
		"ids below 0": edge("(1, 2)", -1, 0), "[2, E]": edge("(2, 3)", 0, 1, 2, 1, 2, 0),
		"ids of 2^40": edge("(1, 2)", 1<<40, 0), "ids of floats": npy("<f8", "(1, 2)", 0, .5),
	} {
		all = append(all, one("igbh: "+name, layouts[0].args,
			"in/processed/paper__written_by__author/edge_index.npy", content, igbh))
	}
	for _, n := range []string{"paper__author", "paper____author", "__a__author", "paper__a__",
		"paper__a__b__author", "paper__a__papers", "paper__" + strings.Repeat("x", 200) + "__author",
		"paper__a\x01__author", "paper__\x1b[2J__author", "author__rev_written_by__paper",
		"..__a__paper", "paper__a__.."} {
		all = append(all, hostileCase{name: fmt.Sprintf("igbh: a relation %.40q", n),
			args: layouts[0].args, files: with(igbh, map[string]any{"in/processed/" + n +
				"/edge_index.npy": edge("(1, 2)", 0, 0)}), names: "import igbh: "})
	}
	yaml := func(name, text string) {
		all = append(all, hostileCase{name: "typed graphbolt: " + name, args: layouts[2].args,
			files: with(bolt, map[string]any{"in/metadata.yaml": text}), names: "import graphbolt: "})
	}
	for _, n := range []string{"../x", "/etc/passwd", "a/b", "'a:b'", "''", "paper", "[x]", "{a: b}",
		"'" + strings.Repeat("x", 4096) + "'", "\"\\e[2J\"", "\"a\\0b\"", "no"} {
		if n != "../x" && n != "/etc/passwd" && n != "a/b" && n != "no" {
			yaml(fmt.Sprintf("a type %.20s", n), meta(n, cites, writes, "writes.npy"))
		}
		if n != "paper" {
			yaml(fmt.Sprintf("ends in a type %.20s", n), meta("author", cites,
				strings.Trim(n, "'\"")+":writes:paper", "writes.npy"))
		}
	}
	for _, r := range []string{"", ":", "::", "author::paper", "author:writes", "author:writes:paper:x",
		"writes:author:paper", cites, "author:\x01:paper"} {
		yaml(fmt.Sprintf("a relation %q", r), meta("author", cites, r, "writes.npy"))
	}
	for _, p := range []string{"../secret.npy", "/etc/passwd", "/dev/zero", ".", "p.npy"} {
		yaml("edges in "+p, meta("author", cites, writes, p))
	}
	relations, types := &strings.Builder{}, &strings.Builder{}
	for i := range 65536 {
		fmt.Fprintf(relations, "{type: 'paper:r%d:paper', format: numpy, path: cites.npy}, ", i)
	}
	for i := range 256 {
		fmt.Fprintf(types, "{type: t%d, num: 1}, ", i)
	}
	good := meta("author", cites, writes, "writes.npy")
	yaml("65,536 relations", strings.Replace(good, "edges: [", "edges: ["+relations.String(), 1))
	yaml("256 types", strings.Replace(good, "nodes: [", "nodes: ["+types.String(), 1))
	return all
}

// torchDict is a dictionary of names and numbers below 256, as torch.save writes it.
func torchDict(items ...any) []byte {
	p := "\x80\x02}("
	for i := 0; i < len(items); i += 2 {
		name := items[i].(string)
		p += "X" + string([]byte{byte(len(name)), 0, 0, 0}) + name + "K" +
			string([]byte{byte(items[i+1].(int))})
	}
	return npz(map[string]any{"archive/data.pkl": []byte(p + "u."), "archive/version": []byte("3\n")},
		zip.Store)
}
