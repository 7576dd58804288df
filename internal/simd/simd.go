// Package simd has the host's vector loops: functions on slices in assembly that avo generates
// (tools/simdgen), and the same in Go. A Level selects between them; every function is a method of
// it. They are our own, as no library promises the same bits on all machines.
//
// Functions that only load, store, add and multiply elementwise give the same bits at every level.
// Products of matrices use fused multiply-add above Generic: AVX2 and AVX512 agree to the bit with
// each other, in Generic each product is rounded before it is added.
package simd

import (
	"strings"

	"github.com/klauspost/cpuid/v2"

	"helios/internal/errs"
)

// Level is a set of instructions.
type Level uint8

// Levels, from the least to the most that a machine must have. The zero value asks for the best
// one.
const (
	Auto    Level = iota
	Generic       // Go
	AVX2          // AVX2, FMA, F16C, BMI2 (x86-64-v3)
	AVX512        // AVX-512 F, BW, CD, DQ, VL (x86-64-v4)
)

var names = []string{"auto", "generic", "avx2", "avx512"}

// Names returns what Parse takes.
func Names() []string { return names }

func (l Level) String() string {
	if int(l) < len(names) {
		return names[l]
	}
	return "unknown"
}

// Best is the highest level of this machine. The operating system must save the registers too,
// which cpuid checks.
func Best() Level {
	if !haveAssembly {
		return Generic
	}
	switch c := &cpuid.CPU; {
	case c.Supports(cpuid.AVX2, cpuid.FMA3, cpuid.F16C, cpuid.BMI1, cpuid.BMI2) &&
		c.Supports(cpuid.AVX512F, cpuid.AVX512BW, cpuid.AVX512CD, cpuid.AVX512DQ, cpuid.AVX512VL):
		return AVX512
	case c.Supports(cpuid.AVX2, cpuid.FMA3, cpuid.F16C, cpuid.BMI1, cpuid.BMI2):
		return AVX2
	}
	return Generic
}

// Resolve is l, or Best for Auto.
func (l Level) Resolve() Level {
	if l == Auto {
		return Best()
	}
	return l
}

// Levels are those that this machine can run, Generic first: what tests go through.
func Levels() []Level {
	var all []Level
	for l := Generic; l <= Best(); l++ {
		all = append(all, l)
	}
	return all
}

// Parse reads the value of --kernels. A level that this machine lacks is an error of class
// capability.
func Parse(s string) (Level, error) {
	for i, n := range names {
		if s != n {
			continue
		}
		l := Level(i).Resolve()
		if best := Best(); l > best {
			return 0, errs.New(errs.Capability,
				"{kernels} %s: this CPU (%s) has no such instructions; use {kernels} %s or auto",
				s, cpuid.CPU.BrandName, best)
		}
		return l, nil
	}
	return 0, errs.New(errs.Usage, "unknown {kernels} %q; choose one of %s", s,
		strings.Join(names, ", "))
}
