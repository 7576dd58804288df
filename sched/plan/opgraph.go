package plan

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"helios/cuda"
)

// Kinds of operators.
const (
	OpSample   = "sample"   // S_h: hop h of sampling
	OpLookup   = "lookup"   // L_h: where the rows of a part of the frontier are
	OpSubmit   = "submit"   // I_h: the reads of those that are in no tier go out
	OpComplete = "complete" // C_h: they have arrived and were checked
	OpGather   = "gather"   // G_h: cached rows go to their places
	OpTrain    = "train"    // T: forward, backward and optimiser, or inference

	// Of tiers that know a superbatch:

	OpSuperbatch = "superbatch" // S_h, of all its mini-batches, into files
	OpInspect    = "inspect"    // A: when each row is accessed; X: the changes of the tiers
	OpRestore    = "restore"    // R: a mini-batch comes back from its files
)

// Names of operators that there is one of.
const (
	NameAhead   = "A"
	NameChanges = "X"
	NameRestore = "R"
)

// Operator is a node of an OpGraph: one operator of a mini-batch, or of a superbatch.
type Operator struct {
	Name string `json:"name"` // S1, L1, I1, C1, G1, T
	Kind string `json:"kind"`
	// Beside: it is no part of the walk. It works for a superbatch before the first mini-batch of
	// that trains (S, A), or ahead of its mini-batches (X).
	Beside bool `json:"beside,omitempty"`
	// Hop of the rows it works on: 0 is the seeds; sampling hop h makes the frontier that feeds
	// layer Layer of the model.
	Hop int `json:"hop"`
	// Layer of the model, counted from its input, whose sources the operator brings; 0 for T, which
	// is all of them.
	Layer int `json:"layer,omitempty"`
	// Rows is the most rows that it can meet in a batch (0: what the graph has).
	Rows   int64  `json:"rows,omitempty"`
	Stream string `json:"stream"` // of OpGraph.Streams
	// After are operators of the same batch that must have ended; an operator's predecessor on its
	// stream too.
	After []string `json:"after,omitempty"`
}

// OpStream holds what runs operators in order: a stream of the device, or the CPU.
type OpStream struct {
	Name     string `json:"name"`
	Priority int    `json:"priority"` // higher goes first
	SMs      int    `json:"sms"`      // most thread blocks at once; 0: all there are
	OnCPU    bool   `json:"on_cpu,omitempty"`
}

// OpGraph is the plan of a run: the operators of a mini-batch as the model's layers ask for them,
// what each waits for, and what bounds how many batches are under way. The engine and the virtual
// clock take their streams, priorities, budgets and credits from it.
type OpGraph struct {
	Pipeline string     `json:"pipeline"`
	Stack    string     `json:"io_stack"`
	Streams  []OpStream `json:"streams"`
	Ops      []Operator `json:"ops"`
	// Credits bound the batches that hold a feature tensor, Samples those that are sampled and not
	// trained.
	Credits int `json:"credits"`
	Samples int `json:"samples"`
	// PerHop: the rows of a hop are looked up and read while the next is sampled. Serial: one
	// operator at a time.
	PerHop bool `json:"per_hop"`
	Serial bool `json:"serial"`
	// Joins is Schedule's.
	Joins bool `json:"joins,omitempty"`
	// Dynamic: lines of the GPU tier come and go. A batch has its feature tensor from G on, not
	// from its lookup.
	Dynamic bool `json:"dynamic,omitempty"`
	// Overlapped: the next superbatch is sampled and inspected while one trains.
	Overlapped bool `json:"overlapped,omitempty"`
	// Window and Accumulate are Config's.
	Window     int     `json:"window"`
	Accumulate float64 `json:"accumulate"`
}

// Operators builds the run's operators from the layers of its model: one hop for each. reads: there
// are rows in no tier. c is settled for its device.
func (c Config) Operators(reads bool) *OpGraph {
	p, t := c.Schedule(), c.Traits()
	g := &OpGraph{
		Pipeline: c.Pipeline, Stack: c.IOStack, Credits: p.Credits, Samples: p.Samples,
		PerHop: p.PerHop, Serial: p.Serial, Joins: p.Joins && reads,
		Dynamic: t.LateTensor, Overlapped: c.SuperbatchOverlap, Window: c.Window,
		Accumulate: c.Accumulate,
	}
	b := &graphBuilder{g: g, c: c, t: t, budget: c.SMs}
	if c.Overlap().WholeDevice {
		b.budget = SMBudget{} // the paper's NoPipe: whoever runs has all of the device
	}
	b.addStreams(reads)
	hops, sampled := len(c.Fanouts), ""
	if t.Ahead {
		b.addSuperbatch()
		sampled = NameRestore
		b.add(Operator{Name: sampled, Kind: OpRestore, Hop: hops, Rows: b.rows(hops),
			Stream: OpSample}, OperatorName("S", hops))
		if !g.PerHop {
			b.addPart(hops, sampled)
		}
		hops = 0 // are sampled
	}
	// a window wants to know all of a batch, and of coming ones, before it is looked up
	early := g.PerHop && g.Window == 0 && !t.Ahead
	if early {
		b.addPart(0, "")
	}
	for h := 1; h <= hops; h++ {
		name := OperatorName("S", h)
		b.add(Operator{Name: name, Kind: OpSample, Hop: h, Layer: hops - h + 1, Rows: b.rows(h),
			Stream: OpSample}, sampled)
		sampled = name
		if early || h == hops && !g.PerHop {
			b.addPart(h, name)
		}
	}
	hops = len(c.Fanouts)
	for h := 0; h <= hops && g.PerHop && !early; h++ {
		b.addPart(h, sampled)
	}
	b.add(Operator{Name: "T", Kind: OpTrain, Hop: hops, Rows: b.rows(hops), Stream: OpTrain},
		b.trainAfter...)
	return g
}

// graphBuilder adds the operators of a mini-batch to a graph.
type graphBuilder struct {
	g      *OpGraph
	c      Config
	t      Traits
	budget SMBudget
	// The streams of reads; "": there are none.
	submit, complete string
	last             string // of the batch's chain where one operator runs at a time
	trainAfter       []string
}

// addStreams adds the streams of a mini-batch.
//
// The earlier an operator in a batch's way, the sooner the SSDs have work; the credits bound how
// far it runs ahead. Training takes what is left: it never waits for a worker that could have
// prepared its next batch meanwhile. The I/O kernels come before all: their work is short, and
// everything waits for it.
func (b *graphBuilder) addStreams(reads bool) {
	g, stack, sms := b.g, b.c.Stack(), b.budget
	g.Streams = []OpStream{
		{Name: OpSample, SMs: sms.Sample, Priority: 1},
		{Name: OpLookup, SMs: sms.Lookup, Priority: 2},
		{Name: OpGather, SMs: sms.Gather, Priority: 2},
		{Name: OpTrain, SMs: sms.Train, Priority: 0},
	}
	switch {
	case !reads:
		g.Stack = StackNone
	case stack.Overlaps:
		b.submit, b.complete = OpSubmit, OpComplete
		g.Streams = append(g.Streams,
			OpStream{Name: b.submit, SMs: sms.IO, Priority: IOPriority},
			OpStream{Name: b.complete, SMs: sms.IO, Priority: IOPriority})
	case stack.Queued: // one kernel submits and waits
		b.submit, b.complete = b.c.IOStack, b.c.IOStack
		g.Streams = append(g.Streams, OpStream{Name: b.submit, SMs: sms.IO, Priority: IOPriority})
	default:
		b.submit, b.complete = b.c.IOStack, b.c.IOStack
		g.Streams = append(g.Streams, OpStream{Name: b.submit, OnCPU: true})
	}
}

// rows is the limit of a batch's rows after a hop.
func (b *graphBuilder) rows(hop int) int64 { return frontierBound(b.c, hop) }

// add adds an operator behind others; "" stands for none.
func (b *graphBuilder) add(o Operator, after ...string) {
	if b.g.Serial && b.last != "" {
		after = []string{b.last}
	}
	o.After = slices.DeleteFunc(after, func(s string) bool { return s == "" })
	b.last = o.Name
	b.g.Ops = append(b.g.Ops, o)
}

// addPart adds the operators of the rows that hop h has added to the frontier.
func (b *graphBuilder) addPart(h int, sampled string) {
	hops := len(b.c.Fanouts)
	layer := min(hops-h+1, hops)
	op := func(letter, kind, stream string, after ...string) string {
		name := OperatorName(letter, h)
		b.add(Operator{Name: name, Kind: kind, Hop: h, Layer: layer, Rows: b.rows(h),
			Stream: stream}, after...)
		return name
	}
	look := op("L", OpLookup, OpLookup, sampled)
	if o := &b.g.Ops[len(b.g.Ops)-1]; b.t.Changes {
		o.After = append(o.After, NameChanges)
	} else if b.t.Ahead {
		o.After = append(o.After, NameAhead)
	}
	gatherAfter := look
	if b.submit != "" {
		read := op("C", OpComplete, b.complete, op("I", OpSubmit, b.submit, look))
		if b.g.Serial || b.t.Staged {
			gatherAfter = read
		}
		b.trainAfter = append(b.trainAfter, read)
	}
	b.trainAfter = append(b.trainAfter, op("G", OpGather, OpGather, gatherAfter))
}

// addSuperbatch adds the work for a superbatch beside the walk.
func (b *graphBuilder) addSuperbatch() {
	g, hops, before := b.g, len(b.c.Fanouts), []string(nil)
	g.Streams = append(g.Streams,
		OpStream{Name: OpSuperbatch, SMs: b.budget.Sample, Priority: 1},
		OpStream{Name: OpInspect, OnCPU: true})
	for i := range g.Streams {
		if g.Streams[i].Name == OpLookup { // slots are written down: rows are only sorted by them
			g.Streams[i].OnCPU = true
		}
	}
	for h := 1; h <= hops; h++ {
		name := OperatorName("S", h)
		g.Ops = append(g.Ops, Operator{Name: name, Kind: OpSample, Beside: true, Hop: h,
			Layer: hops - h + 1, Rows: b.rows(h), Stream: OpSuperbatch, After: before})
		before = []string{name}
	}
	names := []string{NameAhead}
	if b.t.Changes {
		names = append(names, NameChanges)
	}
	for _, name := range names {
		g.Ops = append(g.Ops, Operator{Name: name, Kind: OpInspect, Beside: true, Hop: hops,
			Rows: b.rows(hops), Stream: OpInspect, After: before})
		before = []string{name}
	}
}

// IOPriority is that of the I/O kernels' streams.
const IOPriority = 3

// frontierBound is the most rows that a batch's frontier has after hop h; 0 where that is the
// graph.
func frontierBound(c Config, h int) int64 {
	n, method := int64(c.Batch), c.Method()
	for _, f := range c.Fanouts[:h] {
		if n = method.Bound(n, f); n > 1<<40 {
			return 0
		}
	}
	return n
}

// Stream returns the stream of a name; the zero one where the plan has none.
func (g *OpGraph) Stream(name string) OpStream {
	for _, s := range g.Streams {
		if s.Name == name {
			return s
		}
	}
	return OpStream{Name: name}
}

// StreamOptions returns what a device makes the stream of a name with.
func (g *OpGraph) StreamOptions(name string) cuda.StreamOptions {
	s := g.Stream(name)
	return cuda.StreamOptions{Name: s.Name, SMs: s.SMs, Priority: s.Priority}
}

// OperatorName names an operator by its letter (S, L, I, C or G) and its hop, in the graph as in
// timelines.
func OperatorName(letter string, hop int) string { return letter + strconv.Itoa(hop) }

// Op is the operator of a name, nil for none.
func (g *OpGraph) Op(name string) *Operator {
	i := slices.IndexFunc(g.Ops, func(o Operator) bool { return o.Name == name })
	if i < 0 {
		return nil
	}
	return &g.Ops[i]
}

// Bounds says in words what bounds the batches in flight and how they follow each other.
func (g *OpGraph) Bounds() []string {
	from := "its first lookup (L)"
	if g.Dynamic {
		from = "its gather (G)"
	}
	out := []string{
		fmt.Sprintf("at most %d mini-batches are under way: each holds a tensor of features from %s until it has trained",
			g.Credits, from)}
	if g.Credits == 1 {
		out[0] = fmt.Sprintf("one mini-batch is under way: it holds a tensor of features from %s until it has trained",
			from)
	}
	switch {
	case g.Accumulate > 0:
		out = append(out,
			fmt.Sprintf(
				"at most %d are sampled ahead of training, %d of them in a set of merged reads",
				g.Samples+MaxGroup, MaxGroup))
	case g.Samples > g.Credits:
		out = append(out, fmt.Sprintf("at most %d are sampled ahead of training", g.Samples))
	}
	if g.Serial {
		out = append(out, "one step of a mini-batch at a time")
	}
	if g.Joins {
		out = append(out,
			"where rows of a mini-batch share commands, its hops are looked up and read together, with the last")
	}
	if g.Op(NameAhead) != nil {
		s := fmt.Sprintf("S and %s are done for a superbatch before its first mini-batch trains",
			NameAhead)
		if g.Op(NameChanges) != nil {
			s += fmt.Sprintf("; %s finds its changes ahead of the mini-batches", NameChanges)
		}
		out = append(out, s)
		if g.Overlapped {
			out = append(out, fmt.Sprintf(
				"S and %s of the next superbatch are done while one trains", NameAhead))
		}
	}
	if g.Window > 0 {
		out = append(out,
			fmt.Sprintf("what the next %d mini-batches need stays in the GPU tier (window)",
				g.Window))
	}
	if g.Accumulate > 0 {
		out = append(out,
			fmt.Sprintf(
				"reads of several mini-batches go out together until they reach %g%% of the SSDs' peak rate (accumulator)",
				100*g.Accumulate))
	}
	return append(out, "mini-batches train in order; the steps on a stream run one after another")
}

// TableColumns name the cells of Table.
var TableColumns = []string{"step", "what it does", "waits for", "nodes", "layer", "on", "priority",
	"SMs"}

// Table is the graph for people: a line of cells for each operator.
func (g *OpGraph) Table() (t [][]string) {
	for _, o := range g.Ops {
		s := g.Stream(o.Stream)
		layer, prio := fmt.Sprint(o.Layer), fmt.Sprint(s.Priority)
		rows, sms := "the graph's", "all"
		if o.Layer == 0 {
			layer = "all"
		}
		if o.Rows > 0 {
			rows = fmt.Sprint("≤ ", o.Rows)
		}
		if s.SMs > 0 {
			sms = fmt.Sprint(s.SMs)
		}
		on := "stream " + o.Stream
		if s.OnCPU {
			on, prio, sms = "CPU", "-", "-"
		}
		t = append(t, []string{o.Name, g.words(&o), strings.Join(o.After, " "), rows, layer, on,
			prio, sms})
	}
	return t
}

// words say what an operator does.
func (g *OpGraph) words(o *Operator) string {
	of := fmt.Sprintf("hop %d", o.Hop)
	switch {
	case o.Hop == 0:
		of = "the seeds"
	case !g.PerHop:
		of = "all nodes"
	}
	switch o.Kind {
	case OpSample:
		text := fmt.Sprintf("sample hop %d: neighbours of the seeds", o.Hop)
		if o.Hop > 1 {
			text = fmt.Sprintf("sample hop %d: neighbours of all nodes so far", o.Hop)
		}
		if o.Beside {
			text += ", for a whole superbatch"
		}
		return text
	case OpLookup:
		return "find out which tier has the features of " + of
	case OpSubmit:
		return "ask the SSDs for those of " + of + " that no tier has"
	case OpComplete:
		return "wait until these are there"
	case OpGather:
		return "copy those of " + of + " that a tier has"
	case OpTrain:
		return "forward pass, backward pass, optimiser"
	case OpInspect:
		if o.Name == NameChanges {
			return "find which rows move between tiers, and when"
		}
		return "find when a superbatch needs each row"
	case OpRestore:
		return "read a sampled mini-batch back from its file"
	}
	return o.Kind
}
