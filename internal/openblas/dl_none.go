//go:build nocuda || !linux || !(amd64 || arm64)

package openblas

import "errors"

// A static binary (-tags nocuda) has no loader: purego would make it need the C library's.
const haveLoader = false

var errNoLoader = errors.New("no loader in this build")

func dlopen(string) (uintptr, error)         { return 0, errNoLoader }
func dlsym(uintptr, string) (uintptr, error) { return 0, errNoLoader }
func dlclose(uintptr) error                  { return errNoLoader }
func register(any, uintptr)                  {}
