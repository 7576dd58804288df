// Command gendocs writes a document that the program's own tables make: "faults" of
// internal/faultinject, "formats" of dataset/importer.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	"helios/dataset/importer"
)

var documents = map[string]func(io.Writer) error{
	"faults":  writeFaults,
	"formats": importer.WriteMarkdown,
}

func main() {
	if len(os.Args) != 3 || documents[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: gendocs faults|formats FILE")
		os.Exit(2)
	}
	var text bytes.Buffer
	err := documents[os.Args[1]](&text)
	if err == nil {
		err = os.WriteFile(os.Args[2], text.Bytes(), 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gendocs:", err)
		os.Exit(1)
	}
}
