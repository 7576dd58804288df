//go:build linux && (amd64 || arm64) && !nocuda

package dl

import (
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
)

// Have reports whether this build can open libraries.
const Have = true

// Open loads a library, by name in the loader's places or by path. Its error names it.
func Open(name string) (uintptr, error) { return open(name, purego.RTLD_LOCAL) }

// OpenGlobal is Open for a library whose own plugins look for its symbols in the whole process.
func OpenGlobal(name string) (uintptr, error) { return open(name, purego.RTLD_GLOBAL) }

func open(name string, scope int) (uintptr, error) {
	// dlerror belongs to the thread that dlopen ran on, and Go may move a goroutine between the
	// two.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h, err := purego.Dlopen(name, purego.RTLD_NOW|scope)
	if err != nil {
		return 0, named(name, err)
	}
	return h, nil
}

// Symbol is the address of a function of a library.
func Symbol(library uintptr, name string) (uintptr, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := purego.Dlsym(library, name)
	if err != nil {
		return 0, named(name, err)
	}
	return p, nil
}

// Close gives a library back.
func Close(library uintptr) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := purego.Dlclose(library); err != nil {
		return fmt.Errorf("close a library: %w", err)
	}
	return nil
}

// Register makes the Go function variable that fn points to call the function at p.
func Register(fn any, p uintptr) { purego.RegisterFunc(fn, p) }
