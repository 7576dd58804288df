package stripe

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/dataset/pages"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
)

// TestStacksReadPagesBesideRows: pages go through the whole NVMe stack onto software SSDs in files,
// and every I/O stack reads them, checked, while another reads the rows.
func TestStacksReadPagesBesideRows(t *testing.T) {
	testrig.CheckLeaks(t)
	dev, err := cuda.NewHost(cuda.HostOptions{SMs: 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, dev.Close()) }()
	d := small(t, 700, 128, 1)
	for _, lba := range []int{512, 4096} {
		for n := 1; n <= 3; n++ {
			ssds, done := openProxies(t, backing(t, n, false, 12<<20), false, lba, "")
			_, err := Load(bg, d, ssds, LoadOptions{})
			require.NoError(t, err)
			for i, size := range []int64{4096, 12288} {
				s := pages.Spec{ID: packs[i], PageBytes: size, Pages: 150}
				p, err := CreatePages(bg, d, ssds, s)
				require.NoError(t, err)
				require.NoError(t, writePages(p, s.Pages))
				got := make([]byte, 5*size)
				require.NoError(t, p.ReadAt(bg, 11, got))
				require.True(t, bytes.Equal(pageContent(s, 12), got[size:2*size]))
				require.NoError(t, p.Finish(bg))
				require.NoError(t, p.Close(bg))
				for _, stack := range gpuio.Stacks() {
					t.Run(fmt.Sprintf("%d/%d/%d/%s", lba, n, size, stack.Name),
						func(t *testing.T) {
							o, err := OpenPages(bg, d, ssds, s)
							require.NoError(t, err)
							r, err := stack.Open(dev, o.SSDs, o.Layout,
								o.Options(gpuio.StackOptions{}))
							require.NoError(t, err)
							sums, err := o.Sums(bg)
							require.NoError(t, err)
							r, err = gpuio.NewChecked(dev, r, o.SSDs, o.Layout, sums)
							require.NoError(t, err)
							list := []int64{149, 0}
							for p := int64(20); p < 90; p++ {
								list = append(list, p)
							}
							got, _, err := datasettest.ReadRows(t, dev, r, o.Layout, list)
							require.NoError(t, err)
							for k, p := range list {
								require.True(t, bytes.Equal(pageContent(s, p),
									got[int64(k)*size:][:size]), "page %d", p)
							}
							require.NoError(t, r.Close(bg))
							require.NoError(t, o.Close(bg))
						})
				}
			}
			rep, err := Verify(bg, d, ssds, VerifyOptions{Source: true})
			require.NoError(t, err)
			require.EqualValues(t, 300, rep.Pages)

			// A page that changes after opening is found by its checksum, and named.
			o, err := OpenPages(bg, d, ssds, pages.Spec{ID: packs[0], PageBytes: 4096, Pages: 150})
			require.NoError(t, err)
			ssd, start, _, _ := o.Layout.Locate(77)
			b, err := gpuio.NewBulk(bg, o.SSDs[ssd].Ctrl, 1)
			require.NoError(t, err)
			require.NoError(t, b.WriteAt(bg, o.SSDs[ssd].DataStart+start, make([]byte, 4096)))
			require.NoError(t, b.Close(bg))
			r, err := gpuio.NewAsync(dev, o.SSDs, o.Layout, gpuio.AsyncOptions{})
			require.NoError(t, err)
			sums, err := o.Sums(bg)
			require.NoError(t, err)
			r, err = gpuio.NewChecked(dev, r, o.SSDs, o.Layout, sums)
			require.NoError(t, err)
			_, _, err = datasettest.ReadRows(t, dev, r, o.Layout, []int64{76, 77, 78})
			var sum *gpuio.ChecksumError
			require.ErrorAs(t, err, &sum)
			require.EqualValues(t, 77, sum.Row)
			require.ErrorContains(t, err, "ssds --remove-pages "+packs[0].String())
			require.Equal(t, errs.Device, errs.ClassOf(err))
			require.NoError(t, r.Close(bg))
			done()
		}
	}
}
