package nvme

import "fmt"

// keepCMBAway sees to it that the controller takes no address of ours for its memory buffer, in
// which nothing of ours lies (base specification 2.0, 8.2.1). The controller is disabled.
func (c *Controller) keepCMBAway() error {
	if c.cap.CMBS() {
		// An earlier driver may have switched it on, and CC.EN = 0 leaves it so. The low dword
		// takes effect, so it comes last.
		err := c.bus.Write32(RegCMBMSC+4, 0)
		if err == nil {
			err = c.bus.Write32(RegCMBMSC, 0)
		}
		if err != nil {
			return fmt.Errorf("nvme %s: write CMBMSC: %w", c.bus.Name(), deviceClass(err))
		}
		return nil
	}
	bus, ok := As[BARReserver](c.bus)
	if !ok || c.version < 1<<16|2<<8 {
		return nil
	}
	// Before NVMe 1.4 the buffer is always on, at its address on the PCI bus.
	size, err := c.bus.Read32(RegCMBSZ)
	loc := uint32(0)
	if err == nil {
		loc, err = c.bus.Read32(RegCMBLOC)
	}
	if err != nil {
		return fmt.Errorf("nvme %s: read CMBSZ and CMBLOC: %w", c.bus.Name(), deviceClass(err))
	}
	s, l := CMBSZ(size), CMBLOC(loc)
	if s.Bytes() == 0 {
		return nil
	}
	if err := bus.ReserveBAR(l.BIR(), l.OFST()*s.Unit(), s.Bytes()); err != nil {
		return fmt.Errorf(
			"nvme %s: the addresses of its memory buffer on the PCI bus are in use for DMA: %w; give the SSD a process of its own",
			c.bus.Name(), err)
	}
	return nil
}
