package main

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"helios/cuda/kernels"
)

// machineCode holds what ptxas made of all modules.
type machineCode struct {
	ptxas   string // version
	modules []module
	cubins  map[string][]byte // by kernels.CubinPath
}

// manifest is the archive's first entry.
func (c *machineCode) manifest() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "ptxas %s\n", c.ptxas)
	for _, m := range c.modules {
		fmt.Fprintf(&b, "%s %s\n", m.name, kernels.SumPTX(string(m.ptx)))
	}
	return b.Bytes()
}

// names are the archive's entries in order.
func (c *machineCode) names() []string {
	var out []string
	for name := range c.cubins {
		out = append(out, name)
	}
	slices.Sort(out)
	return append([]string{kernels.CubinManifest}, out...)
}

func (c *machineCode) entry(name string) []byte {
	if name == kernels.CubinManifest {
		return c.manifest()
	}
	return c.cubins[name]
}

// archive packs the cubins. Entries that stay keep their bytes with one version of Go, so a change
// of a kernel is a small difference in the repository.
func (c *machineCode) archive() ([]byte, error) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	z.RegisterCompressor(zip.Deflate, func(w io.Writer) (io.WriteCloser, error) {
		return flate.NewWriter(w, flate.BestCompression)
	})
	for _, name := range c.names() {
		w, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate})
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(c.entry(name)); err != nil {
			return nil, err
		}
	}
	err := z.Close()
	return b.Bytes(), err
}

// difference describes how an archive differs from these cubins; "" for not at all. It looks into the entries,
// since another version of Go packs them otherwise.
func (c *machineCode) difference(file []byte) string {
	if file == nil {
		return "is not there"
	}
	have, err := kernels.OpenCubins(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		return err.Error()
	}
	for _, name := range have.Names() {
		if c.cubins[name] == nil {
			return "has " + name + ", whose module is gone"
		}
	}
	for _, name := range c.names() {
		got, err := have.Read(name)
		if err != nil {
			return err.Error()
		}
		if !bytes.Equal(got, c.entry(name)) {
			return fmt.Sprintf("%s is not what ptxas %s makes", name, c.ptxas)
		}
	}
	return ""
}

// readArchive is the committed archive; nil where there is none.
func readArchive(dir string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, kernels.CubinArchive))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return b, err
}
