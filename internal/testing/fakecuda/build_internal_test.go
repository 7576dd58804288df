package fakecuda

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// An object is compiled anew when a header that it includes changes, also by way of another one,
// and not when any other does.
func TestReach(t *testing.T) {
	root := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		p := filepath.Join(root, name)
		require.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(p), 0o700),
			os.WriteFile(p, []byte(text), 0o600)))
	}
	put("cuda/kernels/types.h", "// types")
	put("cuda/kernels/device.h", "#include <cstdint>\n#ifdef X\n\t#  include \"types.h\"\n#endif\n")
	put("cuda/kernels/queue.h", "#pragma once\n#include \"device.h\"\n#include \"queue.h\"\n")
	put("internal/testing/shim/shim.h", "#include \"types.h\"\n")
	put("internal/testing/fakecuda/src/fake.h", "#include \"shim.h\"\n")
	const kernel, other, fake = "#include \"queue.h\"\n", "#include \"device.h\"\n", "#include \"fake.h\"\n"
	keys := func() [3]string {
		t.Helper()
		b, err := newBuilder(root, t.TempDir())
		if errors.Is(err, ErrNoCompiler) {
			t.Skip(err)
		}
		require.NoError(t, err)
		return [3]string{b.reach("cuda/kernels", kernel), b.reach("cuda/kernels", other),
			b.reach("internal/testing/fakecuda/src", fake)}
	}
	before := keys()
	for _, c := range []struct {
		header  string
		changed [3]bool // kernel, other, fake
	}{
		{"cuda/kernels/types.h", [3]bool{true, true, true}},
		{"cuda/kernels/device.h", [3]bool{true, true, false}},
		{"cuda/kernels/queue.h", [3]bool{true, false, false}},
		{"internal/testing/shim/shim.h", [3]bool{false, false, true}},
		{"internal/testing/fakecuda/src/fake.h", [3]bool{false, false, true}},
	} {
		text, err := os.ReadFile(filepath.Join(root, c.header))
		require.NoError(t, err)
		put(c.header, string(text)+"// more\n")
		after := keys()
		for i := range after {
			if (after[i] != before[i]) != c.changed[i] {
				t.Errorf("%s changed: the key of source %d changed: %v", c.header, i,
					after[i] != before[i])
			}
		}
		before = after
	}
}
