// Package ptxrun runs PTX on the CPU: the committed text that a GPU's driver compiles, and not the
// C++ that it was made of. Tests and tools use it to show that the shipped PTX does what Go's
// kernels do, and to plant changes of single instructions that tests must notice.
//
// Parse reads a module, Kernel.Run executes a launch of one of its kernels, and
// Module.WithMutation changes one instruction. The PTX ISA manual defines each instruction;
// sections are named where a rule is not obvious.
package ptxrun
