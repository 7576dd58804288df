package importer

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sort"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
	"helios/internal/errs"
	"helios/internal/hostcpu"
)

// nodeIDs turns the ids of text files into nodes, which count from 0. The zero value takes them as
// they are.
type nodeIDs struct {
	base int64 // the id of node 0
	// all are the ids of all nodes in ascending order, where these are renumbered.
	all   []int64
	first []uint32 // the first of all whose id, shifted, is at least the index
	shift uint
}

// maxTextID is the largest id that is read, before nodes are numbered anew.
const maxTextID = 1e18

// node returns the node of an id; ok is false for one that no node has.
func (n *nodeIDs) node(id int64) (node int64, ok bool) {
	if n.all == nil {
		return id - n.base, id >= n.base
	}
	bucket := id >> n.shift
	if bucket >= int64(len(n.first))-1 {
		return 0, false
	}
	lo, hi := int(n.first[bucket]), int(n.first[bucket+1])
	i := lo + sort.Search(hi-lo, func(i int) bool { return n.all[lo+i] >= id })
	return int64(i), i < len(n.all) && n.all[i] == id
}

// idOf returns the id of a node.
func (im *importer) idOf(node int64) int64 {
	if im.ids.all == nil {
		return node + im.ids.base
	}
	return im.ids.all[node]
}

// outside explains the refusal of an id of a table, where there are so many nodes.
func (im *importer) outside(id, nodes int64) errs.Text {
	if im.ids.all != nil {
		return errs.Textf("node id %d is in no edge and no file with ids", id)
	}
	base, hint := im.ids.base, errs.Text("")
	if base == 0 && id == nodes && im.m.Source.Kind == "edges" {
		hint = errs.Textf("; if ids count from 1, give {base} 1")
	}
	return errs.Textf("node id %d is outside %d..%d%s", id, base, base+nodes-1, hint)
}

// idSet collects different ids.
type idSet struct {
	mu      sync.Mutex
	sorted  []int64
	pending []int64
}

// add takes ids, in any order and often.
func (s *idSet) add(lists ...[]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range lists {
		s.pending = append(s.pending, l...)
	}
	if len(s.pending) > max(1<<20, len(s.sorted)) {
		s.merge()
	}
}

func (s *idSet) merge() {
	slices.Sort(s.pending)
	s.pending = slices.Compact(s.pending)
	s.sorted = append(s.sorted, s.pending...)
	slices.Sort(s.sorted)
	s.sorted, s.pending = slices.Compact(s.sorted), s.pending[:0]
}

// number makes the ids of a set those of all nodes, in ascending order.
func (im *importer) number(s *idSet) error {
	s.merge()
	n := int64(len(s.sorted))
	if err := im.needMemory(im.o.In+": the ids of all nodes", n, 8+8); err != nil {
		return err
	}
	ids := &im.ids
	ids.all, ids.shift = s.sorted, 0
	if n == 0 {
		return nil
	}
	for ids.all[n-1]>>ids.shift > n {
		ids.shift++
	}
	ids.first = make([]uint32, ids.all[n-1]>>ids.shift+2)
	pos := 0
	for i := range ids.first {
		for pos < len(ids.all) && ids.all[pos]>>ids.shift < int64(i) {
			pos++
		}
		ids.first[i] = uint32(pos)
	}
	im.m.Nodes = n
	return nil
}

// writeIDs keeps the ids of the nodes beside the dataset.
func (im *importer) writeIDs() error {
	out, err := im.s.Array(im.nodesFile(strings.TrimSuffix(dataset.IDsName, ".npy")), npy.Int64, 0)
	if err != nil {
		return err
	}
	var b []byte
	for part := range slices.Chunk(im.ids.all, 1<<14) {
		b = b[:0]
		for _, id := range part {
			b = binary.LittleEndian.AppendUint64(b, uint64(id))
		}
		if _, err := out.Write(b); err != nil {
			return errors.Join(err, out.Discard())
		}
	}
	return out.Close()
}

// eachEdge calls fn with all edges of a source, from several goroutines.
func eachEdge(ctx context.Context, s edges.Source, fn func(src, dst []int64) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(hostcpu.Count())
	for part := range s.Parts {
		g.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return s.Read(ctx, part, fn, func(int64) {})
		})
	}
	return g.Wait()
}

// renumbered is a source whose ids are turned into nodes.
func (n *nodeIDs) renumbered(s edges.Source) edges.Source {
	read := s.Read
	s.Read = func(ctx context.Context, part int, emit func(src, dst []int64) error,
		done func(int64)) error {
		return read(ctx, part, func(src, dst []int64) error {
			for _, ids := range [][]int64{src, dst} {
				for i, id := range ids {
					ids[i], _ = n.node(id) // all were collected
				}
			}
			return emit(src, dst)
		}, done)
	}
	return s
}
