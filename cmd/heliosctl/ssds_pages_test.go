package main

import (
	"bytes"
	"context"
	"os"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"helios/dataset"
	"helios/dataset/pages"
	"helios/dataset/stripe"
	"helios/gpuio"
	"helios/nvme"
	"helios/nvme/proxy"
)

// putPages makes pages beside the dataset g on two files, or begins to.
func putPages(t *testing.T, s pages.Spec, finish bool) {
	t.Helper()
	ctx := context.Background()
	d, err := dataset.Open("g")
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	var ssds []*gpuio.SSD
	for _, path := range []string{"ssd0.img", "ssd1.img"} {
		bus, err := proxy.Open(proxy.Config{Path: path})
		require.NoError(t, err)
		c, err := nvme.Open(ctx, bus, nvme.Options{})
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close(ctx)) }()
		ssds = append(ssds, &gpuio.SSD{Ctrl: c, Name: path})
	}
	p, err := stripe.CreatePages(ctx, d, ssds, s)
	require.NoError(t, err)
	require.NoError(t, p.WriteAt(ctx, 0, bytes.Repeat([]byte{7}, int(s.Bytes()))))
	if finish {
		require.NoError(t, p.Finish(ctx))
	}
	require.NoError(t, p.Close(ctx))
}

// Pages beside a dataset: ssds lists them, verify checks them, load asks, unbind leaves them, and
// they can be removed.
func TestPagesOnSSDs(t *testing.T) {
	loaded(t, 2)
	one := pages.Spec{ID: uuid.MustParse("11111111-1111-4111-8111-111111111111"), PageBytes: 4096,
		Pages: 50}
	two := pages.Spec{ID: uuid.MustParse("22222222-2222-4222-8222-222222222222"), PageBytes: 8192,
		Pages: 3}
	putPages(t, one, true)
	putPages(t, two, false)

	list := lines(t, ok(t, "ssds", "ssd0", "--json"))[0]["pages"].([]any)
	require.Equal(t, map[string]any{"pack": one.ID.String(), "pages": 50.0, "page_bytes": 4096.0,
		"bytes": 25 * 4096.0, "finished": true}, list[0])
	require.Equal(t, false, list[1].(map[string]any)["finished"])
	require.Contains(t, ok(t, "ssds"), "pages of pack "+two.ID.String()+" (16 KiB) unfinished")
	out := hc(t, "verify", "g")
	require.Equal(t, 0, out.code, out.errOut)
	require.Contains(t, out.out, "50 prepared pages have theirs")
	require.Contains(t, out.errOut+out.out, "pages of pack "+two.ID.String()+" are not finished")
	ok(t, trainArgs()...)

	fails(t, hc(t, "load", "g", "--quiet"), 4, "load", "pages of pack "+one.ID.String(), "--force")
	ok(t, "unbind-ssds")
	ok(t, "bind-ssds", "--proxy", "ssd0.img,ssd1.img")
	ok(t, "verify", "g")

	fails(t, hc(t, "ssds", "--remove-pages", "pack1"), 2, "ssds", "no identity of a pack")
	r := lines(t, ok(t, "ssds", "--remove-pages", two.ID.String(), "--json"))
	require.Equal(t, []any{"ssd0", "ssd1"}, r[len(r)-1]["ssds"])
	fails(t, hc(t, "ssds", "--remove-pages", two.ID.String()), 2, "ssds",
		"there are ssd0: pages of pack "+one.ID.String())

	// A flipped bit of a page: it is on the second SSD, behind rows and tables.
	b, err := os.ReadFile("ssd1.img")
	require.NoError(t, err)
	offset := bytes.Index(b, bytes.Repeat([]byte{7}, 4096))
	require.Positive(t, offset)
	b[offset+4096+5] ^= 1
	require.NoError(t, os.WriteFile("ssd1.img", b, 0o600))
	fails(t, hc(t, "verify", "g", "--quiet"), 5, "verify", "page 3 of pack "+one.ID.String(),
		"heliosctl ssds --remove-pages "+one.ID.String())
	require.Contains(t, ok(t, "ssds", "--remove-pages", one.ID.String()), "removed from ssd0, ssd1")
	ok(t, "verify", "g", "--source")
	require.NotContains(t, ok(t, "ssds"), "pack")
	ok(t, "load", "g")
}
