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
