//go:build !linux || (!amd64 && !arm64) || nocuda

package fakecuda

import (
	"errors"
	"testing"
)

// Do reports that a program without purego cannot load the library.
func Do(string, string) (string, error) {
	return "", errors.New("fake libcuda: this build cannot load libraries (tag nocuda)")
}

// Control skips the test.
func Control(t testing.TB, _, _ string) string {
	t.Helper()
	t.Skip("this build cannot load libraries (tag nocuda)")
	return ""
}
