package planner

import (
	"context"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/units"
	"helios/sched/plan"
)

// Sweep is a setting with the values that are planned for.
type Sweep struct {
	Key    string   `json:"key"`
	Values []string `json:"values"`
}

// Sweeps of a tier's size; of a budget the other tier has the rest.
const (
	sweepGPU = "gpu-cache"
	sweepCPU = "cpu-cache"
)

// sweeps are the settings that can be swept, and their setters.
var sweeps = []struct {
	key string
	set func(o *Options, text string) error
}{
	{"ssds", func(o *Options, text string) error {
		return number(text, func(n int64) { o.Hardware.SSDs = int(n) })
	}},
	{sweepGPU, func(o *Options, text string) error {
		o.Config.GPUCacheAuto, o.sized = false, sweepGPU
		return budget(text, &o.Config.GPUCache)
	}},
	{sweepCPU, func(o *Options, text string) error {
		o.sized = sweepCPU
		return budget(text, &o.Config.CPUCache)
	}},
	{"batch-size", func(o *Options, text string) error {
		return number(text, func(n int64) { o.Config.Batch = int(n) })
	}},
	{"row-bytes", func(o *Options, text string) error {
		return number(text, func(n int64) {
			o.Graph.Dim = o.RowType.Dim(int(n))
		})
	}},
}

// SweepKeys are the settings that can be swept.
func SweepKeys() (keys []string) {
	for _, s := range sweeps {
		keys = append(keys, s.key)
	}
	return keys
}

func number(text string, set func(int64)) error {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || n > 1<<24 {
		n, err = units.ParseBytes(text)
	}
	if err != nil || n < 1 || n > 1<<24 {
		return errs.New(errs.Usage, "%q is not a number from 1 to %d", text, 1<<24)
	}
	set(n)
	return nil
}

func budget(text string, to *units.Budget) error {
	b, err := units.ParseBudget(text)
	if err != nil {
		return err
	}
	if b == (units.Budget{}) {
		b = plan.NoCache()
	}
	*to = b
	return nil
}

// Ranges count by one up to mostByOne values; longer ones double. mostValues bounds a list.
const (
	mostByOne  = 32
	mostValues = 256
)

// ParseSweep reads KEY=VALUES: a range such as ssds=1..12, or values such as cpu-cache=0,5%,10%.
func ParseSweep(text string) (s Sweep, err error) {
	key, values, ok := strings.Cut(text, "=")
	s.Key = key
	if !ok || !slices.Contains(SweepKeys(), key) || values == "" {
		return s, errs.New(errs.Usage,
			"%v %q is not one of %s with its values, such as ssds=1..12 or cpu-cache=0,5%%,10%%",
			errs.Key("sweep"), text, strings.Join(SweepKeys(), ", "))
	}
	for _, part := range strings.Split(values, ",") {
		from, to, ranged := strings.Cut(part, "..")
		if !ranged {
			s.Values = append(s.Values, part)
			continue
		}
		a, err1 := strconv.ParseInt(from, 10, 64)
		b, err2 := strconv.ParseInt(to, 10, 64)
		if err1 != nil || err2 != nil || a < 1 || b < a || b > 1<<40 {
			return s, errs.New(errs.Usage, "%v %q: %q is not a range such as 1..12",
				errs.Key("sweep"), text, part)
		}
		for n := a; n <= b; {
			s.Values = append(s.Values, strconv.FormatInt(n, 10))
			if b-a < mostByOne {
				n++
			} else if n *= 2; n > b && n < 2*b {
				n = b
			}
		}
	}
	if len(s.Values) > mostValues {
		return s, errs.New(errs.Usage, "%v %q has %d values: at most %d", errs.Key("sweep"), text,
			len(s.Values), mostValues)
	}
	var o Options
	for _, v := range s.Values {
		if err := s.set(&o, v); err != nil {
			return s, err
		}
	}
	return s, nil
}

func (s Sweep) set(o *Options, value string) error {
	i := slices.IndexFunc(sweeps, func(x struct {
		key string
		set func(o *Options, text string) error
	}) bool {
		return x.key == s.Key
	})
	if err := sweeps[i].set(o, value); err != nil {
		return errs.New(errs.Usage, "%v %s: %w", errs.Key("sweep"), s.Key, err)
	}
	return nil
}

// Point plans for one value of a sweep.
func (p *Planner) Point(ctx context.Context, s Sweep, value string) (*Plan, error) {
	probe := p.o
	if err := s.set(&probe, value); err != nil {
		return nil, err
	}
	return p.Plan(ctx, func(o *Options) { _ = s.set(o, value) }) // it has been set before
}
