// Package pages keeps pages of one size that a kernel's reads fetch as if they were feature rows:
// the disk caches and packed chunks of mini-batches (package cache/packed, whose Pages a Folder
// is), and parts of a graph (package dataset/parted). They are a file in a folder, made by
// CreateFolder (folder.go) and read through a software SSD over it (open.go), by any I/O stack; or
// they lie on the SSDs of a dataset, behind its rows (package dataset/stripe). Each page has a
// checksum (sums.go).
package pages

import (
	"context"
	"fmt"
	"hash/crc32"

	"github.com/google/uuid"

	"helios/gpuio"
	"helios/internal/errs"
)

// Spec gives a store's owner, and the size and number of its pages.
type Spec struct {
	ID        uuid.UUID // of the pack that the pages are part of
	PageBytes int64     // a multiple of 4096, at most 16 MiB
	Pages     int64
}

// align divides the size of a page: direct I/O and LBAs of any SSD go into it.
const align = 4096

// maxPage is the longest row of a gpuio.Layout, and maxPages keeps the size of a store and its
// table of checksums far below what 64 bits hold.
const (
	maxPage  = 1 << 24
	maxPages = 1 << 36
)

// Check refuses a store that cannot be.
func (s Spec) Check() error {
	switch {
	case s.ID == uuid.Nil:
		return errs.New(errs.Usage, "pages without the identity of a pack: give one")
	case s.PageBytes < align || s.PageBytes > maxPage || s.PageBytes%align != 0:
		return errs.New(errs.Usage, "pages of %d bytes: choose a multiple of %d up to %d",
			s.PageBytes, align, maxPage)
	case s.Pages < 1 || s.Pages > maxPages:
		return errs.New(errs.Usage, "%d pages: choose 1 to %d", s.Pages, int64(maxPages))
	}
	return nil
}

// Bytes returns the size of all pages.
func (s Spec) Bytes() int64 { return s.Pages * s.PageBytes }

// CheckRun checks that data are whole pages of the store, from page on.
func (s Spec) CheckRun(page int64, data []byte) error {
	n := int64(len(data)) / s.PageBytes
	if int64(len(data))%s.PageBytes != 0 || page < 0 || page > s.Pages-n {
		return errs.New(errs.Failed, "%d bytes from page %d on: a store of %d pages of %d bytes",
			len(data), page, s.Pages, s.PageBytes)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Opened is a store of pages to read: page p is row p of Layout, whose rows are pages, on SSDs.
type Opened struct {
	SSDs   []*gpuio.SSD
	Layout gpuio.Layout
	// Sums reads the checksums of all pages, for gpuio.NewChecked: 4 bytes a page.
	Sums func(ctx context.Context) ([]uint32, error)
	// Shutdown ends what was opened for the pages alone; nil: nothing was.
	Shutdown func(ctx context.Context) error
}

// Close ends what was opened for the pages alone. Readers of them are closed before.
func (o *Opened) Close(ctx context.Context) error {
	if o.Shutdown == nil {
		return nil
	}
	f := o.Shutdown
	o.Shutdown = nil
	return f(ctx)
}

// Pages are read in long runs: a command moves up to longRead, and of one SSD no more than inFlight
// is being read, which is as much memory for staging or as many read buffers.
const (
	longRead = 1 << 20
	inFlight = 64 << 20
)

// Options fills in how a stack reads runs of pages, where nobody has said how: long commands, and
// so few of them at a time that their buffers stay small.
func (o *Opened) Options(s gpuio.StackOptions) gpuio.StackOptions {
	if s.CoalesceBytes == 0 {
		s.CoalesceBytes = max(longRead, o.Layout.ReadBytes())
	}
	if limit := max(inFlight/max(s.CoalesceBytes, o.Layout.ReadBytes()), 1); s.Depth == 0 {
		s.Depth = limit
	}
	return s
}

// DamageError is a store of pages that is not what was written.
type DamageError struct {
	Place string // a file
	What  string
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("%s: %s; %s", e.Place, e.What, advice)
}

// advice is the next step where pages are damaged: there is no second copy of them.
const advice = "remove the folder that they were prepared in and prepare it again"

func damaged(place, format string, a ...any) error {
	return errs.With(errs.Device, &DamageError{place, fmt.Sprintf(format, a...)})
}
