package gnn

import (
	"strings"

	"helios/internal/errs"
)

// DefaultOptimizer is the optimiser where none is named: Adam (Kingma and Ba, ICLR 2015), whose
// weight decay is an L2 term.
const DefaultOptimizer = "adam"

const adamW = "adamw" // whose weight decay is decoupled from the gradient (Loshchilov, Hutter, 2019)

// Optimizers lists the names of all optimisers, DefaultOptimizer first.
func Optimizers() []string { return []string{DefaultOptimizer, adamW} }

// Decoupled returns the value of Step.Decoupled for an optimiser; an empty name is
// DefaultOptimizer.
func Decoupled(name string) (bool, error) {
	switch name {
	case "", DefaultOptimizer:
		return false, nil
	case adamW:
		return true, nil
	}
	return false, errs.New(errs.Usage, "optimizer %q is unknown; choose one of %s", name,
		strings.Join(Optimizers(), ", "))
}
