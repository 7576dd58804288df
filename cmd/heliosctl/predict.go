package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/outfile"
	"helios/internal/timeline"
	"helios/internal/ui"
	"helios/sched"
)

func predictCommand() *cli.Command {
	return &cli.Command{
		Name:      "predict",
		Usage:     "classify nodes with a checkpoint",
		ArgsUsage: "[DATASET]",
		Description: "Writes node, class and, where the dataset has them, the names of both: to standard output,\n" +
			"or as CSV to --out. --embeddings writes the last layer's outputs, one row for each node.\n" +
			"What is found out about a node depends on its draws, not on --batch-size; but with --sampler ladies the nodes of a\n" +
			"batch share what is drawn: --sampler neighbor --fanout -1,-1 (one for each layer) takes all neighbours instead.",
		Flags: append(inferFlags(),
			oneOf("split", "nodes to classify", "all", append([]string{"all"}, dataset.Splits...), nil),
			&cli.StringFlag{Name: "nodes", Usage: "classify these instead `ID,ID…`"},
			&cli.StringFlag{Name: "out", Usage: "CSV `FILE` to write"},
			&cli.StringFlag{Name: "embeddings", Usage: ".npy `FILE` (float32, nodes × classes) to write"},
			overwriteFlag(),
		),
		Action: action(1, runPredict),
	}
}

// nodes are those that predict was asked for.
func (e *env) nodes(d *dataset.Dataset) ([]int64, error) {
	if s := e.c.String("nodes"); s != "" {
		if e.c.IsSet("split") {
			return nil, errs.New(errs.Usage, "--nodes and --split together; give one")
		}
		parts, err := list("nodes", s)
		if err != nil {
			return nil, err
		}
		out := make([]int64, len(parts))
		for i, p := range parts {
			if out[i], err = strconv.ParseInt(p, 10, 64); err != nil {
				return nil, errs.New(errs.Usage, "--nodes: %q is not a node number", p)
			}
		}
		return out, nil
	}
	if s := e.c.String("split"); s != "all" {
		return d.Split(s)
	}
	out := make([]int64, d.Meta.Nodes)
	for i := range out {
		out[i] = int64(i)
	}
	return out, nil
}

func runPredict(ctx context.Context, e *env) (err error) {
	cfg, checkpoint, err := e.inferConfig()
	if err != nil {
		return err
	}
	csvOut, err := e.createOutput("out")
	if err != nil {
		return err
	}
	defer closing(&err, csvOut.Discard)
	npyOut, err := e.createOutput("embeddings")
	if err != nil {
		return err
	}
	defer closing(&err, npyOut.Discard)
	tl, err := e.openTimeline(timeline.Wall)
	if err != nil {
		return err
	}
	defer closing(&err, tl.close)
	cfg.Timeline = tl.rec
	in, set, done, err := e.inputs(ctx)
	if err != nil {
		return err
	}
	defer closing(&err, done)
	nodes, err := e.nodes(in.Dataset)
	if err != nil {
		return err
	}
	names, err := in.Dataset.Names()
	if err != nil {
		return err
	}
	classes := in.Dataset.Meta.ClassNames

	var rows *csvFile
	if csvOut != nil {
		rows = &csvFile{f: csvOut, w: csv.NewWriter(csvOut)}
		head := []string{"node", "class"}
		if len(names) > 0 {
			head = append(head, "name")
		}
		if len(classes) > 0 {
			head = append(head, "class_name")
		}
		rows.write(head)
	}
	var emb *npyFile
	if npyOut != nil {
		emb = &npyFile{f: npyOut, w: bufio.NewWriterSize(npyOut, 1<<20), rows: int64(len(nodes))}
	}

	var n int64
	res, err := sched.Predict(ctx, cfg, in, checkpoint, nodes, emb != nil, func(p sched.Prediction) error {
		for i, v := range p.Nodes {
			c := p.Classes[i]
			rec := []string{strconv.FormatInt(v, 10), strconv.Itoa(int(c))}
			obj := map[string]any{"node": v, "class": c}
			if int(v) < len(names) {
				rec, obj["name"] = append(rec, names[v]), names[v]
			}
			if int(c) < len(classes) {
				rec, obj["class_name"] = append(rec, classes[c]), classes[c]
			}
			if rows != nil {
				rows.write(rec)
				continue
			}
			for j := range rec {
				rec[j] = ui.Text(rec[j]) // a name may hold a tab
			}
			e.ui.Printf("%s", strings.Join(rec, "\t"))
			if err := e.ui.Object(obj); err != nil {
				return err
			}
		}
		n += int64(len(p.Nodes))
		if emb != nil {
			return emb.write(p.Embeddings, p.Dim)
		}
		return nil
	}, e.observer())
	err = orOtherDataset(err)
	out := &results{e: e}
	e.showFaults(set, out)
	set.markModelled(&res.IO, cfg)
	if err != nil {
		e.showTrouble(res.IO, out)
		return err
	}
	if rows != nil {
		rows.w.Flush()
		if err := rows.f.Commit(rows.w.Error()); err != nil {
			return err
		}
		e.ui.Printf("%d nodes classified in %s", n, rows.f.Path())
	}
	if emb != nil {
		if err := emb.f.Commit(emb.w.Flush()); err != nil {
			return err
		}
		e.ui.Printf("embeddings in %s", emb.f.Path())
	}
	return e.ui.Event("result", map[string]any{"nodes": n, "checkpoint": checkpoint, "out": e.c.String("out"), "embeddings": e.c.String("embeddings"), "io": res.IO,
		"memory_rung": res.MemoryRung, "memory_rung_tried": res.MemoryRungTried, "precision": res.Precision, "blas": res.BLAS, "gpu_cache_shrunk_bytes": res.GPUCacheShrunkBytes,
		"policy": res.Policy, "window": res.Window, "sampler": res.Sampler, "topology": res.Topology})
}

// csvFile keeps its first error for commit, as csv.Writer does.
type csvFile struct {
	f *outfile.File
	w *csv.Writer
}

func (c *csvFile) write(rec []string) { _ = c.w.Write(rec) } // the error comes again from w.Error

// npyFile writes rows × dim float32; dim is known with the first rows.
type npyFile struct {
	f    *outfile.File
	w    *bufio.Writer
	rows int64
	head bool
}

func (f *npyFile) write(v []float32, dim int) error {
	if !f.head {
		h, err := npy.EncodeHeader(npy.Header{DType: npy.Float32, Shape: []int64{f.rows, int64(dim)}})
		if err != nil {
			return err
		}
		if _, err := f.w.Write(h); err != nil {
			return fmt.Errorf("--embeddings %s: %w", f.f.Path(), err)
		}
		f.head = true
	}
	return writeFloats(f.w, v)
}

func writeFloats(w io.Writer, v []float32) error {
	var b [4]byte
	for _, x := range v {
		binary.LittleEndian.PutUint32(b[:], math.Float32bits(x))
		if _, err := w.Write(b[:]); err != nil {
			return err
		}
	}
	return nil
}
