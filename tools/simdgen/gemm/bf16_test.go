package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// instruction is one that encode makes, and how others write it.
type instruction struct {
	prefix, opcode, d, v, m uint8
}

func (i instruction) String() string {
	name := map[uint8]string{opVDPBF16PS: "vdpbf16ps", opVCVTNE2PS2BF16: "vcvtne2ps2bf16"}[i.opcode]
	return fmt.Sprintf("%s %%zmm%d,%%zmm%d,%%zmm%d", name, i.m, i.v, i.d) // AT&T's order
}

// The bytes are those of GNU as 2.40.
func TestEncode(t *testing.T) {
	for i, want := range map[instruction]string{
		{prefixF3, opVDPBF16PS, 0, 0, 0}:         "62f27e4852c0",
		{prefixF3, opVDPBF16PS, 5, 11, 30}:       "6292264852ee",
		{prefixF3, opVDPBF16PS, 23, 24, 25}:      "62823e4052f9",
		{prefixF3, opVDPBF16PS, 31, 16, 8}:       "62427e4052f8",
		{prefixF2, opVCVTNE2PS2BF16, 1, 2, 3}:    "62f26f4872cb",
		{prefixF2, opVCVTNE2PS2BF16, 12, 28, 17}: "62321f4072e1",
	} {
		got := encode(i.prefix, i.opcode, i.d, i.v, i.m)
		require.Equal(t, want, fmt.Sprintf("%x", got[:]), "%v", i)
	}
}

// An assembler, where there is one, has the same bytes for every register in every place.
func TestEncodeAsAssembler(t *testing.T) {
	as, err := exec.LookPath("as")
	if err != nil {
		t.Skip("no assembler on this machine")
	}
	probe := exec.Command(as, "--version")
	if out, err := probe.Output(); err != nil || !bytes.Contains(out, []byte("GNU assembler")) ||
		!bytes.Contains(out, []byte("x86_64")) {
		t.Skip("as is not GNU's for x86-64")
	}
	objcopy, err := exec.LookPath("objcopy")
	if err != nil {
		t.Skip("no objcopy on this machine")
	}
	var text strings.Builder
	var want []byte
	for _, op := range [][2]uint8{{prefixF3, opVDPBF16PS}, {prefixF2, opVCVTNE2PS2BF16}} {
		for place := range 3 {
			for r := range uint8(32) {
				regs := [3]uint8{r / 2, 31 - r, r ^ 21}
				regs[place] = r
				i := instruction{op[0], op[1], regs[0], regs[1], regs[2]}
				fmt.Fprintln(&text, i)
				code := encode(i.prefix, i.opcode, i.d, i.v, i.m)
				want = append(want, code[:]...)
			}
		}
	}
	dir := t.TempDir()
	object, raw := filepath.Join(dir, "a.o"), filepath.Join(dir, "a.bin")
	cmd := exec.Command(as, "-o", object, "-")
	cmd.Stdin = strings.NewReader(text.String())
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command(objcopy, "-O", "binary", "-j", ".text", object, raw).CombinedOutput()
	require.NoError(t, err, "%s", out)
	got, err := os.ReadFile(raw)
	require.NoError(t, err)
	require.Equal(t, want, got)
}
