// Package dl opens shared libraries at run time, without cgo.
package dl

import (
	"fmt"
	"strings"
)

// named puts the library's or symbol's name in front of the loader's words, which mostly have it
// and may be empty.
func named(name string, err error) error {
	if strings.Contains(err.Error(), name) {
		return err
	}
	return fmt.Errorf("%s: %w", name, err)
}
