package stripe

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/importer"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/simd"
	"helios/internal/testing/datasettest"
	"helios/nvme"
)

// halves imports a dataset of float16 rows; dim is odd, so that rows are padded where they are
// stored.
func halves(t testing.TB, nodes, dim int) *dataset.Dataset {
	t.Helper()
	x := make([]uint16, nodes*dim)
	for i := range x {
		x[i] = uint16(i*7) % 0x7c00
	}
	labels := make([]int32, nodes)
	for i := range labels {
		labels[i] = int32(i % 3)
	}
	in := datasettest.WriteDir(t, map[string]datasettest.Arr{
		"features":   {DT: "<f2", Shape: []int64{int64(nodes), int64(dim)}, Data: x},
		"labels":     {DT: "<i4", Shape: []int64{int64(nodes)}, Data: labels},
		"edge_index": {DT: "<i8", Shape: []int64{2, 2}, Data: []int64{0, 1, 1, 2}},
	})
	out := filepath.Join(t.TempDir(), "g")
	require.NoError(t, importNPY(importer.Options{Input: importer.Input{In: in},
		Output: importer.Output{Out: out}}))
	return datasettest.Open(t, out)
}

// TestLoadRowTypes: for each type, rows lie where the layout says, as Encode makes them; checksums
// of rows are over those bytes; attach tells the type; verify compares and finds.
func TestLoadRowTypes(t *testing.T) {
	for name, d := range map[string]*dataset.Dataset{"float32": small(t, 700, 37, 1),
		"float16": halves(t, 700, 37)} {
		src := datasettest.WideRows(t, d)
		for _, rt := range rowtype.Types() {
			t.Run(fmt.Sprintf("%s as %s", name, rt), func(t *testing.T) {
				s := sims(2, 512)
				r, err := load(bg, d, targetsOf(s...), LoadOptions{RowType: rt.String()})
				require.NoError(t, err)
				require.Equal(t, rt.String(), r.RowDType)
				require.Equal(t, rt.RowBytes(37), r.RowBytes)
				row := rt.RowBytes(37)
				want, scales := make([]byte, 700*row), make([]float32, 700)
				for v := range 700 {
					scales[v], err = rt.Encode(want[v*row:(v+1)*row], src[v*37:(v+1)*37])
					require.NoError(t, err)
				}
				stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
				require.NoError(t, err)
				require.Equal(t, rt, stripes[0].sb.RowType)
				l := stripes[0].sb.layout()
				sums, err := rowSums(bg, d, stripes)
				require.NoError(t, err)
				if rt.Scaled() {
					require.Equal(t, scales, scalesOf(t, d, stripes))
					require.EqualValues(t, 2*4096/2, r.RowScales)
				} else {
					require.Zero(t, r.RowScales)
				}
				for v := range int64(700) {
					i, lba, blocks, off := l.Locate(v)
					buf := make([]byte, int(blocks)*512)
					require.NoError(t, stripes[i].t.dev.ReadAt(bg, stripes[i].sb.DataLBA+lba, buf))
					w := want[int(v)*row : int(v+1)*row]
					require.Equal(t, w, buf[off:int(off)+row], "row %d", v)
					require.Equal(t, crc32.Checksum(w, castagnoli), sums[v])
				}
				got, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
				require.NoError(t, err)
				require.EqualValues(t, 700, got.RowsCompared)
				require.EqualValues(t, 700, got.RowsChecked)
				require.Equal(t, rt.String(), got.RowDType)
				require.Equal(t, row, got.RowBytes)
				alone, err := verifyEach(bg, targetsOf(s...), VerifyOptions{})
				require.NoError(t, err)
				require.Equal(t, rt.String(), alone.RowDType)
				// A byte of a row changes.
				_, lba, _, off := l.Locate(0)
				s[0].durable[int64(stripes[0].sb.DataLBA+lba)*512+int64(off)+1] ^= 4
				got, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
				require.Equal(t, errs.Device, errs.ClassOf(err))
				require.Equal(t, []int64{0}, got.Bad[0].Rows)
				require.Contains(t, got.Bad[len(got.Bad)-1].What, "row 0 differs from")
			})
		}
	}
}

func scalesOf(t *testing.T, d *dataset.Dataset, stripes []stripe) []float32 {
	t.Helper()
	got := make([]float32, stripes[0].sb.Rows)
	require.NoError(t, eachTable(bg, d, stripes, func(v int64, _ uint32, scale float32) {
		got[v] = scale
	}))
	return got
}

// TestScales: rows of 256 int8 features take 256 bytes; their scales lie in the row table, with and
// without checksums of rows, and damage to them is found: by the table's checksum, or, where that
// was made to fit, by the source.
func TestScales(t *testing.T) {
	d := small(t, 3000, 256, 1)
	src := datasettest.WideRows(t, d)
	for _, sums := range []bool{true, false} {
		s := sims(2, 512)
		r, err := load(bg, d, targetsOf(s...), LoadOptions{RowType: "int8", NoRowChecksums: !sums})
		require.NoError(t, err)
		require.Equal(t, []int{256, 2}, []int{r.RowBytes, r.RowsPerLBA})
		require.Equal(t, sums, r.RowChecksums > 0)
		stripes, err := attach(bg, d, targetsOf(s...), AttachOptions{})
		require.NoError(t, err)
		got, tmp := scalesOf(t, d, stripes), make([]byte, 256)
		for v := range 3000 {
			scale, err := rowtype.Int8.Encode(tmp, src[v*256:(v+1)*256])
			require.NoError(t, err)
			require.Equal(t, scale, got[v])
		}
		_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
		require.NoError(t, err)

		sb := stripes[0].sb
		table := s[0].durable[int64(sb.RowTableLBA)*512:][:1500*sb.rowEntry()]
		table[sb.rowEntry()*11-2] ^= 1 // of slot 10, which is row 20
		err = eachTable(bg, d, stripes, func(int64, uint32, float32) {})
		require.ErrorIs(t, err, errTable)
		require.ErrorContains(t, err, "ssd sim0: "+sb.rowTableName()+": damaged table: CRC32C")
		require.Equal(t, errs.Device, errs.ClassOf(err))
		_, err = verify(bg, d, targetsOf(s...), VerifyOptions{})
		require.ErrorContains(t, err, sb.rowTableName()+": damaged table")
		reseal(t, s[0], func(w *wireSuperblock) {
			w.RowTableCRC = crc32.Checksum(table, castagnoli)
		})
		_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
		require.ErrorContains(t, err, "the scale of row 20 differs from ")
	}
}

// TestOldScales: a stripe whose int8 rows begin with their scales, as up to version 3, is refused
// by name wherever it is looked at, and loaded over only with consent.
func TestOldScales(t *testing.T) {
	d := small(t, 300, 16, 1)
	s := sims(1, 512)
	must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "int8"}))
	reseal(t, s[0], func(w *wireSuperblock) { w.Version = versionRowTypes })
	_, err := attach(bg, d, targetsOf(s...), AttachOptions{})
	require.ErrorContains(t, err, "int8 rows begin with their scales")
	require.ErrorContains(t, err, "heliosctl load --row-dtype int8")
	require.Equal(t, errs.Device, errs.ClassOf(err))
	_, err = load(bg, d, targetsOf(s...), LoadOptions{RowType: "int8"})
	require.ErrorContains(t, err, "int8 rows begin with their scales")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "int8", Force: "SER0"}))
	_, err = verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
	require.NoError(t, err)
}

// TestFloat32StaysVersion1: stripes of float32 rows are what they were before there were other
// types, to the byte.
func TestFloat32StaysVersion1(t *testing.T) {
	s := sealed(t, small(t, 300, 16, 1), 1)[0]
	var w wireSuperblock
	_, err := binary.Decode(s.durable[:superblockBytes], binary.LittleEndian, &w)
	require.NoError(t, err)
	require.Equal(t, []uint32{1, 1, 0}, []uint32{w.Version, w.DType, w.StoredDType})
	require.Zero(t, w.Scale)
	require.Zero(t, w.Zero)
	require.Equal(t, [179]byte{}, w.Reserved)
	// And one that a version 1 has written says float32, whatever its reserved fields hold.
	reseal(t, s, func(w *wireSuperblock) { w.StoredDType = 3 })
	sb, err := decodeSuperblock(s.durable[:superblockBytes])
	require.NoError(t, err)
	require.Equal(t, rowtype.Float32, sb.RowType)
}

func TestRowTypeFields(t *testing.T) {
	d := small(t, 300, 16, 1)
	for name, c := range map[string]struct {
		change func(w *wireSuperblock)
		want   string
	}{
		"unknown": {func(w *wireSuperblock) { w.StoredDType = 5 },
			"stored dtype 5, this heliosctl knows 1 to 4"},
		"unknown own":     {func(w *wireSuperblock) { w.DType = 9 }, "dtype 9"},
		"a scale for all": {func(w *wireSuperblock) { w.Scale = 0.5 }, "row type is impossible"},
		"a zero point":    {func(w *wireSuperblock) { w.Zero = 1 }, "row type is impossible"},
		"says itself twice": {func(w *wireSuperblock) { w.StoredDType, w.Scale = 1, 0 },
			"row type is impossible"},
		"scales of float16": {func(w *wireSuperblock) { w.StoredDType, w.Scale = 2, 1 },
			"row type is impossible"},
		"version 1, float16": {func(w *wireSuperblock) { w.Version, w.DType = 1, 2 }, "dtype 2"},
	} {
		t.Run(name, func(t *testing.T) {
			s := sims(1, 512)
			must(load(bg, d, targetsOf(s...), LoadOptions{RowType: "int8"}))
			reseal(t, s[0], c.change)
			_, err := attach(bg, d, targetsOf(s...), AttachOptions{})
			require.ErrorContains(t, err, c.want)
			require.Equal(t, errs.Device, errs.ClassOf(err))
		})
	}
}

// TestLoadRefusesValues: a value that the type cannot hold ends the load with its row and the next
// step, and nothing can be attached then.
func TestLoadRefusesValues(t *testing.T) {
	d := small(t, 300, 16, 1)
	datasettest.Unseal(t, d.Dir()) // the values are not damage
	b, err := os.ReadFile(d.Path(dataset.FeaturesName))
	require.NoError(t, err)
	start := len(b) - 300*64 + 217*64 + 3*4
	for _, c := range []struct {
		x    float32
		rt   string
		want string
	}{
		{70000, "float16",
			"row 217: feature 3 is 70000, which float16 cannot hold (it ends at 65504); use option row-dtype bfloat16"},
		{math.MaxFloat32, "bfloat16",
			"row 217: feature 3 is 3.4028235e+38, which bfloat16 cannot hold; use option row-dtype float32"},
		{float32(math.NaN()), "int8",
			"row 217: feature 3 is NaN, which int8 cannot hold; replace it with a number"},
		{float32(math.Inf(1)), "int8",
			"row 217: feature 3 is +Inf, which int8 cannot hold; replace it"},
	} {
		binary.LittleEndian.PutUint32(b[start:], math.Float32bits(c.x))
		require.NoError(t, os.WriteFile(d.Path(dataset.FeaturesName), b, 0o600))
		e := datasettest.Open(t, d.Dir())
		s := sims(2, 512)
		_, err := load(bg, e, targetsOf(s...), LoadOptions{RowType: c.rt})
		require.ErrorContains(t, err, c.want)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
		_, err = attach(bg, e, targetsOf(s...), AttachOptions{})
		require.ErrorContains(t, err, "did not finish")
	}
	_, err = load(bg, d, targetsOf(sims(1, 512)...), LoadOptions{RowType: "int4"})
	require.ErrorContains(t, err, "float32, float16, bfloat16, int8")
	datasettest.RequireUsage(t, err)
}

// TestResumeRowType: an interrupted load of the same type is resumed, to the same bytes; one of
// another type starts over.
func TestResumeRowType(t *testing.T) {
	d := small(t, 30_000, 64, 1)
	for _, c := range [][2]string{{"float16", "float16"}, {"float16", "bfloat16"},
		{"float16", "float32"}, {"int8", "int8"}} {
		was, next := c[0], c[1]
		if was == "int8" { // as many bytes
			d = small(t, 30_000, 128, 1)
		}
		whole := junkSims()
		must(load(bg, d, targetsOf(whole...), LoadOptions{Force: "SER0,SER1", RowType: was}))
		s := interrupted(t, d, 1, LoadOptions{RowType: was})
		_, err := attach(bg, d, targetsOf(s...), AttachOptions{})
		require.ErrorContains(t, err, `run "heliosctl load --dataset `+d.Dir()+
			` --row-dtype `+was+`"`)
		r, err := load(bg, d, targetsOf(s...), often(LoadOptions{RowType: next}))
		require.NoError(t, err)
		if next == was {
			require.Positive(t, r.ResumedBytes)
			require.Empty(t, r.StartedOver)
			for i := range s {
				s[i] = s[i].clone()
			}
			a, b := whole[0].clone(), s[0].clone()
			sameLoad(t, a, b)
			sb, err := decodeSuperblock(a.durable[:superblockBytes])
			require.NoError(t, err)
			end := (int(sb.RowTableLBA) + int(sb.RowTableLBAs)) * 512
			require.Greater(t, end, headBytes+int(r.DataBytes/2))
			require.True(t, bytes.Equal(a.durable[headBytes:end], b.durable[headBytes:end]))
			continue
		}
		require.Zero(t, r.ResumedBytes)
		require.Equal(t,
			fmt.Sprintf("ssd sim0 was being loaded with rows of float16, now they are %s", next),
			r.StartedOver)
		v, err := verify(bg, d, targetsOf(s...), VerifyOptions{Source: true})
		require.NoError(t, err)
		require.Equal(t, next, v.RowDType)
	}
}

// TestImportFloat16: features keep their type.
func TestImportFloat16(t *testing.T) {
	d := halves(t, 50, 5)
	require.Equal(t, rowtype.Float16, d.Meta.RowType())
	require.Equal(t, 12, d.Meta.RowBytes())
	rows := make([]byte, 3*12)
	require.NoError(t, d.ReadRows(47, rows))
	for v := range 3 {
		for k := range 5 {
			require.EqualValues(t, uint16(((47+v)*5+k)*7)%0x7c00,
				binary.LittleEndian.Uint16(rows[12*v+2*k:]))
		}
		require.Zero(t, binary.LittleEndian.Uint16(rows[12*v+10:]), "padding")
	}
	var wide [5]float32
	rowtype.Float16.Decode(simd.Generic, wide[:], rows, 1)
	require.Equal(t, datasettest.WideRows(t, d)[47*5:48*5], wide[:])
	fi, err := os.Stat(d.Path(dataset.FeaturesName))
	require.NoError(t, err)
	require.Less(t, fi.Size(), int64(50*5*2+200))
}

// TestAttachTellsTheType through the NVMe stack, where the CLI and training get it.
func TestAttachTellsTheType(t *testing.T) {
	d := small(t, 500, 40, 1)
	ssds, off := openProxies(t, backing(t, 2, true, 16<<20), true, 512, "")
	defer off()
	_, err := Load(bg, d, ssds, LoadOptions{RowType: "bfloat16"})
	require.NoError(t, err)
	a, err := Find(bg, d, ssds, AttachOptions{})
	require.NoError(t, err)
	require.Equal(t, rowtype.BFloat16, a.RowType)
	require.EqualValues(t, 80, a.Layout.RowBytes)
	require.Len(t, a.SSDs, 2)
	require.NotEqual(t, nvme.LBA(0), a.SSDs[0].DataStart)
	c, _, err := Contents(bg, ssds[1])
	require.NoError(t, err)
	require.Equal(t, rowtype.BFloat16, c[0].RowType)
}

func importNPY(o importer.Options) error {
	return importer.NPY(bg, importer.NPYOptions{Options: o})
}
