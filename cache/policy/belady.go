package policy

import "helios/internal/errs"

// Belady is MIN with bypass (Ginex). It needs the future: package replay plays it over a trace, and
// a run has it superbatch by superbatch (package superbatch).
const Belady = "belady"

var beladyPolicy = &Policy{Name: Belady,
	Summary: "MIN: the line whose next access is the furthest leaves",
	Offline: errs.Textf("needs to know the future: train with it, or record a run ({trace}) and play it with \"heliosctl cache replay --policy belady\"")}
