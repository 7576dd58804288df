package parted

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/pages"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/rowtype"
	"helios/internal/testing/datasettest"
	"helios/internal/testing/testrig"
	"helios/nvme"
	"helios/nvme/proxy"
)

// TestOnSSDs: rows come from SSDs, pages go beside them, and an interrupted layout is resumed
// there.
func TestOnSSDs(t *testing.T) {
	testrig.CheckLeaks(t)
	d, topo := generated(t, 4000, 25)
	var ssds []*gpuio.SSD
	dir, err := os.MkdirTemp(datasettest.DiskDir, "helios-parted-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	for i := range 3 {
		path := filepath.Join(dir, fmt.Sprintf("ssd%d.img", i))
		require.NoError(t, proxy.Create(path, 8<<20))
		bus, err := proxy.Open(proxy.Config{Path: path})
		require.NoError(t, err)
		c, err := nvme.Open(bg, bus, nvme.Options{})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.Close(bg)) })
		ssds = append(ssds, &gpuio.SSD{Ctrl: c, Name: path})
	}
	_, err = stripe.Load(bg, d, ssds, stripe.LoadOptions{RowType: "float16"})
	require.NoError(t, err)
	p := partsOf(t, d, topo, 6)
	o := Options{Dir: filepath.Join(testrig.MemoryDir(t), "l"), Partition: p, StaticShare: 0.1,
		RowType: rowtype.Float16, Place: stripe.PagePlace{Dataset: d, SSDs: ssds}, MarkEvery: 1}
	rows := func() (Source, func() error, error) {
		r, err := stripe.OpenRows(bg, d, ssds)
		return r, func() error { return r.Close(bg) }, err
	}
	o.Source = func() (Source, func() error, error) { return nil, nil, errFault }
	_, err = Make(bg, d, topo, o)
	require.ErrorIs(t, err, errFault)
	o.Source = rows
	l, err := Make(bg, d, topo, o)
	require.NoError(t, err)
	m, err := readManifest(o.Dir)
	require.NoError(t, err)
	require.Equal(t, 1, m.Stats.EdgeSweeps, "the first Make has written the edges")

	opened, err := l.OpenPages(bg, o.Place)
	require.NoError(t, err)
	store := make([]byte, l.Spec.Bytes())
	for page := range l.Spec.Pages {
		ssd, lba, _, _ := opened.Layout.Locate(page)
		b, err := gpuio.NewBulk(bg, opened.SSDs[ssd].Ctrl, 1)
		require.NoError(t, err)
		require.NoError(t, b.ReadAt(bg, opened.SSDs[ssd].DataStart+lba,
			store[page*l.Spec.PageBytes:][:l.Spec.PageBytes]))
		require.NoError(t, b.Close(bg))
	}
	require.NoError(t, opened.Close(bg))
	holds(t, l, store, d, topo, p.Of, 0.1, rowtype.Float16)

	r, err := Verify(bg, o.Dir, d.Meta.UUID, nil)
	require.NoError(t, err)
	require.Zero(t, r.Pages)
	require.Len(t, r.Notes, 1)
	all, err := stripe.Verify(bg, d, ssds, stripe.VerifyOptions{Source: true})
	require.NoError(t, err)
	require.Equal(t, l.Spec.Pages, all.Pages)
	_, err = l.OpenPages(bg, pages.InFolder{})
	require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
	require.ErrorContains(t, err, "on the dataset's SSDs")
}
