package gnn

import (
	"strings"

	"helios/internal/errs"
)

// DefaultOptimizer is the optimiser where none is named: Adam (Kingma and Ba, ICLR 2015), whose
// weight decay is an L2 term.
const DefaultOptimizer = "adam"

// The value is set where weight decay is decoupled from the gradient: AdamW (Loshchilov and Hutter,
// ICLR 2019).
var optimizers = map[string]bool{DefaultOptimizer: false, "adamw": true}

// Optimizers lists the names of all optimisers, DefaultOptimizer first.
func Optimizers() []string { return namesOf(optimizers, DefaultOptimizer) }

// Decoupled returns the value of Step.Decoupled for an optimiser; an empty name is
// DefaultOptimizer.
func Decoupled(name string) (bool, error) {
	if name == "" {
		name = DefaultOptimizer
	}
	if d, ok := optimizers[name]; ok {
		return d, nil
	}
	return false, errs.New(errs.Usage, "optimizer %q is unknown; choose one of %s", name,
		strings.Join(Optimizers(), ", "))
}
