package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// module is the least ELF file that has a .modinfo section.
func module(t *testing.T, info string) []byte {
	t.Helper()
	names := "\x00.modinfo\x00.shstrtab\x00"
	const head, section = 64, 64
	h := elf.Header64{Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1,
		Ehsize: head, Shentsize: section, Shnum: 3, Shstrndx: 2}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64),
		byte(elf.ELFDATA2LSB), 1
	h.Shoff = uint64(head + len(info) + len(names))
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: head, Size: uint64(len(info)), Addralign: 1},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: uint64(head + len(info)),
			Size: uint64(len(names)), Addralign: 1},
	}
	var b bytes.Buffer
	for _, v := range []any{h, []byte(info + names), sections} {
		require.NoError(t, binary.Write(&b, binary.LittleEndian, v))
	}
	return b.Bytes()
}

const testRelease = "6.1.0-9-cloud-amd64"

// fakeApt puts commands first in PATH that play apt and dpkg-deb: the package is the tar file
// itself.
func fakeApt(t *testing.T, files map[string][]byte) (dir string) {
	t.Helper()
	dir = t.TempDir()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, data := range files {
		if err := w.WriteHeader(&tar.Header{Name: "./" + name, Typeflag: tar.TypeReg, Mode: 0o644,
			Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	require.NoError(t, w.Close())
	for name, text := range map[string]string{
		"package.tar": b.String(),
		"apt-cache": `#!/bin/sh
[ -e ` + dir + `/no-lists ] && { echo "E: No packages found" >&2; exit 100; }
if [ "$1" = pkgnames ]; then echo linux-image-6.2.0-9-cloud-amd64; echo linux-image-6.2.0-10-cloud-amd64; echo linux-image-6.2.0-11-amd64; exit; fi
echo "Depends: linux-image-` + testRelease + ` (= 1)"
`,
		"apt-get": `#!/bin/sh
[ -e ` + dir + `/no-network ] && { echo "E: Failed to fetch" >&2; exit 100; }
for n; do :; done
echo "$n" >>` + dir + `/downloads
cp ` + dir + `/package.tar "${n}_1%3a1_amd64.deb"
`,
		"dpkg-deb": "#!/bin/sh\nexec cat \"$2\"\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return dir
}

func kernelFiles(t *testing.T) map[string][]byte {
	root := "lib/modules/" + testRelease + "/"
	files := map[string][]byte{
		"boot/vmlinuz-" + testRelease:         []byte("kernel"),
		root + "modules.builtin":              []byte("kernel/fs/ext4/ext4.ko\n"),
		root + "kernel/drivers/net/unused.ko": module(t, "depends=\x00"),
		"usr/share/doc/x":                     []byte("doc"),
	}
	for name, deps := range map[string]string{"vfio": "", "vfio_iommu_type1": "vfio",
		"pci/vfio-pci": "vfio,vfio-pci-core", "pci/vfio-pci-core": "vfio,helper", "helper": "",
		"md-mod": "", "dm-mod": ""} {
		files[root+"kernel/drivers/"+name+".ko"] = module(t, "license=GPL\x00depends="+deps+
			"\x00name=x\x00")
	}
	return files
}

func TestFetchKernel(t *testing.T) {
	dir, cache := fakeApt(t, kernelFiles(t)), t.TempDir()
	k, err := fetchKernel(t.Context(), cache, "")
	require.NoError(t, err)
	if b, err := os.ReadFile(k.image); err != nil || string(b) != "kernel" ||
		k.release != testRelease {
		t.Errorf("%+v: %q %v", k, b, err)
	}
	dep, err := os.ReadFile(filepath.Join(k.modules, "modules.dep"))
	require.NoError(t, err)
	for _, want := range []string{
		"kernel/drivers/pci/vfio-pci.ko: kernel/drivers/vfio.ko kernel/drivers/pci/vfio-pci-core.ko kernel/drivers/helper.ko\n",
		"kernel/drivers/vfio.ko:\n", "kernel/drivers/helper.ko:\n",
	} {
		if !strings.Contains(string(dep), want) {
			t.Errorf("modules.dep lacks %q:\n%s", want, dep)
		}
	}
	if _, err := os.Stat(filepath.Join(k.modules, "kernel/drivers/net/unused.ko")); err == nil {
		t.Error("a module that nobody asked for is there")
	}
	// what is there needs no network, unpacked or not
	require.NoError(t, os.WriteFile(filepath.Join(dir, "no-network"), nil, 0o600))
	if _, err := fetchKernel(t.Context(), cache, ""); err != nil {
		t.Error(err)
	}
	require.NoError(t, os.RemoveAll(filepath.Dir(k.image)))
	if _, err := fetchKernel(t.Context(), cache, ""); err != nil {
		t.Error(err)
	}
	// nor apt's lists
	require.NoError(t, os.WriteFile(filepath.Join(dir, "no-lists"), nil, 0o600))
	if k, err := fetchKernel(t.Context(), cache, "6.1"); err != nil || k.release != testRelease {
		t.Errorf("%+v %v", k, err)
	}
	// and without any of it the error names the next step
	if _, err := fetchKernel(t.Context(), t.TempDir(), ""); err == nil ||
		!strings.Contains(err.Error(), "apt-get update") {
		t.Errorf("%v", err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "downloads")); err != nil ||
		string(b) != "linux-image-"+testRelease+"\n" {
		t.Errorf("downloads: %q %v", b, err)
	}
	left, _ := filepath.Glob(filepath.Join(cache, "*-*"))
	for _, l := range left {
		if strings.HasPrefix(filepath.Base(l), "download-") || strings.HasPrefix(filepath.Base(l),
			"unpack-") {
			t.Errorf("left %s", l)
		}
	}
}

func TestFetchKernelSeries(t *testing.T) {
	fakeApt(t, nil)
	if n, err := kernelPackage(t.Context(), "6.2"); err != nil ||
		n != "linux-image-6.2.0-10-cloud-amd64" {
		t.Errorf("%s %v", n, err)
	}
}

func TestFetchKernelWithoutItsModules(t *testing.T) {
	for _, c := range []struct{ lacks, want string }{
		{"boot/vmlinuz-" + testRelease, "no boot/vmlinuz"},
		{"lib/modules/" + testRelease + "/kernel/drivers/pci/vfio-pci.ko", "no module vfio_pci"},
	} {
		files := kernelFiles(t)
		delete(files, c.lacks)
		fakeApt(t, files)
		if _, err := fetchKernel(t.Context(), t.TempDir(), ""); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}
}

func TestFetchBusybox(t *testing.T) {
	fakeApt(t, map[string][]byte{"bin/busybox": []byte("bb")})
	cache := t.TempDir()
	for range 2 {
		p, err := fetchBusybox(t.Context(), cache)
		require.NoError(t, err)
		st, err := os.Stat(p)
		if err != nil || st.Mode().Perm() != 0o755 || st.Size() != 2 {
			t.Errorf("%v %v", st, err)
		}
	}
	fakeApt(t, map[string][]byte{"other": nil})
	if _, err := fetchBusybox(t.Context(), t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "no bin/busybox") {
		t.Errorf("%v", err)
	}
}
