package sched

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/ranks"
	"helios/internal/shardtree"
	"helios/sched/checkpoint"
	"helios/sched/engine"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
)

// Several processes, the ranks, may train one model, each with its own SSDs, caches and a copy of
// the parameters. A rank walks its own shards of each step. The gradients are added in the fixed
// tree: each rank adds one part of all of them, and then everybody gathers the parts.
//
// With the parts go the figures of the shards, which all ranks count in the order of mini-batches,
// and who was asked to stop. So all end behind the same step, and results are those of one rank.

// ErrTogether is in the error of a run that all ranks ended behind the same step, since one of them
// was asked to stop.
var ErrTogether = errors.New("all ranks stopped")

// others are the other ranks of a run. The methods that nil has do nothing.
type others struct {
	group  ranks.Group
	shards int
	asked  context.Context         // ends when this process is asked to stop
	stop   context.CancelCauseFunc // of the pass at work
	grace  time.Duration

	mine, all []counted // of mini-batches that are not told yet, and not taken yet
}

// counted are the figures of a mini-batch, as ranks exchange them.
type counted struct {
	Index, Seeds     int64
	Loss             float64
	Correct, Labeled int64
	Mass             float64
}

func newOthers(ctx context.Context, cfg plan.Config, in prepare.Inputs) *others {
	if in.Group == nil {
		return nil
	}
	return &others{group: in.Group, shards: cfg.Shards, asked: ctx, grace: stopGrace}
}

// begin forgets what an earlier pass has left.
func (o *others) begin() {
	if o != nil {
		o.mine, o.all = nil, nil
	}
}

// add notes the figures of a mini-batch, by its number in the pass of all ranks.
func (o *others) add(index, seeds int, out engine.Outcome) {
	if o != nil {
		o.mine = append(o.mine, counted{int64(index), int64(seeds), out.Loss, out.Correct,
			out.Counted, out.Mass})
	}
}

// take counts the mini-batches of all ranks that are told by now, in their order.
func (o *others) take(t *report.Partial) {
	if o == nil {
		return
	}
	slices.SortFunc(o.all, func(a, b counted) int { return cmp.Compare(a.Index, b.Index) })
	for _, c := range o.all {
		engine.CountBatch(t, int(c.Seeds), engine.Outcome{Loss: c.Loss, Correct: c.Correct,
			Counted: c.Labeled, Mass: c.Mass})
	}
	o.all = o.all[:0]
}

// part returns the mini-batches of an evaluation that this rank has.
func (o *others) part(all prepare.Order) prepare.Order {
	if o == nil {
		return all
	}
	return o.rankPart(all, o.group.Rank())
}

// rankPart is part for some rank.
func (o *others) rankPart(all prepare.Order, rank int) prepare.Order {
	return all.Share(all.Len(), rank, o.group.Size())
}

// together returns a context for a pass of training, which ends behind the step at which some rank
// has been asked to stop.
func (o *others) together(ctx context.Context) (context.Context, func()) {
	inner, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	o.asked, o.stop = ctx, cancel
	return inner, func() { cancel(nil) }
}

// tell is the message of a rank beside its part of a sum: a request to stop, and the figures of its
// mini-batches.
func (o *others) tell(stop bool) ([]byte, error) {
	var b bytes.Buffer
	err := errors.Join(binary.Write(&b, binary.LittleEndian, stop),
		binary.Write(&b, binary.LittleEndian, uint32(len(o.mine))),
		binary.Write(&b, binary.LittleEndian, o.mine))
	o.mine = o.mine[:0]
	return b.Bytes(), err
}

// hear takes what a rank told, and returns what is behind it.
func (o *others) hear(from int, b []byte) (stop bool, rest []byte, err error) {
	r := bytes.NewReader(b)
	var n uint32
	err = errors.Join(binary.Read(r, binary.LittleEndian, &stop),
		binary.Read(r, binary.LittleEndian, &n))
	if err == nil && int64(n) > int64(r.Len()) {
		err = errors.New("cut short")
	}
	if err != nil {
		return false, nil, fmt.Errorf("rank %d: figures of a step: %w", from, err)
	}
	c := make([]counted, n)
	if err := binary.Read(r, binary.LittleEndian, c); err != nil {
		return false, nil, fmt.Errorf("rank %d: figures of a step: %w", from, err)
	}
	o.all = append(o.all, c...)
	return stop, b[len(b)-r.Len():], nil
}

// stopGrace is the time for which a rank that was asked to stop waits for the others at a call of
// all.
const stopGrace = 30 * time.Second

// call returns the context of a call of all ranks. It bears the wait for a slow one, but not for
// longer than o.grace once this rank is asked to stop: its end then ends the group.
func (o *others) call() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := context.AfterFunc(o.asked, func() {
		select {
		case <-ctx.Done():
		case <-time.After(o.grace):
			cancel(errs.New(errs.Interrupted,
				"interrupted, and the other ranks did not come to the end of the step within %v",
				o.grace))
		}
	})
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// askedBy is the cause of a stop that ranks have told of.
func askedBy(who []int) error {
	return fmt.Errorf("%w: rank %d was asked to", ErrTogether, who[0])
}

// gather tells the other ranks how an evaluation went, and hears of theirs. Where one was stopped
// all are, with an error of class Interrupted.
func (o *others) gather(own error) error {
	asked, err := o.tell(own != nil)
	if err != nil {
		return err
	}
	ctx, cancel := o.call()
	defer cancel()
	in, err := o.group.AllGather(ctx, asked)
	if err != nil {
		return err
	}
	var who []int
	for r, b := range in {
		stop, _, err := o.hear(r, b)
		if err != nil {
			return err
		}
		if stop {
			who = append(who, r)
		}
	}
	if len(who) > 0 {
		return errs.New(errs.Interrupted, "interrupted: %w", askedBy(who))
	}
	return nil
}

// sum adds the gradients of all ranks over a step of n shards and leaves the sum in into, in all of
// them. The roots of this rank are mine.
func (o *others) sum(n int, mine []hostRoot, into []float32) error {
	size := o.group.Size()
	start := func(r int) int { return r * len(into) / size }
	out := make([][]byte, size)
	for r := range size {
		for _, root := range mine {
			out[r] = append(out[r], hostmem.Bytes(root.Floats[start(r):start(r+1)])...)
		}
	}
	ctx, cancel := o.call()
	defer cancel()
	in, err := o.group.Exchange(ctx, out)
	if err != nil {
		return err
	}
	me := o.group.Rank()
	part, err := addParts(n, o.shards, start(me+1)-start(me), in)
	if err != nil {
		return err
	}
	asked, err := o.tell(o.asked.Err() != nil)
	if err != nil {
		return err
	}
	if in, err = o.group.AllGather(ctx, append(asked, hostmem.Bytes(part)...)); err != nil {
		return err
	}
	var who []int
	for r, b := range in {
		stop, rest, err := o.hear(r, b)
		if err != nil {
			return err
		}
		to := hostmem.Bytes(into[start(r):start(r+1)])
		if len(rest) != len(to) {
			return fmt.Errorf("rank %d: %d bytes of a sum, %d are its part", r, len(rest), len(to))
		}
		copy(to, rest)
		if stop {
			who = append(who, r)
		}
	}
	if len(who) > 0 && o.stop != nil {
		o.stop(askedBy(who))
	}
	return nil
}

// addParts adds one part, of so many floats, of all ranks' roots in the order of the tree.
func addParts(n, shards, floats int, in [][]byte) ([]float32, error) {
	var nodes []shardtree.Node
	var sums [][]float32
	for r, b := range in {
		first, end := shardtree.Share(shards, n, r, len(in))
		roots := shardtree.Roots(n, first, end)
		if len(b) != len(roots)*floats*4 {
			return nil, fmt.Errorf("rank %d: %d bytes of gradients, a step of %d shards makes %d", r,
				len(b), n, len(roots)*floats*4)
		}
		for _, root := range roots {
			x := make([]float32, floats)
			b = b[copy(hostmem.Bytes(x), b):]
			nodes, sums = append(nodes, root), append(sums, x)
			for range shardtree.Joins(nodes, n) {
				k := len(nodes) - 1
				for i, v := range sums[k] {
					sums[k-1][i] += v
				}
				nodes[k-1].Count += nodes[k].Count
				nodes, sums = nodes[:k], sums[:k]
			}
		}
	}
	if len(nodes) != 1 {
		return nil, fmt.Errorf("the gradients of a step of %d shards make %d sums", n, len(nodes))
	}
	return sums[0], nil
}

// done returns how many mini-batches of the epoch are trained on when the step of the pass's
// mini-batch i is.
func (s *steps) done(i int) int {
	first, shard := s.shardOf(s.mine.Index(i))
	return first + shard.Of
}

// rest takes part in the epoch's last step, from mini-batch first on, of which this rank has none.
func (s *steps) rest(ctx context.Context, first int) error {
	op, cancel := s.e.OperatorContext(ctx)
	defer cancel()
	return s.apply(op, first, s.all.Len()-first, s.set(first))
}

// combine adds what each rank counted for itself, rows and commands. Times are this rank's.
func (o *others) combine(p report.Partial) (report.Partial, error) {
	if o == nil {
		return p, nil
	}
	b, err := json.Marshal(p)
	if err != nil {
		return p, err
	}
	ctx, cancel := o.call()
	defer cancel()
	in, err := o.group.AllGather(ctx, b)
	if err != nil {
		return p, err
	}
	for r, b := range in {
		if r == o.group.Rank() {
			continue
		}
		var x report.Partial
		if err := json.Unmarshal(b, &x); err != nil {
			return p, fmt.Errorf("rank %d: figures of a pass: %w", r, err)
		}
		p.AddRows(x)
	}
	return p, nil
}

// share gives all ranks the first one's checkpoint, from.
func (t *trainer) share(ctx context.Context, in prepare.Inputs,
	from *checkpoint.File) (*checkpoint.File, error) {
	if in.Group == nil {
		return from, nil
	}
	var b bytes.Buffer
	if from != nil {
		if err := checkpoint.Write(&b, from); err != nil {
			return nil, err
		}
	}
	out := make([][]byte, in.Group.Size())
	if t.cfg.Rank == 0 {
		for r := range out[1:] {
			out[1+r] = b.Bytes()
		}
	}
	got, err := in.Group.Exchange(ctx, out)
	if err != nil || t.cfg.Rank == 0 || len(got[0]) == 0 {
		return from, err
	}
	const path = "of rank 0"
	if from, err = checkpoint.Decode(got[0]); err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", path, err)
	}
	st, err := decodeState(path, from)
	if err != nil {
		return nil, err
	}
	t.keepLoops(path, &st.Print)
	if field, is, was, ok := t.state.Print.differs(st.Print); ok {
		return nil, errs.New(errs.Usage,
			"checkpoint %s was made with %s %v, this rank has %v; give all ranks the same options",
			path, field, was, is)
	}
	t.state = st
	t.state.Partial.DropRows() // rank 0 has them
	return from, nil
}

// agreement has the facts that must be the same in all ranks.
type agreement struct {
	Print                   fingerprint
	Epochs, CheckpointEvery int
	NoEval                  bool
	Patience                int
	MinDelta                float64
	Resume                  bool
	Epoch, Batch            int

	Saves bool // which may differ
}

// agree refuses ranks whose settings differ. It comes before a checkpoint is shared, for which all
// have to make the same calls, and again when the rows and kernels are known.
func (t *trainer) agree(ctx context.Context, in prepare.Inputs) error {
	if in.Group == nil {
		return nil
	}
	mine := agreement{t.state.Print, t.cfg.Epochs, t.cfg.CheckpointEvery, t.cfg.NoEval,
		t.cfg.Patience, t.cfg.MinDelta,
		t.cfg.Resume, t.state.Epoch, t.state.Batch, t.path != ""}
	b, err := json.Marshal(mine)
	if err != nil {
		return err
	}
	all, err := in.Group.AllGather(ctx, b)
	if err != nil {
		return err
	}
	var first agreement
	for r, b := range all {
		var x agreement
		if err := json.Unmarshal(b, &x); err != nil {
			return fmt.Errorf("rank %d: settings: %w", r, err)
		}
		if r == 0 {
			first = x
			continue
		}
		field, is, was, ok := x.Print.differs(first.Print)
		for _, y := range []struct {
			name   string
			is, as any
		}{
			{"row-dtype", x.Print.rowType(), first.Print.rowType()},
			{"kernels", x.Print.Kernels, first.Print.Kernels},
			{"epochs", x.Epochs, first.Epochs},
			{"checkpoint-every", x.CheckpointEvery, first.CheckpointEvery},
			{"no-eval", x.NoEval, first.NoEval},
			{"patience", x.Patience, first.Patience},
			{"min-delta", x.MinDelta, first.MinDelta},
			{"resume", x.Resume, first.Resume},
			{"position", [2]int{x.Epoch, x.Batch}, [2]int{first.Epoch, first.Batch}},
		} {
			if !ok && y.is != y.as {
				field, is, was, ok = y.name, y.is, y.as, true
			}
		}
		if ok {
			return errs.New(errs.Usage,
				"rank %d has %s %v, rank 0 has %v; give all ranks the same options and data", r,
				field, is, was)
		}
	}
	t.saves = first.Saves
	return nil
}

// agreeOnEnd refuses a result that the ranks do not share.
func (t *trainer) agreeOnEnd(ctx context.Context, in prepare.Inputs) error {
	if in.Group == nil {
		return nil
	}
	all, err := in.Group.AllGather(ctx, []byte(t.sha))
	if err != nil {
		return err
	}
	for r, b := range all {
		if !bytes.Equal(b, all[0]) {
			return errs.New(errs.Device,
				"rank %d ends with parameters %s, rank 0 with %s: the memory of a machine or the network is damaged",
				r, b, all[0])
		}
	}
	return nil
}
