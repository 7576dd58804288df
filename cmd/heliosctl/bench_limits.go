package main

import (
	"path/filepath"

	"helios/gpuio"
	"helios/gpuio/iobench"
	"helios/internal/state"
)

// limit says of a row what its SSDs and their links allow, where a model or the kernel tells.
func (b *ioBench) limit(row *iobench.Row, bound []state.SSD, ssds []*gpuio.SSD) error {
	stripes := make([]iobench.Stripe, len(ssds))
	for i, s := range ssds {
		stripes[i].On = gpuio.StripesOn(ssds, s)
		for _, d := range bound {
			if d.Name != s.Name {
				continue
			}
			var err error
			if d.Kind == state.KindVFIO {
				// its data sheet is not known, its link is
				if c, err := b.machine.Sys.Device(filepath.Base(d.Path)); err == nil {
					stripes[i].Link = c.LinkBytes()
				}
			} else if stripes[i].Model, err = b.opener.opener().ModelOf(d); err != nil {
				return err
			}
		}
	}
	lba := ssds[0].Ctrl.Namespace().LBABytes
	bytes := float64((row.RowBytes + lba - 1) / lba * lba)
	if row.IOPS > 0 { // several rows may share a command
		bytes = max(bytes, row.SSDBytesPerSecond/row.IOPS)
	}
	row.Limit(stripes, int64(bytes))
	return nil
}
