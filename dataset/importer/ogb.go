package importer

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/infile"
)

var ogbFormat = newFormat(Format{Name: "ogb",
	Usage:       "node datasets of the Open Graph Benchmark, such as ogbn-products and ogbn-papers100M",
	Description: ogbHelp}, OGB)

// OGBOptions shape an import of an OGB dataset.
type OGBOptions struct {
	Split      string `option:"split" common:"yes" shown:"the only one" arg:"NAME" usage:"NAME of the folder in split/, where there are several"`
	AddInverse string `option:"add-inverse-edge" oneof:"yes,no,auto" default:"auto" usage:"add the opposite of each edge, as OGB does to products; auto goes by master.csv or the folder's name"`
	FillOptions
	Options
}

const ogbHelp = "{in} is the folder that OGB unpacks: raw/ with edge.csv.gz and the files beside it, or with data.npz and\n" +
	"node-label.npz (papers100M, where NaN means unlabelled), and split/ with the official split. A graph of several types\n" +
	"(ogbn-mag: raw/triplet-type-list.csv.gz and raw/relations) keeps them; {undirected} adds the reverse of each relation,\n" +
	"or takes it both ways where it joins nodes of one type."

const ogbFolder = "an OGB node dataset as it is unpacked: raw/edge.csv.gz and the files beside it, or raw/data.npz and raw/node-label.npz, and split/"

// ogbBothWays are the datasets whose files hold each edge once though it stands for both directions
// (add_inverse_edge in OGB's master.csv), by the names of the folders that OGB's archives unpack
// to.
var ogbBothWays = []string{"ogbn_products", "products", "ogbn_proteins", "proteinfunc"}

// OGB imports a node-property dataset of the Open Graph Benchmark (ogbHelp). Where OGB's own reader
// adds the opposite of each edge, the import does too: every edge twice, and nothing dropped.
func OGB(ctx context.Context, o OGBOptions) error {
	if err := o.fillOwn(); err != nil {
		return err
	}
	if err := o.inFolder(ogbFolder); err != nil {
		return err
	}
	raw := filepath.Join(o.In, "raw")
	fills, err := parseFills(o.Fill)
	if err != nil {
		return err
	}
	r := request{kind: "ogb", options: &o, Options: o.Options}
	return runNamed(r, func(base *importer) error {
		im := &ogbImport{base, o}
		switch types := filepath.Join(raw, ogbTypes); {
		case isFile(types):
			return im.ogbTyped(ctx, raw, types, fills)
		case o.Fill != "" || o.Pad:
			return errs.New(errs.Usage,
				"{fill} and {pad} are for graphs of several types, and %s has no raw/%s; leave them out",
				o.In, ogbTypes)
		case isFile(filepath.Join(raw, "data.npz")):
			return im.ogbBinary(ctx, raw)
		case isFile(filepath.Join(raw, "edge.csv.gz")):
			return im.ogbText(ctx, raw)
		}
		return errs.New(errs.Usage,
			"%s has no raw/edge.csv.gz and no raw/data.npz; {in} must be a folder with %s", o.In,
			ogbFolder)
	})
}

// ogbImport is an import of an OGB dataset.
type ogbImport struct {
	*importer
	opt OGBOptions
}

func (im *ogbImport) ogbText(ctx context.Context, raw string) error {
	o := &im.o
	nodeList := filepath.Join(raw, "num-node-list.csv.gz")
	nodes, err := im.ogbCount(ctx, nodeList)
	if err != nil {
		return err
	}
	count, err := im.ogbCount(ctx, filepath.Join(raw, "num-edge-list.csv.gz"))
	if err != nil {
		return err
	}
	if err := im.stateNodes(nodes, nodeList); err != nil {
		return err
	}
	inverse, err := im.ogbInverse()
	if err != nil {
		return err
	}
	p := parts{labelFile: cmp.Or(o.Labels, filepath.Join(raw, "node-label.csv.gz"))}
	if p.labels, err = im.labelFile(ctx, p.labelFile); err != nil {
		return err
	}
	if o.Labels == "" && im.plain() {
		im.m.LabelDims = 2 // as OGB's library gives them
	}
	if p.splits, err = im.splitsOr(ctx, im.ogbSplits); err != nil {
		return err
	}
	used := []string{"num-node-list.csv.gz", "num-edge-list.csv.gz", "edge.csv.gz"}
	if o.ownFeatures() {
		p.features.path = filepath.Join(raw, "node-feat.csv.gz")
		if !isFile(p.features.path) {
			return errs.New(errs.Usage,
				"%s has no node-feat.csv.gz: this dataset comes without features; give some with {features} FILE (.npy, or .csv with a row for each node), or {feature-fn}",
				raw)
		}
		used = append(used, "node-feat.csv.gz")
	}
	im.ogbUnused(raw, p.labelFile, p.splits, used...)
	if p.edges, err = csvEdges(ctx, filepath.Join(raw, "edge.csv.gz"), nodes, count,
		inverse); err != nil {
		return err
	}
	return im.write(ctx, p)
}

// only reads an array that has one element for each graph, of which there must be one.
func only(data *npy.Archive, name string) (n int64, err error) {
	a, err := data.Array(name)
	if err == nil && a.Header.Elements() != 1 {
		err = errs.New(errs.Usage, "%s has shape %s: %d graphs; a node dataset has one", a.Name,
			a.Header.ShapeString(), a.Header.Elements())
	}
	if err == nil {
		err = eachInt(a, func(_, x int64) error { n = x; return nil })
	}
	return n, err
}

func (im *ogbImport) ogbBinary(ctx context.Context, raw string) (err error) {
	o := &im.o
	data, err := npy.OpenArchive(filepath.Join(raw, "data.npz"))
	if err != nil {
		return err
	}
	defer func() { err = closing(err, data) }()
	index, err := im.ogbBinaryEdges(data)
	if err != nil {
		return err
	}
	if im.opt.AddInverse == "yes" {
		return errs.New(errs.Usage,
			"{add-inverse-edge} yes: OGB adds no edges to datasets in data.npz; take it away")
	}
	im.noteUnused(data.Path, slices.DeleteFunc(append(data.Names(), data.Others()...),
		func(n string) bool {
			return n == "num_nodes_list" || n == "num_edges_list" || n == "edge_index" ||
				n == "node_feat" && o.ownFeatures()
		}))
	p := parts{labelFile: cmp.Or(o.Labels, filepath.Join(raw, "node-label.npz"))}
	if o.Labels != "" {
		p.labels, err = im.labelFile(ctx, o.Labels)
	} else {
		p.labels, err = im.ogbBinaryLabels(ctx, p.labelFile)
	}
	if err != nil {
		return err
	}
	if p.splits, err = im.splitsOr(ctx, im.ogbSplits); err != nil {
		return err
	}
	im.ogbUnused(raw, p.labelFile, p.splits, "data.npz")
	if len(p.splits) == 0 {
		o.UnlabelledOK = true // what NaN means here
	}
	if index.Seekable() { // it may be read in parts, which no checksum covers
		if err := index.Check(ctx); err != nil {
			return err
		}
	}
	if p.edges, err = indexEdges(index, ofOne(im.m.Nodes), twoRows); err != nil {
		return err
	}
	if o.ownFeatures() {
		feat, err := data.Array("node_feat")
		if err != nil {
			return err
		}
		p.features = dataOf(feat)
	}
	return im.write(ctx, p)
}

// ogbBinaryEdges opens the edges, of which the archive also states the number, and takes the
// number of nodes.
func (im *ogbImport) ogbBinaryEdges(data *npy.Archive) (*npy.Array, error) {
	nodes, err := only(data, "num_nodes_list")
	if err != nil {
		return nil, err
	}
	edges, err := only(data, "num_edges_list")
	if err != nil {
		return nil, err
	}
	if err := im.stateNodes(nodes, data.Path+":num_nodes_list"); err != nil {
		return nil, err
	}
	index, err := data.Array("edge_index")
	if err != nil {
		return nil, err
	}
	if sh := index.Header.Shape; len(sh) != 2 || sh[0] != 2 || sh[1] != edges {
		return nil, errs.New(errs.Usage, "%s has shape %s, num_edges_list says (2, %d)", index.Name,
			index.Header.ShapeString(), edges)
	}
	return index, nil
}

func (im *ogbImport) ogbBinaryLabels(ctx context.Context, path string) (labels []int32,
	err error) {
	a, err := npy.OpenArchive(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = closing(err, a) }()
	arr, err := a.Array("node_label")
	if err != nil {
		return nil, err
	}
	return im.labels(ctx, dataOf(arr), nil)
}

// ogbUnused names the files of the dataset that are not used.
func (im *ogbImport) ogbUnused(raw, labels string, splits []splitSet, used ...string) {
	for i, n := range used {
		used[i] = filepath.Join(raw, n)
	}
	used = append(used, filepath.Clean(labels), filepath.Join(im.o.In, "master.csv"))
	for _, s := range splits {
		used = append(used, s.file)
	}
	im.noteUnused(im.o.In, unusedBelow(im.o.In, used))
}

// ogbCount reads the number of nodes or edges of the only graph.
func (im *ogbImport) ogbCount(ctx context.Context, path string) (int64, error) {
	if !isFile(path) {
		return 0, errs.New(errs.Usage, "%s is missing; {in} must be a folder with %s", path,
			ogbFolder)
	}
	n, lines := int64(0), 0
	err := im.eachValue(ctx, columnTable(path, ""), func(_, line int64, x float64) error {
		if x < 0 || x > math.MaxInt64/4 || x != math.Trunc(x) {
			return errs.New(errs.Usage, "%s:%d: %v is not a number of nodes or edges", path,
				line, x)
		}
		lines++
		n = int64(x)
		return nil
	})
	if err == nil && lines != 1 {
		err = errs.New(errs.Usage,
			"%s has %d lines, so the dataset has %d graphs; a node dataset has one", path,
			lines, lines)
	}
	return n, err
}

// ogbSplits reads the splits in split/: none is fine, several need a choice.
func (im *ogbImport) ogbSplits(ctx context.Context) ([]splitSet, error) {
	dir := filepath.Join(im.o.In, "split")
	name, err := im.ogbSplitName(dir)
	if err != nil || name == "" {
		return nil, err
	}
	im.m.Source.Options["split"] = name
	return im.folderSplits(ctx, filepath.Join(dir, name))
}

// ogbSplitName returns the name of the split that is asked for, or the only one; "" for none.
func (im *ogbImport) ogbSplitName(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) && im.opt.Split == "" {
		return "", nil
	}
	if err != nil {
		return "", errs.With(errs.Usage, err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	name := im.opt.Split
	switch {
	case name != "" && !slices.Contains(names, name):
		return "", errs.New(errs.Usage, "{split} %s: %s has %s", name, dir,
			strings.Join(names, ", "))
	case name != "":
		return name, nil
	case len(names) == 0:
		return "", errs.New(errs.Usage, "%s holds no split; take it away to have splits made", dir)
	case len(names) > 1:
		return "", errs.New(errs.Usage, "%s has several splits; choose one of %s with {split}",
			dir, strings.Join(names, ", "))
	}
	return names[0], nil
}

// ogbInverse reports whether to add the opposite of each edge.
func (im *ogbImport) ogbInverse() (add bool, err error) {
	switch im.opt.AddInverse {
	case "yes":
		add = true
	case "", "auto":
		name := strings.ToLower(filepath.Base(im.absIn()))
		master := filepath.Join(im.o.In, "master.csv")
		if isFile(master) {
			if add, err = ogbMaster(master, name); err != nil {
				return false, err
			}
			break
		}
		for _, n := range ogbBothWays {
			add = add || name == n || n == "proteinfunc" && strings.HasPrefix(name, n)
		}
	}
	if add {
		im.m.Source.Options["add-inverse-edge"] = "true"
	}
	return add, nil
}

// ogbMaster reads add_inverse_edge from OGB's table of datasets, which has a column for each of
// them.
func ogbMaster(path, folder string) (bool, error) {
	f, err := infile.Open(path)
	if err != nil {
		return false, errs.With(errs.Usage, err)
	}
	defer f.Close()
	rows, err := csv.NewReader(io.LimitReader(f, dataset.MaxDescription)).ReadAll()
	if err != nil {
		return false, errs.New(errs.Usage, "%s: %w", path, err)
	}
	col := -1
	if len(rows) > 0 {
		for i, n := range rows[0] {
			if i > 0 && (strings.ReplaceAll(n, "-", "_") == folder || len(rows[0]) == 2) {
				col = i
			}
		}
	}
	for _, r := range rows {
		if col >= 0 && r[0] == "add_inverse_edge" {
			switch r[col] {
			case "True":
				return true, nil
			case "False":
				return false, nil
			}
			return false, errs.New(errs.Usage,
				"%s: add_inverse_edge of %s is %.40q, must be True or False", path,
				brief(rows[0][col]), r[col])
		}
	}
	return false, errs.New(errs.Usage,
		"%s does not say add_inverse_edge of %s; give {add-inverse-edge} yes or no", path, folder)
}
