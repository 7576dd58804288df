// Package nvmewalk makes an NVMe controller say every error that it can be brought to say, and
// checks what comes back: type and code of the status, and that the error of package nvme says it
// in the specification's words with the queue, the blocks and the class that belong to it.
//
// It writes nothing: reads, administration, and commands that must be refused. Controllers read the
// specification differently; each step lists the right answers and
// other readings that are known and let pass, with the reason. Section numbers are those of the NVM
// Express Base Specification 2.0.
package nvmewalk

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/nvme"
	"helios/nvme/faultbus"
)

// Reading is a way to take the specification where it leaves, or they took, room.
type Reading int

const (
	// Strict controllers answer as the specification has it: the proxy.
	Strict Reading = iota
	// QEMU is the model of QEMU 7 and later.
	QEMU
	// Any lets every answer pass that a step knows: controllers that we have not met.
	Any
)

// Target is a controller to walk.
type Target struct {
	// Open gives the controller's bus, fresh, each time; the walk closes it.
	Open func(ctx context.Context) (nvme.Bus, error)
	// Options of the controller. Timeout 0 is five seconds.
	Options nvme.Options
	Reading Reading
	// BadBlock is a block whose reading fails in the medium; nil where there is none.
	BadBlock *nvme.LBA
	// BadAddress is an address that the controller refuses to move data to: not mapped, or its own
	// registers. 0 where there is none, or where the IOMMU would log it.
	BadAddress nvme.IOVA
	// Skip has steps that the controller does not survive, by name, with the reason.
	Skip map[string]string
	// Hold keeps the next read in the medium until release is called; nil where nobody can.
	Hold func() (release func() error, err error)
}

// Verdict is a step's outcome.
type Verdict string

// Results of a step.
const (
	Right   Verdict = "as specified"
	Lenient Verdict = "let pass"
	Absent  Verdict = "not applicable"
	Wrong   Verdict = "WRONG"
)

// Result is one step's.
type Result struct {
	Step    string
	Cite    string // where the specification has it
	Want    string // the statuses that are right
	Got     string
	Text    string // the error, as a user reads it
	Verdict Verdict
	Why     string // of Lenient, Absent and Wrong
}

// answer is a status that may come, and what it says.
type answer struct {
	status nvme.Status
	words  string // the specification's, from the document and not from package nvme
}

func (a answer) String() string {
	if a.status == nvme.StatusSuccess {
		return "success"
	}
	return fmt.Sprintf("%s (%d/%02Xh)", a.words, a.status.SCT(), a.status.SC())
}

// lenience is an answer of controllers that read the specification differently.
type lenience struct {
	answer
	of  Reading
	why string
}

// step is one thing to provoke.
type step struct {
	name, cite string
	// need returns the reason why the controller cannot be asked, or "".
	need func(w *walker) string
	// run provokes it. A status comes as a *nvme.StatusError; other errors are failures of the
	// step.
	run  func(ctx context.Context, w *walker) error
	want func(w *walker) []answer // any of these is right
	let  []lenience
	// says holds what the error's text has besides the status: the queue, the blocks.
	says func(w *walker) string
	// moves: data may have been moved though the command failed. Otherwise no byte may have been.
	moves bool
}

// stepTime bounds a step: nothing may hang.
const stepTime = 20 * time.Second

// Walk takes the steps and tells of each. The error is for what keeps the walk itself from being
// taken: a controller that cannot be opened, or does not survive.
func Walk(ctx context.Context, t Target) ([]Result, error) {
	var all []Result
	for _, leg := range []struct {
		name   string
		faults string
		steps  []step
		queues bool
	}{
		{"administration", "", adminSteps, false},
		{"reading", "", ioSteps, true},
		// A status that a controller cannot be brought to say is injected, so that at least the
		// way from the completion queue to the words has been taken.
		{"injected", injected, injectedSteps, true},
	} {
		r, err := walkLeg(ctx, t, leg.faults, leg.steps, leg.queues)
		all = append(all, r...)
		if err != nil {
			return all, fmt.Errorf("walk: %s: %w", leg.name, err)
		}
	}
	return all, nil
}

func walkLeg(ctx context.Context, t Target, faults string, steps []step, queues bool) (_ []Result,
	err error) {
	bus, err := t.Open(ctx)
	if err != nil {
		return nil, err
	}
	var set *faultinject.Set
	if faults != "" {
		if set, err = faultinject.Parse(faults); err != nil {
			return nil, errors.Join(err, bus.Close())
		}
		bus = faultbus.New(bus, set, faultbus.Options{})
	}
	c, err := nvme.Open(ctx, bus, t.Options)
	if err != nil {
		return nil, errors.Join(err, bus.Close())
	}
	w := &walker{t: t, c: c, ns: c.Namespace(), id: c.Identity()}
	defer func() {
		// However a step ended, its commands end with the controller's reset in Close.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, w.close(ctx))
	}()
	if err := w.prepare(ctx, queues); err != nil {
		return nil, err
	}
	var all []Result
	for _, s := range steps {
		r := w.take(ctx, s)
		all = append(all, r)
		if err := c.Health(); err != nil {
			return all, fmt.Errorf("after step %q: %w", s.name, err)
		}
		if ctx.Err() != nil {
			return all, ctx.Err()
		}
	}
	if queues {
		// The controller has refused a lot; it must still read.
		if err := w.read(ctx, 0, 1); err != nil {
			return all, fmt.Errorf("a read after all steps: %w", err)
		}
	}
	if set != nil {
		for f, n := range set.Counts() {
			if n == 0 {
				return all, fmt.Errorf("the fault %s never struck", f)
			}
		}
	}
	return all, nil
}

// take runs one step and judges what came.
func (w *walker) take(ctx context.Context, s step) Result {
	r := Result{Step: s.name, Cite: s.cite}
	want := s.want(w)
	names := make([]string, len(want))
	for i, a := range want {
		names[i] = a.String()
	}
	r.Want = strings.Join(names, " or ")
	r.Why = w.t.Skip[s.name]
	if s.need != nil && r.Why == "" {
		r.Why = s.need(w)
	}
	if r.Why != "" {
		r.Verdict = Absent
		return r
	}
	w.guard()
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	err := s.run(ctx, w)
	wrong := func(format string, a ...any) Result {
		r.Verdict, r.Why = Wrong, fmt.Sprintf(format, a...)
		return r
	}
	var se *nvme.StatusError
	st := nvme.StatusSuccess
	switch {
	case errors.As(err, &se):
		st = se.Status
		r.Text = err.Error()
		r.Got = fmt.Sprintf("%d/%02Xh", st.SCT(), st.SC())
		if st.DNR() {
			r.Got += " DNR"
		}
	case err != nil:
		r.Got, r.Text = "no status", err.Error()
		return wrong("the command did not come back with a status")
	default:
		r.Got = "success"
	}
	var is *answer
	for i := range want {
		if st.Is(want[i].status) {
			r.Verdict, is = Right, &want[i]
		}
	}
	for i := range s.let {
		if l := &s.let[i]; is == nil && st.Is(l.status) &&
			(w.t.Reading == l.of || w.t.Reading == Any) {
			r.Verdict, r.Why, is = Lenient, l.why, &l.answer
		}
	}
	if is == nil {
		return wrong("no such answer is known")
	}
	if st.OK() {
		return r
	}
	if why := w.judge(s, se, is); why != "" {
		return wrong("%s", why)
	}
	return r
}

// judge checks an error's words, class and traces.
func (w *walker) judge(s step, se *nvme.StatusError, is *answer) string {
	text := se.Error()
	retry := ", retryable;"
	if se.Status.DNR() {
		retry = ", not retryable;"
	}
	numbers := fmt.Sprintf("(SCT %Xh, SC %02Xh)", is.status.SCT(), is.status.SC())
	says := []string{w.c.Name(), is.words + " " + numbers, retry}
	if s.says != nil {
		says = append(says, s.says(w))
	} else {
		says = append(says, " q0: ")
	}
	for _, what := range says {
		if !strings.Contains(text, what) {
			return fmt.Sprintf("the error does not say %q", what)
		}
	}
	if c := errs.ClassOf(se); c != errs.Device {
		return fmt.Sprintf("the error is of class %d and not %d", c, errs.Device)
	}
	if !s.moves {
		if pos := w.touched(); pos >= 0 {
			return fmt.Sprintf("the command failed, and byte %d of its memory changed", pos)
		}
	}
	return ""
}

// Failed are the results that are wrong.
func Failed(all []Result) []Result {
	var bad []Result
	for _, r := range all {
		if r.Verdict == Wrong {
			bad = append(bad, r)
		}
	}
	return bad
}

// Table prints results: what was done, what should come, what came, and the words.
func Table(all []Result) string {
	var b strings.Builder
	wide := [3]int{}
	for _, r := range all {
		for i, s := range []string{r.Step, r.Want, r.Got} {
			wide[i] = max(wide[i], len(s))
		}
	}
	count := map[Verdict]int{}
	for _, r := range all {
		count[r.Verdict]++
		fmt.Fprintf(&b, "%-*s  %-*s  %-*s  %s", wide[0], r.Step, wide[1], r.Want, wide[2], r.Got,
			r.Verdict)
		if r.Why != "" {
			fmt.Fprintf(&b, ": %s", r.Why)
		}
		if r.Cite != "" {
			fmt.Fprintf(&b, " [%s]", r.Cite)
		}
		b.WriteByte('\n')
		if r.Text != "" {
			fmt.Fprintf(&b, "    %s\n", r.Text)
		}
	}
	fmt.Fprintf(&b, "%d steps: %d as specified, %d let pass, %d not applicable, %d wrong\n",
		len(all), count[Right], count[Lenient], count[Absent], count[Wrong])
	return b.String()
}
