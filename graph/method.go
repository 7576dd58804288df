package graph

import (
	"math"
	"slices"
	"strings"

	"helios/internal/errs"
)

// Method is a way to draw mini-batches. Each is declared in a file of its own and stands in the
// list of this one; names, help and reports read the list, and code that must know more asks for
// the traits below, never for a name.
type Method struct {
	Name    string
	Summary string // for help: a few words after the name
	Title   string // for reports; "" for the default, which needs no mention
	Fanout  string // what a fanout counts

	MostFanout int
	// WholeLists is set where a hop reads the whole lists of its destinations, not only what it
	// draws.
	WholeLists bool
	// NoAll is set where a run needs a bound for each hop: fanout -1, all, is for comparisons only.
	NoAll bool
	// Dependent is set where batches can share draws (SamplerConfig.Dependency).
	Dependent bool
	// Untyped gives the reason that it can't draw from graphs with types; "": it can.
	Untyped string
	// Bound returns the most nodes in the frontier of so many after a hop of a fanout; Unbounded
	// where only the graph limits them.
	Bound func(nodes int64, fanout int) int64
	// open makes the hopper for a device that samples itself.
	open func(c sampling) (hopper, error)
}

// Unbounded is Method.Bound's answer where only the graph limits the frontier.
const Unbounded = math.MaxInt64

// methods are all methods in the order of lists, the default first.
var methods []*Method

func init() { methods = []*Method{neighborMethod, laborMethod, ladiesMethod} }

// Methods returns all methods, the default first.
func Methods() []*Method { return slices.Clone(methods) }

// MethodNames returns the names of Methods.
func MethodNames() []string {
	names := make([]string, len(methods))
	for i, m := range methods {
		names[i] = m.Name
	}
	return names
}

// DependentNames returns the names of methods with Dependent.
func DependentNames() (names []string) {
	for _, m := range methods {
		if m.Dependent {
			names = append(names, m.Name)
		}
	}
	return names
}

// FindMethod returns the method of a name, the default for "".
func FindMethod(name string) (*Method, error) {
	if name == "" {
		name = Neighbor
	}
	for _, m := range methods {
		if m.Name == name {
			return m, nil
		}
	}
	return nil, errs.New(errs.Usage, "sampler %q is not known; choose one of %s", name,
		strings.Join(MethodNames(), ", "))
}
