//go:build nocuda || !linux || !(amd64 || arm64)

package dl

import "errors"

// Have reports whether this build can open libraries. A static binary (-tags nocuda) has no loader:
// purego would make it need the C library's.
const Have = false

var errNone = errors.New("this build opens no libraries")

// Open fails.
func Open(name string) (uintptr, error) { return 0, named(name, errNone) }

// OpenGlobal fails.
func OpenGlobal(name string) (uintptr, error) { return 0, named(name, errNone) }

// Symbol fails.
func Symbol(_ uintptr, name string) (uintptr, error) { return 0, named(name, errNone) }

// Close fails.
func Close(uintptr) error { return errNone }

// Register does nothing: there is no symbol to register.
func Register(any, uintptr) {}
