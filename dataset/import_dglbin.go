package dataset

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// The names of node tensors that are looked for.
var (
	dglFeatureNames = []string{"feat", "features", "feats", "feature", "x"}
	dglLabelNames   = []string{"label", "labels", "y"}
	dglMaskNames    = [3][]string{{"train_mask", "train_masks"}, {"val_mask", "valid_mask", "val_masks", "valid_masks"}, {"test_mask", "test_masks"}}
)

// ImportDGL imports a homogeneous graph that dgl.save_graphs wrote, with its node data feat, label, train_mask, val_mask
// and test_mask. --in is the .bin file, or a folder with one. The arrays are read where they lie in the file; nothing
// of their size is in memory.
func ImportDGL(ctx context.Context, o ImportOptions) (err error) {
	if err := o.fill(); err != nil {
		return err
	}
	path, err := dglFile(o.In)
	if err != nil {
		return err
	}
	want := int64(-1)
	if o.Format.Graph != "" {
		if want, err = strconv.ParseInt(o.Format.Graph, 10, 64); err != nil || want < 0 {
			return errs.New(errs.Usage, "--graph %s: must be the number of a graph, from 0", o.Format.Graph)
		}
	}
	r, err := openDGL(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	_, g, err := r.graphs(want)
	if err != nil {
		return err
	}
	return runFormat(o, "dgl", func(im *importer) error {
		if want >= 0 {
			im.m.Source.Options["graph"] = o.Format.Graph
		}
		return im.dgl(ctx, path, g)
	})
}

func dglFile(in string) (string, error) {
	st, err := os.Stat(in)
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	if !st.IsDir() {
		return in, nil
	}
	found, err := filepath.Glob(filepath.Join(in, "*.bin"))
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	if len(found) != 1 {
		return "", errs.New(errs.Usage, "%s has %d .bin files; name the file of dgl.save_graphs with --in", in, len(found))
	}
	return found[0], nil
}

func (im *importer) dgl(ctx context.Context, path string, g dglGraph) error {
	o := &im.o
	edges, err := im.dglEdges(path, g)
	if err != nil {
		return err
	}
	have := make([]string, len(g.tensors))
	for i, t := range g.tensors {
		have[i] = t.name
	}
	for ours, theirs := range o.Map {
		if !slices.Contains(have, theirs) || ours == "edge_index" || ours == "indptr" || ours == "indices" {
			return errs.New(errs.Usage, "--map %s=%s: the graph has no such node data (it has %s)", brief(theirs), ours, briefNames(have))
		}
	}
	used := map[string]bool{}
	find := func(ours string, names []string) *npy.Array {
		if theirs := o.Map[ours]; theirs != "" {
			names = []string{theirs}
		}
		for _, n := range names {
			for _, t := range g.tensors {
				if t.name == n && !used[n] {
					used[n] = true
					return t.a
				}
			}
		}
		return nil
	}
	for _, t := range g.tensors {
		if t.a.Header.DType.Size == 0 && (slices.Contains(dglFeatureNames, t.name) || slices.Contains(dglLabelNames, t.name) || looksLikeSplit(t.name) || slices.Contains(slices.Collect(maps.Values(o.Map)), t.name)) {
			return errs.New(errs.Usage, "%s: node data %q holds elements of a type that cannot be read; save float, int or bool", path, t.name)
		}
	}
	var feat *npy.Array
	if o.Features == "" && o.FeatureFn == "" {
		feat = find("features", dglFeatureNames)
	}
	if feat == nil && o.Features == "" && o.FeatureFn == "" {
		return errs.New(errs.Usage, "%s: the graph has no node data %s (it has %s); give features with --features FILE, or --feature-fn", path, strings.Join(dglFeatureNames, ", "), briefNames(have))
	}
	var labels []int32
	labelFile := path
	var lab *npy.Array
	if o.Labels == "" {
		lab = find("labels", dglLabelNames)
	}
	switch {
	case o.Labels != "":
		labelFile = o.Labels
		labels, err = im.ogbLabels(ctx, o.Labels)
	case lab != nil:
		labelFile = lab.Name
		labels, err = im.nodeLabels(lab)
	case !o.UnlabelledOK:
		err = errs.New(errs.Usage, "%s: the graph has no node data %s (it has %s); --unlabelled-ok imports it without labels", path, strings.Join(dglLabelNames, ", "), briefNames(have))
	}
	if err != nil {
		return err
	}
	splits, err := im.dglSplits(ctx, path, find)
	if err != nil {
		return err
	}
	unused := slices.DeleteFunc(slices.Clone(have), func(n string) bool { return used[n] })
	if i := slices.IndexFunc(unused, looksLikeSplit); i >= 0 && len(splits) == 0 && !o.MakeSplits {
		return errs.New(errs.Usage, "%s: node data %s may be a split, and there is none that is known; name it with --map, as in --map %s=train, give --splits DIR, or --make-splits to deal new ones",
			path, brief(unused[i]), brief(unused[i]))
	}
	for _, n := range g.edgeData {
		unused = append(unused, "edge data "+n)
	}
	im.noteUnused(path, unused)
	if err := im.edgesFrom(ctx, edges); err != nil {
		return err
	}
	if err := im.topology(ctx); err != nil {
		return err
	}
	if err := im.featuresOr(ctx, func() error { return im.features(ctx, feat) }); err != nil {
		return err
	}
	return im.labelsAndSplits(labels, labelFile, splits)
}

func (im *importer) dglSplits(ctx context.Context, path string, find func(string, []string) *npy.Array) ([]splitSet, error) {
	if im.o.MakeSplits {
		return nil, nil
	}
	if im.o.SplitDir != "" {
		return im.folderSplits(ctx, im.o.SplitDir)
	}
	var sets []splitSet
	missing := ""
	for i, names := range dglMaskNames {
		a := find(Splits[i], names)
		if a == nil {
			missing = names[0]
			continue
		}
		ids, err := im.dglMask(a)
		if err != nil {
			return nil, err
		}
		sets = append(sets, splitSet{a.Name, ids})
	}
	if missing != "" && len(sets) > 0 {
		return nil, errs.New(errs.Usage, "%s: the graph has no node data %s beside its other masks; all three or none are needed", path, missing)
	}
	return sets, nil
}

// dglMask reads a mask; DGL saves bool as uint8.
func (im *importer) dglMask(a *npy.Array) (ids []int64, err error) {
	sh := a.Header.Shape
	switch {
	case len(sh) == 2:
		return im.splitIDs(a)
	case len(sh) != 1 || sh[0] != im.m.Nodes:
		return nil, errs.New(errs.Usage, "%s: the mask has shape %s, there are %d nodes", a.Name, a.Header.ShapeString(), im.m.Nodes)
	}
	err = eachInt(a, func(v, x int64) (err error) {
		if x != 0 && x != 1 {
			return errs.New(errs.Usage, "%s: %d for node %d; a mask holds 0 and 1", a.Name, x, v)
		}
		if x == 1 {
			ids, err = im.addID(ids, v, a.Name)
		}
		return err
	})
	return ids, err
}

// dglEdges checks that the graph is homogeneous, sets the nodes, and chooses the form that is nearest to ours.
func (im *importer) dglEdges(path string, g dglGraph) (s edgeSource, err error) {
	if len(g.nodes) != 1 || g.relations != 1 || g.nodeGroups != 1 {
		return s, errs.New(errs.Usage, "%s: offset %d: a graph of %d types of nodes (%s) and %d of edges (%s); graphs with one of each can be imported: take dgl.to_homogeneous, or one relation",
			path, g.at, len(g.nodes), briefNames(g.nodeTypes), g.relations, briefNames(g.edgeTypes))
	}
	nodes := g.nodes[0]
	if nodes < 1 || nodes > maxTextNodes {
		return s, errs.New(errs.Usage, "%s: offset %d: %d nodes, must be from 1 to %d", path, g.at, nodes, int64(maxTextNodes))
	}
	if im.o.Nodes > 0 && im.o.Nodes != nodes {
		return s, errs.New(errs.Usage, "--nodes %d, but %s says %d", im.o.Nodes, path, nodes)
	}
	im.m.Nodes = nodes
	count := int64(-1)
	var best dglForm
	for _, f := range g.forms {
		for _, a := range []*npy.Array{f.a, f.b} {
			if k := a.Header.DType.Kind; len(a.Header.Shape) != 1 || k != 'i' && k != 'u' {
				return s, errs.New(errs.Usage, "%s: shape %s of %s; ids are integers of one dimension", a.Name, a.Header.ShapeString(), a.Header.DType)
			}
		}
		if f.rows != nodes || f.cols != nodes {
			return s, errs.New(errs.Usage, "%s: a matrix of %d × %d for %d nodes", f.b.Name, f.rows, f.cols, nodes)
		}
		want := nodes + 1
		if f.bit == dglCOO {
			want = f.b.Header.Elements()
		}
		if n := f.a.Header.Elements(); n != want {
			return s, errs.New(errs.Usage, "%s has %d entries, %d are needed", f.a.Name, n, want)
		}
		if n := f.b.Header.Elements(); count >= 0 && n != count {
			return s, errs.New(errs.Usage, "%s has %d entries, another form of the same edges has %d", f.b.Name, n, count)
		}
		count = f.b.Header.Elements()
		if f.bit > best.bit { // CSC before CSR before COO
			best = f
		}
	}
	if best.bit == dglCOO {
		return pairEdges(best.a, best.b, nodes), nil
	}
	return offsetEdges(best.a, best.b, nodes, best.bit == dglCSC), nil
}

// partEdges is how many edges a part of an array has: many times a batch, and enough parts for all cores. Tests make it small.
var partEdges int64 = 4 << 20

// pairEdges are the edges src[i] → dst[i] of two seekable arrays.
func pairEdges(src, dst *npy.Array, nodes int64) edgeSource {
	n := src.Header.Elements()
	parts := int(max(1, (n+partEdges-1)/partEdges))
	return edgeSource{Name: src.Name, Unit: "edges", Total: n, Parts: parts,
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error, done func(int64)) error {
			from, to := int64(part)*partEdges, min(n, int64(part+1)*partEdges)
			rs, err := src.Reader(from)
			if err != nil {
				return err
			}
			defer rs.Close()
			rd, err := dst.Reader(from)
			if err != nil {
				return err
			}
			defer rd.Close()
			s, d := make([]int64, 32<<10), make([]int64, 32<<10)
			for at := from; at < to; {
				k := int(min(int64(len(s)), to-at))
				if err := fullInts(rs, s[:k]); err != nil {
					return err
				}
				if err := fullInts(rd, d[:k]); err != nil {
					return err
				}
				for i := range k {
					if uint64(s[i]) >= uint64(nodes) {
						return badID(src.Name, at+int64(i), s[i], nodes)
					}
					if uint64(d[i]) >= uint64(nodes) {
						return badID(dst.Name, at+int64(i), d[i], nodes)
					}
				}
				if err := emit(s[:k], d[:k]); err != nil {
					return err
				}
				done(int64(k))
				at += int64(k)
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
			return nil
		}}
}

// fullInts fills dst.
func fullInts(r *npy.Reader, dst []int64) error {
	for len(dst) > 0 {
		n, err := r.Ints(dst)
		if err != nil {
			return err
		}
		dst = dst[n:]
	}
	return nil
}

// offsetEdges are the edges of two seekable arrays: the neighbours of v are idx[ptr[v]:ptr[v+1]], which are the sources of
// edges to v with in, and the destinations of edges from v without. A part is a range of nodes.
func offsetEdges(ptr, idx *npy.Array, nodes int64, in bool) edgeSource {
	total := idx.Header.Elements()
	parts := max(1, min((total+partEdges-1)/partEdges, nodes))
	return edgeSource{Name: idx.Name, Unit: "edges", Total: total, Parts: int(parts),
		Read: func(ctx context.Context, part int, emit func(src, dst []int64) error, done func(int64)) error {
			v, last := nodes/parts*int64(part)+min(int64(part), nodes%parts), nodes/parts*int64(part+1)+min(int64(part+1), nodes%parts)
			rp, err := ptr.Reader(v)
			if err != nil {
				return err
			}
			defer rp.Close()
			offs := make([]int64, 16<<10)
			bad := func(at, x int64) error {
				return errs.New(errs.Usage, "%s: offset %d at position %d does not rise from 0 to the %d entries of %s", ptr.Name, x, at, total, idx.Name)
			}
			if err := fullInts(rp, offs[:1]); err != nil {
				return err
			}
			pos := offs[0]
			if pos < 0 || pos > total || v == 0 && pos != 0 {
				return bad(v, pos)
			}
			ri, err := idx.Reader(pos)
			if err != nil {
				return err
			}
			defer ri.Close()
			ids, own := make([]int64, 32<<10), make([]int64, 32<<10)
			n := 0 // edges that wait to be emitted
			flush := func() error {
				if n == 0 {
					return nil
				}
				if err := fullInts(ri, ids[:n]); err != nil {
					return err
				}
				for i, x := range ids[:n] {
					if uint64(x) >= uint64(nodes) {
						return badID(idx.Name, pos-int64(n)+int64(i), x, nodes)
					}
				}
				s, d := ids[:n], own[:n]
				if !in {
					s, d = d, s
				}
				if err := emit(s, d); err != nil {
					return err
				}
				done(int64(n))
				n = 0
				return ctx.Err()
			}
			for v < last {
				k := int(min(int64(len(offs)), last-v))
				if err := fullInts(rp, offs[:k]); err != nil {
					return err
				}
				for _, end := range offs[:k] {
					if end < pos || end > total {
						return bad(v+1, end)
					}
					for ; pos < end; pos++ {
						own[n] = v
						if n++; n == len(own) {
							pos++ // flush names positions from what was taken
							err := flush()
							if pos--; err != nil {
								return err
							}
						}
					}
					v++
				}
			}
			if err := flush(); err != nil {
				return err
			}
			if last == nodes && pos != total {
				return errs.New(errs.Usage, "%s ends with %d, but %s has %d entries", ptr.Name, pos, idx.Name, total)
			}
			return nil
		}}
}
