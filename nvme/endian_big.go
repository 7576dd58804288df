//go:build armbe || arm64be || m68k || mips || mips64 || mips64p32 || ppc || ppc64 || s390 || s390x || shbe || sparc || sparc64

package nvme

// NVMe data is little-endian and used in place; a big-endian host would misread it.
var _ int = "helios/nvme needs a little-endian host"
