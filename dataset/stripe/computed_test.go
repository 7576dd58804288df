package stripe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/build"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/rowtype"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/proxy"
)

// loadedImages loads d onto simulated SSDs of zeros and returns all of their bytes.
func loadedImages(t testing.TB, d *dataset.Dataset, n, lba int, size int64,
	o LoadOptions) [][]byte {
	t.Helper()
	var ts []*target
	var sims []*simSSD
	for i := range n {
		s := newSim(size/int64(lba), lba)
		sims = append(sims, s)
		ts = append(ts, &target{dev: s, name: fmt.Sprintf("sim%d", i),
			serial: fmt.Sprintf("S%d", i), lbaBytes: lba, lbas: uint64(size / int64(lba))})
	}
	_, err := load(bg, d, ts, o)
	require.NoError(t, err)
	var out [][]byte
	for _, s := range sims {
		out = append(out, s.durable)
	}
	return out
}

// TestComputedEqualsLoaded compares a computed SSD with one that was loaded, every byte of both.
func TestComputedEqualsLoaded(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	type c struct {
		nodes    int64
		dim      int
		lba, ssd int
		typ      rowtype.Type
		noSums   bool
	}
	cases := []c{
		{1500, 1024, 4096, 2, rowtype.Float32, false}, // whole
		{9000, 32, 4096, 1, rowtype.Float32, false},   // packed
		{4000, 301, 512, 3, rowtype.Float32, false},   // padded, across chunks
		{1, 1, 512, 2, rowtype.Float32, false},        // an empty stripe
		{5000, 100, 512, 1, rowtype.Int8, false},
		{5000, 100, 512, 2, rowtype.Int8, true},
		{3000, 601, 4096, 2, rowtype.Float16, false},
		{3000, 129, 512, 2, rowtype.BFloat16, true},
	}
	if !wide.Lean() {
		for range 12 {
			cases = append(cases, c{1 + rng.Int64N(4000), 1 + rng.IntN(1400),
				[]int{512, 4096}[rng.IntN(2)], 1 + rng.IntN(4), rowtype.Types()[rng.IntN(4)],
				rng.IntN(3) == 0})
		}
		// rows of most of a chunk; a row table of two pieces
		cases = append(cases, c{40, 100_001, 512, 3, rowtype.Float32, false},
			c{300_000, 3, 512, 1, rowtype.Float32, false})
	}
	for _, k := range cases {
		t.Run(fmt.Sprintf("%+v", k), func(t *testing.T) {
			d := hashed(t, k.nodes, k.dim, rng.Uint64(), "hash")
			l, err := gpuio.NewLayout(k.nodes, k.typ.RowBytes(k.dim), k.ssd, k.lba)
			require.NoError(t, err)
			g, err := newGeometry(l, 0, k.lba, 1<<40, 8)
			require.NoError(t, err)
			// beyond the last 4 KiB bound, too
			size := g.needBytes + rng.Int64N(20)*512*8 + int64(k.lba)*rng.Int64N(8)
			images := loadedImages(t, d, k.ssd, k.lba, size, LoadOptions{NoRowChecksums: k.noSums,
				RowType: k.typ.String()})
			for i, want := range images {
				sb, err := decodeSuperblock(want)
				require.NoError(t, err)
				o := ComputedOptions{Stripe: i, Stripes: k.ssd, LBABytes: k.lba, Bytes: size,
					Type: k.typ, NoRowChecksums: k.noSums, loadID: sb.LoadID}
				m, err := NewComputed(bg, d, o)
				require.NoError(t, err)
				require.Equal(t, sb, m.sb)
				got := make([]byte, len(want))
				n, err := m.ReadAt(got, 0)
				require.NoError(t, err)
				require.Equal(t, len(want), n)
				require.Equal(t, -1, firstDifference(got, want), "the first difference")
				for range 200 { // pieces of any size at any place
					off := rng.Int64N(int64(len(want)))
					b := make([]byte, min(rng.Int64N(9000), int64(len(want))-off))
					_, err := m.ReadAt(b, off)
					require.NoError(t, err)
					require.True(t, bytes.Equal(want[off:off+int64(len(b))], b), "%d bytes at %d",
						len(b), off)
				}
				sums := m.Sums()
				o.Sums = &sums
				again, err := NewComputed(bg, d, o)
				require.NoError(t, err)
				require.Equal(t, m.super, again.super)
			}
		})
	}
}

// TestFilesEqualLoaded compares an SSD whose rows are in features.npy with one that was loaded, and
// damages the file.
func TestFilesEqualLoaded(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for name, d := range map[string]*dataset.Dataset{
		"whole": small(t, 700, 128, 1), "packed": small(t, 2000, 16, 2),
		"padded": small(t, 1500, 37, 3), "odd halves": halves(t, 2000, 37)} {
		t.Run(name, func(t *testing.T) {
			m, err := NewComputed(bg, d, ComputedOptions{Stripes: 1, LBABytes: 512,
				Type: d.Meta.RowType(), NoSums: true})
			require.NoError(t, err)
			want := loadedImages(t, d, 1, 512, m.Size(), LoadOptions{NoRowChecksums: true})[0]
			from, to := int64(m.g.dataLBA)*512, int64(m.g.dataLBA)*512+m.g.dataBytes
			got := make([]byte, len(want))
			_, err = m.ReadAt(got, 0)
			require.NoError(t, err)
			require.Equal(t, -1, firstDifference(got[from:to], want[from:to]))
			require.NoError(t, d.CheckRowsOnce())
			for range 500 {
				off := from + rng.Int64N(m.g.dataBytes)
				b := make([]byte, min(rng.Int64N(9000), to-off))
				_, err := m.ReadAt(b, off)
				require.NoError(t, err)
				require.True(t, bytes.Equal(want[off:off+int64(len(b))], b), "%d at %d", len(b), off)
			}
			path := d.Path(dataset.FeaturesName)
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			raw[len(raw)-1] ^= 1
			require.NoError(t, os.WriteFile(path, raw, 0o644))
			again := datasettest.Open(t, d.Dir()) // which has checked no block yet
			require.NoError(t, again.CheckRowsOnce())
			m, err = NewComputed(bg, again, ComputedOptions{Stripes: 1, LBABytes: 512,
				Type: d.Meta.RowType(), NoSums: true})
			require.NoError(t, err)
			_, err = m.ReadAt(make([]byte, 1), from+(m.g.rows-1)/m.perUnit*m.unit)
			require.ErrorContains(t, err, path)
		})
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

func TestComputedEnds(t *testing.T) {
	d := hashed(t, 100, 8, 1, "hash")
	m, err := NewComputed(bg, d, ComputedOptions{Stripes: 1, LBABytes: 512})
	require.NoError(t, err)
	b := make([]byte, 100)
	n, err := m.ReadAt(b, m.Size()-40)
	require.Equal(t, 40, n)
	require.ErrorIs(t, err, io.EOF)
	_, err = m.ReadAt(b, m.Size()+1)
	require.Error(t, err)
	_, err = m.ReadAt(b, -1)
	require.Error(t, err)

	_, err = NewComputed(bg, d, ComputedOptions{Stripes: 1, LBABytes: 512, Bytes: m.Size() - 4096})
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	_, err = NewComputed(bg, d, ComputedOptions{Stripe: 2, Stripes: 2, LBABytes: 512})
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	_, err = NewComputed(bg, small(t, 100, 8, 1), ComputedOptions{Stripes: 1, LBABytes: 512})
	require.ErrorContains(t, err, "option feature-fn")
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err = NewComputed(ctx, d, ComputedOptions{Stripes: 1, LBABytes: 512})
	require.ErrorIs(t, err, context.Canceled)
}

// TestComputedHuge: a billion rows of 4 KiB over three SSDs, their sizes beyond 32 bits, with sums
// as given.
func TestComputedHuge(t *testing.T) {
	d := hashed(t, 10, 1024, 9, "hash")
	d.Meta.Nodes = 1_000_000_000 // only the SSD's content looks at it
	m, err := NewComputed(bg, d, ComputedOptions{Stripe: 1, Stripes: 3, LBABytes: 4096,
		Sums: &ComputedSums{}})
	require.NoError(t, err)
	require.Greater(t, m.Size(), int64(1_333_333_333_000))
	want, got := make([]byte, 4096), make([]byte, 4096)
	for _, row := range []int64{1, 4, 999_999_997, 500_000_002} {
		ssd, lba, blocks, _ := m.l.Locate(row)
		require.Equal(t, 1, ssd)
		require.EqualValues(t, 1, blocks)
		_, err := m.ReadAt(got, int64(lba+m.sb.DataLBA)*4096)
		require.NoError(t, err)
		d.FeatureFunc().Row(row, want)
		require.Equal(t, want, got)
	}
	// The last chunk's checksum, both ways.
	var sum [4]byte
	_, err = m.ReadAt(sum[:], int64(m.sb.TableLBA)*4096+4*(m.g.chunks-1))
	require.NoError(t, err)
	last := make([]byte, m.g.dataBytes-(m.g.chunks-1)*chunkBytes)
	_, err = m.ReadAt(last, headBytes+(m.g.chunks-1)*chunkBytes)
	require.NoError(t, err)
	p := newHeadway(&geometry{lbaBytes: 512, tableLBAs: 1})
	p.add(last, false)
	require.Equal(t, p.table[:4], sum[:])
}

// TestComputedThroughTheNVMeStack attaches and verifies, and writes, which is refused.
func TestComputedThroughTheNVMeStack(t *testing.T) {
	memory := total(hostmem.Usage())
	d := hashed(t, 5000, 150, 4, "hash:77")
	ctx, cancel := context.WithTimeout(bg, time.Minute)
	defer cancel()
	var ssds []*gpuio.SSD
	for i := range 3 {
		m, err := NewComputed(ctx, d, ComputedOptions{Stripe: i, Stripes: 3, LBABytes: 512})
		require.NoError(t, err)
		bus, err := proxy.Open(proxy.Config{Name: fmt.Sprintf("c%d", i),
			Serial: fmt.Sprintf("C%d", i), Content: m, Bytes: m.Size(), OutOfOrder: true})
		require.NoError(t, err)
		require.Equal(t, "computed", bus.Engine())
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		require.NoError(t, err)
		ssds = append(ssds, &gpuio.SSD{Ctrl: c, Name: fmt.Sprintf("c%d", i)})
	}
	a, err := Find(ctx, d, []*gpuio.SSD{ssds[2], ssds[0], ssds[1]}, AttachOptions{})
	require.NoError(t, err)
	for i, s := range a.SSDs {
		require.Same(t, ssds[i].Ctrl, s.Ctrl)
	}
	require.EqualValues(t, 5000, a.Layout.Rows)
	require.NoError(t, RowSums(ctx, d, ssds, make([]uint32, 5000)))
	r, err := Verify(ctx, d, ssds, VerifyOptions{Source: true})
	require.NoError(t, err)
	require.GreaterOrEqual(t, r.RowsCompared, int64(5000))
	require.EqualValues(t, 5000, r.RowsChecked)
	_, err = VerifySSDs(ctx, ssds[:1], VerifyOptions{})
	require.NoError(t, err)

	b, err := gpuio.NewBulk(ctx, ssds[0].Ctrl, 4)
	require.NoError(t, err)
	err = b.WriteAt(ctx, 0, make([]byte, 4096))
	var st *nvme.StatusError
	require.True(t, errors.As(err, &st), "%v", err)
	require.True(t, st.Status.Is(nvme.StatusNamespaceReadOnly), "%v", err)
	require.NoError(t, b.Flush(ctx))
	require.NoError(t, b.Close(ctx))
	log, err := ssds[0].Ctrl.SMART(ctx)
	require.NoError(t, err)
	require.EqualValues(t, nvme.WarnReadOnly, log.CriticalWarning)

	_, err = Load(ctx, d, ssds, LoadOptions{})
	require.ErrorContains(t, err, "write protected")
	for _, s := range ssds {
		require.NoError(t, s.Ctrl.Close(ctx))
	}
	require.Equal(t, memory, total(hostmem.Usage()))

	// Another function is another dataset.
	other := hashed(t, 5000, 150, 4, "hash:78")
	m, err := NewComputed(ctx, other, ComputedOptions{Stripes: 1, LBABytes: 512})
	require.NoError(t, err)
	bus, err := proxy.Open(proxy.Config{Name: "o", Serial: "O", Content: m, Bytes: m.Size()})
	require.NoError(t, err)
	c, err := nvme.Open(ctx, bus, nvme.Options{})
	require.NoError(t, err)
	_, err = Find(ctx, d, []*gpuio.SSD{{Ctrl: c, Name: "o"}}, AttachOptions{})
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.NoError(t, c.Close(ctx))
}

func BenchmarkFeatureFnRow(b *testing.B) {
	f := dataset.NewFeatureFunc(1, 1024, 1e9)
	dst := make([]byte, 4096)
	b.SetBytes(4096)
	for i := int64(0); b.Loop(); i++ {
		f.Row(i*2654435761%1e9, dst)
	}
}

func BenchmarkComputedChecksums(b *testing.B) {
	e := newRowEncoder(dataset.NewFeatureFunc(1, 1024, 1e9), rowtype.Float32)
	s := uint32(0)
	b.SetBytes(4096)
	for i := int64(0); b.Loop(); i++ {
		s = e.shift.apply(s) ^ e.raw(i)
	}
	crcSink = s
}

var crcSink uint32

// hashed generates a dataset with a feature function, or without one, and opens it.
func hashed(t testing.TB, nodes int64, dim int, seed uint64, fn string) *dataset.Dataset {
	t.Helper()
	out := filepath.Join(t.TempDir(), "d")
	require.NoError(t, build.Generate(bg, build.GenerateOptions{Kind: "sbm", Nodes: nodes, Dim: dim,
		Classes: int(min(nodes, 4)), AvgDegree: 3, Seed: seed, FeatureFn: fn, Out: out}))
	d, err := dataset.Open(out)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}
