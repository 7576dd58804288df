// Package ptxexec runs the kernels of the fake libcuda from their committed PTX, by
// tools/ptxrun. A test binary that imports it, as "make test-ptx" builds them, does so for each
// library that it builds.
package ptxexec

import (
	"encoding/json"
	"fmt"
	"os"

	"helios/tools/ptxrun"
)

// Environment of a process that runs the PTX: a Plant as JSON; the number of instructions of warps
// that a launch may take (0: any number); and a folder for the counts of the launches (Executed).
const (
	EnvPlant    = "HELIOS_PTX_PLANT"
	EnvSteps    = "HELIOS_PTX_STEPS"
	EnvExecuted = "HELIOS_PTX_EXECUTED"
)

// Plant is a change of one instruction of one kernel, for all launches of a process.
type Plant struct {
	Kernel   string
	Index    int
	Mutation ptxrun.Mutation
}

// Executed holds what a process ran of a kernel.
type Executed struct {
	Launches     int64
	Instructions int64 // of warps
	Lanes        int64
	Most         int64   // instructions of one launch
	NS           int64   // in the interpreter
	Counts       []int64 // by index of the instruction
	Compared     int64   // of a plant: see ptxrun.Stats
	Differed     int64
}

// add takes a launch, or another process's, in.
func (e *Executed) add(o Executed) {
	e.Launches += o.Launches
	e.Instructions += o.Instructions
	e.Lanes += o.Lanes
	e.Most = max(e.Most, o.Most)
	e.NS += o.NS
	e.Compared += o.Compared
	e.Differed += o.Differed
	if e.Counts == nil {
		e.Counts = make([]int64, len(o.Counts))
	}
	for i, n := range o.Counts {
		e.Counts[i] += n
	}
}

// ReadExecuted adds up what processes left in the folder that EnvExecuted names.
func ReadExecuted(dir string) (map[string]Executed, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string]Executed{}
	for _, f := range files {
		text, err := os.ReadFile(dir + "/" + f.Name())
		if err != nil {
			return nil, err
		}
		var one map[string]Executed
		if err := json.Unmarshal(text, &one); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		for k, e := range one {
			sum := all[k]
			sum.add(e)
			all[k] = sum
		}
	}
	return all, nil
}
