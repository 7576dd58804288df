//go:build linux && (amd64 || arm64) && !nocuda

package fakecuda

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"helios/internal/dl"
)

var handles sync.Map // library → address of hx_fake_control

// Do sends a command to the library at path, which the process loads if it has not yet: knobs
// separated by commas, and questions, whose answers it returns.
func Do(path, command string) (string, error) {
	fn, ok := handles.Load(path)
	if !ok {
		h, err := dl.Open(path)
		if err != nil {
			return "", err
		}
		a, err := dl.Symbol(h, "hx_fake_control")
		if err != nil {
			return "", err
		}
		fn, _ = handles.LoadOrStore(path, a)
	}
	in, out := append([]byte(command), 0), make([]byte, 8<<10)
	var pins runtime.Pinner
	defer pins.Unpin()
	pins.Pin(&in[0])
	pins.Pin(&out[0])
	r, _, _ := purego.SyscallN(fn.(uintptr), uintptr(unsafe.Pointer(&in[0])),
		uintptr(unsafe.Pointer(&out[0])), uintptr(len(out)))
	text, _, _ := strings.Cut(string(out), "\x00")
	if int32(r) < 0 {
		return "", fmt.Errorf("fake libcuda: %s: %s", command, text)
	}
	return text, nil
}

// Control is Do for tests: errors are fatal.
func Control(t testing.TB, path, command string) string {
	t.Helper()
	answer, err := Do(path, command)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}
