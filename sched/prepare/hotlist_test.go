package prepare

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func TestHotList(t *testing.T) {
	dir := t.TempDir()
	read := func(text string) ([]uint32, error) {
		p := filepath.Join(dir, "l")
		require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
		return readHotList(p, 5)
	}
	const top = math.MaxUint32
	for _, text := range []string{
		"3\n0\n3\n4", "\n# a\n 3 \n0#b\r\n4\n3\n",
		"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }            \n" +
			"\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00",
	} {
		got, err := read(text)
		require.NoError(t, err)
		require.Equal(t, []uint32{top - 1, 0, 0, top, top - 2}, got)
	}
	for text, want := range map[string]string{
		"5\n": "line 1 is node 5", "1\n-1\n": "line 2 is node -1", "1\nx\n": `line 2: "x"`,
		"PK\x03\x04": "PyTorch", "\x80\x02": "PyTorch",
		"1 2\n": "no node number", "\x93NUMPY\x01": "l:", "": "names no node",
		"# none\n\n": "names no node", strings.Repeat("1", 1<<17): "l:",
		"\x93NUMPY\x01\x00\x46\x00{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }            \n": "integers are needed",
		"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1,1),}            \n" + strings.Repeat("\x00",
			8): "shape",
	} {
		_, err := read(text)
		require.ErrorContains(t, err, want)
		require.Equal(t, errs.Usage, errs.ClassOf(err), text)
	}
	_, err := readHotList(filepath.Join(dir, "none"), 5)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}
