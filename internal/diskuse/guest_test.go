package diskuse

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/internal/pci"
)

// The vm tier's scenario safety runs this in its guest, which has no device-mapper tools. It makes
// a linear device that names itself as LVM does, looks at the disk below it, and leaves it there.
// HELIOS_VM_MAPPER is "DISK NAME UUID".
func TestMapperInGuest(t *testing.T) {
	arg := strings.Fields(os.Getenv("HELIOS_VM_MAPPER"))
	if len(arg) != 3 {
		t.Skip("HELIOS_VM_MAPPER is not set: this is not a guest of the vm tier")
	}
	disk := strings.TrimPrefix(arg[0], "/dev/")
	us, err := Of(pci.Sys{}, disk)
	require.NoError(t, err)
	require.False(t, slices.ContainsFunc(us, live), "before: %v", us)

	ctl, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0)
	require.NoError(t, err)
	defer ctl.Close() //nolint:errcheck // nothing to lose
	dmIoctl(t, ctl, dmDevCreate, arg[1], arg[2], nil)
	sectors := strings.TrimSpace(read(t, "/sys/class/block/"+disk+"/size"))
	dmIoctl(t, ctl, dmTableLoad, arg[1], "",
		linear(t, sectors, strings.TrimSpace(read(t, "/sys/class/block/"+disk+"/dev"))))
	dmIoctl(t, ctl, dmDevSuspend, arg[1], "", nil) // without the suspend flag it resumes

	us, err = Of(pci.Sys{}, disk)
	require.NoError(t, err)
	i := slices.IndexFunc(us, func(u Use) bool { return u.Live })
	require.GreaterOrEqual(t, i, 0, "%v", us)
	require.Equal(t, LVM, us[i].Kind)
	require.Equal(t, disk, us[i].Device)
	require.ErrorIs(t, openExclusive("/dev/"+disk), unix.EBUSY)
}

func read(t *testing.T, path string) string {
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

// linux/dm-ioctl.h
const (
	dmDevCreate  = 0xc138fd03
	dmDevSuspend = 0xc138fd06
	dmTableLoad  = 0xc138fd09
)

type dmHeader struct {
	version                 [3]uint32
	dataSize, dataStart     uint32
	targetCount             uint32
	openCount               int32
	flags, eventNr, padding uint32
	dev                     uint64
	name                    [128]byte
	uuid                    [129]byte
	data                    [7]byte
}

type dmTarget struct {
	start, length uint64
	status        int32
	next          uint32
	kind          [16]byte
}

var _ [312]byte = [unsafe.Sizeof(dmHeader{})]byte{}
var _ [40]byte = [unsafe.Sizeof(dmTarget{})]byte{}

func linear(t *testing.T, sectors, dev string) []byte {
	var n uint64
	for _, c := range sectors {
		n = n*10 + uint64(c-'0')
	}
	require.NotZero(t, n)
	table := dev + " 0\x00"
	g := dmTarget{length: n, next: uint32((40 + len(table) + 7) &^ 7)}
	copy(g.kind[:], "linear")
	out := bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&g)), 40))
	out = append(out, table...)
	return append(out, make([]byte, int(g.next)-len(out))...)
}

func dmIoctl(t *testing.T, ctl *os.File, op uintptr, name, uuid string, target []byte) {
	t.Helper()
	buf := make([]byte, 312+len(target))
	h := (*dmHeader)(unsafe.Pointer(&buf[0]))
	h.version, h.dataSize, h.dataStart = [3]uint32{4, 0, 0}, uint32(len(buf)), 312
	copy(h.name[:], name)
	copy(h.uuid[:], uuid)
	if target != nil {
		h.targetCount = 1
		copy(buf[312:], target)
	}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, ctl.Fd(), op, uintptr(unsafe.Pointer(&buf[0])))
	require.Zero(t, e, "%v (device-mapper request %x)", e, op)
}
