// Package pci looks at PCI devices through sysfs and moves them from one kernel driver to another.
package pci

import "helios/internal/errs"

// Sys is a view of the machine. Root "" is the real one; tests give a folder that holds "sys",
// "proc", "dev" and "run" as they would be below "/".
type Sys struct{ Root string }

// NVMeClass is the class code of NVM Express I/O controllers (PCI Code and ID Assignment, 01 08 02).
const NVMeClass = 0x010802

// Device is one function.
type Device struct {
	Addr      string // 0000:00:04.0
	Vendor    uint16
	DeviceID  uint16
	Class     uint32 // 24 bits
	Driver    string // bound kernel driver, "" for none
	Override  string // driver_override, "" for none
	Group     int    // IOMMU group, -1 without one
	NUMANode  int    // -1 when unknown
	LinkSpeed string // "16.0 GT/s PCIe", "" when unknown
	LinkWidth int    // lanes, 0 when unknown
}

// Devices lists the functions of a class (0: all) in the order of their addresses.
func (s Sys) Devices(class uint32) ([]Device, error) { return nil, errTodo }

// Device reads one function; addr may lack the domain ("00:04.0").
func (s Sys) Device(addr string) (Device, error) { return Device{}, errTodo }

// GroupMembers lists the functions of an IOMMU group other than PCI bridges.
func (s Sys) GroupMembers(group int) ([]Device, error) { return nil, errTodo }

// Bind makes driver the device's driver by driver_override, so that nothing else is rebound: sets
// the override, unbinds the present driver, probes. On error the device is back where it was, or
// the error says where it is.
func (s Sys) Bind(addr, driver string) error { return errTodo }

// Restore gives a device back to driver ("" lets the kernel choose): clears the override, unbinds,
// probes, and waits until the driver has it.
func (s Sys) Restore(addr, driver string) error { return errTodo }

var errTodo = errs.New(errs.Capability, "pci: not in this version yet")
