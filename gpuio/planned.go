package gpuio

// Planner counts the commands that a set of rows would take, without SSDs: the rules of the stacks
// as pure arithmetic, for the virtual clock.
type Planner struct {
	e          queueSet // layout and units only
	keys, keyB []uint64
	idx, idxB  []uint32
	runs       []uint32
}

// PlanOptions hold what of a stack's options, and of its SSDs, decides about commands.
type PlanOptions struct {
	Stack            string // name of a Stack
	CoalesceBytes    int    // as in AsyncOptions
	Depth            int    // as in AsyncOptions
	MaxTransferBytes int    // of the SSDs; 0: no limit but that of a page of PRP list
	Speed            Speed  // as in AsyncOptions
}

// planPage is the memory page of a controller that nobody has asked: the smallest, and the usual
// one.
const planPage = 4096

// NewPlanner makes a planner for a layout.
func NewPlanner(l Layout, o PlanOptions) (*Planner, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	p := &Planner{}
	a := AsyncOptions{CoalesceBytes: o.CoalesceBytes, Depth: o.Depth, Speed: o.Speed}
	if err := a.fill(); err != nil {
		return nil, err
	}
	p.e.layout, p.e.opt, p.e.ssds = l, a, make([]*SSD, l.SSDs)
	limit := listLimit(planPage)
	if o.MaxTransferBytes > 0 {
		limit = min(limit, o.MaxTransferBytes)
	}
	stack, err := FindStack(o.Stack)
	if err != nil {
		return nil, err
	}
	if !stack.Queued {
		limit = max(l.ReadBytes(), maxHostRead) // the CPU's reads are as long as it likes
	}
	if p.e.unitRule, err = chooseUnits(l, limit, stack.Coalesces, a.CoalesceBytes,
		a.Depth, a.Speed); err != nil {
		return nil, err
	}
	return p, nil
}

// Shares reports whether rows of a set of so many, spread evenly over the SSDs, share commands.
func (p *Planner) Shares(rows int64) bool {
	return rows > 0 && p.e.coalesces(&ReadSet{SSDOffset: p.spread(rows)})
}

// mergeSaves is the share of commands that merging sets has to save. The reads of each wait for the
// lookup of the last.
const mergeSaves = 0.1

// Joined returns how many of n mini-batches are to be read as one set where each reads so many
// rows, spread evenly over the SSDs: 0 where each hop is to be a set of its own.
func (p *Planner) Joined(rows int64, n int) int {
	switch {
	case p.merges(rows, n):
		return n
	case p.Shares(rows):
		return 1
	}
	return 0
}

// merges reports whether n sets of so many rows, spread evenly over the SSDs, are better one set.
// Only of files a command costs enough for that.
func (p *Planner) merges(rows int64, n int) bool {
	if rows == 0 || n < 2 || p.e.window == 0 || !p.e.opt.Speed.OfFiles {
		return false
	}
	commands := func(rows int64) float64 {
		return expectedCommands(p.e.layout, p.spread(rows), p.e.window, p.e.reach)
	}
	return commands(rows*int64(n)) <= (1-mergeSaves)*float64(n)*commands(rows)
}

// spread returns the bounds of buckets of as many rows.
func (p *Planner) spread(rows int64) []int64 {
	offsets := make([]int64, p.e.layout.SSDs+1)
	for s := range offsets {
		offsets[s] = rows * int64(s) / int64(p.e.layout.SSDs)
	}
	return offsets
}

// Planned holds what a set takes on one SSD.
type Planned struct {
	Commands int64
	Bytes    int64 // that they move
	Shared   int64 // rows that share a command with another
}

// Set plans the rows of a ReadSet: rows[offsets[s]:offsets[s+1]] are those of SSD s. The answer is
// added to out, which has an entry for each SSD.
func (p *Planner) Set(rows, offsets []int64, out []Planned) {
	l := &p.e.layout
	each := int64(l.ReadBytes())
	together := p.e.coalesces(&ReadSet{SSDOffset: offsets})
	for s := range int(l.SSDs) {
		bucket := rows[offsets[s]:offsets[s+1]]
		n := int64(len(bucket))
		if !together || n == 0 {
			out[s].Commands += n * int64(p.e.parts)
			out[s].Bytes += n * each
			continue
		}
		p.reserve(len(bucket))
		keys, other, idx, otherIdx := p.keys[:n], p.keyB[:n], p.idx[:n], p.idxB[:n]
		for i, r := range bucket {
			keys[i] = uint64(r / int64(l.SSDs))
		}
		keys, _ = sortSlots(keys, other, idx, otherIdx, l.passes())
		runs := p.runs[:n]
		m := l.cut(keys, int64(p.e.window), int64(p.e.reach), 0, runs)
		out[s].Commands += int64(m)
		for k := range m {
			last := uint32(n)
			if k+1 < m {
				last = runs[k+1]
			}
			if first := runs[k]; last-first > 1 {
				out[s].Shared += int64(last - first)
			}
			end, _ := l.place(int64(keys[last-1]))
			begin, _ := l.place(int64(keys[runs[k]]))
			out[s].Bytes += int64(end-begin)*int64(l.LBABytes) + each
		}
	}
}

func (p *Planner) reserve(n int) {
	if n <= len(p.keys) {
		return
	}
	c := grown(int64(n))
	p.keys, p.keyB = make([]uint64, c), make([]uint64, c)
	p.idx, p.idxB, p.runs = make([]uint32, c), make([]uint32, c), make([]uint32, c)
}
