package partition

import (
	"bytes"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

const someUUID = "c8a3a170-e6f0-861b-bfd0-0ed8876a0ab5"

func written(t testing.TB, nodes int) (*Partition, []byte) {
	t.Helper()
	x := anyEdges(generator(1), nodes, 3*nodes).topology(t, false)
	p := made(t, x, Options{Parts: 5, Method: Stream, Seed: 1})
	p.Info.Dataset = someUUID
	var b bytes.Buffer
	require.NoError(t, p.Write(&b))
	return p, b.Bytes()
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a"+Suffix)
	for _, nodes := range []int{5, 16384, 16385, 40000} { // about one block and more
		p, b := written(t, nodes)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		got, err := Open(path)
		require.NoError(t, err)
		require.Equal(t, p.Info, got.Info)
		require.Equal(t, p.Of, got.Of)
		require.NoError(t, got.BelongsTo(someUUID, p.Info.Nodes, p.Info.Edges))
		for _, err := range []error{got.BelongsTo(someUUID, p.Info.Nodes, 0),
			got.BelongsTo("another", p.Info.Nodes, p.Info.Edges)} {
			require.ErrorContains(t, err, "the partition is of dataset "+someUUID)
			require.Equal(t, errs.Usage, errs.ClassOf(err))
		}
		require.NoError(t, got.Close())
		var again bytes.Buffer
		require.NoError(t, p.Write(&again))
		require.Equal(t, b, again.Bytes())
	}
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), ".b"+Suffix), nil, 0o600))
	files, err := Files(filepath.Dir(path))
	require.NoError(t, err)
	require.Equal(t, []string{path}, files)
}

// A byte that changed, anywhere, and any other length are found.
func TestFileIsDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	_, b := written(t, 20)
	refused := func(b []byte, what string, offset int) {
		t.Helper()
		_, err := open(bytes.NewReader(b), int64(len(b)), path)
		if err == nil {
			t.Fatalf("%s %d: it was taken", what, offset)
		}
		if c := errs.ClassOf(err); !strings.Contains(err.Error(), path) ||
			c != errs.Device && c != errs.Usage {
			t.Fatalf("%s %d: the error is %v, class %d", what, offset, err, c)
		}
	}
	for offset := range b {
		for _, bit := range []byte{1, 0x80} {
			bad := bytes.Clone(b)
			bad[offset] ^= bit
			refused(bad, "flipped", offset)
		}
	}
	for n := range b {
		refused(b[:n], "cut at", n)
	}
	refused(append(bytes.Clone(b), 0), "longer by", 1)

	// Whole, by its checksums, and wrong.
	line, rest, _ := strings.Cut(string(b), "\n")
	for _, c := range []struct{ old, now, want string }{
		{`{"partition":1`, `{"partition":2`, "version 2 is unknown, this heliosctl reads 1"},
		{`"parts":5`, `"parts":2`, "of 2"},
		{`"parts":5`, `"parts":0`, "0 parts"},
		{`"nodes":20`, `"nodes":30`, "30 nodes need"},
		{`"nodes":20`, `"nodes":4000000000`, "4000000000 nodes need"},
		{`"nodes":20`, `"nodes":-20`, "-20 nodes"},
		{someUUID, "nobody", `dataset "nobody"`},
		{`"block":65536`, `"block":0`, "blocks of 0 bytes"},
	} {
		now := strings.Replace(line, c.old, c.now, 1)
		require.NotEqual(t, line, now, c.old)
		bad := []byte(now + "\n" + sumText(now) + rest[8:])
		refused(bad, c.want, 0)
		require.NoError(t, os.WriteFile(path, bad, 0o600))
		_, err := Open(path)
		require.ErrorContains(t, err, c.want)
	}
	_, err := Open(filepath.Join(t.TempDir(), "none"))
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	_, err = Open(t.TempDir())
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

func sumText(line string) string {
	const digits = "0123456789abcdef"
	sum, out := crc32.Checksum([]byte(line), castagnoli), make([]byte, 8)
	for i := range out {
		out[i] = digits[sum>>(28-4*i)&15]
	}
	return string(out)
}

func FuzzOpen(f *testing.F) {
	_, b := written(f, 20)
	f.Add(b)
	f.Add([]byte(`{"partition":1}` + "\n00000000\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(t.TempDir(), "a")
		require.NoError(t, os.WriteFile(path, b, 0o600))
		p, err := Open(path)
		if err != nil {
			require.Contains(t, []errs.Class{errs.Device, errs.Usage}, errs.ClassOf(err))
			return
		}
		require.Len(t, p.Of, int(p.Info.Nodes))
		require.NoError(t, p.Close())
	})
}
