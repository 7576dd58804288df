package graph

import (
	"context"
	"errors"
	"math"
	"slices"
	"sort"
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

	reader *pageReader
	stats  StorageStats
}

// OpenOutOfCore takes over t, which has offsets and no ids, with its ids in f: it reads the file
// once to check every id and to count out-degrees, and a second time, in part, to fill the cache of
// lists. The result is t; Close ends both. Errors of reads have class Device and are *StorageError.
func OpenOutOfCore(ctx context.Context, t *Topology, f IndexFile, o OutOfCoreOptions) (*Topology,
	error) {
	return t, openFiles(ctx, []*Topology{t}, []IndexFile{f}, o, t.NumNodes,
		func(int) (source, destination int64) { return 0, 0 })
}

// OpenTypedOutOfCore is OpenOutOfCore for a typed graph, each of whose relations has a file. The
// cache's memory is divided by what the relations' lists take, and a list's score has the
// out-degree of its node over all relations. The relations are the result's, and after an error
// the caller's.
func OpenTypedOutOfCore(ctx context.Context, s *Schema, relations []*Topology, files []IndexFile,
	o OutOfCoreOptions) (*Topology, error) {
	t, err := NewTyped(s, relations)
	if err == nil {
		err = openFiles(ctx, relations, files, o, t.NumNodes,
			func(r int) (source, destination int64) {
				return s.First(s.Relations[r].Src), s.First(s.Relations[r].Dst)
			})
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// openFiles opens the files of topologies of a graph of so many nodes, which share memory for reads
// and for lists. first returns the numbers of a topology's first source and destination.
func openFiles(ctx context.Context, topologies []*Topology, files []IndexFile, o OutOfCoreOptions,
	nodes int64, first func(i int) (source, destination int64)) (err error) {
	start := time.Now()
	cache, err := cacheShares(topologies, o.CacheBytes, nodes)
	if err != nil {
		return err
	}
	room, err := newReadRoom(!o.Threads)
	if err != nil {
		return err
	}
	var all []*storage
	defer func() {
		if err == nil {
			return
		}
		for _, s := range all {
			err = errors.Join(err, s.close())
		}
		err = errors.Join(err, room.close()) // where no file was opened
	}()
	for i, t := range topologies {
		o.CacheBytes = cache[i]
		s, err := newStorage(t, files[i], o, room)
		if err != nil {
			return err
		}
		all = append(all, s)
	}
	var out []uint32 // out-degrees, which stop at the most they can be
	if slices.Max(cache) > 0 {
		mem, err := hostmem.Alloc(4*nodes, "out-degrees")
		if err != nil {
			return err
		}
		defer func() { _ = hostmem.Free(mem) }()
		out = hostmem.View[uint32](mem)
	}
	for i, s := range all {
		var counts []uint32
		if out != nil {
			source, _ := first(i)
			counts = out[source:]
		}
		if err := s.check(ctx, counts); err != nil {
			return err
		}
	}
	for i, s := range all {
		if cache[i] > 0 {
			_, destination := first(i)
			if err := s.cache.choose(s.t, out[destination:], cache[i]); err != nil {
				return err
			}
			if err := s.fill(ctx); err != nil {
				return err
			}
		}
		s.reader.reads, s.reader.bytes, s.reader.retries = 0, 0, 0
	}
	for i, t := range topologies {
		all[i].took, t.far = time.Since(start), all[i]
	}
	return nil
}

// newStorage opens the file of t, to be read in a room.
func newStorage(t *Topology, f IndexFile, o OutOfCoreOptions, room *readRoom) (*storage, error) {
	if t.Indices32 != nil || t.Indices64 != nil || t.far != nil ||
		int64(len(t.Indptr)) != t.NumNodes+1 {
		return nil, errs.New(errs.Usage,
			"topology on storage: give offsets of all nodes and no ids")
	}
	if n := max(t.NumNodes, t.sources()); n > 1<<32 {
		return nil, errs.New(errs.Capability,
			"topology on storage: %d nodes, at most 2^32 can be; keep it in memory (%v)",
			n, errs.Key("topology"))
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
	err := s.checkOffsets()
	if err != nil {
		return nil, err
	}
	if s.reader, err = openPages(f.Path, f.Offset+t.NumEdges<<s.shift, !o.PageCache,
		room); err != nil {
		return nil, err
	}
	if f.PageSums != nil {
		if err := s.reader.know(f.PageSums); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
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

// cacheShares divides the memory of a cache of lists among topologies: each has room for its table,
// and a share of the rest by what its lists take. It refuses a cache for which there is no memory,
// or that is too small to find anything in. 0: no cache.
func cacheShares(topologies []*Topology, bytes, nodes int64) ([]int64, error) {
	shares, least, lists := make([]int64, len(topologies)), int64(0), int64(0)
	for _, t := range topologies {
		if t.NumEdges > 0 {
			least += LeastNeighborCache(t.NumNodes)
			lists += 4 * (t.NumNodes + t.NumEdges)
		}
	}
	if bytes == 0 || lists == 0 {
		return shares, nil
	}
	if bytes < least {
		return nil, errs.New(errs.Usage,
			"%v %s: the table of the lists that it holds of %d nodes takes %s alone; give more than that, or 0 for none",
			errs.Key("neighbor-cache"), units.FormatBytes(bytes), nodes, units.FormatBytes(least))
	}
	// Counting out-degrees takes 4 bytes a node for a while.
	need := min(bytes, least+lists) + 4*nodes + readSlots*unitBytes
	if free, err := hostmem.AvailableBytes(); err == nil && need > free {
		return nil, errs.New(errs.Usage,
			"%v %s: with %s to choose the lists by it passes the %s of memory that are free; give less",
			errs.Key("neighbor-cache"), units.FormatBytes(bytes), units.FormatBytes(4*nodes),
			units.FormatBytes(free))
	}
	part := min(float64(bytes-least)/float64(lists), 1)
	for i, t := range topologies {
		switch {
		case t.NumEdges == 0:
		case len(topologies) == 1:
			shares[i] = bytes
		default:
			shares[i] = LeastNeighborCache(t.NumNodes) +
				int64(4*part*float64(t.NumNodes+t.NumEdges))
		}
	}
	return shares, nil
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

// check checks the file, and adds to the out-degrees of the sources where out is not nil.
func (s *storage) check(ctx context.Context, out []uint32) error {
	s.beginLoopless()
	sources := s.t.sources()
	err := s.reader.sum(ctx, func(off int64, data []byte) error {
		first, narrow, wide := s.ids(off, data)
		s.leaveOut(first, narrow, wide)
		bad := func(i int, id int64) error {
			return errs.New(errs.Usage,
				"%s: node id %d at position %d is outside 0..%d; import or generate the dataset again",
				s.file.Path, id, first+int64(i), sources-1)
		}
		for i, id := range narrow {
			if int64(id) >= sources {
				return bad(i, int64(id))
			}
			if out != nil && out[id] != math.MaxUint32 {
				out[id]++
			}
		}
		for i, id := range wide {
			if uint64(id) >= uint64(sources) {
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
	return err
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
	s.reader.mu.Lock()
	defer s.reader.mu.Unlock()
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
	return s.cache.held() + int64(len(s.reader.sums))*4 + s.reader.roomBytes()
}

// OnStorage reports whether t's in-neighbour lists are in a file: then Indices32, Indices64 and
// Neighbor are not to be used.
func (t *Topology) OnStorage() bool {
	return t.far != nil || len(t.Relations) > 0 && t.Relations[0].far != nil
}

// Storage returns what sampling from a topology on storage has read so far; zero for one in memory.
func (t *Topology) Storage() (all StorageStats) {
	for _, r := range t.Relations {
		all = all.Add(r.Storage())
	}
	if t.far == nil {
		return all
	}
	t.far.reader.mu.Lock()
	defer t.far.reader.mu.Unlock()
	return t.far.stats
}

// StorageInfo describes the memory and the reads of a topology on storage; zero for one in memory.
func (t *Topology) StorageInfo() (all StorageInfo) {
	for i, r := range t.Relations {
		x := r.StorageInfo()
		if i == 0 {
			all = x
			continue
		}
		all.OffsetBytes += x.OffsetBytes
		all.ChecksumBytes += x.ChecksumBytes
		all.CacheBytes += x.CacheBytes
		all.CacheMetadata += x.CacheMetadata
		all.CacheLists += x.CacheLists
		all.CacheEdges += x.CacheEdges
		all.Direct = all.Direct && x.Direct
	}
	s := t.far
	if s == nil {
		return all
	}
	return StorageInfo{
		OffsetBytes: int64(len(t.Indptr)) * 8, ChecksumBytes: int64(len(s.reader.sums)) * 4,
		ReadBytes:  s.reader.roomBytes(),
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
	s.reader.mu.Lock()
	defer s.reader.mu.Unlock()
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
