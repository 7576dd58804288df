package stripe

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/google/uuid"

	"helios/nvme"
)

// pageBytes counts the bytes of checked pages on a stripe's SSD.
func (s *stripe) pageBytes() (n int64) {
	for _, e := range s.sb.Pages.All() {
		if e.State == StateComplete {
			n += e.LBAs * int64(s.sb.LBABytes)
		}
	}
	return n
}

// pages checks all pages on a stripe's SSD.
func (v *verifier) pages(ctx context.Context, s stripe) error {
	for _, e := range s.sb.Pages.All() {
		if e.State != StateComplete {
			v.note("ssd %s: the pages of pack %s are not finished and were not checked", s.t.name,
				e.ID)
			continue
		}
		if err := v.pack(ctx, s, &e); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) note(format string, a ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.r.Notes = append(v.r.Notes, fmt.Sprintf(format, a...))
}

// pack checks the pages of one extent.
func (v *verifier) pack(ctx context.Context, s stripe, e *PageExtent) error {
	table, err := s.pageTable(ctx, e)
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		v.badPage(s, e, e.TableLBA, e.TableLBAs, "%v", err)
		table = nil
	}
	lba := int64(s.sb.LBABytes)
	per := e.PageBytes / lba
	buf := make([]byte, max(chunkBytes/e.PageBytes, 1)*e.PageBytes)
	for slot, slots := int64(0), e.LBAs/per; slot < slots; {
		b := buf[:min(int64(len(buf)), (slots-slot)*e.PageBytes)]
		start := e.LBA + nvme.LBA(slot*per)
		rerr := s.t.dev.ReadAt(ctx, start, b)
		if rerr != nil {
			if ctx.Err() != nil {
				return rerr
			}
			v.badPage(s, e, start, int64(len(b))/lba, "pages of pack %s: %v", e.ID, rerr)
		}
		n := int64(len(b)) / e.PageBytes
		for k := int64(0); k < n && rerr == nil && table != nil; k++ {
			want := binary.LittleEndian.Uint32(table[4*(slot+k):])
			got := crc32.Checksum(b[k*e.PageBytes:][:e.PageBytes], castagnoli)
			if got != want {
				v.badPage(s, e, start+nvme.LBA(k*per), per,
					"page %d of pack %s: CRC32C %08x, %08x was written",
					(slot+k)*int64(s.sb.StripeCount)+int64(s.sb.StripeIndex), e.ID, got, want)
			}
		}
		slot += n
		v.mu.Lock()
		v.r.Pages += n
		v.r.Bytes += int64(len(b))
		v.done += int64(len(b))
		v.o.Progress.Report("verify", v.done, v.total)
		v.mu.Unlock()
	}
	return nil
}

// badPage is a finding among pages.
func (v *verifier) badPage(s stripe, e *PageExtent, lba nvme.LBA, blocks int64, format string,
	a ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.record(BadChunk{SSD: s.t.name, Stripe: s.sb.StripeIndex, Chunk: -1, LBA: lba,
		Blocks: blocks, What: fmt.Sprintf(format, a...), Pack: e.ID.String()})
	v.r.BadPages++
	if v.badPack == uuid.Nil {
		v.badPack = e.ID
	}
}

// wholePacks notes packs that some of a dataset's SSDs have pages of, and others not.
func (v *verifier) wholePacks(stripes []stripe) {
	seen := map[uuid.UUID]int{}
	var order []uuid.UUID
	for _, s := range stripes {
		for _, e := range s.sb.Pages.All() {
			if seen[e.ID]++; seen[e.ID] == 1 {
				order = append(order, e.ID)
			}
		}
	}
	for _, id := range order {
		if n := seen[id]; n < len(stripes) {
			v.note("pages of pack %s are on %d of %d SSDs: making or removing them was cut off; %s",
				id, n, len(stripes), pageAdvice(id))
		}
	}
}
