package build

import (
	"errors"
	"path"

	"helios/dataset"
	"helios/dataset/npy"
	"helios/internal/philox"
)

// Splitter deals nodes to train, val and test by a hash of the seed and a key of the node, so
// that a node's place does not depend on the others.
type Splitter struct {
	key      [2]uint32
	train    float64
	trainVal float64
	all      float64 // of the three
	out      [3]*Array
	n        [3]int64
	buf      [3][]int64
}

// NewSplitter begins the three splits, in a folder of the dataset: a share of the nodes goes to
// train, one to val, the rest to test.
func NewSplitter(s *Staging, folder string, seed uint64, train, val float64) (*Splitter, error) {
	sp := &Splitter{key: philox.Key(seed, philox.StreamSplit), train: train, trainVal: train +
		val, all: 1}
	for i, name := range dataset.Splits {
		out, err := s.Array(path.Join(folder, name), npy.Int64, 0)
		if err != nil {
			return nil, errors.Join(err, sp.Discard())
		}
		sp.out[i] = out
	}
	return sp, nil
}

// Unit is a number from 0 to below 1 by chance, the same for a seed and a key.
func (sp *Splitter) Unit(k uint64) float64 {
	w := philox.Block(sp.key, [4]uint32{uint32(k), uint32(k >> 32), 0, genSplit})
	return unit(w[0], w[1])
}

// Of is the split of the node whose stable key is k; -1 for none.
func (sp *Splitter) Of(k uint64) int {
	switch u := sp.Unit(k); {
	case u < sp.train:
		return 0
	case u < sp.trainVal:
		return 1
	case u < sp.all:
		return 2
	}
	return -1
}

// Place puts node v into a split.
func (sp *Splitter) Place(i int, v int64) error {
	sp.n[i]++
	sp.buf[i] = append(sp.buf[i], v)
	if len(sp.buf[i]) < nodesPerChunk {
		return nil
	}
	return sp.flush(i)
}

func (sp *Splitter) flush(i int) error {
	err := sp.out[i].int64s(sp.buf[i])
	sp.buf[i] = sp.buf[i][:0]
	return err
}

// Discard closes the files; their content does not matter.
func (sp *Splitter) Discard() error {
	var err error
	for _, o := range sp.out {
		if o != nil {
			err = errors.Join(err, o.Discard())
		}
	}
	return err
}

// Close completes the splits and returns the number of nodes in each.
func (sp *Splitter) Close() (train, val, test int64, err error) {
	for i, o := range sp.out {
		if ferr := sp.flush(i); ferr != nil {
			err = errors.Join(err, ferr, o.Discard())
			continue
		}
		err = errors.Join(err, o.Close())
	}
	return sp.n[0], sp.n[1], sp.n[2], err
}
