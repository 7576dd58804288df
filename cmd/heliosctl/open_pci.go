package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"helios/gpuio"
	"helios/internal/bound"
	"helios/internal/errs"
	"helios/internal/state"
	"helios/internal/vfio"
	"helios/nvme"
	"helios/nvme/vfiobus"
	"helios/sched/plan"
)

// domain is one IOMMU address space with the controllers that a process drives in it.
type domain interface {
	// Open takes the controller at a PCI address.
	Open(addr string) (nvme.Bus, error)
	// Close ends the address space; the buses must have been closed.
	Close() error
}

type vfioDomain struct{ *vfio.Domain }

func openDomain() (domain, error) {
	d, err := vfio.New(vfio.Options{})
	if err != nil {
		return nil, err
	}
	return vfioDomain{d}, nil
}

func (d vfioDomain) Open(addr string) (nvme.Bus, error) {
	dev, err := d.Attach(addr)
	if err != nil {
		return nil, err
	}
	bus, err := vfiobus.Open(dev, vfiobus.Options{})
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	return bus, nil
}

// openController opens a controller's bus. The holder of its IOMMU group may have just been killed:
// the kernel releases the group some time after the process.
func openController(ctx context.Context, d domain, addr string) (nvme.Bus, error) {
	return bound.Retry(ctx, bound.DyingTimeout,
		func() (nvme.Bus, error) { return d.Open(addr) },
		func(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EAGAIN) })
}

// vfioBus opens the bus of a bound controller in the set's one address space.
func (o *ssdOpener) vfioBus(ctx context.Context, s *bound.Set, d state.SSD) (nvme.Bus, error) {
	if _, next, err := o.machine.stillBound(d); err != nil {
		return nil, fmt.Errorf("at %s: %w: %s", d.PCI, err, next)
	}
	if s.Domain == nil {
		dom, err := o.machine.domain()
		if err != nil {
			return nil, err
		}
		s.Domain = dom
	}
	return openController(ctx, s.Domain.(domain), d.PCI)
}

// refuseKernelStacks says that an I/O stack which reads through the kernel cannot read SSDs that
// were taken from it, nor those that it has never had.
func (o *ssdOpener) refuseKernelStacks(chosen []state.SSD) error {
	flag := o.stackFlag
	for _, s := range o.stacks {
		stack := s
		if flag == "mode" {
			stack = plan.Config{Mode: s}.WithDefaults().IOStack
		}
		if kind, err := gpuio.FindStack(stack); err != nil || kind.Queued {
			continue
		}
		way := map[string]string{"mode": "--mode " + plan.DefaultMode, "io-stack": "--io-stack " +
			gpuio.StackAsync}[flag]
		for _, d := range chosen {
			switch d.Kind {
			case state.KindComputed:
				return errs.New(errs.Capability,
					"%v %s reads through the kernel, and SSD %s is computed: there is no file behind it; use %s, or bind files with {proxy} and load the dataset onto them",
					errs.Key(flag), s, d.Name, way)
			case state.KindVFIO:
				return errs.New(errs.Capability,
					"%v %s reads through the kernel, from which SSD %s (%s) was taken; use %s, or give the SSD back with \"sudo heliosctl unbind-ssds %s\" and bind it with {proxy}",
					errs.Key(flag), s, d.Name, d.PCI, way, d.Name)
			}
		}
	}
	return nil
}
