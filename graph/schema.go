package graph

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"helios/internal/errs"
)

// Schema names the types of a graph's nodes and the relations between them. Node n of type t has
// number First(t)+n in the graph: its row, and its place in frontiers. Relations and seeds count
// within their types.
type Schema struct {
	Types     []NodeType
	Relations []Relation // their order is part of the samples
	Seeds     int        // type of the seeds
}

// NodeType is a type of nodes.
type NodeType struct {
	Name  string
	Nodes int64
	Dim   int // features that are used of its rows; the rest are zeros
}

// Relation is a kind of edges, from nodes of type Src to nodes of type Dst.
type Relation struct {
	Name     string
	Src, Dst int
}

// First returns the number of the first node of type t; First(len(Types)) is the number of nodes.
func (s *Schema) First(t int) (first int64) {
	for i := range s.Types[:t] {
		first += s.Types[i].Nodes
	}
	return first
}

// nodeOf returns a node's type and its number there.
func (s *Schema) nodeOf(v NodeID) (t int, local NodeID) {
	for ; t < len(s.Types)-1 && v >= s.Types[t].Nodes; t++ {
		v -= s.Types[t].Nodes
	}
	return t, v
}

// RelationName returns "source:relation:destination" of relation r.
func (s *Schema) RelationName(r int) string {
	x := &s.Relations[r]
	return s.Types[x.Src].Name + ":" + x.Name + ":" + s.Types[x.Dst].Name
}

// bySource returns the relations in the order in which a hop draws from them: by the type of their
// sources.
func (s *Schema) bySource() []int {
	order := make([]int, len(s.Relations))
	for r := range order {
		order[r] = r
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return s.Relations[a].Src - s.Relations[b].Src
	})
	return order
}

// NewTyped makes the topology of a typed graph of those of its relations, in the schema's order:
// the lists of a relation are those of its destinations, and their ids count within the type of its
// sources (Topology.Sources). Close closes them, too.
func NewTyped(s *Schema, relations []*Topology) (*Topology, error) {
	if len(relations) != len(s.Relations) {
		return nil, errs.New(errs.Usage, "typed topology: %d relations, lists of %d",
			len(s.Relations), len(relations))
	}
	t := &Topology{Schema: s, Relations: relations, NumNodes: s.First(len(s.Types))}
	if t.NumNodes > math.MaxInt64/32 {
		return nil, errs.New(errs.Usage, "typed topology of %d nodes: out of range", t.NumNodes)
	}
	for r, x := range relations {
		dst, src := s.Types[s.Relations[r].Dst].Nodes, s.Types[s.Relations[r].Src].Nodes
		if x.NumNodes != dst || x.sources() != src {
			return nil, errs.New(errs.Usage,
				"relation %s: lists of %d destinations with %d sources; its types have %d and %d nodes",
				s.RelationName(r), x.NumNodes, x.sources(), dst, src)
		}
		t.NumEdges += x.NumEdges
	}
	return t, nil
}

// sources is the number of nodes that ids can name.
func (t *Topology) sources() int64 {
	if t.Sources != 0 {
		return t.Sources
	}
	return t.NumNodes
}

// validateRelations is Validate for a typed graph.
func (t *Topology) validateRelations() error {
	for r, x := range t.Relations {
		if err := x.Validate(); err != nil {
			return fmt.Errorf("relation %s: %w", t.Schema.RelationName(r), err)
		}
	}
	return nil
}

func (t *Topology) closeRelations() error {
	var err error
	for _, x := range t.Relations {
		err = errors.Join(err, x.Close())
	}
	t.Relations = nil
	return err
}

// inDegree is the number of in-neighbours of node v of a typed graph over all relations.
func (t *Topology) inDegree(v NodeID) (n int64) {
	s := t.Schema
	d, v := s.nodeOf(v)
	for r, x := range t.Relations {
		if s.Relations[r].Dst == d {
			n += x.InDegree(v)
		}
	}
	return n
}
