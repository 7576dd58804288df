package prepare

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"helios/dataset"
	"helios/graph"
	"helios/internal/errs"
	"helios/sched/plan"
)

// SchemaOf returns the types and relations of a dataset as samplers and models see them; nil: the
// graph has one type and one relation. Seeds are of the first task's type.
func SchemaOf(m *dataset.Meta) *graph.Schema {
	if m.Homogeneous() {
		return nil
	}
	s := &graph.Schema{Seeds: m.TypeOf(m.Tasks[0].Type)}
	for _, t := range m.NodeTypes {
		s.Types = append(s.Types, graph.NodeType{Name: t.Name, Nodes: t.Nodes, Dim: t.Dim})
	}
	for _, r := range m.Relations {
		s.Relations = append(s.Relations, graph.Relation{Name: r.Name, Src: m.TypeOf(r.Src),
			Dst: m.TypeOf(r.Dst)})
	}
	return s
}

// sampled is the schema that the sampler of a run has: no type has rows where none is read.
func sampled(c *plan.Config, m *dataset.Meta) *graph.Schema {
	s := SchemaOf(m)
	if s != nil && c.Featureless {
		for t := range s.Types {
			s.Types[t].Dim = 0
		}
	}
	return s
}

// TargetNodes is the number of nodes that have a class: those of the first task's type.
func TargetNodes(m *dataset.Meta) int64 {
	g := m.Graph()
	return g.NodeTypes[g.TypeOf(g.Tasks[0].Type)].Nodes
}

// CheckTypes refuses a run of a dataset whose types, relations or targets it can't have.
func CheckTypes(c *plan.Config, m *dataset.Meta) error {
	schema := SchemaOf(m)
	if schema == nil {
		if c.RelationFanouts != "" {
			return errs.New(errs.Usage,
				"{relation-fanout}: dataset %s has one type and one relation; use {fanout}", m.Name)
		}
		return nil
	}
	model := c.ModelConfig()
	model.Schema, model.Classes = schema, m.Classes
	if err := model.CheckTables(); err != nil {
		return fmt.Errorf("dataset %s: %w", m.Name, err)
	}
	return CheckSchema(c, schema)
}

// CheckSchema refuses a configuration that typed graphs can't have, or this one can't.
func CheckSchema(c *plan.Config, schema *graph.Schema) error {
	if why := c.Traits().Untyped; why != "" {
		return errs.New(errs.Capability, "{mode} %s does not train on typed graphs: %s", c.Mode, why)
	}
	if why := c.Method().Untyped; why != "" {
		return errs.New(errs.Capability,
			"{sampler} %s does not draw from typed graphs: %s; use {sampler} %s or %s", c.Sampler,
			why, graph.Neighbor, graph.Labor)
	}
	_, err := RelationFanouts(c, schema)
	return err
}

// Together is the RelationFanouts by which Fanouts count over all relations into a node.
const Together = "together"

// RelationFanouts reads the fanouts of relations: "NAME=F1,F2;…", where a name is that of a
// relation or "source:name:destination". nil: all have those of all.
func RelationFanouts(c *plan.Config, s *graph.Schema) ([][]int, error) {
	if c.RelationFanouts == "" || c.RelationFanouts == Together {
		return nil, nil
	}
	all := make([][]int, len(s.Relations))
	for r := range all {
		all[r] = c.Fanouts
	}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(c.RelationFanouts, ";") {
		eq := strings.LastIndexByte(part, '=') // a name may have one
		ok := eq >= 0
		name, text := strings.TrimSpace(part[:max(eq, 0)]), part[eq+1:]
		if seen[name] {
			return nil, errs.New(errs.Usage, "{relation-fanout}: relation %q is there twice", name)
		}
		seen[name] = true
		var list []int
		for f := range strings.SplitSeq(text, ",") {
			n, err := strconv.Atoi(strings.TrimSpace(f))
			ok = ok && err == nil && n >= -1
			list = append(list, n)
		}
		if !ok || len(list) != len(c.Fanouts) {
			return nil, errs.New(errs.Usage,
				"{relation-fanout} %q: give NAME=F1,F2 with a fanout for each of the %d hops, 0 for none and -1 for all, and a semicolon between relations",
				part, len(c.Fanouts))
		}
		found := false
		for r := range s.Relations {
			if name == s.Relations[r].Name || name == s.RelationName(r) {
				all[r], found = list, true
			}
		}
		if !found {
			var names []string
			for r := range s.Relations {
				names = append(names, s.RelationName(r))
			}
			return nil, errs.New(errs.Usage, "{relation-fanout}: there is no relation %q; there are %s",
				name, strings.Join(names, ", "))
		}
	}
	return all, nil
}

// typedFrontier is MaxFrontier of a typed graph.
func (s *Sampling) typedFrontier(batch int) (all int64) {
	g := s.schema
	limit, now := g.First(len(g.Types)), make([]int64, len(g.Types))
	now[g.Seeds] = int64(batch)
	fanouts, _ := RelationFanouts(&s.Config, g) // CheckTypes has read them
	for h, fanout := range s.Config.Fanouts {
		next := slices.Clone(now)
		for r, relation := range g.Relations {
			if fanouts != nil {
				fanout = fanouts[r][h]
			}
			found := s.Config.Method().Bound(now[relation.Dst], fanout) - now[relation.Dst]
			next[relation.Src] = min(next[relation.Src]+min(found, limit), limit)
		}
		for t := range next {
			next[t] = min(next[t], max(g.Types[t].Nodes, now[t]))
		}
		now = next
	}
	for t, n := range now {
		if g.Types[t].Dim > 0 {
			all += n
		}
	}
	return min(all, s.Rows)
}

// openRelations opens the topology of a typed graph.
func (s *Sampling) openRelations() (err error) {
	lists := make([]*graph.Topology, len(s.schema.Relations))
	open := s.In.Dataset.Relation
	if s.OnGPU() {
		open = s.In.Dataset.RelationInMemory
	}
	for r := range lists {
		if lists[r], err = open(r); err != nil {
			return err
		}
		lists[r].Sources = s.schema.Types[s.schema.Relations[r].Src].Nodes
	}
	// The dataset closes them.
	s.Topology, err = graph.NewTyped(s.schema, lists)
	return err
}

// RefuseTypes refuses a typed graph for work that does not know types; what names the work.
func RefuseTypes(d *dataset.Dataset, what string) error {
	if d == nil || d.Meta.Homogeneous() {
		return nil
	}
	return errs.New(errs.Capability,
		"dataset %s is a typed graph, and %s knows graphs of one type; train, eval and predict take it",
		d.Meta.Name, what)
}

// rowsOf returns the rows of nodes that have a class.
func (s *Sampling) rowsOf(nodes []int64) []int64 {
	if s.schema == nil {
		return nodes
	}
	rows := make([]int64, len(nodes))
	for i, v := range nodes {
		rows[i] = s.schema.First(s.schema.Seeds) + v
	}
	return rows
}
