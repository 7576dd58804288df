package pages

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
)

var bg = context.Background()

var testID = uuid.MustParse("5c5f7f0e-3a43-4bd1-9c3d-0a4f3b1d7e55")

// content returns the content of page p of the tests.
func content(p, pageBytes int64) []byte {
	b := make([]byte, pageBytes)
	rng := rand.New(rand.NewPCG(uint64(p), 7))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64())
	}
	return b
}

// fill writes all pages in a random order, some together.
func fill(t testing.TB, f *Folder, seed uint64) {
	t.Helper()
	s := f.Spec()
	rng := rand.New(rand.NewPCG(seed, 1))
	var runs [][2]int64
	for p := int64(0); p < s.Pages; {
		n := min(1+rng.Int64N(9), s.Pages-p)
		runs = append(runs, [2]int64{p, n})
		p += n
	}
	rng.Shuffle(len(runs), func(i, j int) { runs[i], runs[j] = runs[j], runs[i] })
	for _, r := range runs {
		var b []byte
		for p := r[0]; p < r[0]+r[1]; p++ {
			b = append(b, content(p, s.PageBytes)...)
		}
		require.NoError(t, f.WriteAt(bg, r[0], b))
	}
}

func made(t testing.TB, s Spec) string {
	t.Helper()
	dir, err := os.MkdirTemp(datasettest.DiskDir, "helios-pages-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	f, err := CreateFolder(dir, s)
	require.NoError(t, err)
	require.False(t, f.Resumed())
	fill(t, f, 3)
	require.NoError(t, f.Finish(bg))
	require.NoError(t, f.Close())
	return dir
}

// TestStacksReadPages: every I/O stack, checked and not, gives the pages that were written.
func TestStacksReadPages(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	for _, size := range []int64{4096, 8192, 20480, 3 << 20} {
		s := Spec{testID, size, 97}
		dir := made(t, s)
		n, err := VerifyFolder(bg, dir, &s, nil)
		require.NoError(t, err)
		require.Equal(t, s.Pages, n)
		for _, stack := range gpuio.Stacks() {
			t.Run(fmt.Sprintf("%d/%s", size, stack.Name), func(t *testing.T) {
				o, err := OpenFolder(bg, dir, s, OpenOptions{})
				require.NoError(t, err)
				defer func() { require.NoError(t, o.Close(bg)) }()
				r, err := stack.Open(dev, o.SSDs, o.Layout, o.Options(gpuio.StackOptions{}))
				require.NoError(t, err)
				sums, err := o.Sums(bg)
				require.NoError(t, err)
				r, err = gpuio.NewChecked(dev, r, o.SSDs, o.Layout, sums)
				require.NoError(t, err)
				defer func() { require.NoError(t, r.Close(bg)) }()
				pages := []int64{96, 0, 1, 2, 3, 4, 5, 50, 51, 52, 7}
				got, st, err := datasettest.ReadRows(t, dev, r, o.Layout, pages)
				require.NoError(t, err)
				for i, p := range pages {
					require.True(t, bytes.Equal(content(p, size), got[int64(i)*size:][:size]),
						"page %d", p)
				}
				require.EqualValues(t, len(pages), st.Rows)
			})
		}
	}
}

// TestDamageIsNamed: a file that is cut short, flipped, another pack's or made up is an error that
// names the place.
func TestDamageIsNamed(t *testing.T) {
	testrig.CheckLeaks(t)
	s := Spec{testID, 8192, 40}
	path := func(dir, name string) string { return filepath.Join(dir, name) }
	flip := func(name string, offset int64) func(dir string) error {
		return func(dir string) error {
			datasettest.FlipBit(t, path(dir, name), offset)
			return nil
		}
	}
	other := s
	other.ID = uuid.MustParse("00000000-0000-4000-8000-000000000001")
	for name, c := range map[string]struct {
		spoil func(dir string) error
		open  string // what OpenFolder says; "": it finds nothing
		all   string // what VerifyFolder says
		class errs.Class
	}{
		"flipped page": {flip(PagesName, 14*8192+77), "", "page 14 (bytes from 114688 on)",
			errs.Device},
		"flipped first page": {flip(PagesName, 5), "page 0", "page 0", errs.Device},
		"flipped header":     {flip(SumsName, 33), "its header has CRC32C", "its header", errs.Device},
		"flipped magic":      {flip(SumsName, 0), "does not begin", "does not begin", errs.Device},
		"flipped table":      {flip(SumsName, 4096+8), "its table has CRC32C", "its table", errs.Device},
		"cut pages": {func(d string) error { return os.Truncate(path(d, PagesName), 8192*39) },
			"it has 319488 bytes and should have 327680", "it has 319488 bytes", errs.Device},
		"cut table": {func(d string) error { return os.Truncate(path(d, SumsName), 4096+156) },
			"it has 4252 bytes and should have 4256", "should have 4256", errs.Device},
		"cut header": {func(d string) error { return os.Truncate(path(d, SumsName), 100) },
			"its header cannot be read", "its header", errs.Device},
		"longer pages": {func(d string) error { return os.Truncate(path(d, PagesName), 8192*41) },
			"should have 327680", "should have 327680", errs.Device},
		"no pages": {func(d string) error { return os.Remove(path(d, PagesName)) },
			"no such file", "no such file", errs.Device},
		"no table": {func(d string) error { return os.Remove(path(d, SumsName)) },
			"there are no pages", "no such file", errs.Usage},
		"pages of another pack": {func(d string) error {
			f, err := CreateFolder(d+"/x", other)
			if err == nil {
				err = errors.Join(f.Finish(bg), f.Close(),
					os.Rename(d+"/x/"+PagesName, path(d, PagesName)))
			}
			return err
		}, "page 0", "40 of 40 pages are wrong", errs.Device},
		"folder of another pack": {func(d string) error {
			f, err := CreateFolder(d+"/x", other)
			if err == nil {
				err = errors.Join(f.Finish(bg), f.Close(), os.Rename(d+"/x/"+SumsName,
					path(d, SumsName)))
			}
			return err
		}, "of pack 00000000-", "of pack 00000000-", errs.Refused},
		"a folder in its place": {func(d string) error {
			return errors.Join(os.Remove(path(d, PagesName)), os.Mkdir(path(d, PagesName), 0o700))
		}, "a regular file is needed", "a regular file is needed", errs.Device},
	} {
		t.Run(name, func(t *testing.T) {
			dir := made(t, s)
			require.NoError(t, os.Mkdir(filepath.Join(dir, "x"), 0o700))
			require.NoError(t, c.spoil(dir))
			_, err := VerifyFolder(bg, dir, &s, nil)
			require.ErrorContains(t, err, c.all)
			o, err := OpenFolder(bg, dir, s, OpenOptions{})
			if c.open == "" {
				require.NoError(t, err)
				require.NoError(t, o.Close(bg))
				return
			}
			require.ErrorContains(t, err, c.open)
			require.Equal(t, c.class, errs.ClassOf(err), "%v", err)
			require.ErrorContains(t, err, dir)
		})
	}
}

// TestCheckedReadsFindFlips: a reader with checks names the page that was flipped after opening.
func TestCheckedReadsFindFlips(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	s := Spec{testID, 4096, 64}
	dir := made(t, s)
	o, err := OpenFolder(bg, dir, s, OpenOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close(bg)) }()
	datasettest.FlipBit(t, filepath.Join(dir, PagesName), 33*4096)
	for _, name := range []string{gpuio.StackAsync, gpuio.StackCPU} {
		stack, err := gpuio.FindStack(name)
		require.NoError(t, err)
		r, err := stack.Open(dev, o.SSDs, o.Layout, o.Options(gpuio.StackOptions{}))
		require.NoError(t, err)
		sums, err := o.Sums(bg)
		require.NoError(t, err)
		r, err = gpuio.NewChecked(dev, r, o.SSDs, o.Layout, sums)
		require.NoError(t, err)
		_, _, err = datasettest.ReadRows(t, dev, r, o.Layout, []int64{32, 33, 34})
		var sum *gpuio.ChecksumError
		require.ErrorAs(t, err, &sum)
		require.EqualValues(t, 33, sum.Row)
		require.ErrorContains(t, err, "prepare it again")
		require.ErrorContains(t, err, filepath.Join(dir, PagesName))
		require.NoError(t, r.Close(bg))
	}
}

// TestFaultsStrikePages: injected faults come to a reader of pages, and transient ones are mended.
func TestFaultsStrikePages(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	s := Spec{testID, 4096, 64}
	dir := made(t, s)
	for text, want := range map[string]string{
		"error(op=read,lba=33-33,sct=2,sc=0x81,dnr=1)":         "unrecovered read error",
		"error(op=read,lba=33-33,sct=2,sc=0x81,dnr=0,times=1)": "",
	} {
		faults, err := faultinject.Parse(text)
		require.NoError(t, err)
		o, err := OpenFolder(bg, dir, s, OpenOptions{Faults: faults})
		require.NoError(t, err)
		stack, err := gpuio.FindStack(gpuio.StackAsync)
		require.NoError(t, err)
		r, err := stack.Open(dev, o.SSDs, o.Layout, o.Options(gpuio.StackOptions{}))
		require.NoError(t, err)
		_, _, err = datasettest.ReadRows(t, dev, r, o.Layout, []int64{31, 32, 33, 34})
		if want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
			require.Equal(t, errs.Device, errs.ClassOf(err))
		}
		require.NoError(t, r.Close(bg))
		require.NoError(t, o.Close(bg))
	}
}

// TestCreateRefuses: nothing that is there is written over, and nothing is left of what fails.
func TestCreateRefuses(t *testing.T) {
	testrig.CheckLeaks(t)
	s := Spec{testID, 4096, 10}
	dir := made(t, s)
	_, err := CreateFolder(dir, s)
	var done *FinishedError
	require.ErrorAs(t, err, &done)
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	other := s
	other.Pages = 11
	_, err = CreateFolder(dir, other)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	_, err = VerifyFolder(bg, dir, &s, nil)
	require.NoError(t, err)

	require.NoError(t, os.Remove(filepath.Join(dir, SumsName)))
	_, err = CreateFolder(dir, s)
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "not known whose it is")
	require.NoError(t, RemoveFolder(dir))
	require.NoError(t, RemoveFolder(dir))

	// A disk that is too small, for a file of 64 TiB.
	_, err = CreateFolder(dir, Spec{testID, 1 << 24, 1 << 22})
	require.Equal(t, errs.Capability, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "prepared pages take 64 TiB, more room than "+dir+" has")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	for _, bad := range []Spec{{uuid.Nil, 4096, 1}, {testID, 4095, 1}, {testID, 0, 1},
		{testID, 1<<24 + 4096, 1}, {testID, 4096, 0}, {testID, 4096, -1}, {testID, 4096, 1 << 60}} {
		_, err = CreateFolder(dir, bad)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%+v: %v", bad, err)
	}

	f, err := CreateFolder(dir, s)
	require.NoError(t, err)
	_, err = CreateFolder(dir, s) // another writer
	require.Equal(t, errs.Refused, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "is in use by process")
	for _, run := range []struct{ page, bytes int64 }{{-1, 4096}, {10, 4096}, {9, 8192},
		{0, 4095}, {1 << 60, 4096}} {
		require.Error(t, f.WriteAt(bg, run.page, make([]byte, run.bytes)))
		require.Error(t, f.ReadAt(bg, run.page, make([]byte, run.bytes)))
	}
	_, err = OpenFolder(bg, dir, s, OpenOptions{})
	require.ErrorContains(t, err, "are not finished")
	require.NoError(t, f.Close())
}

// writeForever is a process that writes pages until it is killed. Its output is how many of them
// a Sync has made durable.
func writeForever(dir string) {
	f, err := CreateFolder(dir, killSpec)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for p := int64(0); ; p++ {
		if p == killSpec.Pages {
			p = 0
		}
		if err := errors.Join(f.WriteAt(bg, p, content(p, killSpec.PageBytes)),
			f.Sync(bg)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(p + 1)
	}
}

var killSpec = Spec{testID, 8192, 512}

// TestKilledWriter: whenever a writer is killed, another goes on, and what was synced is there.
func TestKilledWriter(t *testing.T) {
	dir, err := os.MkdirTemp(datasettest.DiskDir, "helios-pages-")
	require.NoError(t, err)
	defer func() { require.NoError(t, os.RemoveAll(dir)) }()
	times := 8
	if testing.Short() {
		times = 3
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range times {
		var out bytes.Buffer
		c := exec.Command(os.Args[0], "-test.run=^$")
		c.Env = append(os.Environ(), "HELIOS_PAGES_WRITER="+dir)
		c.Stdout, c.Stderr = &out, os.Stderr
		require.NoError(t, c.Start())
		time.Sleep(time.Duration(rng.IntN(60*(i+1))) * time.Millisecond)
		require.NoError(t, c.Process.Kill())
		err := c.Wait()
		require.ErrorContains(t, err, "killed")
		f, err := CreateFolder(dir, killSpec)
		require.NoError(t, err)
		b := make([]byte, killSpec.PageBytes)
		synced := int64(0)
		for _, w := range bytes.Fields(out.Bytes()) {
			n, err := strconv.ParseInt(string(w), 10, 64)
			require.NoError(t, err)
			synced = max(synced, n)
		}
		for p := range synced {
			require.NoError(t, f.ReadAt(bg, p, b))
			require.True(t, bytes.Equal(content(p, killSpec.PageBytes), b), "page %d", p)
			require.Equal(t, crc32.Checksum(b, castagnoli), f.sums[p], "page %d", p)
		}
		require.NoError(t, f.Close())
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.LessOrEqual(t, len(left), 3, "%v", left) // at most one temporary table
	}
	f, err := CreateFolder(dir, killSpec)
	require.NoError(t, err)
	require.True(t, f.Resumed())
	fill(t, f, 9)
	require.NoError(t, f.Finish(bg))
	require.NoError(t, f.Close())
	_, err = VerifyFolder(bg, dir, &killSpec, nil)
	require.NoError(t, err)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 2)
}

// TestCutOffCreation: a file that was being reserved is made anew, one that was written and cut is
// an error.
func TestCutOffCreation(t *testing.T) {
	testrig.CheckLeaks(t)
	dir := t.TempDir()
	s := Spec{testID, 4096, 10}
	f, err := CreateFolder(dir, s)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.NoError(t, os.Truncate(filepath.Join(dir, PagesName), 4096))
	f, err = CreateFolder(dir, s)
	require.NoError(t, err)
	require.NoError(t, f.WriteAt(bg, 3, content(3, 4096)))
	require.NoError(t, f.Sync(bg))
	require.NoError(t, f.Close())
	require.NoError(t, os.Truncate(filepath.Join(dir, PagesName), 4096))
	_, err = CreateFolder(dir, s)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "should be a file of 40960")
}

// FuzzSums: no file of checksums leads to a panic, or to memory that its size does not justify.
func FuzzSums(f *testing.F) {
	dir := f.TempDir()
	s := Spec{testID, 4096, 5}
	require.NoError(f, (&sumsFile{spec: s, sums: make([]uint32, 5)}).write(dir))
	good, err := os.ReadFile(filepath.Join(dir, SumsName))
	require.NoError(f, err)
	f.Add(good, uint64(5), true)
	f.Add(good[:100], uint64(1<<40), false)
	f.Fuzz(func(t *testing.T, b []byte, pages uint64, mend bool) {
		if len(b) >= sumsHeader && mend { // past the checksum, to what it protects
			binary.LittleEndian.PutUint64(b[40:], pages)
			binary.LittleEndian.PutUint32(b[sumsCRCAt:], crc32.Checksum(b[:sumsCRCAt], castagnoli))
		}
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, SumsName), b, 0o600))
		got, err := readSums(dir, nil)
		if err == nil && (got.spec.Pages != int64(len(got.sums)) ||
			int64(len(b)) != sumsHeader+4*got.spec.Pages) {
			t.Fatalf("%+v of %d bytes", got.spec, len(b))
		}
	})
}

func TestMain(m *testing.M) {
	if dir := os.Getenv("HELIOS_PAGES_WRITER"); dir != "" {
		writeForever(dir)
	}
	os.Exit(datasettest.Main(m))
}
