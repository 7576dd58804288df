package kernels

import (
	"archive/zip"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCubinArch(t *testing.T) {
	for cc, want := range map[int]string{
		60: "", 70: "", 75: "", // older than every cubin
		80: "sm_80", 86: "sm_80", 89: "sm_80", 90: "sm_90",
		87: "", 101: "", // Tegra
		100: "sm_100", 103: "sm_100", 110: "", 120: "", 121: "",
	} {
		require.Equal(t, want, CubinArch(cc), "compute capability %d", cc)
	}
}

// paramSizes reads what a kernel of a cubin takes (EIATTR_KPARAM_INFO of .nv.info.NAME).
func paramSizes(t *testing.T, info []byte) []int {
	t.Helper()
	sizes := map[int]int{}
	for len(info) >= 4 {
		n := 0
		if info[0] == 4 {
			n = int(binary.LittleEndian.Uint16(info[2:]))
		}
		if info[0] == 4 && info[1] == 0x17 {
			sizes[int(binary.LittleEndian.Uint16(info[8:]))] =
				int(binary.LittleEndian.Uint32(info[12:]) >> 18)
		}
		info = info[4+n:]
	}
	out := make([]int, len(sizes))
	for i := range out {
		out[i] = sizes[i]
	}
	return out
}

// Each module has a cubin of each architecture, made from its PTX, with its kernels and what they
// take.
func TestCubins(t *testing.T) {
	modules, err := Modules()
	require.NoError(t, err)
	c, err := openCubins()
	require.NoError(t, err)
	require.Len(t, c.Names(), len(CubinArchs)*len(modules))
	require.Len(t, c.Sources, len(modules))
	require.NotEmpty(t, c.Ptxas)
	for _, m := range modules {
		require.Equal(t, SumPTX(m.PTX), c.Sources[m.Name],
			"the cubins of %s are of other PTX; run \"make kernels PTXAS=…\"", m.Name)
		for cc, arch := range map[int]string{86: "sm_80", 90: "sm_90", 100: "sm_100"} {
			got, err := m.Cubin(cc)
			require.NoError(t, err)
			require.Equal(t, arch, got.Arch)
			image := slices.Clone(got.Image)
			image[20] = 1 // e_version, which ptxas sets to one of its own
			f, err := elf.NewFile(bytes.NewReader(image))
			require.NoError(t, err)
			var names []string
			for _, s := range f.Sections {
				if name, ok := strings.CutPrefix(s.Name, ".nv.info."); ok {
					names = append(names, name)
				}
			}
			require.Len(t, names, len(m.Kernels))
			for _, k := range m.Kernels {
				require.True(t, slices.Contains(names, k.Name), k.Name)
				info, err := f.Section(".nv.info." + k.Name).Data()
				require.NoError(t, err)
				require.Equal(t, []int{k.ParamBytes, LaunchBytes}, paramSizes(t, info), k.Name)
			}
		}
		_, err := m.Cubin(70)
		require.ErrorContains(t, err, "no cubins for compute capability 7.0")
		m.PTX += "\n"
		_, err = m.Cubin(90)
		require.ErrorContains(t, err, "are of other PTX")
	}
}

// A damaged archive is an error and no machine code.
func TestDamagedCubins(t *testing.T) {
	pack := func(manifest string, method uint16) []byte {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		for _, e := range [][2]string{{CubinManifest, manifest}, {"sm_80/m.cubin", "code of m"}} {
			w, err := z.CreateHeader(&zip.FileHeader{Name: e[0], Method: method})
			require.NoError(t, err)
			_, err = w.Write([]byte(e[1]))
			require.NoError(t, err)
		}
		require.NoError(t, z.Close())
		return b.Bytes()
	}
	open := func(b []byte) (*Cubins, error) { return OpenCubins(bytes.NewReader(b), int64(len(b))) }
	good := pack("ptxas 1\nm 00\n", zip.Store)
	c, err := open(good)
	require.NoError(t, err)
	b, err := c.Read("sm_80/m.cubin")
	require.NoError(t, err)
	require.Equal(t, "code of m", string(b))
	_, err = c.Read("sm_90/m.cubin")
	require.ErrorContains(t, err, "has no sm_90/m.cubin")

	c, err = open(bytes.Replace(good, []byte("code of m"), []byte("code of n"), 1))
	require.NoError(t, err)
	_, err = c.Read("sm_80/m.cubin")
	require.ErrorContains(t, err, "checksum")
	_, err = open(pack("ptxas", zip.Store))
	require.ErrorContains(t, err, "has the line")
	_, err = open(good[:len(good)/2])
	require.Error(t, err)
}
