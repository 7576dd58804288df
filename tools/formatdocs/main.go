// Command formatdocs writes docs/reference/formats.md from the formats of dataset/importer.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"helios/dataset/importer"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: formatdocs FILE")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "formatdocs:", err)
		os.Exit(1)
	}
}

func write(path string) error {
	var b bytes.Buffer
	if err := importer.WriteMarkdown(&b); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
