package nvmewalk_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/vfiobus"
	walk "helios/tools/nvmewalk"
)

// TestVFIO walks the NVMe controllers that HELIOS_VFIO_TEST names (PCI addresses, separated by
// commas, bound to vfio-pci). HELIOS_WALK_BAD=LBA: reads of this block fail on the first of them.
// tools/vmtest runs it on QEMU's; HELIOS_WALK_READING=any is for controllers that we have not met.
func TestVFIO(t *testing.T) {
	list := os.Getenv("HELIOS_VFIO_TEST")
	if list == "" {
		t.Skip(
			"HELIOS_VFIO_TEST names no PCI addresses of NVMe controllers that are bound to vfio-pci")
	}
	reading := walk.QEMU
	if os.Getenv("HELIOS_WALK_READING") == "any" {
		reading = walk.Any
	}
	dom, err := vfio.New(vfio.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dom.Close()) })
	for i, addr := range strings.Split(list, ",") {
		t.Run(addr, func(t *testing.T) {
			target := walk.Target{Reading: reading,
				Open: func(context.Context) (nvme.Bus, error) {
					dev, err := dom.Attach(addr)
					if err != nil {
						return nil, err
					}
					return vfiobus.Open(dev, vfiobus.Options{})
				}}
			// QEMU refuses to move data to the controller's own registers; other controllers
			// would try.
			if reading == walk.QEMU {
				target.BadAddress = bar0(t, addr)
			}
			if bad := os.Getenv("HELIOS_WALK_BAD"); bad != "" && i == 0 {
				n, err := strconv.ParseUint(bad, 10, 64)
				require.NoError(t, err)
				lba := nvme.LBA(n)
				target.BadBlock = &lba
			}
			if i == 0 {
				target.Hold = holdReads(t)
			}
			all := must(t, target)
			verdicts := map[walk.Verdict]int{}
			for _, r := range all {
				verdicts[r.Verdict]++
			}
			require.Greater(t, verdicts[walk.Right], 55)
		})
	}
}

// askHost has the test's host, which runs QEMU, do something and returns its answer.
// HELIOS_HOST_DIR is where they meet; tools/vmtest sets it.
func askHost(line string) (string, error) {
	dir := os.Getenv("HELIOS_HOST_DIR")
	answer := filepath.Join(dir, "answer")
	tmp := filepath.Join(dir, "tmp")
	if err := os.WriteFile(tmp, []byte(line), 0o600); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, filepath.Join(dir, "ask")); err != nil {
		return "", err
	}
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(
		5 * time.Millisecond) {
		b, err := os.ReadFile(answer)
		if err == nil {
			return string(b), os.Remove(answer)
		}
	}
	return "", fmt.Errorf("the host does not answer to %q", line)
}

// holdReads has blkdebug hold the first SSD's next read.
func holdReads(t *testing.T) func() (func() error, error) {
	if os.Getenv("HELIOS_HOST_DIR") == "" {
		return nil
	}
	hmp := func(line string) error {
		out, err := askHost("hmp " + line)
		t.Logf("%s: %s", line, strings.TrimSpace(out))
		return err
	}
	return func() (func() error, error) {
		return func() error { return hmp(`qemu-io d0 "resume held"`) },
			hmp(`qemu-io d0 "break read_aio held"`)
	}
}

// bar0 returns the address of the controller's registers.
func bar0(t *testing.T, addr string) nvme.IOVA {
	b, err := os.ReadFile("/sys/bus/pci/devices/" + addr + "/resource")
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(b), " ")
	v, err := strconv.ParseUint(strings.TrimPrefix(first, "0x"), 16, 64)
	require.NoError(t, err)
	require.NotZero(t, v)
	return nvme.IOVA(v)
}
