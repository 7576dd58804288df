package dataset

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const typedText = `format: 2
uuid: 8c5f1f58-8b6b-8c8a-9f30-0c5c2c3d4e5f
name: shop
node_types:
- {name: paper, nodes: 100, dim: 8, dtype: float16, dir: nodes/000}
- {name: author, nodes: 50, dim: 6, dtype: float16, dir: nodes/001}
- {name: venue, nodes: 7, dir: nodes/002}
relations:
- {src: paper, name: cites, dst: paper, edges: 300, reverse: 0, dir: edges/000}
- {src: author, name: writes, dst: paper, edges: 200, reverse: 2, dir: edges/001}
- {src: paper, name: rev_writes, dst: author, edges: 200, reverse: 1, dir: edges/002}
- {src: venue, name: prints, dst: paper, edges: 0, dir: edges/003}
tasks:
- {name: topic, kind: node, type: paper, target: class, classes: 4, train: 60, val: 20,
   test: 20, dir: tasks/000}
- {name: skills, kind: node, type: author, target: multi-label, columns: 3, train: 30,
   val: 10, test: 10, dir: tasks/001}
- {name: impact, kind: node, type: venue, target: regression, columns: 1, train: 3,
   val: 2, test: 2, dir: tasks/002}
source: {kind: test}
created_by: heliosctl
sealed: true
`

func TestSchemaDecode(t *testing.T) {
	var m Meta
	require.NoError(t, m.decode([]byte(typedText)))
	require.True(t, m.Typed())
	require.False(t, m.Homogeneous())
	require.Equal(t, []any{int64(157), int64(700), 8, "float16", 4, int64(60)},
		[]any{m.Nodes, m.Edges, m.Dim, m.DType, m.Classes, m.Train})
	require.Equal(t, int64(150), m.Rows())
	require.Equal(t, int64(150), m.FirstRow(2))
	require.Equal(t, 1, m.TypeOf("author"))
	task, err := m.TaskOf("skills")
	require.NoError(t, err)
	require.Equal(t, 1, task)
	require.Equal(t, 3, m.Tasks[task].Outputs())
	_, err = m.TaskOf("nothing")
	require.ErrorContains(t, err, "there are topic, skills, impact")

	text, err := m.Encode()
	require.NoError(t, err)
	var again Meta
	require.NoError(t, again.decode(text))
	require.Equal(t, m, again)

	sum := m.digest()
	m.Relations[0], m.Relations[3] = m.Relations[3], m.Relations[0]
	require.NotEqual(t, sum, m.digest(), "the order of the relations decides samples")
}

// TestSchemaOfFormat1 shows one type, one relation and one task for a graph of format 1.
func TestSchemaOfFormat1(t *testing.T) {
	m := Meta{Nodes: 9, Edges: 20, Dim: 3, DType: "float32", Classes: 2, Train: 5, Val: 2, Test: 2}
	text, err := m.Encode()
	require.NoError(t, err)
	require.Contains(t, string(text), "format: 1\n")
	require.NotContains(t, string(text), "types")
	g := m.Graph()
	require.True(t, m.Homogeneous())
	require.Equal(t, int64(9), m.Rows())
	require.Equal(t, int64(9), g.NodeTypes[0].Nodes)
	require.Equal(t, int64(20), g.Relations[0].Edges)
	require.Equal(t, 2, g.Tasks[0].Outputs())
}

// TestSchemaHostile breaks one thing of a good description at a time.
func TestSchemaHostile(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes+1)
	types := func(n int) (all string) {
		for i := range n {
			all += fmt.Sprintf("- {name: t%d, nodes: 1, dir: nodes/%03d}\n", i+3, i+3)
		}
		return all + "relations:\n"
	}
	relations := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "- {src: paper, name: r%d, dst: paper, edges: 0, dir: edges/%03d}\n", i+4,
				i+4)
		}
		return b.String() + "tasks:\n"
	}
	for _, c := range []struct{ old, new, want string }{
		{"name: paper", "name: ../paper", `src "paper" is no type`},
		{"name: paper, nodes", `name: "", nodes`, "a name has 1 to 128 bytes"},
		{"name: author, nodes", `name: "a\x00b", nodes`, "a name has 1 to 128 bytes"},
		{"name: author, nodes", `name: "a\nb", nodes`, "a name has 1 to 128 bytes"},
		{"name: author, nodes", `name: " author", nodes`, "a name has 1 to 128 bytes"},
		{"name: author, nodes", "name: " + long + ", nodes", "a name has 1 to 128 bytes"},
		{"name: author, nodes", "name: paper, nodes", `node type 1, "paper": the name is there twice`},
		{"name: cites", `name: ""`, "relation 0"},
		{"name: topic", `name: "a\tb"`, "task 0"},
		{"name: skills", "name: topic", "there twice"},
		{"nodes: 100", "nodes: 0", "0 nodes, must be 1 to 2^46"},
		{"nodes: 100", "nodes: -1", "-1 nodes"},
		{"nodes: 100", "nodes: 9000000000000000000", "must be 1 to 2^46"},
		{"nodes: 100", "nodes: 1e99", "not readable"},
		{"nodes: 100", "nodes: many", "not readable"},
		{"dim: 8", "dim: -8", "dim -8 is outside"},
		{"dim: 8", "dim: 1000000", "dim 1000000 is outside"},
		{"dim: 8, dtype: float16", "dtype: float16", "but no dim"},
		{"dim: 8, dtype: float16, dir", "dir", "types without rows come last"},
		{"dtype: float16", "dtype: float64", `dtype "float64" is unknown`},
		{"dtype: float16", "dtype: float32", "dtype float16, but the types before have float32"},
		{"dim: 6, dtype: float16", "dim: 6", `dtype "" is unknown`},
		{"dir: nodes/000", "dir: ../../etc", `dir "../../etc" must be nodes/000`},
		{"dir: nodes/001", "dir: nodes/000", "must be nodes/001"},
		{"dir: edges/002", "dir: /edges/002", "must be edges/002"},
		{"dir: tasks/000", "dir: tasks/0", "must be tasks/000"},
		{"src: author", "src: autor", `src "autor" is no type of nodes`},
		{"name: prints, dst: paper", "name: prints, dst: ''", `dst "" is no type of nodes`},
		{"src: venue, name: prints", "src: paper, name: cites", "the relation is there twice"},
		{"edges: 300", "edges: -1", "-1 edges"},
		{"edges: 300", "edges: 8000000000000000000", "must be 0 to 2^46"},
		{"reverse: 0", "reverse: 9", "reverse 9 is no relation; there are 0 to 3"},
		{"reverse: 0", "reverse: -1", "reverse -1 is no relation"},
		{"reverse: 0", "reverse: 1", `must go from paper to paper`},
		{"reverse: 1", "reverse: 3", "does not name it as its own reverse"},
		{"edges: 200, reverse: 1, ", "edges: 200, ", "does not name it as its own reverse"},
		{"kind: node, type: paper", "kind: link, type: paper", `kind "link" is unknown`},
		{"type: paper", "type: papers", `type "papers" is no type of nodes`},
		{"target: class", "target: klass", `target "klass" is unknown`},
		{"classes: 4", "classes: 0", "needs one class or more"},
		{"classes: 4", "classes: 4, columns: 2", "and no columns"},
		{"classes: 4", "classes: 3000000000", "needs one class"},
		{"columns: 3", "columns: 0", "multi-label needs 1 to"},
		{"columns: 1", "columns: 1, classes: 1", "regression needs 1 to"},
		{"classes: 4", "classes: 4, class_names: [a, b, c, d, e]", "5 class_names for 4"},
		{"classes: 4", "classes: 4, label_dims: 3", "label_dims 3 of 0 columns"},
		{"columns: 3", "columns: 3, label_dims: 1", "label_dims 1 of 3 columns"},
		{"train: 60", "train: 101", "train 101 is outside 0..100"},
		{"train: 60", "train: -1", "train -1 is outside"},
		{"train: 60", "train: 61", "are 101 nodes together, paper has 100"},
		{"val: 20", "val: 9223372036854775807", "val 9223372036854775807 is outside"},
		{"train: 60", "unlabelled: 200, train: 60", "unlabelled 200 is outside"},
		{"train: 60", "trane: 60", "field trane not found"},
		{"edges: 300", "edges: 300, weights: true", "field weights not found"},
		{"relations:\n", types(253), "node_types: there are 256, must be 1 to 255"},
		{"tasks:\n", relations(65_532), "relations: there are 65536, must be 1 to 65535"},
		{"tasks:\n", "tasks: []\nnothing:\n", "not readable"},
		{"format: 2", "format: 3", "format version 3 is unknown"},
		{"format: 2", "format: 2\nfeature_fn: hash:1", "has dim 8 of float16, must have 8 of float32"},
		{"format: 2", "format: 2\nfeature_fn: sum", "feature_fn"},
		{"uuid: 8c", "uuid: zz", "uuid"},
		{"name: shop", "name: shop\nnodes: 3", "field nodes not found"},
	} {
		var m Meta
		require.Contains(t, typedText, c.old)
		text := strings.Replace(typedText, c.old, c.new, 1)
		require.ErrorContains(t, m.decode([]byte(text)), c.want, "%q for %q", brief(c.new), c.old)
	}
	var m Meta
	require.ErrorContains(t, m.decode([]byte(strings.Split(typedText, "tasks:")[0])),
		"tasks: there are 0")
}
