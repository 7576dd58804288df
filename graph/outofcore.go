package graph

import (
	"context"
	"errors"
	"math"
	"sort"
	"sync"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/hostmem"
	"helios/internal/units"
)

// A topology on storage: the offsets are in memory, the in-neighbour lists are in a file. Lists of
// nodes that many walks meet are kept in memory (outofcore_cache.go), and of the others sampling
// reads the pages that hold what it has drawn (hop_stored.go): a hop's reads go out together,
// sorted, each page once. Draws and numbers are those of a topology in memory, so the blocks are
// the same to the bit.
//
// Each page read is held against a checksum: that of IndexFile.PageSums, or else of the pass in
// which the file was checked at first: sampling trusts ids that it has not looked at, and a file
// that changes under a run must not pass for the graph that was opened.

// IndexFile locates the ids of a topology's in-neighbour lists: little-endian numbers, one list
// after the other.
type IndexFile struct {
	Path   string
	Offset int64 // of the first id, in bytes; a multiple of the width of an id
	Wide   bool  // int64, else uint32
	// PageSums are CRC32Cs of the file's pages of 4096 bytes, its header included, from when it was
	// made; nil: not known. They are only read, until the topology is closed.
	PageSums []uint32
}

// OutOfCoreOptions shape a topology on storage. Zero values mean the defaults.
type OutOfCoreOptions struct {
	// CacheBytes is the memory for in-neighbour lists and for what finds them; 0: none are kept.
	CacheBytes int64
	// PageCache reads through the kernel's page cache in place of O_DIRECT, for comparison.
	PageCache bool
	// Threads reads with pread and threads in place of io_uring, as is done where there is none.
	Threads bool
	// Chunk is the number of a hop's draws in one round, which takes 40 bytes of memory each and
	// reads a page once; default 1048576.
	Chunk int
	// Loopless counts edges of nodes to themselves, for samplers with SamplerConfig.Loopless; 4
	// bytes a node.
	Loopless bool
}

// StorageStats counts the reads of sampling from a topology on storage so far.
type StorageStats struct {
	Edges       int64 `json:"edges"`        // drawn
	CachedEdges int64 `json:"cached_edges"` // of them from lists in memory
	// of 4096 bytes that were read, as often as they were
	Pages   int64         `json:"pages"`
	Reads   int64         `json:"reads"`   // neighbouring pages are one read
	Bytes   int64         `json:"bytes"`   // that came
	Retries int64         `json:"retries"` // reads that were done again
	Wait    time.Duration `json:"wait_ns"` // in which hops waited for reads
}

// Add returns the sum of both.
func (s StorageStats) Add(o StorageStats) StorageStats {
	return StorageStats{
		s.Edges + o.Edges, s.CachedEdges + o.CachedEdges, s.Pages + o.Pages, s.Reads + o.Reads,
		s.Bytes + o.Bytes,
		s.Retries + o.Retries, s.Wait + o.Wait,
	}
}

// Sub returns the difference to an earlier count.
func (s StorageStats) Sub(o StorageStats) StorageStats {
	return StorageStats{
		s.Edges - o.Edges, s.CachedEdges - o.CachedEdges, s.Pages - o.Pages, s.Reads - o.Reads,
		s.Bytes - o.Bytes,
		s.Retries - o.Retries, s.Wait - o.Wait,
	}
}

// StorageInfo describes a topology on storage.
type StorageInfo struct {
	OffsetBytes   int64 `json:"offset_bytes"`   // of Indptr: 8 a node
	ChecksumBytes int64 `json:"checksum_bytes"` // 4 for a page of the file
	ReadBytes     int64 `json:"read_bytes"`     // of slots that reads go to
	// of lists in memory and of what finds them, while they are there
	CacheBytes    int64   `json:"cache_bytes"`
	CacheMetadata int64   `json:"cache_metadata"` // of the latter alone
	CacheLists    int64   `json:"cache_lists"`
	CacheEdges    int64   `json:"cache_edges"`
	Direct        bool    `json:"direct"`   // O_DIRECT, not through the page cache
	IOUring       bool    `json:"io_uring"` // else threads
	OpenSeconds   float64 `json:"open_seconds"`
}

// storage is the part of a Topology that is in a file.
type storage struct {
	t     *Topology
	file  IndexFile
	shift uint // log2 of an id's bytes
	opt   OutOfCoreOptions
	cache neighbourCache
	took  time.Duration
	// Of Loopless: the in-degree of each node without its edges to itself; nil: it has none of
	// them.
	loopless []uint32
	looped   int64 // of these edges

	mu     sync.Mutex // of the reader
	reader *pageReader
	stats  StorageStats
}

// OpenOutOfCore takes over t, which has offsets and no ids, with its ids in f: it reads the file
// once to check every id and to count out-degrees, and a second time, in part, to fill the cache of
// lists. The result is t; Close ends both. Errors of reads have class Device and are *StorageError.
func OpenOutOfCore(ctx context.Context, t *Topology, f IndexFile, o OutOfCoreOptions) (*Topology,
	error) {
	start := time.Now()
	if t.Indices32 != nil || t.Indices64 != nil || t.far != nil ||
		int64(len(t.Indptr)) != t.NumNodes+1 {
		return nil, errs.New(errs.Usage,
			"topology on storage: give offsets of all nodes and no ids")
	}
	if t.NumNodes > 1<<32 {
		return nil, errs.New(errs.Capability,
			"topology on storage: %d nodes, at most 2^32 can be; keep it in memory (%v)",
			t.NumNodes, errs.Key("topology"))
	}
	s := &storage{t: t, file: f, shift: 2, opt: o}
	if f.Wide {
		s.shift = 3
	}
	if f.Offset < 0 || f.Offset&(1<<s.shift-1) != 0 {
		return nil, errs.New(errs.Usage,
			"topology on storage: ids of %s begin at byte %d, which is no multiple of their width; import the dataset again",
			f.Path, f.Offset)
	}
	if s.opt.Chunk <= 0 {
		s.opt.Chunk = 1 << chunkBits
	}
	s.opt.Chunk = min(s.opt.Chunk, 1<<chunkBits)
	if err := s.checkOffsets(); err != nil {
		return nil, err
	}
	if err := s.fits(); err != nil {
		return nil, err
	}
	var err error
	if s.reader, err = openPages(f.Path, f.Offset+t.NumEdges<<s.shift, !o.PageCache,
		!o.Threads); err != nil {
		return nil, err
	}
	if f.PageSums != nil {
		if err := s.reader.know(f.PageSums); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	if err := s.load(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.reader.reads, s.reader.bytes, s.reader.retries = 0, 0, 0
	s.took = time.Since(start)
	t.far = s
	return t, nil
}

// checkOffsets does the part of Validate that is about offsets.
func (s *storage) checkOffsets() error {
	t := s.t
	if t.Indptr[0] != 0 || t.Indptr[t.NumNodes] != t.NumEdges {
		return errs.New(errs.Usage,
			"topology: indptr goes from %d to %d, must go from 0 to the number of edges %d; import or generate the dataset again",
			t.Indptr[0], t.Indptr[t.NumNodes], t.NumEdges)
	}
	i := firstBad(t.NumNodes, func(lo, hi int64) int64 {
		for i := lo; i < hi; i++ {
			if d := t.Indptr[i+1] - t.Indptr[i]; d < 0 || d > math.MaxUint32 {
				return i
			}
		}
		return -1
	})
	if i >= 0 {
		return errs.New(errs.Usage,
			"topology: indptr[%d] is %d after indptr[%d] = %d: offsets must not fall, nor rise by 2^32; import or generate the dataset again",
			i+1, t.Indptr[i+1], i, t.Indptr[i])
	}
	return nil
}

// fits refuses a cache for which there is no memory, or that is too small to find anything in.
func (s *storage) fits() error {
	if s.opt.CacheBytes == 0 {
		return nil
	}
	t := s.t
	if least := LeastNeighborCache(t.NumNodes); s.opt.CacheBytes < least && t.NumEdges > 0 {
		return errs.New(errs.Usage,
			"%v %s: the table of the lists that it holds of %d nodes takes %s alone; give more than that, or 0 for none",
			errs.Key("neighbor-cache"), units.FormatBytes(s.opt.CacheBytes), t.NumNodes,
			units.FormatBytes(least))
	}
	// Counting out-degrees takes 4 bytes a node for a while.
	need := min(s.opt.CacheBytes, MostNeighborCache(t.NumNodes, t.NumEdges)) + 4*t.NumNodes +
		readSlots*unitBytes
	if free, err := hostmem.AvailableBytes(); err == nil && need > free {
		return errs.New(errs.Usage,
			"%v %s: with %s to choose the lists by it passes the %s of memory that are free; give less",
			errs.Key("neighbor-cache"), units.FormatBytes(s.opt.CacheBytes),
			units.FormatBytes(4*t.NumNodes), units.FormatBytes(free))
	}
	return nil
}

// ids views the ids among a piece of the file that starts at byte off, all of it whole ids: the
// first one's number, and either slice.
func (s *storage) ids(off int64, data []byte) (first int64, narrow []uint32, wide []int64) {
	if off < s.file.Offset {
		cut := min(s.file.Offset-off, int64(len(data)))
		off, data = off+cut, data[cut:]
	}
	first = (off - s.file.Offset) >> s.shift
	n := len(data) >> s.shift
	if n == 0 {
		return first, nil, nil
	}
	if s.file.Wide {
		return first, nil, unsafe.Slice((*int64)(unsafe.Pointer(&data[0])), n)
	}
	return first, unsafe.Slice((*uint32)(unsafe.Pointer(&data[0])), n), nil
}

// load checks the file and fills the cache.
func (s *storage) load(ctx context.Context) error {
	t := s.t
	s.beginLoopless()
	var out []uint32 // out-degrees, which stop at the most they can be
	if s.opt.CacheBytes > 0 && t.NumEdges > 0 {
		mem, err := hostmem.Alloc(4*t.NumNodes, "out-degrees")
		if err != nil {
			return err
		}
		defer func() { _ = hostmem.Free(mem) }()
		out = hostmem.View[uint32](mem)
	}
	err := s.reader.sum(ctx, func(off int64, data []byte) error {
		first, narrow, wide := s.ids(off, data)
		s.leaveOut(first, narrow, wide)
		bad := func(i int, id int64) error {
			return errs.New(errs.Usage,
				"%s: node id %d at position %d is outside 0..%d; import or generate the dataset again",
				s.file.Path, id, first+int64(i), t.NumNodes-1)
		}
		for i, id := range narrow {
			if int64(id) >= t.NumNodes {
				return bad(i, int64(id))
			}
			if out != nil && out[id] != math.MaxUint32 {
				out[id]++
			}
		}
		for i, id := range wide {
			if uint64(id) >= uint64(t.NumNodes) {
				return bad(i, id)
			}
			if out != nil && out[id] != math.MaxUint32 {
				out[id]++
			}
		}
		return nil
	})
	if s.looped == 0 {
		s.loopless = nil
	}
	if err != nil || out == nil {
		return err
	}
	if err := s.cache.choose(t, out, s.opt.CacheBytes); err != nil {
		return err
	}
	return s.fill(ctx)
}

// beginLoopless makes room for in-degrees without edges of a node to itself.
func (s *storage) beginLoopless() {
	if !s.opt.Loopless {
		return
	}
	s.loopless = make([]uint32, s.t.NumNodes)
	for v := range s.loopless {
		s.loopless[v] = uint32(s.t.InDegree(int64(v)))
	}
}

// leaveOut takes edges of a node to itself from its degree: of ids from number first on.
func (s *storage) leaveOut(first int64, narrow []uint32, wide []int64) {
	ids := int64(len(narrow) + len(wide))
	if s.loopless == nil || ids == 0 {
		return
	}
	v := int64(sort.Search(int(s.t.NumNodes), func(v int) bool { return s.t.Indptr[v+1] > first }))
	for i := int64(0); i < ids; v++ {
		for end := min(s.t.Indptr[v+1]-first, ids); i < end; i++ {
			if narrow != nil && int64(narrow[i]) == v || wide != nil && wide[i] == v {
				s.loopless[v]--
				s.looped++
			}
		}
	}
}

// fill reads the chosen lists.
func (s *storage) fill(ctx context.Context) error {
	c := &s.cache
	return s.readLists(ctx, s.t.NumNodes, func(i int64) int64 { return i }, func(v int64) []uint32 {
		first, ok := c.find(v)
		if !ok {
			return nil
		}
		return c.lists[first : first+s.t.InDegree(v)]
	})
}

// refill is fill beside sampling, which counts it: bytes is what came.
func (s *storage) refill(ctx context.Context) (bytes int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	begin, pages, before := time.Now(), s.reader.pagesRead, s.reader.bytes
	err = s.fill(ctx)
	s.count(0, 0, s.reader.pagesRead-pages)
	s.stats.Wait += time.Since(begin)
	return s.reader.bytes - before, err
}

// readLists reads whole lists: of nodes node(0) < … < node(n-1), those for which dst gives memory.
func (s *storage) readLists(ctx context.Context, n int64, node func(i int64) int64,
	dst func(v int64) []uint32) error {
	t := s.t
	i, last := int64(0), int64(-1) // the next to look at, the last page that was given
	next := func(u *pageRun) bool {
		u.pages = 0
		for ; i < n; i++ {
			v := node(i)
			if len(dst(v)) == 0 {
				continue
			}
			lo := max(s.page(t.Indptr[v]), last+1)
			hi := s.page(t.Indptr[v+1] - 1)
			if lo > hi {
				continue
			}
			if u.pages > 0 && (lo != u.page+int64(u.pages) || u.pages == unitPages) {
				return true
			}
			if u.pages == 0 {
				u.page = lo
			}
			k := min(hi-lo+1, unitPages-int64(u.pages))
			u.pages += int(k)
			last = lo + k - 1
			if last < hi {
				return true // the list goes on in the next run
			}
		}
		return u.pages > 0
	}
	return s.reader.read(ctx, next, func(u *pageRun, data []byte) error {
		first, narrow, wide := s.ids(u.page*filePage, data)
		end := first + int64(len(narrow)+len(wide))
		for i := int64(sort.Search(int(n),
			func(i int) bool { return t.Indptr[node(int64(i))+1] > first })); i < n; i++ {
			v := node(i)
			if t.Indptr[v] >= end {
				break
			}
			to := dst(v)
			if len(to) == 0 {
				continue
			}
			lo, hi := max(t.Indptr[v], first), min(t.Indptr[v+1], end)
			to = to[lo-t.Indptr[v]:]
			if wide != nil {
				for i, id := range wide[lo-first : hi-first] {
					to[i] = uint32(id)
				}
			} else {
				copy(to, narrow[lo-first:hi-first])
			}
		}
		return nil
	})
}

// page is the page of the file that has an edge's id.
func (s *storage) page(edge int64) int64 { return (s.file.Offset + edge<<s.shift) / filePage }

func (s *storage) close() error {
	return errors.Join(s.reader.close(), s.cache.close())
}

// bytes is the memory that is held beside the offsets.
func (s *storage) bytes() int64 {
	return s.cache.held() + int64(len(s.reader.sums))*4 + int64(len(s.reader.mem))
}

// OnStorage reports whether t's in-neighbour lists are in a file: then Indices32, Indices64 and
// Neighbor are not to be used.
func (t *Topology) OnStorage() bool { return t.far != nil }

// Storage returns what sampling from a topology on storage has read so far; zero for one in memory.
func (t *Topology) Storage() StorageStats {
	if t.far == nil {
		return StorageStats{}
	}
	t.far.mu.Lock()
	defer t.far.mu.Unlock()
	return t.far.stats
}

// StorageInfo describes the memory and the reads of a topology on storage; zero for one in memory.
func (t *Topology) StorageInfo() StorageInfo {
	s := t.far
	if s == nil {
		return StorageInfo{}
	}
	return StorageInfo{
		OffsetBytes: int64(len(t.Indptr)) * 8, ChecksumBytes: int64(len(s.reader.sums)) * 4,
		ReadBytes:  int64(len(s.reader.mem)),
		CacheBytes: s.cache.bytes(), CacheMetadata: s.cache.metadata(),
		CacheLists: s.cache.chosen, CacheEdges: s.cache.ids,
		Direct: s.reader.direct, IOUring: s.reader.ring != nil, OpenSeconds: s.took.Seconds(),
	}
}

// Scan shows see all ids in the order of the edges, a piece at a time: first is the number of the
// piece's first edge. A topology on storage is read from its file.
func (t *Topology) Scan(ctx context.Context, see func(first int64, ids []uint32) error) error {
	if t.NumNodes > 1<<32 {
		return errs.New(errs.Capability, "walk over the edges of %d nodes: at most 2^32 can be",
			t.NumNodes)
	}
	const piece = 1 << 16
	buf := make([]uint32, 0, piece)
	widen := func(first int64, wide []int64) error {
		for pos := 0; pos < len(wide); pos += piece {
			buf = buf[:0]
			for _, id := range wide[pos:min(pos+piece, len(wide))] {
				buf = append(buf, uint32(id))
			}
			if err := see(first+int64(pos), buf); err != nil {
				return err
			}
			if ctx.Err() != nil {
				return errs.New(errs.Interrupted, "walk over the edges: %w", context.Cause(ctx))
			}
		}
		return nil
	}
	switch s := t.far; {
	case s != nil:
		return s.scan(ctx, func(first int64, narrow []uint32, wide []int64) error {
			if wide != nil {
				return widen(first, wide)
			}
			return see(first, narrow)
		})
	case t.Indices64 != nil:
		return widen(0, t.Indices64)
	}
	for pos := 0; pos < len(t.Indices32); pos += piece {
		if err := see(int64(pos), t.Indices32[pos:min(pos+piece, len(t.Indices32))]); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return errs.New(errs.Interrupted, "walk over the edges: %w", context.Cause(ctx))
		}
	}
	return nil
}

// scan reads the file front to back, 2 MiB at a time so that they can be put in order.
func (s *storage) scan(ctx context.Context, see func(first int64, narrow []uint32,
	wide []int64) error) error {
	const pages = 64 * unitPages
	s.mu.Lock()
	defer s.mu.Unlock()
	mem, err := hostmem.Alloc(pages*filePage, "neighbour list scan")
	if err != nil {
		return err
	}
	defer func() { _ = hostmem.Free(mem) }()
	for from := int64(0); from < s.reader.pages; from += pages {
		to := min(from+pages, s.reader.pages)
		err := s.reader.read(ctx, s.reader.all(from, to), func(u *pageRun, data []byte) error {
			copy(mem[(u.page-from)*filePage:], data)
			return nil
		})
		if err != nil {
			return err
		}
		off := from * filePage
		first, narrow, wide := s.ids(off, mem[:min(to*filePage, s.reader.end)-off])
		if len(narrow)+len(wide) == 0 {
			continue
		}
		if err := see(first, narrow, wide); err != nil {
			return err
		}
	}
	return nil
}
