package stripe

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
	"helios/nvme"
)

// wantSums are the checksums of a dataset's rows, from features.npy.
func wantSums(t testing.TB, d *dataset.Dataset) []uint32 {
	b := datasettest.AllRows(t, d)
	row := d.Meta.RowBytes()
	sums := make([]uint32, d.Meta.Nodes)
	for i := range sums {
		sums[i] = crc32.Checksum(b[i*row:][:row], crc32.MakeTable(crc32.Castagnoli))
	}
	return sums
}

// Where memory has no room for the checksums of rows, they are not read, and verify says that it
// does without.
func TestRowSumsNeedMemory(t *testing.T) {
	d := small(t, 3000, 16, 1)
	ts := targetsOf(sealed(t, d, 2)...)
	was := refuseSumsFrom
	refuseSumsFrom = 0
	t.Cleanup(func() { refuseSumsFrom = was })
	stripes, err := attach(bg, d, ts, AttachOptions{})
	require.NoError(t, err)
	_, err = rowSums(bg, d, stripes)
	require.Equal(t, errs.Capability, errs.ClassOf(err))
	require.ErrorContains(t, err, "3000 rows take 12000 bytes")
	v, err := verify(bg, d, ts, VerifyOptions{})
	require.NoError(t, err)
	require.Zero(t, v.RowsChecked)
	require.NotZero(t, v.Chunks)
	require.Contains(t, v.Notes[0], "by the checksums of their chunks only")
}

// TestRowSums: what load has written is what attach gives, for every layout and order of SSDs; the
// tables are where the superblock says and take no more than 4 bytes a row, rounded up to 4 KiB.
func TestRowSums(t *testing.T) {
	for _, c := range []struct {
		nodes int64
		dim   int
	}{{3000, 16}, {3000, 100}, {300, 1024}, {300, 1100}, {3, 7}, {300_000, 1}} {
		d := small(t, c.nodes, c.dim, 1)
		want := wantSums(t, d)
		for _, lba := range []int{512, 4096} {
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%d rows of %d/%d/%d", c.nodes, c.dim*4, lba, n),
					func(t *testing.T) {
						s := sims(n, lba)
						r, err := load(bg, d, targetsOf(s...), LoadOptions{})
						require.NoError(t, err)
						require.LessOrEqual(t, r.RowChecksums, c.nodes*4+int64(n)*4095)
						require.GreaterOrEqual(t, r.RowChecksums, c.nodes*4)
						ts := targetsOf(s...)
						ts[0], ts[n-1] = ts[n-1], ts[0]
						stripes, err := attach(bg, d, ts, AttachOptions{})
						require.NoError(t, err)
						got, err := rowSums(bg, d, stripes)
						require.NoError(t, err)
						require.Equal(t, want, got)
						for _, x := range stripes {
							require.Equal(t, x.sb.TableLBA+nvme.LBA(x.sb.TableLBAs),
								x.sb.RowTableLBA)
							require.Zero(t, int64(x.sb.RowTableLBA)*int64(lba)%alignBytes)
							require.Zero(t, x.sb.RowTableLBAs*int64(lba)%alignBytes)
						}
						v, err := verify(bg, d, ts, VerifyOptions{})
						require.NoError(t, err)
						require.Equal(t, c.nodes, v.RowsChecked)
					})
			}
		}
	}
}

// TestWithoutRowSums: a stripe without them is what every earlier heliosctl wrote: the same bytes
// in the superblock. It attaches and verifies, and only checked reads are refused.
func TestWithoutRowSums(t *testing.T) {
	d := small(t, 3000, 256, 1)
	s := sims(2, 512)
	r, err := load(bg, d, targetsOf(s...), LoadOptions{NoRowChecksums: true})
	require.NoError(t, err)
	require.Zero(t, r.RowChecksums)
	for _, x := range s {
		for _, start := range []int{0, len(x.durable) - superblockBytes} {
			require.Equal(t, make([]byte, crcOffset-248), x.durable[start+248:start+crcOffset],
				"what was reserved is zero")
		}
	}
	v, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.NoError(t, err)
	require.Zero(t, v.RowsChecked)
	stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	_, err = rowSums(bg, d, stripes)
	require.ErrorContains(t, err, "ssd sim0: stripe 0 of "+d.Dir()+
		" has no row checksums; load it again with \"heliosctl load --dataset "+d.Dir()+
		" --row-checksums\"")
	require.Equal(t, errs.Device, errs.ClassOf(err))

	// A load with them over it, and one without over that.
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	v, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 3000, v.RowsChecked)
	must(load(bg, d, targetsOf(s...), LoadOptions{NoRowChecksums: true}))
	v, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
	require.NoError(t, err)
	require.Zero(t, v.RowsChecked)
}

// TestOlderVersionIgnoresRowSums: to a version 1 that knows no row table a stripe with one is
// whole: it looks at all fields but these, and where it places things nothing has moved.
func TestOlderVersionIgnoresRowSums(t *testing.T) {
	l, err := gpuio.NewLayout(1234, 400, 3, 512)
	require.NoError(t, err)
	with, err := newGeometry(l, 2, 512, 1<<20, 4)
	require.NoError(t, err)
	without, err := newGeometry(l, 2, 512, 1<<20, 0)
	require.NoError(t, err)
	require.Less(t, without.needBytes, with.needBytes)
	with.rowTableLBA, with.rowTableLBAs, with.rowEntry = 0, 0, 0
	with.needBytes = without.needBytes
	require.Equal(t, without, with)
	require.EqualValues(t, 1, superblockVersion, "the row table is optional: see superblockVersion")
}

// TestRowTableFields: a row table is believed only where it must be, and only of a kind that is
// known.
func TestRowTableFields(t *testing.T) {
	d := small(t, 300, 16, 1)
	s := sealed(t, d, 1)[0]
	for name, c := range map[string]struct {
		change func(*wireSuperblock)
		want   string
	}{
		"moved": {func(w *wireSuperblock) { w.RowTableLBA++ }, "row table is impossible"},
		"longer": {func(w *wireSuperblock) { w.RowTableLBAs = 1 << 40 },
			"row table is impossible"},
		"left behind": {func(w *wireSuperblock) { w.RowChecksum = 0 },
			"row table is impossible"},
		"other kind": {func(w *wireSuperblock) { w.RowChecksum = 2 },
			"row checksum kind 2, this heliosctl knows 1; use the heliosctl that wrote it"},
	} {
		t.Run(name, func(t *testing.T) {
			b := append([]byte(nil), s.durable[:superblockBytes]...)
			var w wireSuperblock
			_, err := binary.Decode(b, binary.LittleEndian, &w)
			require.NoError(t, err)
			c.change(&w)
			w.CRC = 0
			_, err = binary.Encode(b, binary.LittleEndian, &w)
			require.NoError(t, err)
			binary.LittleEndian.PutUint32(b[crcOffset:], crc32.Checksum(b, castagnoli))
			_, err = decodeSuperblock(b)
			require.ErrorContains(t, err, c.want)
		})
	}
}

// TestVerifyNamesRows: rows that no longer have their checksum are named, also where the chunk's
// own checksum was made to fit, and where they lie across two chunks; a damaged row table is a
// finding, and RowSums refuses it.
func TestVerifyNamesRows(t *testing.T) {
	d := small(t, 2000, 700, 1) // rows of 2800 bytes in 3072: some lie across chunks
	big := func() []*simSSD { return []*simSSD{newSim(16<<20/512, 512), newSim(16<<20/512, 512)} }
	s := big()
	must(load(bg, d, targetsOf(s...), LoadOptions{}))
	for i := range s {
		s[i] = s[i].clone()
	}
	st, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.NoError(t, err)
	l := st[0].sb.layout()

	across := int64(chunkBytes / 3072) // 341: bytes 1047552 to 1050352 hold 1048576
	hit := s[1].clone()
	for _, slot := range []int64{5, across, 400} {
		hit.durable[headBytes+slotOffset(l, slot)+100] ^= 1
	}
	r, err := verify(bg, d, targetsOf(s[0], hit), VerifyOptions{})
	require.Error(t, err)
	require.EqualValues(t, 3, r.BadRows)
	require.EqualValues(t, 2000, r.RowsChecked)
	require.Len(t, r.Bad, 2)
	require.Equal(t, []int64{5*2 + 1}, r.Bad[0].Rows)
	require.Equal(t, []int64{across*2 + 1, 400*2 + 1}, r.Bad[1].Rows)
	require.Contains(t, r.Bad[1].What, fmt.Sprintf("rows %d, 801 are not what their checksums say",
		across*2+1))

	// The chunk's sum says it is well, as after a load that had the wrong bytes in its hands.
	chunk := hit.durable[headBytes : headBytes+chunkBytes]
	table := hit.durable[int64(st[1].sb.TableLBA)*512:]
	binary.LittleEndian.PutUint32(table, crc32.Checksum(chunk, castagnoli))
	r, err = verify(bg, d, targetsOf(s[0], hit), VerifyOptions{})
	require.Error(t, err)
	require.EqualValues(t, 3, r.BadRows)

	// Many bad rows are counted, and the first ones named.
	for i := range chunk {
		chunk[i] ^= 0xff
	}
	r, err = verify(bg, d, targetsOf(s[0], hit), VerifyOptions{})
	require.Error(t, err)
	require.EqualValues(t, across+2, r.BadRows)
	require.Len(t, r.Bad[1].Rows, maxBadRows, "%+v", r.Bad)
	require.Contains(t, r.Bad[1].What, fmt.Sprintf("and %d more", across-maxBadRows))

	// A row that could not be read is no bad row, nor is one that lies half in it.
	lost := s[0].clone()
	lost.readFail = func(lba int64) error {
		if lba == headBytes/512+3 {
			return errPowerLoss
		}
		return nil
	}
	r, err = verify(bg, d, targetsOf(lost, s[1]), VerifyOptions{})
	require.Error(t, err)
	require.Zero(t, r.BadRows)
	require.EqualValues(t, 2000-across-1, r.RowsChecked)

	torn := s[0].clone()
	torn.durable[int64(st[0].sb.RowTableLBA)*512+77] ^= 1
	r, err = verify(bg, d, targetsOf(torn, s[1]), VerifyOptions{})
	require.ErrorContains(t, err, "row checksums: damaged table: CRC32C")
	require.EqualValues(t, -1, r.Bad[0].Chunk)
	require.EqualValues(t, 1000, r.RowsChecked, "of the other SSD")
	st, err = attach(bg, d, targetsOf(torn, s[1]), AttachOptions{})
	require.NoError(t, err)
	_, err = rowSums(bg, d, st)
	require.ErrorIs(t, err, errTable)
	require.ErrorContains(t, err, "ssd sim0: row checksums: ")
	require.ErrorContains(t, err, "heliosctl verify --dataset "+d.Dir())
	require.Equal(t, errs.Device, errs.ClassOf(err))

	ctx, cancel := context.WithCancel(bg)
	torn.readFail = func(int64) error { cancel(); return ctx.Err() }
	_, err = rowSums(ctx, d, st)
	require.ErrorIs(t, err, context.Canceled)
}

// TestRowSumsThroughTheNVMeStack: the way that train takes.
func TestRowSumsThroughTheNVMeStack(t *testing.T) {
	d := small(t, 1500, 100, 1)
	ssds, done := openProxies(t, backing(t, 2, true, 16<<20), true, 512, "")
	defer done()
	_, err := Load(bg, d, ssds, LoadOptions{})
	require.NoError(t, err)
	got := make([]uint32, d.Meta.Nodes)
	require.NoError(t, RowSums(bg, d, []*gpuio.SSD{ssds[1], ssds[0]}, got))
	require.Equal(t, wantSums(t, d), got)
}

// The checksums of lines are those of what is on the SSDs, however rows lie in them; where the last
// row of an SSD is not what load has written, its line has none.
func TestLineSums(t *testing.T) {
	for _, c := range []struct {
		dim, ssds           int
		perLine, stride, of int64 // rows, bytes between them, bytes of the line
	}{
		{64, 1, 16, 256, 4096}, {64, 3, 32, 256, 8192}, {128, 2, 8, 512, 4096}, // whole LBAs
		{25, 3, 5, 100, 512},                             // an LBA with padding behind its rows
		{200, 2, 4, 1024, 4096}, {333, 3, 3, 1536, 4608}, // rows with padding
	} {
		d := small(t, 1000, c.dim, 1)
		s := sealed(t, d, c.ssds)
		stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
		require.NoError(t, err)
		rows, err := rowSums(bg, d, stripes)
		require.NoError(t, err)
		n := int64(c.ssds)
		lines := ((1000+n-1)/n + c.perLine - 1) / c.perLine
		l := Lines{Rows: c.perLine, Stride: c.stride}
		l.Layout, err = gpuio.NewLayout(lines*n, int(c.of), c.ssds, 512)
		require.NoError(t, err)
		got := make([]uint32, lines*n)
		require.NoError(t, lineSums(bg, stripes, l, rows, got))
		for i, x := range s {
			for k := range (stripes[i].sb.layout().RowsOn(i) + c.perLine - 1) / c.perLine {
				b := x.durable[headBytes+k*c.of:][:c.of]
				require.Equal(t, crc32.Checksum(b, castagnoli), got[k*n+int64(i)], "%+v: line %d of %d",
					c, k, i)
			}
		}
		if 1000/n%c.perLine == 0 {
			continue
		}
		last := stripes[0].sb.layout().RowsOn(0) - 1
		s[0].durable[headBytes+last/c.perLine*c.of+last%c.perLine*c.stride] ^= 1
		err = lineSums(bg, stripes, l, rows, got)
		require.Equal(t, errs.Device, errs.ClassOf(err))
		require.ErrorContains(t, err, fmt.Sprintf("row %d, in the line", last*n))
	}
}
