package kernels

import (
	"archive/zip"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// CubinArchive is the file with the machine code of all modules, beside the PTX: for each of
// CubinArchs an entry "sm_80/module.cubin", and CubinManifest.
const CubinArchive = "cubins.zip"

// CubinManifest is the archive's first entry: a line "ptxas VERSION", then for each module a line
// "name sha256" of the PTX that its cubins are made from.
const CubinManifest = "MANIFEST"

// CubinArchs are the architectures in the archive: A100, H100 and H200, B200.
var CubinArchs = []string{"sm_80", "sm_90", "sm_100"}

//go:embed cubins.zip
var cubins string

// Cubin is machine code of a module, an ELF file.
type Cubin struct {
	Arch  string // such as sm_90
	Image []byte
}

// CubinArch is the architecture of the cubins that a GPU of compute capability cc (times 10) runs;
// "" for none. Machine code runs on GPUs of its own major version and at least its minor one, and
// not on Tegra, 8.7 and 10.1 (CUDA programming guide, "Binary Compatibility").
func CubinArch(cc int) string {
	if cc == 87 || cc == 101 {
		return ""
	}
	best := 0
	for _, a := range CubinArchs {
		n, err := strconv.Atoi(strings.TrimPrefix(a, "sm_"))
		if err == nil && n/10 == cc/10 && n <= cc && n > best {
			best = n
		}
	}
	if best == 0 {
		return ""
	}
	return fmt.Sprintf("sm_%d", best)
}

// CubinPath is a cubin's name in the archive.
func CubinPath(arch, module string) string { return arch + "/" + module + ".cubin" }

// Cubins is an archive of machine code.
type Cubins struct {
	Ptxas   string            // the version that made them
	Sources map[string]string // by module: sha256 of the PTX
	files   map[string]*zip.File
}

// OpenCubins reads the archive's manifest. Each cubin is unpacked when it is asked for.
func OpenCubins(r io.ReaderAt, size int64) (*Cubins, error) {
	z, err := zip.NewReader(r, size)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", CubinArchive, err)
	}
	c := &Cubins{Sources: map[string]string{}, files: map[string]*zip.File{}}
	for _, f := range z.File {
		c.files[f.Name] = f
	}
	text, err := c.Read(CubinManifest)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case !ok:
			return nil, fmt.Errorf("%s: %s has the line %q", CubinArchive, CubinManifest, line)
		case name == "ptxas" && c.Ptxas == "":
			c.Ptxas = value
		default:
			c.Sources[name] = value
		}
	}
	return c, nil
}

// Names returns the cubins in the archive, by name.
func (c *Cubins) Names() []string {
	var out []string
	for name := range c.files {
		if name != CubinManifest {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Read unpacks an entry and compares its checksum.
func (c *Cubins) Read(name string) ([]byte, error) {
	f := c.files[name]
	if f == nil {
		return nil, fmt.Errorf("%s has no %s", CubinArchive, name)
	}
	r, err := f.Open()
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", CubinArchive, name, err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", CubinArchive, name, err)
	}
	return b, nil
}

var openCubins = sync.OnceValues(func() (*Cubins, error) {
	return OpenCubins(strings.NewReader(cubins), int64(len(cubins)))
})

// SumPTX is a module's PTX in the manifest.
func SumPTX(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// Cubin is the machine code of a module for a GPU of compute capability cc (times 10). An error has
// the reason for which there is none; then the driver has to compile the PTX. A cubin that was made
// from other PTX than the module's is none.
func (m Module) Cubin(cc int) (Cubin, error) {
	arch := CubinArch(cc)
	if arch == "" {
		return Cubin{}, fmt.Errorf("no cubins for compute capability %d.%d", cc/10, cc%10)
	}
	c, err := openCubins()
	if err != nil {
		return Cubin{}, err
	}
	if c.Sources[m.Name] != SumPTX(m.PTX) {
		return Cubin{}, fmt.Errorf("the cubins of module %s are of other PTX", m.Name)
	}
	image, err := c.Read(CubinPath(arch, m.Name))
	if err != nil {
		return Cubin{}, err
	}
	return Cubin{arch, image}, nil
}
