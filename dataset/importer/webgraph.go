package importer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"helios/dataset/edges"
	"helios/dataset/webgraph"
	"helios/internal/errs"
)

var webgraphFormat = newFormat(Format{Name: "webgraph",
	Usage:       "graphs in WebGraph's BV format: NAME.graph, NAME.properties, NAME.offsets",
	Description: webgraphHelp}, WebGraph)

const webgraphHelp = "{in} is NAME.graph (or NAME). An arc u → v becomes the edge u → v. Where NAME.offsets is there, parts of\n" +
	"the stream are read at the same time. Features, labels and splits come from {features}, {labels}\n" +
	"and {splits}."

// WebGraph imports a graph in WebGraph's BV format: In is the path of NAME.graph or of NAME, or a
// folder that holds one such graph. An arc u → v becomes the edge u → v. With NAME.offsets the
// stream is read in parts.
func WebGraph(ctx context.Context, o Options) (err error) {
	if err := o.fillFor(webgraphBase(o.In) + ".properties"); err != nil {
		return err
	}
	base := webgraphBase(o.In)
	if st, err := os.Stat(o.In); err == nil && st.IsDir() {
		names, err := filepath.Glob(filepath.Join(o.In, "*.properties"))
		if err != nil || len(names) != 1 {
			return errs.New(errs.Usage,
				"%s has %d .properties files; give the path of the graph, NAME.graph", o.In,
				len(names))
		}
		base = webgraphBase(names[0])
	}
	r := request{kind: "webgraph", options: &o, Options: o}
	if _, err := os.Stat(o.In); err != nil {
		r.In = filepath.Dir(base) // so that it names something
	}
	g, err := webgraph.Open(ctx, base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close()) }()
	if err := o.needFeaturesSoon(g.Name); err != nil {
		return err
	}
	r.inputs = []string{base + ".graph", base + ".properties"}
	if offsets := base + ".offsets"; isFile(offsets) {
		r.inputs = append(r.inputs, offsets)
	}
	return run(r, func(im *importer) error {
		im.m.Nodes = g.Nodes
		if st, err := os.Stat(o.In); err == nil && st.IsDir() {
			im.noteUnused(o.In, append(unusedFiles(o.In, r.inputs...), subfolders(o.In)...))
		}
		return im.around(ctx, g.Name, webgraphEdges(g))
	})
}

// webgraphBase takes the ending off the name of one of a graph's files.
func webgraphBase(path string) string {
	for _, e := range []string{".graph", ".properties", ".offsets"} {
		if s, ok := strings.CutSuffix(path, e); ok {
			return s
		}
	}
	return path
}

// webgraphEdges gives a graph's arcs, in the parts that its offsets allow.
func webgraphEdges(g *webgraph.Graph) edges.Source {
	return edges.Source{
		Name: g.Name, Unit: "edges", Total: g.Arcs, Parts: g.Parts(),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error,
			done func(int64)) error {
			const batch = 64 << 10
			src, dst := make([]int64, 0, batch), make([]int64, 0, batch)
			flush := func() error {
				n := int64(len(src))
				err := emit(src, dst)
				src, dst = src[:0], dst[:0]
				done(n)
				return err
			}
			err := g.Read(ctx, part, func(u int64, succ []int64) error {
				for len(succ) > 0 {
					n := min(batch-len(src), len(succ))
					for range n {
						src = append(src, u)
					}
					dst = append(dst, succ[:n]...)
					if succ = succ[n:]; len(src) == batch {
						if err := flush(); err != nil {
							return err
						}
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			return flush()
		},
	}
}
