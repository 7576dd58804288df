//go:build linux && (amd64 || arm64) && !nocuda

package ptxexec

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"helios/internal/testing/fakecuda"
	"helios/tools/ptxrun"
)

func init() {
	fakecuda.AfterBuild(func(t testing.TB, library string) {
		t.Cleanup(func() {
			if err := leaveExecuted(); err != nil {
				t.Error(err)
			}
		})
		if err := interpret(library); err != nil {
			t.Fatal(err)
		}
	})
}

// interpreter runs the launches of one library from their PTX.
type interpreter struct {
	plant *Plant
	steps int64

	mu      sync.Mutex
	modules map[uint64]func() (*ptxrun.Module, error)
}

// lostPoll is the interval at which a long launch asks whether somebody still waits for it.
const lostPoll = 20 * time.Millisecond

var (
	interpreted sync.Map // library → nothing: those that have an interpreter
	executedMu  sync.Mutex
	executedAll = map[string]Executed{} // of this process, by kernel
)

// interpret has the library at path run the PTX of its modules, once.
func interpret(path string) error {
	if _, there := interpreted.LoadOrStore(path, nil); there {
		return nil
	}
	in := &interpreter{modules: map[uint64]func() (*ptxrun.Module, error){}}
	if text := os.Getenv(EnvPlant); text != "" {
		in.plant = &Plant{}
		if err := json.Unmarshal([]byte(text), in.plant); err != nil {
			return fmt.Errorf("%s: %w; it takes a ptxexec.Plant as JSON", EnvPlant, err)
		}
	}
	if text := os.Getenv(EnvSteps); text != "" {
		var err error
		if in.steps, err = strconv.ParseInt(text, 10, 64); err != nil || in.steps < 0 {
			return fmt.Errorf("%s=%q: give a number of instructions, or 0 for no end", EnvSteps,
				text)
		}
	}
	return fakecuda.Execute(path, in.run)
}

// module parses a text once, and plants the change.
func (in *interpreter) module(l *fakecuda.Launch) (*ptxrun.Module, error) {
	in.mu.Lock()
	get, ok := in.modules[l.Module]
	if !ok {
		text := l.PTX
		get = sync.OnceValues(func() (*ptxrun.Module, error) {
			m, err := ptxrun.Parse([]byte(text))
			if err != nil || in.plant == nil {
				return m, err
			}
			if _, has := m.Kernel(in.plant.Kernel); !has {
				return m, nil
			}
			return m.WithMutation(in.plant.Kernel, in.plant.Index, in.plant.Mutation)
		})
		in.modules[l.Module] = get
	}
	in.mu.Unlock()
	return get()
}

func (in *interpreter) run(l *fakecuda.Launch) error {
	m, err := in.module(l)
	if err != nil {
		return err
	}
	k, ok := m.Kernel(l.Kernel)
	if !ok {
		return fmt.Errorf("the module has no kernel %s", l.Kernel)
	}
	memory := make(ptxrun.Memory, 0, len(l.Ranges))
	for _, r := range l.Ranges {
		memory = append(memory, ptxrun.Region{Base: r.Addr, Size: r.Size})
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // a lost context's grids end by themselves
		tick := time.NewTicker(lostPoll)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				if l.Lost() {
					cancel()
				}
			}
		}
	}()
	dims := func(d [3]uint32) [3]int { return [3]int{int(d[0]), int(d[1]), int(d[2])} }
	began := time.Now()
	stats, err := k.Run(ctx, ptxrun.Launch{Grid: dims(l.Grid), Block: dims(l.Block),
		SharedBytes: int(l.SharedBytes), Params: l.Params, Memory: memory, Seed: l.Seed,
		Resident: int(l.Resident), MaxInstructions: in.steps})
	executedMu.Lock()
	sum := executedAll[k.Name]
	sum.add(Executed{1, stats.Instructions, stats.Lanes, stats.Instructions,
		time.Since(began).Nanoseconds(), stats.Executed, stats.Compared, stats.Differed})
	executedAll[k.Name] = sum
	executedMu.Unlock()
	if err == nil {
		return nil
	}
	// GPUs tell a wild address from a misaligned one, and both from the rest.
	code := int32(fakecuda.LaunchFailed)
	switch text := err.Error(); {
	case strings.Contains(text, "is not aligned to"):
		code = fakecuda.MisalignedAddress
	case strings.Contains(text, "is outside the"), strings.Contains(text, "is not mapped"):
		code = fakecuda.IllegalAddress
	}
	return &fakecuda.LaunchError{Result: code, Err: err}
}

// leaveExecuted writes what this process has run so far where EnvExecuted asks for it.
func leaveExecuted() error {
	dir := os.Getenv(EnvExecuted)
	if dir == "" {
		return nil
	}
	executedMu.Lock()
	defer executedMu.Unlock()
	text, err := json.Marshal(executedAll)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, fmt.Sprintf("%d.json", os.Getpid()))
	return errors.Join(os.WriteFile(path+".new", text, 0o600), os.Rename(path+".new", path))
}
