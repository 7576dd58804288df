package stripe

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/faultinject"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
	"helios/internal/testing/wide"
	"helios/nvme"
	"helios/nvme/faultbus"
	"helios/nvme/proxy"
)

// openProxies opens backing files as SSDs through the whole NVMe stack.
func openProxies(t testing.TB, paths []string, ram bool, lba int, faults string) (ssds []*gpuio.SSD,
	closeAll func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(bg, 30*time.Second)
	for _, p := range paths {
		f, err := faultinject.Parse(faults)
		require.NoError(t, err)
		var bus nvme.Bus
		bus, err = proxy.Open(proxy.Config{Path: p, RAM: ram, LBABytes: lba, OutOfOrder: true})
		require.NoError(t, err)
		if !f.Empty() {
			bus = faultbus.New(bus, f, faultbus.Options{})
		}
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		require.NoError(t, err)
		ssds = append(ssds, &gpuio.SSD{Ctrl: c, Name: filepath.Base(p), BackingPath: p})
	}
	return ssds, func() {
		for _, s := range ssds {
			require.NoError(t, s.Ctrl.Close(ctx))
		}
		cancel()
	}
}

func backing(t testing.TB, n int, ram bool, size int64) []string {
	t.Helper()
	parent := datasettest.DiskDir
	if ram {
		parent = "/dev/shm"
	}
	dir, err := os.MkdirTemp(parent, "helios-dataset-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	var paths []string
	for i := range n {
		p := filepath.Join(dir, fmt.Sprintf("ssd%d.img", i))
		require.NoError(t, proxy.Create(p, size))
		paths = append(paths, p)
	}
	return paths
}

// TestThroughTheNVMeStack loads, attaches and verifies over software SSDs in memory and in
// files, and looks at the backing files for the rows.
func TestThroughTheNVMeStack(t *testing.T) {
	testrig.CheckLeaks(t)
	for _, dim := range []int{100, 1024, 1100} { // packed or padded, whole, padded
		d := small(t, 1500, dim, 1)
		for _, lba := range []int{512, 4096} {
			for n := 1; n <= 4; n++ {
				for _, ram := range []bool{true, false} {
					if !ram && (n == 2 || n == 3 || dim == 1024 || wide.Lean()) {
						continue
					}
					t.Run(fmt.Sprintf("dim %d/LBA %d/%d SSDs/ram=%v", dim, lba, n, ram),
						func(t *testing.T) {
							paths := backing(t, n, ram, 16<<20)
							ssds, done := openProxies(t, paths, ram, lba, "")
							r, err := Load(bg, d, ssds, LoadOptions{})
							require.NoError(t, err)
							require.Equal(t, n, r.SSDs)
							done()

							// Another process, another order.
							slices.Reverse(paths)
							ssds, done = openProxies(t, paths, ram, lba, "")
							defer done()
							a, err := Find(bg, d, ssds, AttachOptions{})
							require.NoError(t, err)
							require.Equal(t, r.Layout, a.Layout)
							want := datasettest.AllRows(t, d)
							row := d.Meta.RowBytes()
							var images [][]byte
							for _, s := range a.SSDs {
								b, err := os.ReadFile(s.BackingPath)
								require.NoError(t, err)
								images = append(images, b)
							}
							for v := range d.Meta.Nodes {
								i, start, _, off := a.Layout.Locate(v)
								from := int(a.SSDs[i].DataStart+start)*lba + off
								if !bytes.Equal(want[int(v)*row:int(v+1)*row],
									images[i][from:from+row]) {
									t.Fatalf("row %d is not where the layout says", v)
								}
							}
							rep, err := Verify(bg, d, ssds, VerifyOptions{Source: true})
							require.NoError(t, err)
							require.Equal(t, d.Meta.Nodes, rep.RowsCompared)
							c, _, err := Contents(bg, a.SSDs[n-1])
							require.NoError(t, err)
							sb := c[0]
							require.Equal(t, n-1, sb.StripeIndex)
							require.Equal(t, d.UUID(), sb.UUID)
							require.Equal(t, StateComplete, sb.State)
						})
				}
			}
		}
	}
}

func TestFaultsSurface(t *testing.T) {
	d := small(t, 1500, 256, 1)
	paths := backing(t, 2, true, 8<<20)
	ssds, done := openProxies(t, paths, true, 512, "")
	_, _, err := Contents(bg, ssds[0])
	require.ErrorIs(t, err, ErrNoSuperblock)
	require.Equal(t, errs.Device, errs.ClassOf(err))
	_, err = Load(bg, d, ssds, LoadOptions{})
	require.NoError(t, err)
	done()

	// A read error in the data: verify names it and goes on.
	ssds, done = openProxies(t, paths, true, 512,
		"error(op=read,lba=2100-2101,sct=2,sc=0x81,dnr=1)")
	rep, err := Verify(bg, d, ssds, VerifyOptions{})
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.Len(t, rep.Bad, 2) // both SSDs have the fault
	require.Equal(t, "ssd0.img", rep.Bad[0].SSD)
	require.EqualValues(t, 2048, rep.Bad[0].LBA)
	require.Contains(t, rep.Bad[0].What, "LBA")
	done()

	// A transient one is retried below us.
	ssds, done = openProxies(t, paths, true, 512,
		"error(op=read,lba=2100-2101,sct=2,sc=0x81,dnr=0,times=1)")
	_, err = Verify(bg, d, ssds, VerifyOptions{Source: true})
	require.NoError(t, err)
	done()

	// The first superblock cannot be read: attach uses the second and says so.
	ssds, done = openProxies(t, paths, true, 512, "error(op=read,lba=0-7,sct=2,sc=0x81,dnr=1)")
	var notes []string
	a, err := Find(bg, d, ssds,
		AttachOptions{Note: func(s string) { notes = append(notes, s) }})
	require.NoError(t, err)
	require.Len(t, a.SSDs, 2)
	require.Len(t, notes, 2)
	require.Contains(t, notes[0], "using the second")
	done()

	// Writing fails: the load does, and what it leaves is not attached.
	ssds, done = openProxies(t, paths, true, 512,
		"error(op=write,lba=2100-2101,sct=2,sc=0x80,dnr=1)")
	_, err = Load(bg, d, ssds, LoadOptions{})
	require.Error(t, err)
	require.Equal(t, errs.Device, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "write fault")
	require.Regexp(t, `ssd ssd[01]\.img: `, err.Error())
	done()
	ssds, done = openProxies(t, paths, true, 512, "")
	_, err = Find(bg, d, ssds, AttachOptions{})
	require.ErrorContains(t, err, "did not finish")
	done()
}

func total(usage map[string]int64) int64 {
	var n int64
	for _, v := range usage {
		n += v
	}
	return n
}
