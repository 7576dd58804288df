package gpuio

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/internal/testing/difftest"
	"helios/internal/testing/fakecuda"
	"helios/internal/testing/wide"
)

// checkCase is a launch of check_rows on memory of its own.
type checkCase struct {
	rows, count       int64
	rowBytes          int
	stride, offset    int64
	lanes             uint32
	blocks            int
	wrong, row0, pos0 int64 // how many sums are wrong; -1, or what the first row and position are
}

func (c checkCase) String() string {
	return fmt.Sprintf("%d rows of %d bytes, stride %d, offset %d, %d lanes, %d blocks", c.count,
		c.rowBytes, c.stride, c.offset, c.lanes, c.blocks)
}

// launch runs check_rows on dev and returns its checksums, which must be those of hash/crc32.
func (c checkCase) launch(t *testing.T, dev cuda.Device, rng *rand.Rand) error {
	t.Helper()
	ctx := testCtx(t)
	st, err := dev.NewStream(cuda.StreamOptions{Name: "check"})
	require.NoError(t, err)
	k, err := dev.Kernel("check_rows")
	require.NoError(t, err)
	var bufs []cuda.Buffer
	alloc := func(n int64, kind cuda.MemKind) cuda.Buffer {
		b, err := dev.Alloc(kind, max(n, 4), "check")
		require.NoError(t, err)
		bufs = append(bufs, b)
		return b
	}
	defer func() {
		_ = st.Close() // a failed stream says so again
		for _, b := range bufs {
			require.NoError(t, b.Free())
		}
	}()
	mem := make([]byte, c.offset+c.count*c.stride)
	for i := range mem {
		mem[i] = byte(rng.Uint32())
	}
	ids, off, sums := make([]int64, c.count), make([]uint32, c.count), make([]uint32, c.rows)
	want := make([]uint32, c.count)
	for i, p := range rng.Perm(int(c.count)) {
		ids[i], off[i] = int64(i), uint32(p)
		want[i] = crc32.Checksum(mem[c.offset+int64(p)*c.stride:][:c.rowBytes], castagnoli)
		sums[i] = want[i]
	}
	for i := range c.wrong {
		sums[i*3%c.count] ^= 1 << (i % 32)
	}
	wrong := uint32(0)
	for i, w := range want {
		if sums[i] != w {
			wrong++
		}
	}
	if c.row0 >= 0 {
		ids[0] = c.row0
	}
	if c.pos0 >= 0 {
		off[0] = uint32(c.pos0)
	}
	rows, pos, sum := alloc(c.count*8, cuda.MemDevice), alloc(c.count*4, cuda.MemDevice),
		alloc(c.rows*4, cuda.MemPinned)
	dst, got, bad, tables := alloc(int64(len(mem)), cuda.MemDevice),
		alloc(c.count*4, cuda.MemDevice), alloc(4, cuda.MemDevice),
		alloc(checkTableWords*4, cuda.MemPinned)
	require.NoError(t, difftest.Upload(ctx, dev, st, rows.Ptr(), ids))
	require.NoError(t, difftest.Upload(ctx, dev, st, pos.Ptr(), off))
	require.NoError(t, difftest.Upload(ctx, dev, st, dst.Ptr(), mem))
	copy(words(sum.Bytes()), sums)
	copy(words(tables.Bytes()), checkTables(c.lanes))
	err = cuda.Launch(st, k, cuda.LaunchConfig{Blocks: c.blocks, Threads: 64}, checkParams{
		Rows: rows.Ptr(), Pos: pos.Ptr(), Sums: sum.Ptr(), Dst: dst.Ptr() +
			cuda.DevicePtr(c.offset), Got: got.Ptr(), Bad: bad.Ptr(), Tables: tables.Ptr(),
		Count: c.count, LayoutRows: c.rows, DstLimit: int64(len(mem)) - c.offset,
		DstStride: c.stride, RowBytes: uint32(c.rowBytes), Lanes: c.lanes,
	})
	if err != nil {
		return err
	}
	if err := st.Synchronize(ctx); err != nil {
		return err
	}
	have, err := difftest.Download[uint32](ctx, dev, st, got.Ptr(), c.count)
	require.NoError(t, err)
	require.Equal(t, want, have, "%v", c)
	n, err := difftest.Download[uint32](ctx, dev, st, bad.Ptr(), 1)
	require.NoError(t, err)
	require.Equal(t, wrong, n[0], "%v", c)
	return nil
}

// TestDriverCheckRows compares the CUDA kernel with Go's and both with hash/crc32: every length of
// row, lanes of every number, odd addresses and strides, more blocks than rows, and long rows.
func TestDriverCheckRows(t *testing.T) {
	dev := difftest.Open(t, difftest.Options{Seed: 5, RandomThreads: true})
	rng := rand.New(rand.NewPCG(5, 6))
	var cases []checkCase
	for n := 1; n <= 70; n++ {
		cases = append(cases, checkCase{rowBytes: n, lanes: checkLanes(n)})
	}
	for _, n := range []int{400, 512, 1000, 1023, 4096, 20480, 65536} {
		for _, lanes := range []uint32{1, 2, 4, 8} {
			cases = append(cases, checkCase{rowBytes: n, lanes: lanes})
		}
	}
	bytes := int64(1 << 20)
	if wide.Lean() {
		bytes = 1 << 15
	}
	for i, c := range cases {
		c.count = max(1, min(rng.Int64N(200), bytes/int64(c.rowBytes)))
		c.rows = c.count + rng.Int64N(5)
		c.stride = int64(c.rowBytes) + []int64{0, 0, 1, 4, 13}[i%5]
		if i%3 == 0 {
			c.stride = (c.stride + 3) &^ 3
		}
		c.offset = []int64{0, 4, 1, 512}[i%4]
		c.blocks = 1 + rng.IntN(9)
		c.wrong = rng.Int64N(c.count + 1)
		c.row0, c.pos0 = -1, -1
		require.NoError(t, c.launch(t, dev, rng), "%v", c)
	}
	require.Equal(t, len(cases), dev.Launches()["check_rows"])
}

// TestDriverCheckRowsFaults: rows outside the layout and positions outside the destination fail the
// launch, with the same words on both sides.
func TestDriverCheckRowsFaults(t *testing.T) {
	dev := difftest.Open(t, difftest.Options{Seed: 6})
	rng := rand.New(rand.NewPCG(7, 8))
	good := checkCase{rows: 20, count: 20, rowBytes: 64, stride: 64, lanes: 8, blocks: 1, row0: -1,
		pos0: -1}
	for _, c := range []struct {
		change func(*checkCase)
		want   string
	}{
		{func(c *checkCase) { c.row0 = 20 },
			"check_rows: row 20 at index 0: the layout has 20 rows"},
		{func(c *checkCase) { c.pos0 = 20 },
			"check_rows: position 20 at index 0 is outside the destination of 1280 bytes"},
	} {
		x := good
		c.change(&x)
		err := x.launch(t, dev, rng)
		var ke *cuda.KernelError
		require.True(t, errors.As(err, &ke), "%v", err)
		require.EqualError(t, ke.Err, c.want)
	}
}

// TestDriverCheckedReads: a checked Reader on the driver's device, over memory that the CPU may not
// see, finds what changed on an SSD.
func TestDriverCheckedReads(t *testing.T) {
	onGPU(t)
	for _, size := range []int{16, 400, 4096} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			r := newRig(t, rigOptions{ssds: 2, lba: 512, rowBytes: size, rows: 500})
			rd := r.checked(NewAsync(r.dev, r.ssds, r.layout, AsyncOptions{Depth: 32}))
			rng := rand.New(rand.NewPCG(1, 2))
			var all []*testSet
			for range 4 {
				s := r.newSet(rng, 1+rng.IntN(300), int64(size+3)&^3, int64(rng.IntN(2)*512))
				s.read(rd)
				all = append(all, s)
			}
			bad := all[0].ids[0]
			r.corrupt(bad)
			p, err := rd.Submit(testCtx(t), all[0].rs)
			require.NoError(t, err)
			_, err = p.Wait(testCtx(t))
			var sum *ChecksumError
			require.ErrorAs(t, err, &sum)
			require.Equal(t, bad, sum.Row)
			all[0].check(map[int64]bool{bad: true})
			freeSets(rd, all)
		})
	}
}

// TestDriverCheckRowsPlanted: mistakes of the kind that a port makes, planted in copies of the CUDA
// kernel, are found by the comparison with Go's.
func TestDriverCheckRowsPlanted(t *testing.T) {
	if os.Getenv("HELIOS_GPU") == "1" {
		t.Skip("the kernels of a GPU come from the binary")
	}
	good := fakecuda.Build(t, fakecuda.Private())  // or skip
	const hold = "seed=3,store_buffer=16,jitter=0" // stores are held back as long as may be
	c := checkCase{rows: 60, count: 60, rowBytes: 400, stride: 400, lanes: 8, blocks: 2, row0: -1,
		pos0: -1}
	fakecuda.Control(t, good, hold)
	require.NoError(t, c.launch(t, difftest.OpenLibrary(t, good, difftest.Options{Seed: 5}),
		rand.New(rand.NewPCG(1, 1))))
	for name, p := range map[string]struct{ right, wrong string }{
		"no barrier":  {"\tdev::syncthreads();\n", ""},
		"first word":  {"at >= front ?", "at > front ?"},
		"joined late": {"late ? other : r", "late ? r : other"},
	} {
		t.Run(name, func(t *testing.T) {
			lib := fakecuda.Build(t,
				fakecuda.Root(plantedRoot(t, "check_rows.cu", p.right, p.wrong)),
				fakecuda.Private())
			fakecuda.Control(t, lib, hold)
			// differences are wanted
			ignore := func(difftest.Launch, func(int) cuda.DevicePtr, difftest.Memory) {}
			dev := difftest.OpenLibrary(t, lib, difftest.Options{Seed: 5, Spoil: ignore})
			var m *difftest.Mismatch
			require.ErrorAs(t, c.launch(t, dev, rand.New(rand.NewPCG(1, 1))), &m)
			require.Equal(t, "check_rows", m.Kernel)
		})
	}
}

// plantedRoot is a copy of the kernels' and the shim's sources with one mistake.
func plantedRoot(t *testing.T, file, right, wrong string) string {
	t.Helper()
	root := t.TempDir()
	for _, pattern := range []string{"go.mod", "cuda/kernels/*.h", "cuda/kernels/*.cu",
		"internal/testing/shim/*.h", "internal/testing/shim/*.cc", "internal/testing/fakecuda/src/*"} {
		files, err := filepath.Glob(filepath.Join("..", pattern))
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, f := range files {
			text, err := os.ReadFile(f)
			require.NoError(t, err)
			if filepath.Base(f) == file {
				require.Equal(t, 1, strings.Count(string(text), right),
					"%s has %q so often: the plant is out of date", file, right)
				text = []byte(strings.Replace(string(text), right, wrong, 1))
			}
			to := filepath.Join(root, strings.TrimPrefix(f, "../"))
			require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o700))
			require.NoError(t, os.WriteFile(to, text, 0o600))
		}
	}
	return root
}
