// Package repo finds the repository that a tool of the laboratory works on.
package repo

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
)

// Root returns the folder of the product's module, at or above the working folder.
func Root() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(mod, []byte("module helios\n")) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not in the repository of heliosctl", start)
		}
	}
}
