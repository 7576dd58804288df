package ptxrun

import (
	"slices"
	"strings"
)

// shadow is the instruction that a mutation has changed, which is run before the changed one for
// what it would have written. Until the two differ for the first time, a launch has the state that
// it would have without the mutation.
type shadow struct {
	index int
	text  Instr
	in    inst
}

// comparable says that the two write registers only, and read what no other thread changes.
func (s *shadow) comparable(changed *inst) bool {
	load := strings.HasPrefix(s.text.Opcode, "ld.")
	plainly := func(in *inst) bool {
		return in.kind == plain && !in.observes && (in.mem == nil || load)
	}
	somewhere := load || s.in.d != sink || s.in.p != predSink
	return plainly(&s.in) && plainly(changed) && somewhere && s.in.d == changed.d &&
		s.in.p == changed.p && s.in.guard == changed.guard && s.in.not == changed.not &&
		!strings.HasPrefix(s.text.Opcode, "cp.")
}

// watch has the changed instruction's exec run the other one too.
func (s *shadow) watch(p *program) {
	in := &p.insts[s.index]
	if !s.comparable(in) {
		return
	}
	run := in.exec
	in.exec = func(w *warp, in *inst, lanes uint32) {
		launch := w.block.run
		launch.compared.Add(1)
		if launch.differed.Load() > 0 || w.fault != nil {
			run(w, in, lanes)
			return
		}
		rows := append([]int32{s.in.d, in.d}, slices.Concat(s.in.list, in.list)...)
		before, preds := w.rows(rows), slices.Clone(w.preds)
		s.in.exec(w, &s.in, lanes)
		was, wasPreds := w.rows(rows), slices.Clone(w.preds)
		faulted := w.fault != nil
		w.fault = nil
		for i, r := range rows {
			w.regs[r] = before[i]
		}
		copy(w.preds, preds)
		run(w, in, lanes)
		same := !faulted && w.fault == nil && slices.Equal(w.preds, wasPreds)
		for i, r := range rows {
			for l := 0; r != sink && l < 32; l++ {
				same = same && (lanes>>l&1 == 0 || w.regs[r][l] == was[i][l])
			}
		}
		if !same {
			launch.differed.Add(1)
		}
	}
}

// rows are copies of register slots.
func (w *warp) rows(slots []int32) [][32]uint64 {
	out := make([][32]uint64, len(slots))
	for i, s := range slots {
		out[i] = w.regs[s]
	}
	return out
}
