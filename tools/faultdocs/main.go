// Command faultdocs writes docs/reference/faults.md from the catalogue of internal/faultinject.
package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"helios/internal/faultinject"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: faultdocs FILE")
		os.Exit(2)
	}
	if err := write(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "faultdocs:", err)
		os.Exit(1)
	}
}

func write(path string) error {
	var b bytes.Buffer
	if err := faultinject.WriteMarkdown(&b); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
