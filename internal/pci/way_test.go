package pci_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/pci"
	"helios/internal/testing/fakesys"
)

func TestWay(t *testing.T) {
	m := fakesys.New(t.TempDir())
	off := func(addr, dir string) {
		m.Mkdir("/sys/devices/" + dir + "/" + addr)
		m.Link("/sys/bus/pci/devices/"+addr, "../../../devices/"+dir+"/"+addr)
	}
	off("0000:03:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0")
	off("0000:04:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0")
	off("0000:05:00.0", "pci0000:00/0000:00:02.0")
	off("0000:00:09.0", "pci0000:00")
	off("0000:81:00.0", "pci0000:80/0000:80:01.0")
	m.Mkdir("/sys/devices/lost")
	m.Link("/sys/bus/pci/devices/0000:99:00.0", "../../../devices/lost")
	for _, c := range []struct {
		a, b string
		want pci.Way
	}{
		{"0000:03:00.0", "0000:04:00.0", pci.BelowOnePort}, {"0000:03:00.0", "0000:05:00.0",
			pci.ByRootComplex},
		{"0000:03:00.0", "0000:00:09.0", pci.ByRootComplex}, {"0000:81:00.0", "0000:03:00.0",
			pci.BetweenHostBridges},
	} {
		w, err := m.Sys().Way(c.a, c.b)
		require.NoError(t, err)
		require.Equal(t, c.want, w, "%s and %s: %s", c.a, c.b, w)
		require.NotEmpty(t, w.String())
	}
	for _, bad := range []string{"0000:77:00.0", "0000:99:00.0"} {
		_, err := m.Sys().Way("0000:03:00.0", bad)
		require.ErrorContains(t, err, bad)
	}
}
