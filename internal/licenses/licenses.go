// Package licenses holds the licences of everything that is linked into heliosctl: they travel with
// the binary, as they ask for.
package licenses

import (
	_ "embed"
	"encoding/json"
	"fmt"
)

//go:generate go -C ../../tools run ./licenses -o ../internal/licenses/licenses.json

//go:embed licenses.json
var text []byte

// Std is the path of Go's standard library.
const Std = "std"

// Module is a part of the binary that others wrote.
type Module struct {
	Path string `json:"path"` // of the module; or Std
	// not of std: that is the version of Go that built the binary
	Version string `json:"version,omitempty"`
	Files   []File `json:"files"`
}

// File is a licence, notice or patent grant of a module.
type File struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// All are the modules of the binary, by path, the standard library first.
func All() ([]Module, error) {
	var all []Module
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("licences: %w", err)
	}
	return all, nil
}
