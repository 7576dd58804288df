package nvme

import (
	"errors"
	"fmt"
)

// prpPages is the number of memory pages that [addr, addr+bytes) touches.
func prpPages(addr IOVA, bytes, pageBytes int) int {
	off := int(uint64(addr) & uint64(pageBytes-1))
	return (off + bytes + pageBytes - 1) / pageBytes
}

// BuildPRP describes the bytes [addr, addr+bytes), which are contiguous in IOVA space, by
// physical region pages (section 4.1.1): PRP1 may start anywhere on a dword in its page, all
// others start a page. More than two pages need lists: list is then called for one list
// memory after another, each of which is filled in order; where a list ends before the
// transfer does, its last entry points to the next. entries[0] is at iova, which must be
// qword aligned; entries past iova's memory page are not used, since a list never crosses a
// page. The entries are written before BuildPRP returns and must stay until the command
// completed. list may be nil when it is known not to be needed.
//
// pageBytes is CC.MPS's page, a power of two; addr and bytes are multiples of 4.
func BuildPRP(addr IOVA, bytes int, pageBytes int, list func() (entries []uint64, iova IOVA,
	err error)) (prp1, prp2 uint64, err error) {
	if err := refusePRP(addr, bytes, pageBytes); err != nil {
		return 0, 0, err
	}
	page := uint64(pageBytes)
	next := (uint64(addr) &^ (page - 1)) + page // the page after PRP1's; wraps only when unused
	pages := prpPages(addr, bytes, pageBytes)
	switch pages {
	case 1:
		return uint64(addr), 0, nil
	case 2:
		return uint64(addr), next, nil
	}
	if list == nil {
		return 0, 0, fmt.Errorf("nvme: %d bytes at %#x need a PRP list and there is none", bytes,
			uint64(addr))
	}
	link := &prp2 // where the address of the next list goes
	for left := pages - 1; left > 0; {
		entries, iova, err := list()
		if err != nil {
			return 0, 0, fmt.Errorf("nvme: PRP list: %w", err)
		}
		if iova&7 != 0 {
			return 0, 0, fmt.Errorf("nvme: PRP list address %#x is not a multiple of 8",
				uint64(iova))
		}
		if room := int((page - uint64(iova)&(page-1)) / 8); len(entries) > room {
			entries = entries[:room]
		}
		// A list that does not reach the end of its page cannot be chained: the pointer is
		// read from the last entry of the memory page and nowhere else.
		full := uint64(iova)&(page-1)+uint64(len(entries))*8 == page
		n := len(entries)
		if left > n {
			if !full {
				return 0, 0,
					errors.New("nvme: a PRP list that must be chained ends before its memory page")
			}
			if n < 2 {
				return 0, 0,
					errors.New(
						"nvme: a PRP list at its page's end has room for the chain pointer only")
			}
			n--
		} else {
			n = left
		}
		*link = uint64(iova)
		for i := range entries[:n] {
			entries[i] = next
			next += page
		}
		left -= n
		if left > 0 {
			link = &entries[n]
		}
	}
	return uint64(addr), prp2, nil
}

// refusePRP returns why a transfer cannot be described by PRP entries, or nil.
func refusePRP(addr IOVA, bytes, pageBytes int) error {
	if pageBytes < 4096 || pageBytes&(pageBytes-1) != 0 {
		return fmt.Errorf("nvme: PRP page size %d is not a power of two of at least 4096",
			pageBytes)
	}
	if addr&3 != 0 {
		return fmt.Errorf("nvme: PRP address %#x is not a multiple of 4", uint64(addr))
	}
	if bytes <= 0 || bytes&3 != 0 {
		return fmt.Errorf("nvme: PRP length %d is not a positive multiple of 4", bytes)
	}
	if uint64(addr)+uint64(bytes)-1 < uint64(addr) {
		return fmt.Errorf("nvme: %d bytes at %#x leave the address space", bytes,
			uint64(addr))
	}
	return nil
}
