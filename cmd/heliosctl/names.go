package main

import (
	"context"
	"encoding/csv"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/dataset"
	hcli "helios/internal/cli"
	"helios/internal/errs"
)

func namesCommand() *cli.Command {
	return verb(&cli.Command{
		Name:      "names",
		Usage:     "look up names and numbers of a dataset's nodes",
		ArgsUsage: "DATASET",
		Description: "A dataset of tables keeps the names of its nodes, and every output has them. Names are looked up without reading\n" +
			"all of them, but for those of names.txt. Exit code 2 says that a name or number is not there.",
	}, 1, hcli.Of[namesArgs](), runNames)
}

// namesArgs holds the options of names.
type namesArgs struct {
	datasetArgs
	ids   []string `option:"id" common:"yes" arg:"NAME[,NAME…]" usage:"the numbers of the nodes that are called NAME[,NAME…]; one with a comma in double quotes, as in CSV"`
	nodes []string `option:"node" common:"yes" arg:"N[,N…]" usage:"the names of nodes N[,N…], from 0"`
	kind  string   `option:"node-type" shown:"that with the labels" arg:"TYPE" usage:"TYPE of the nodes, where there are several"`
}

// SetOption reads names.
func (a *namesArgs) SetOption(name, text string) (done bool, err error) {
	if name != "id" {
		return false, nil
	}
	a.ids, err = parseNames(text)
	return true, err
}

// parseNames reads a line of CSV.
func parseNames(text string) ([]string, error) {
	names, err := csv.NewReader(strings.NewReader(text)).Read()
	if errors.Is(err, io.EOF) {
		return nil, errs.New(errs.Usage, "{id} %q has no name; give names with commas between", text)
	}
	if err != nil {
		return nil, errs.New(errs.Usage, "{id} %q is no line of CSV: %v", text, err)
	}
	return names, nil
}

// nameLine is a node with its name.
type nameLine struct {
	Node int64  `json:"node"`
	Name string `json:"name"`
}

func runNames(_ context.Context, e *env, a *namesArgs) (err error) {
	if len(a.ids)+len(a.nodes) == 0 {
		return errs.New(errs.Usage, "give names with {id} or numbers with {node}")
	}
	d, err := a.open(e)
	if err != nil {
		return err
	}
	defer closing(&err, d.Close)
	g := d.Meta.Graph()
	i := g.TypeOf(g.Tasks[0].Type)
	if a.kind != "" {
		if i = g.TypeOf(a.kind); i < 0 {
			return errs.New(errs.Usage, "{node-type} %s: the dataset has no such nodes", a.kind)
		}
	}
	m, err := namesOf(d, i)
	if err != nil {
		return err
	}
	defer closing(&err, m.Close)
	nodes, err := nodesNamed(m, a.ids)
	if err != nil {
		return err
	}
	var found []nameLine
	for i, node := range nodes {
		found = append(found, nameLine{node, a.ids[i]})
	}
	for _, text := range a.nodes {
		node, err := strconv.ParseInt(text, 10, 64)
		if err != nil || node < 0 || node >= m.Nodes() {
			return errs.New(errs.Usage, "{node} %q: nodes are 0 to %d", text, m.Nodes()-1)
		}
		name, err := m.Name(node)
		if err != nil {
			return err
		}
		found = append(found, nameLine{node, name})
	}
	rows := [][]string{}
	for _, f := range found {
		if err := e.ui.Event("name", f); err != nil {
			return err
		}
		rows = append(rows, []string{strconv.FormatInt(f.Node, 10), f.Name})
	}
	e.ui.Table([]string{"node", "name"}, rows)
	return nil
}

// nodeNames finds nodes by their names.
type nodeNames interface {
	io.Closer
	Nodes() int64
	Name(node int64) (string, error)
	Node(name string) (node int64, ok bool, err error)
}

// namesOf opens the names of a type of nodes; without them it fails.
func namesOf(d *dataset.Dataset, nodeType int) (nodeNames, error) {
	if m, err := d.NameMap(nodeType); m != nil || err != nil {
		return m, err
	}
	list, err := d.NamesOf(nodeType)
	if err == nil && list == nil {
		err = errs.New(errs.Usage, "%s has neither %s nor %s: its nodes have no names",
			d.Meta.Name, dataset.NameMapName, dataset.NamesName)
	}
	return nameList(list), err
}

// nameList holds the lines of names.txt.
type nameList []string

// Close has nothing to close.
func (nameList) Close() error { return nil }

// Nodes counts them.
func (l nameList) Nodes() int64 { return int64(len(l)) }

// Name returns that of a node.
func (l nameList) Name(node int64) (string, error) { return l[node], nil }

// Node returns the node that has a name, which no other may have.
func (l nameList) Node(name string) (node int64, ok bool, err error) {
	first := slices.Index(l, name)
	if first < 0 {
		return 0, false, nil
	}
	if next := slices.Index(l[first+1:], name); next >= 0 {
		return 0, false, errs.New(errs.Usage, "{id} %q: nodes %d and %d have this name", name, first,
			first+1+next)
	}
	return int64(first), true, nil
}

// nodesNamed returns the nodes that have names, the operands of --id.
func nodesNamed(m nodeNames, names []string) ([]int64, error) {
	nodes := make([]int64, len(names))
	for i, name := range names {
		node, ok, err := m.Node(name)
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, errs.New(errs.Usage, "{id} %q: no node has this name", name)
		}
		nodes[i] = node
	}
	return nodes, nil
}
