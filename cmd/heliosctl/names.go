package main

import (
	"context"
	"strconv"

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
			"all of them. Exit code 2 says that a name or number is not there.",
	}, 1, hcli.Of[namesArgs](), runNames)
}

// namesArgs holds the options of names.
type namesArgs struct {
	datasetArgs
	ids   []string `option:"id" common:"yes" arg:"NAME[,NAME…]" usage:"the numbers of the nodes that are called NAME[,NAME…]"`
	nodes []string `option:"node" common:"yes" arg:"N[,N…]" usage:"the names of nodes N[,N…], from 0"`
	kind  string   `option:"node-type" shown:"that with the labels" arg:"TYPE" usage:"TYPE of the nodes, where there are several"`
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
	m, err := d.NameMap(i)
	if err != nil {
		return err
	}
	if m == nil {
		return errs.New(errs.Usage, "%s has no %s: its nodes have no names that are looked up",
			d.Meta.Name, dataset.NameMapName)
	}
	defer closing(&err, m.Close)
	var found []nameLine
	for _, name := range a.ids {
		node, ok, err := m.Node(name)
		if err != nil {
			return err
		}
		if !ok {
			return errs.New(errs.Usage, "{id} %q: no node has this name", name)
		}
		found = append(found, nameLine{node, name})
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
