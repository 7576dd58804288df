package gpuio

import (
	"slices"
	"strings"

	"helios/cuda"
	"helios/internal/errs"
)

// Stack is a way to read rows. Each is declared beside its constructor, in a file that registers
// it; names, help, checks and the virtual clock read the registry, and code that must know more
// asks for the traits below, never for a name.
type Stack struct {
	Name    string
	Summary string // for help: a few words after the name

	// Queued: kernels drive the SSDs' NVMe queues. Else the CPU reads the files behind the SSDs,
	// past their controllers.
	Queued bool
	// Coalesces: rows on equal or close LBAs may share a read.
	Coalesces bool
	// Overlaps: kernels do not wait for their reads, so several sets are in flight, on SMs of their
	// own. Of other queued stacks a launch lasts as long as its reads.
	Overlaps bool
	// PageCache: rows come through the kernel's page cache, in whole pages, and no option applies.
	PageCache bool
	// Threads is the default size of a block of the I/O kernels; 0: there are none.
	Threads int
	// Blocks is the default number of such blocks of an I/O kernel; nil: DefaultBlocks.
	Blocks func(info cuda.Info, threads int) int

	Open func(dev cuda.Device, ssds []*SSD, l Layout, o StackOptions) (Reader, error)
}

// StackOptions are the options of all stacks; each takes those that it has. Zero values choose
// defaults.
type StackOptions struct {
	AsyncOptions
	Workers int    // CPU threads of a stack that reads files
	Engine  string // CPUOptions.Engine
}

// DefaultBlocks are the blocks of an I/O kernel of stacks that do not wait for their reads.
const DefaultBlocks = 32

// BlocksOn returns the stack's default of blocks on a device.
func (s *Stack) BlocksOn(info cuda.Info, threads int) int {
	if s.Blocks == nil {
		return DefaultBlocks
	}
	return s.Blocks(info, threads)
}

// allStacks are all stacks in the order of lists, the default first.
var allStacks []*Stack

func init() { allStacks = []*Stack{asyncStack, syncStack, cpuStack, mmapStack} }

// Stacks returns all stacks, the default first.
func Stacks() []*Stack { return slices.Clone(allStacks) }

// StackNames returns the names of the stacks for which keep holds; nil: of all.
func StackNames(keep func(*Stack) bool) []string {
	var names []string
	for _, s := range allStacks {
		if keep == nil || keep(s) {
			names = append(names, s.Name)
		}
	}
	return names
}

// FindStack returns the stack of a name, the default for "".
func FindStack(name string) (*Stack, error) {
	for _, s := range allStacks {
		if s.Name == name || name == "" {
			return s, nil
		}
	}
	return nil, errs.New(errs.Usage, "I/O stack %q is not known; choose one of %s", name,
		strings.Join(StackNames(nil), ", "))
}

// AnyStack reports whether a trait holds for one of the stacks of these names.
func AnyStack(names []string, trait func(*Stack) bool) bool {
	return slices.ContainsFunc(names, func(n string) bool {
		s, err := FindStack(n)
		return err == nil && trait(s)
	})
}
