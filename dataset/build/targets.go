package build

import (
	"encoding/binary"
	"math"

	"helios/dataset"
	"helios/dataset/edges"
	"helios/dataset/npy"
)

// Targets that are no classes are planted by the class. They are of format 2, with one type of
// nodes and one relation, as those of imports.

var targets = []string{dataset.TargetClass, dataset.TargetMultiLabel, dataset.TargetRegression}

// plain reports whether the dataset is of format 1, whose targets are classes.
func (o *GenerateOptions) plain() bool { return o.Target == dataset.TargetClass }

// store returns where edges are written.
func (g *generator) store(s *Staging) edges.Store {
	if g.plain() {
		return s.Store()
	}
	return s.RelationStore(0)
}

// describe makes a description one of targets that are no classes.
func (g *generator) describe(m *dataset.Meta) {
	_, columns := g.labelShape()
	m.Source.Options["target"] = g.Target
	m.Source.Options["classes"] = formatFloat(float64(g.Classes))
	m.Schema = m.Graph()
	t := &m.Tasks[0]
	t.Name, t.Target, t.Classes, t.Columns = "target", g.Target, 0, int(columns)
	m.Classes = 0
}

// labelShape returns the type of the labels, and how many a node has; 0: one, in an array without
// columns.
func (g *generator) labelShape() (npy.DType, int64) {
	switch g.Target {
	case dataset.TargetMultiLabel:
		return npy.Uint8, int64(g.Classes)
	case dataset.TargetRegression:
		return npy.Float32, 1
	}
	return npy.Int32, 0
}

// appendLabels appends the bytes of a node's labels. Of several it has that of its class, and that
// of the next one where there are more than two; a number is ten times the class plus noise.
func (g *generator) appendLabels(to []byte, node int64) []byte {
	class := g.class(g.rank(node))
	switch g.Target {
	case dataset.TargetMultiLabel:
		from := len(to)
		to = append(to, make([]byte, g.Classes)...)
		to[from+int(class)] = 1
		if g.Classes > 2 {
			to[from+(int(class)+1)%g.Classes] = 1
		}
		return to
	case dataset.TargetRegression:
		var x [1]float32
		g.noise(x[:], uint64(node), genTarget)
		return binary.LittleEndian.AppendUint32(to, math.Float32bits(float32(10*class)+x[0]))
	}
	return binary.LittleEndian.AppendUint32(to, uint32(class))
}
