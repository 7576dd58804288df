package kernels

import "fmt"

// faults says what a kernel's dev::fail codes mean: faults[kernel][code-1] is a format whose %d
// are the record's A, B and C as signed numbers (in order, or by %[n]d). The owner of a kernel
// adds its lines here; a test compares with the codes in the .cu files.
var faults = map[string][]string{
	"conf_fail": {"conf_fail was told to fail"},
}

// FaultText puts a fault record of a kernel into words.
func FaultText(kernel string, code uint32, a, b, c uint64) string {
	words := faults[kernel]
	if code == 0 || int64(code) > int64(len(words)) {
		return fmt.Sprintf("unknown fault %d (%d, %d, %d)", code, int64(a), int64(b), int64(c))
	}
	// The indexed fourth operand, which is empty, lets a format leave operands unused.
	return fmt.Sprintf(words[code-1]+"%[4]s", int64(a), int64(b), int64(c), "")
}
