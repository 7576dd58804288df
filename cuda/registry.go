package cuda

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"helios/internal/errs"
)

// hostKernel is a Go function that stands for a kernel, with its type erased.
type hostKernel struct {
	name string
	size uintptr
	run  func(b *Block, params unsafe.Pointer) error
}

func (k *hostKernel) Name() string       { return k.name }
func (k *hostKernel) ParamSize() uintptr { return k.size }

var registry struct {
	sync.RWMutex
	kernels map[string]*hostKernel
}

// RegisterHost makes fn the host device's kernel of that name, usually from an init function.
// fn runs once per block, in any order and concurrently, and must not write to p, which all
// blocks of a launch share. An error, a panic or a fault of fn fails the stream. It must not end
// its goroutine (runtime.Goexit, which a test's FailNow calls): that would lose a worker slot.
// RegisterHost panics on a duplicate name and on a T that holds Go pointers: a kernel's
// parameters are bytes that a GPU could read.
func RegisterHost[T any](name string, fn func(b *Block, p *T) error) {
	t := reflect.TypeFor[T]()
	if where := goPointer(t); where != "" {
		panic(
			fmt.Sprintf(
				"cuda: kernel %q: parameter type %v holds a Go pointer at %s; use DevicePtr", name,
				t, where))
	}
	if t.Align() > 8 {
		panic(fmt.Sprintf("cuda: kernel %q: parameter type %v needs alignment %d", name, t,
			t.Align()))
	}
	registry.Lock()
	defer registry.Unlock()
	if registry.kernels == nil {
		registry.kernels = map[string]*hostKernel{}
	}
	if registry.kernels[name] != nil {
		panic(fmt.Sprintf("cuda: kernel %q is registered twice", name))
	}
	registry.kernels[name] = &hostKernel{name, t.Size(), func(b *Block, p unsafe.Pointer) error {
		return fn(b, (*T)(p))
	}}
}

// goPointer finds a field of t that holds a Go pointer and returns its path, or "".
func goPointer(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool, reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64,
		reflect.Uintptr,
		reflect.Float32, reflect.Float64, reflect.Complex64, reflect.Complex128:
		return ""
	case reflect.Array:
		if w := goPointer(t.Elem()); w != "" {
			return "[]" + w
		}
		return ""
	case reflect.Struct:
		for i := range t.NumField() {
			f := t.Field(i)
			if w := goPointer(f.Type); w != "" {
				return "." + f.Name + w
			}
		}
		return ""
	default:
		return " (" + t.Kind().String() + ")"
	}
}

func lookupHost(name string) (*hostKernel, error) {
	registry.RLock()
	defer registry.RUnlock()
	if k := registry.kernels[name]; k != nil {
		return k, nil
	}
	var known []string
	for n := range registry.kernels {
		if !strings.HasPrefix(n, "conf_") {
			known = append(known, n)
		}
	}
	slices.Sort(known)
	return nil, errs.New(errs.Capability,
		"host device: no kernel %q is registered; import the package that has it (there are: %s)",
		name, strings.Join(known, ", "))
}
