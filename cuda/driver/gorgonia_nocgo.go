//go:build gorgonia && !nocuda && !cgo

package driver

// The tag gorgonia builds a binding that is cgo. Without it this line stops the compiler with the
// way out in its name.
var _ = tag_gorgonia_needs_CGO_ENABLED_1
