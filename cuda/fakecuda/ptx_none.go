//go:build !linux || (!amd64 && !arm64) || nocuda

package fakecuda

import "errors"

func interpret(string) error {
	return errors.New("fake libcuda: this build cannot load libraries (tag nocuda)")
}

func leaveExecuted() error { return nil }
