package dl

import (
	"strings"
	"sync"
	"testing"
)

// Every failure names its library, also where many goroutines fail at once: the loader keeps its
// words per thread.
func TestErrorsNameTheLibrary(t *testing.T) {
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 200 {
				_, err := Open("libhelios-no-such.so.7")
				if err == nil || !strings.Contains(err.Error(), "libhelios-no-such.so.7") {
					t.Errorf("the error is %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// The first library that can be used is taken; the errors of the others name what they lack, and no
// function is bound to a part of a library.
func TestFirstThatBinds(t *testing.T) {
	length, other := func(string) uint64 { return 0 }, func() {}
	bind := func(h uintptr, name string) error {
		return Bind(h, map[string]any{"strlen": &length, "hx_none": &other, "hx_also_none": &other})
	}
	err := First([]string{"libhelios-no-such.so.7", "libc.so.6"}, Open, bind)
	if err == nil || !strings.Contains(err.Error(), "libhelios-no-such.so.7") ||
		!strings.Contains(err.Error(), "lacks hx_also_none, hx_none") {
		t.Errorf("the error is %v", err)
	}
	if n := length("four"); n != 0 {
		t.Errorf("strlen is bound, though others are not: %d", n)
	}
	used := ""
	err = First([]string{"libhelios-no-such.so.7", "libc.so.6", "libm.so.6"}, Open,
		func(h uintptr, name string) error {
			used = name
			return Bind(h, map[string]any{"strlen": &length})
		})
	if err != nil || used != "libc.so.6" || length("four") != 4 {
		t.Errorf("%q is used, its strlen says %d: %v", used, length("four"), err)
	}
}
