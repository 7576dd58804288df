package region

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// CloseError is the error of a device that was closed with parts still open, or whose driver failed
// to give parts back; nil for neither.
func CloseError(device string, leaks, failed []string) error {
	if len(leaks)+len(failed) == 0 {
		return nil
	}
	slices.Sort(leaks)
	const show = 16
	more := ""
	if len(leaks) > show {
		more = fmt.Sprintf(" and %d more", len(leaks)-show)
		leaks = leaks[:show]
	}
	msg := "device " + device + ": closed"
	if len(leaks) > 0 {
		msg += " with open " + strings.Join(leaks, ", ") + more
	}
	if len(failed) > 0 {
		msg += "; " + strings.Join(failed, "; ")
	}
	return errors.New(msg)
}
