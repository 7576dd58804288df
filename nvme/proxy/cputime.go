package proxy

import (
	"runtime"
	"sync/atomic"
	"time"

	"helios/internal/hostcpu"
)

// The CPU time of all software controllers of the process: carrying commands out, handing them to
// the kernel (which does its part of a read in that call or when it is entered for completions) and
// posting completions. Goroutines share threads, so a section of this work is tied to its thread
// while the thread's clock measures it. Two system calls a section are not for every run: it is
// counted only while somebody asks.
var (
	metering  atomic.Int32
	cpuSpent  atomic.Int64 // ns
	noSection = int64(-1)
)

// MeterCPU has CPUTime count from here on, until stop is called.
func MeterCPU() (stop func()) {
	metering.Add(1)
	var once atomic.Bool
	return func() {
		if !once.Swap(true) {
			metering.Add(-1)
		}
	}
}

// CPUTime returns what the controllers have spent while it was counted. Threads that the kernel
// lends to io_uring are not in it; nor is the polling of those who wait.
func CPUTime() time.Duration { return time.Duration(cpuSpent.Load()) }

// section begins a piece of work that blocks at most in the kernel; ended takes what it returns.
func section() int64 {
	if metering.Load() == 0 {
		return noSection
	}
	runtime.LockOSThread()
	return int64(hostcpu.ThreadTime())
}

func ended(from int64) {
	if from == noSection {
		return
	}
	cpuSpent.Add(int64(hostcpu.ThreadTime()) - from)
	runtime.UnlockOSThread()
}
