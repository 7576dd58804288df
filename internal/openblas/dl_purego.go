//go:build linux && (amd64 || arm64) && !nocuda

package openblas

import "github.com/ebitengine/purego"

const haveLoader = true

func dlopen(name string) (uintptr, error) {
	return purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
}
func dlsym(h uintptr, name string) (uintptr, error) { return purego.Dlsym(h, name) }
func dlclose(h uintptr) error                       { return purego.Dlclose(h) }
func register(fn any, addr uintptr)                 { purego.RegisterFunc(fn, addr) }
