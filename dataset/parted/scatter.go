package parted

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"

	"helios/dataset/pages"
	"helios/internal/errs"
	"helios/internal/hostmem"
)

// scatter puts pieces of bytes at their places in the pages. A page is in memory from its first
// piece to its last, then it is written. Places of one stream (the rows of a part, its lists, …)
// come in rising order, so that a stream has one such page, and one more where it meets the next.
type scatter struct {
	to    pages.Writer
	page  int64
	left  []uint32 // by page: bytes that have not come; 0: written, or not of this pass
	slot  []int32  // by page: 1 + the buffer that it is in
	arena []byte   // the buffers
	free  chan int32
	open  int // pages that are in memory, those that are being written aside
	full  chan fullPage
	g     *errgroup.Group
	ctx   context.Context // of the writers
	mem   [][]byte

	mu      sync.Mutex
	idle    sync.Cond
	writing int
	written int64 // bytes
}

type fullPage struct {
	page int64
	slot int32
}

// scatterBytes is the memory of a scatter for each page and for each buffer of a page.
const scatterBytes = 4 + 4

// newScatter begins with buffers for so many pages.
func newScatter(ctx context.Context, to pages.Writer, s pages.Spec, buffers int64,
	workers int) (_ *scatter, err error) {
	c := &scatter{to: to, page: s.PageBytes, free: make(chan int32, buffers),
		full: make(chan fullPage)}
	c.idle.L = &c.mu
	defer func() {
		if err != nil {
			err = errors.Join(err, freeAll(c.mem))
		}
	}()
	alloc := func(bytes int64) []byte {
		b, aerr := hostmem.Alloc(bytes, "layout by part")
		if aerr == nil {
			c.mem = append(c.mem, b)
		}
		err = errors.Join(err, aerr)
		return b
	}
	c.left = hostmem.View[uint32](alloc(4 * s.Pages))
	c.slot = hostmem.View[int32](alloc(4 * s.Pages))
	c.arena = alloc(buffers * c.page)
	if err != nil {
		return nil, err
	}
	for i := range int32(buffers) {
		c.free <- i
	}
	c.g, c.ctx = errgroup.WithContext(ctx)
	for range workers {
		c.g.Go(c.write)
	}
	return c, nil
}

// close ends the writers. Pages that are not whole are dropped.
func (c *scatter) close() error {
	close(c.full)
	return errors.Join(c.g.Wait(), freeAll(c.mem))
}

func (c *scatter) buffer(slot int32) []byte { return c.arena[int64(slot)*c.page:][:c.page] }

// write writes pages that are whole until there are no more, or one cannot be written.
func (c *scatter) write() error {
	for f := range c.full {
		err := c.to.WriteAt(c.ctx, f.page, c.buffer(f.slot))
		c.mu.Lock()
		if c.writing--; c.writing == 0 || err != nil {
			c.idle.Broadcast()
		}
		c.written += c.page
		c.mu.Unlock()
		if err != nil {
			return err
		}
		c.free <- f.slot
	}
	return nil
}

// put puts bytes at a place, counted over all pages. Those of pages that are written are left out.
func (c *scatter) put(offset int64, data []byte) error {
	for len(data) > 0 {
		page, in := offset/c.page, offset%c.page
		n := min(c.page-in, int64(len(data)))
		if c.left[page] > 0 {
			if c.slot[page] == 0 {
				if err := c.take(page); err != nil {
					return err
				}
			}
			copy(c.buffer(c.slot[page] - 1)[in:], data[:n])
			if int64(c.left[page]) < n {
				return errs.New(errs.Failed, "page %d of the layout gets more than it has room for",
					page)
			}
			if c.left[page] -= uint32(n); c.left[page] == 0 {
				if err := c.send(page); err != nil {
					return err
				}
			}
		}
		offset, data = offset+n, data[n:]
	}
	return nil
}

// take gives a page a buffer.
func (c *scatter) take(page int64) error {
	if c.open == cap(c.free) {
		return errs.New(errs.Failed, "%d pages of the layout are in memory and none is whole",
			c.open)
	}
	select {
	case i := <-c.free:
		if n := int64(c.left[page]); n < c.page { // the rest of it is zeros
			clear(c.buffer(i)[n:])
		}
		c.slot[page] = i + 1
		c.open++
		return nil
	case <-c.ctx.Done():
		return c.failure()
	}
}

// send has a page written.
func (c *scatter) send(page int64) error {
	i := c.slot[page] - 1
	c.slot[page] = 0
	c.open--
	c.mu.Lock()
	c.writing++
	c.mu.Unlock()
	select {
	case c.full <- fullPage{page, i}:
		return nil
	case <-c.ctx.Done():
		c.mu.Lock()
		c.writing--
		c.mu.Unlock()
		return c.failure()
	}
}

// failure is why the writers have ended.
func (c *scatter) failure() error {
	if cause := context.Cause(c.ctx); cause != nil {
		return cause
	}
	return c.ctx.Err()
}

// settle waits for the pages that are being written, and makes them durable.
func (c *scatter) settle() error {
	stop := context.AfterFunc(c.ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.idle.Broadcast()
	})
	defer stop()
	c.mu.Lock()
	for c.writing > 0 && c.ctx.Err() == nil {
		c.idle.Wait()
	}
	c.mu.Unlock()
	if c.ctx.Err() != nil {
		return c.failure()
	}
	return c.to.Sync(c.ctx)
}

// missing returns the number of pages that are not whole.
func (c *scatter) missing() (n int64) {
	for _, left := range c.left {
		if left > 0 {
			n++
		}
	}
	return n
}
