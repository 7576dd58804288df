package pci

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"helios/internal/errs"
)

const driversDir = "/sys/bus/pci/drivers"

// NoDriver stands for the driver of a device that had none: Restore takes the present driver away
// and gives the device to nobody.
const NoDriver = "none"

func (s Sys) wait() time.Duration {
	if s.Wait > 0 {
		return s.Wait
	}
	return 30 * time.Second
}

// stuckError is that of a sysfs write that the kernel did not return from in time.
type stuckError struct{ what string }

func (e *stuckError) Error() string { return e.what }

// Bind makes driver the device's driver by driver_override, so that nothing else is rebound: sets
// the override, unbinds the present driver, binds. A device that has the driver already only gets
// the override. On error the device is back where it was, or the error shows where it is.
//
// Whoever kills this leaves one of these states, all seen by Device.Taken: override set and old
// driver bound; override set and no driver; both set. Bind and Restore go on from each of them.
func (s Sys) Bind(addr, driver string) error {
	d, err := s.Device(addr)
	if err != nil {
		return err
	}
	if driver == "" || strings.ContainsAny(driver, "/\n") {
		return errs.New(errs.Usage, "%s: %q is not the name of a kernel driver", d.Addr, driver)
	}
	if err := s.haveDriver(d, driver); err != nil {
		return err
	}
	if strings.HasPrefix(driver, "vfio") && d.Group < 0 {
		return errs.New(errs.Capability,
			"%s is in no IOMMU group: the IOMMU is off; \"heliosctl vfio-setup status\" names which kernel argument turns it on",
			d.Addr)
	}
	err = s.move(d, driver, driver)
	var stuck *stuckError
	if err == nil || errors.As(err, &stuck) { // more writes would hang as well
		return err
	}
	if undo := s.undo(d); undo != nil {
		return fmt.Errorf("%w; putting it back failed too: %w; %s", err, undo, s.where(d.Addr))
	}
	return fmt.Errorf("%w; nothing has changed: %s", err, s.where(d.Addr))
}

// Restore gives a device back to driver: clears the override, unbinds, binds, and waits until the
// driver has it. "" lets the kernel choose, which may find no driver; with NoDriver the device is
// left without one. A driver that somebody gave the device to since keeps it: its disk may be
// mounted. Restore goes on where a killed Bind or Restore stopped. On error the error shows where
// the device is.
func (s Sys) Restore(addr, driver string) error {
	d, err := s.Device(addr)
	if err != nil {
		return err
	}
	if strings.ContainsAny(driver, "/\n") {
		return errs.New(errs.Usage, "%s: %q is not the name of a kernel driver", d.Addr, driver)
	}
	if d.Driver != "" && d.Driver != d.Override && !strings.HasPrefix(d.Driver, "vfio") {
		driver = d.Driver // never left it, or somebody gave it to that driver since
	}
	if driver == NoDriver {
		if err := s.strip(d); err != nil {
			return fmt.Errorf("%w; %s", err, s.where(d.Addr))
		}
		return nil
	}
	if driver != "" {
		if err := s.haveDriver(d, driver); err != nil {
			return err
		}
	}
	if err := s.move(d, "", driver); err != nil {
		return fmt.Errorf("%w; %s", err, s.where(d.Addr))
	}
	return nil
}

// haveDriver refuses before anything is touched.
func (s Sys) haveDriver(d Device, driver string) error {
	if _, err := os.Stat(s.Path(driversDir, driver)); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: kernel driver %s: %w", d.Addr, driver, err)
	}
	next := "modprobe " + driver
	if strings.HasPrefix(driver, "vfio") {
		next = "heliosctl vfio-setup setup"
	}
	return errs.New(errs.Capability, "%s: the kernel has no driver %s loaded; run \"%s\"", d.Addr,
		driver, next)
}

// where says in words what state a device is in.
func (s Sys) where(addr string) string {
	d, err := s.Device(addr)
	if err != nil {
		return "the device is gone"
	}
	has := "it has no driver"
	if d.Driver != "" {
		has = "it is with driver " + d.Driver
	}
	if d.Busy {
		has += ", the kernel is still at work on it"
	}
	if d.Override != "" {
		has += ", driver_override is " + d.Override
	}
	return fmt.Sprintf("%s: %s", addr, has)
}

// move sets the override and gives the device to driver ("": whichever the kernel finds). Every
// step is left out where its effect is there.
func (s Sys) move(d Device, override, driver string) error {
	if now, busy := s.override(d.Addr); busy || now != override {
		if err := s.setOverride(d.Addr, override); err != nil {
			return err
		}
	}
	if now := s.driver(d.Addr); now != "" && now != driver {
		if err := s.unbind(d.Addr, now); err != nil {
			return err
		}
	}
	return s.bind(d.Addr, driver)
}

// undo brings a device back to the state d. An override that is not the driver's own was left by a
// killed bind; it is not put back.
func (s Sys) undo(d Device) error {
	override := d.Override
	if d.Driver != "" && override != d.Driver {
		override = ""
	}
	if d.Driver != "" {
		return s.move(d, override, d.Driver)
	}
	if now := s.driver(d.Addr); now != "" {
		if err := s.unbind(d.Addr, now); err != nil {
			return err
		}
	}
	return s.setOverride(d.Addr, override)
}

// strip takes a device from the driver that d names, no other, and clears the override. The
// override goes last: until then no other driver takes the device.
func (s Sys) strip(d Device) error {
	if d.Driver != "" {
		if err := s.unbind(d.Addr, d.Driver); err != nil {
			return err
		}
	}
	if now, busy := s.override(d.Addr); !busy && now == "" {
		return nil
	}
	return s.setOverride(d.Addr, "")
}

func (s Sys) setOverride(addr, driver string) error {
	err := s.write(devicesDir+"/"+addr+"/driver_override", driver+"\n")
	if err != nil {
		return s.explain(addr, "setting driver_override", err)
	}
	if got, _ := s.override(addr); got != driver {
		return errs.New(errs.Device, "%s: driver_override is %q after it was set to %q", addr,
			got, driver)
	}
	return nil
}

// unbind takes a device from the driver that has it. The kernel returns when the driver let go.
func (s Sys) unbind(addr, driver string) error {
	err := s.write(driversDir+"/"+driver+"/unbind", addr)
	if errors.Is(err, syscall.ENODEV) && s.driver(addr) != driver { // it went by itself
		err = nil
	}
	if err != nil {
		return s.explain(addr, "unbinding driver "+driver, err)
	}
	return s.until(addr, "leave driver "+driver, func(now string) bool { return now != driver })
}

// bind gives a device without driver to one ("": the kernel's choice).
func (s Sys) bind(addr, driver string) error {
	if driver != "" && s.driver(addr) == driver {
		return nil
	}
	if driver == "" {
		if err := s.write("/sys/bus/pci/drivers_probe", addr); err != nil {
			return s.explain(addr, "probing for a driver", err)
		}
		return nil // the kernel has asked every driver by now; it may be that none takes the device
	}
	// The driver's own bind explains why it fails, which drivers_probe does not.
	err := s.write(driversDir+"/"+driver+"/bind", addr)
	if err != nil && s.driver(addr) != driver {
		return s.explain(addr, "binding driver "+driver, err)
	}
	return s.until(addr, "get driver "+driver, func(now string) bool { return now == driver })
}

// until polls the driver's link.
func (s Sys) until(addr, what string, done func(driver string) bool) error {
	for deadline := time.Now().Add(s.wait()); ; {
		if done(s.driver(addr)) {
			return nil
		}
		if _, err := os.Stat(s.Path(devicesDir, addr)); err != nil {
			return errs.New(errs.Device, "%s was unplugged", addr)
		}
		if time.Now().After(deadline) {
			return errs.New(errs.Device, "%s did not %s within %v; see the kernel's log (dmesg)",
				addr, what, s.wait())
		}
		time.Sleep(time.Millisecond)
	}
}

// explain puts words to what a sysfs write returned.
func (s Sys) explain(addr, doing string, err error) error {
	var stuck *stuckError
	switch {
	case errors.As(err, &stuck):
		return errs.New(errs.Device,
			"%s: %s: %w; the kernel continues it and cannot be stopped: end what uses the SSD, see its log (dmesg), then run the same command again",
			addr, doing, err)
	case errors.Is(err, fs.ErrPermission):
		return errs.New(errs.Capability, "%s: %s: %w; only root may do that", addr, doing, err)
	case errors.Is(err, fs.ErrNotExist):
		if _, gone := os.Stat(s.Path(devicesDir, addr)); gone != nil {
			return errs.New(errs.Device, "%s: %s: it was unplugged", addr, doing)
		}
		return errs.New(errs.Capability, "%s: %s: this kernel has no such attribute: %w", addr,
			doing, err)
	case errors.Is(err, syscall.ENODEV):
		return errs.New(errs.Device, "%s: %s: %w: the driver does not take this device", addr,
			doing, err)
	}
	return errs.New(errs.Device, "%s: %s: %w; see the kernel's log (dmesg)", addr, doing, err)
}

// write writes a sysfs attribute and gives up waiting after a while. The kernel runs the driver's
// work in the write, which no signal interrupts; where it hangs, so does the goroutine.
func (s Sys) write(path, text string) error {
	done := make(chan error, 1)
	go func() {
		if s.Write != nil {
			done <- s.Write(path, text)
			return
		}
		f, err := os.OpenFile(s.Path(path), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(text)
			err = errors.Join(err, f.Close())
		}
		done <- err
	}()
	t := time.NewTimer(s.wait())
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
		return &stuckError{fmt.Sprintf("the kernel did not finish within %v (%s)", s.wait(),
			filepath.Base(path))}
	}
}
