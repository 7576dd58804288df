// Package partition divides the nodes of a graph into parts of about equal size with few edges
// between them, in three ways (Methods): METIS through its library, a streaming partitioner of ours
// for graphs beyond memory, and at random. It keeps the result in a file with checksums that is
// bound to its dataset.
package partition

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"helios/graph"
	"helios/internal/errs"
	"helios/internal/hostcpu"
	"helios/internal/hostmem"
	"helios/internal/work"
)

// Auto is the method METIS where its library is there and the graph fits, or else streaming.
const Auto = "auto"

// Defaults of Options.
const (
	DefaultBalance = 1.05
	DefaultPasses  = 5
)

// MostPasses bounds Options.Passes.
const MostPasses = 1000

// MostThreads bounds Options.Threads, each of which looks at all lists for the votes of its nodes.
const MostThreads = 1024

// Options of a partition. Zero values mean the defaults.
type Options struct {
	Parts  int    `option:"parts" shown:"none" arg:"NUMBER" usage:"NUMBER of parts (required without {in})"` // how many; at least 1, at most one for each node
	Method string `option:"method" oneof:"@partitioners" default:"auto" usage:"how"`                         // one of MethodNames, or Auto, the default
	// Seed decides all random choices: equal seeds give equal parts, whatever the threads.
	Seed uint64 `option:"seed" default:"1" usage:"seed of all random choices"`
	// Balance is the most nodes of a part as a multiple of the mean, 1.05. The streaming
	// and the random method never pass it (a part of one node more than the mean's whole number is
	// always allowed); METIS aims at it.
	Balance float64 `option:"balance" positive:"yes" default:"1.05" usage:"most nodes of a part, as a multiple of the mean; metis may miss it"`
	// Passes is the number of times that the streaming method looks at each node again after each
	// of its starts, 5.
	Passes  int    `option:"passes" positive:"yes" default:"5" usage:"stream: how often each node is looked at again"`
	Threads int    `option:"workers" positive:"yes" shown:"one per CPU" usage:"stream: threads; the parts do not depend on them"` // of the streaming method; one for each CPU
	Library string `option:"metis" shown:"the loader's libmetis.so.5" arg:"FILE" usage:"library of METIS 5 in FILE"`              // file of METIS; "" takes the loader's libmetis.so.5

	Progress work.Progress
}

// Partition holds the part of each node. Close gives its memory back.
type Partition struct {
	Info  Info
	Of    []uint32 // by node; below Info.Parts
	Notes []string // notes for the user on how it was made

	mem []byte
}

// Info describes a partition; it is in its file, too.
type Info struct {
	Version int     `json:"partition"` // of the file
	Dataset string  `json:"dataset"`   // UUID of the graph's dataset
	Nodes   int64   `json:"nodes"`
	Edges   int64   `json:"edges"`
	Parts   int     `json:"parts"`
	Method  string  `json:"method"`
	Seed    uint64  `json:"seed"`
	Balance float64 `json:"balance"`           // as it was asked for
	Passes  int     `json:"passes,omitempty"`  // after each start
	Start   string  `json:"start,omitempty"`   // the start that was best
	Library string  `json:"library,omitempty"` // METIS's
	// EdgePasses is the number of times that the edges were read.
	EdgePasses int `json:"edge_passes"`
	Stats
}

// method is a way to make partitions. Each has a file, which registers it.
type method struct {
	name    string
	summary string
	// run fills of and what it knows of info.
	run func(ctx context.Context, t *graph.Topology, o *Options, of []uint32, info *Info) error
}

// methods lists all methods by their names.
var methods = []method{metisMethod, randomMethod, streamMethod}

// MethodNames returns the names of the methods, Auto aside.
func MethodNames() []string {
	names := make([]string, len(methods))
	for i, m := range methods {
		names[i] = m.name
	}
	return names
}

// Summary describes a method in a few words; "" for an unknown name.
func Summary(name string) string {
	for _, m := range methods {
		if m.name == name {
			return m.summary
		}
	}
	return ""
}

func (o *Options) check(t *graph.Topology) error {
	if t.NumNodes >= math.MaxUint32 {
		return errs.New(errs.Capability, "partition of %d nodes: at most 2^32-2 can be",
			t.NumNodes)
	}
	if o.Parts < 1 || int64(o.Parts) > t.NumNodes {
		return errs.New(errs.Usage, "%v %d: give 1 to %d, the number of nodes", errs.Key("parts"),
			o.Parts, t.NumNodes)
	}
	if o.Balance == 0 {
		o.Balance = DefaultBalance
	}
	if !(o.Balance >= 1 && o.Balance <= 1000) {
		return errs.New(errs.Usage,
			"%v %g: give the most nodes of a part as a multiple of the mean, 1 to 1000",
			errs.Key("balance"), o.Balance)
	}
	if o.Passes == 0 {
		o.Passes = DefaultPasses
	}
	if o.Passes < 1 || o.Passes > MostPasses {
		return errs.New(errs.Usage, "%v %d: give 1 to %d", errs.Key("passes"), o.Passes,
			MostPasses)
	}
	if o.Threads <= 0 {
		o.Threads = min(hostcpu.Count(), MostThreads)
	}
	if o.Threads > MostThreads {
		return errs.New(errs.Usage, "%v %d: give 1 to %d", errs.Key("workers"), o.Threads,
			MostThreads)
	}
	if o.Method == "" {
		o.Method = Auto
	}
	return nil
}

// room is the most nodes that a part may have.
func (o *Options) room(nodes int64) int64 {
	mean := float64(nodes) / float64(o.Parts)
	return max(int64(mean*o.Balance), (nodes+int64(o.Parts)-1)/int64(o.Parts))
}

// Make partitions a graph, in memory or on storage. Edges count as often as they stand and in
// either direction; an edge from a node to itself is never cut.
func Make(ctx context.Context, t *graph.Topology, o Options) (p *Partition, err error) {
	if err := o.check(t); err != nil {
		return nil, err
	}
	mem, err := hostmem.Alloc(4*t.NumNodes, "parts of nodes")
	if err != nil {
		return nil, err
	}
	p = &Partition{Of: hostmem.View[uint32](mem), mem: mem, Info: Info{Version: Version,
		Nodes: t.NumNodes, Edges: t.NumEdges, Parts: o.Parts, Seed: o.Seed, Balance: o.Balance}}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
			p = nil
		}
	}()
	err = p.fill(ctx, t, &o)
	if err == nil {
		p.Info.Stats, err = p.Measure(ctx, t, o.Progress)
		p.Info.EdgePasses++
	}
	if room := o.room(t.NumNodes); err == nil && p.Info.MaxNodes > room {
		p.Notes = append(p.Notes, fmt.Sprintf(
			"%s missed the balance that was asked for: a part has %d nodes, more than %d; %s keeps to it",
			p.Info.Method, p.Info.MaxNodes, room, Stream))
	}
	return p, err
}

func (p *Partition) fill(ctx context.Context, t *graph.Topology, o *Options) error {
	if o.Method == Auto {
		before := p.Info
		err := metisMethod.run(ctx, t, o, p.Of, &p.Info)
		if errs.ClassOf(err) != errs.Capability {
			return err
		}
		p.Notes = append(p.Notes, err.Error())
		p.Info = before
		return streamMethod.run(ctx, t, o, p.Of, &p.Info)
	}
	for _, m := range methods {
		if m.name == o.Method {
			return m.run(ctx, t, o, p.Of, &p.Info)
		}
	}
	return errs.New(errs.Usage, "%v %q: choose one of %s, %s", errs.Key("method"), o.Method, Auto,
		strings.Join(MethodNames(), ", "))
}

// Close gives the memory back; Of must not be used any more.
func (p *Partition) Close() error {
	mem := p.mem
	p.mem, p.Of = nil, nil
	if mem == nil {
		return nil
	}
	return hostmem.Free(mem)
}

// BelongsTo is an error of class Usage unless the partition is of this dataset.
func (p *Partition) BelongsTo(dataset string, nodes, edges int64) error {
	i := &p.Info
	if i.Dataset == dataset && i.Nodes == nodes && i.Edges == edges {
		return nil
	}
	return errs.New(errs.Usage,
		"the partition is of dataset %s (%d nodes, %d edges), this one is %s (%d nodes, %d edges); partition this one",
		i.Dataset, i.Nodes, i.Edges, dataset, nodes, edges)
}

// Stats are the figures of a partition.
type Stats struct {
	CutEdges int64   `json:"cut_edges"` // whose ends lie in two parts, as often as they stand
	CutShare float64 `json:"cut_share"` // of all edges
	MaxNodes int64   `json:"max_nodes"` // of a part
	// NodeBalance and EdgeBalance are max / mean over the parts. A part's edges are the in-edges of
	// its nodes, as their lists have them.
	NodeBalance float64 `json:"node_balance"`
	MaxEdges    int64   `json:"max_edges"`
	EdgeBalance float64 `json:"edge_balance"`
	EmptyParts  int     `json:"empty_parts"`
}

// Measure reads the edges once and counts.
func (p *Partition) Measure(ctx context.Context, t *graph.Topology, report work.Progress) (Stats,
	error) {
	var s Stats
	parts := p.Info.Parts
	nodes, edges := make([]int64, parts), make([]int64, parts)
	for v, part := range p.Of {
		nodes[part]++
		edges[part] += t.InDegree(int64(v))
	}
	for i := range nodes {
		s.MaxNodes, s.MaxEdges = max(s.MaxNodes, nodes[i]), max(s.MaxEdges, edges[i])
		if nodes[i] == 0 {
			s.EmptyParts++
		}
	}
	s.NodeBalance = float64(s.MaxNodes) * float64(parts) / float64(t.NumNodes)
	if t.NumEdges == 0 {
		return s, nil
	}
	s.EdgeBalance = float64(s.MaxEdges) * float64(parts) / float64(t.NumEdges)
	v := int64(0)
	err := t.Scan(ctx, func(first int64, ids []uint32) error {
		for i := 0; i < len(ids); v++ {
			to := min(t.Indptr[v+1]-first, int64(len(ids)))
			for own := p.Of[v]; i < int(to); i++ {
				if p.Of[ids[i]] != own {
					s.CutEdges++
				}
			}
			if t.Indptr[v+1] > first+to {
				break // the list goes on in the next piece
			}
		}
		report.Report("count cut edges", first+int64(len(ids)), t.NumEdges)
		return nil
	})
	s.CutShare = float64(s.CutEdges) / float64(t.NumEdges)
	return s, err
}
