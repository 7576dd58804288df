package gpuio

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"helios/cuda"
	"helios/internal/errs"
)

// StackMmap copies rows out of the page cache.
const StackMmap = "mmap"

var mmapStack = &Stack{
	Name: StackMmap, Summary: "rows come out of the page cache", PageCache: true,
	Open: func(dev cuda.Device, ssds []*SSD, l Layout, _ StackOptions) (Reader, error) {
		return NewMmap(dev, ssds, l)
	},
}

// NewMmap makes the stack that copies rows out of the page cache, as loaders of DGL and PyTorch
// Geometric do. Its ReadStats.Bytes are the rows' LBAs, an upper bound: what the page cache held
// already did not move.
func NewMmap(dev cuda.Device, ssds []*SSD, l Layout) (Reader, error) {
	r, err := newHostReader(StackMmap, dev, ssds, l, false)
	if err != nil {
		return nil, err
	}
	for _, b := range r.files {
		if b.size == 0 {
			continue
		}
		if b.mapped, err = unix.Mmap(int(b.fd), 0, int(b.size), unix.PROT_READ,
			unix.MAP_SHARED); err != nil {
			err = errs.New(errs.Device, "SSD %s: map %s: %w", b.ssd, b.path, err)
			return nil, errors.Join(err, r.copyS.Close(), r.closeFiles())
		}
		// Without this each fault reads around it, as for sequential access.
		if err := unix.Madvise(b.mapped, unix.MADV_RANDOM); err != nil {
			err = errs.New(errs.Device, "SSD %s: advise on %s: %w", b.ssd, b.path, err)
			return nil, errors.Join(err, r.copyS.Close(), r.closeFiles())
		}
	}
	for range max(2, runtime.NumCPU()) {
		r.workers.Add(1)
		go func() {
			defer r.workers.Done()
			r.syncWorker(mmapRow)
		}()
	}
	return r, nil
}

// mmapRow copies a row from the mapping. The file may have become shorter since it was mapped, or
// its medium may fail: the fault becomes an error.
func mmapRow(p *hostPending, u *hostUnit) (err error) {
	defer func() {
		if x := recover(); x != nil {
			cause, ok := x.(error)
			if !ok {
				cause = fmt.Errorf("%v", x)
			}
			err = &BackingError{SSD: u.file.ssd, Path: u.file.path, Offset: u.off,
				Bytes: len(u.dst), Err: fmt.Errorf("%w or unreadable (%w)", ErrShort, cause)}
		}
	}()
	p.account(u.ssd, p.r.layout.ReadBytes())
	copy(u.dst, u.file.mapped[u.off:])
	p.takeCRCs(u, u.dst)
	return nil
}
