package serve

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"helios/internal/errs"
	"helios/internal/hostmem"
)

// gatherTime is the time that ranks that ask for an epoch wait for the others of their job.
const gatherTime = 100 * time.Millisecond

// openDataset is a dataset that a session has open, or a job that goes on behind it.
type openDataset struct {
	Dataset
	q     OpenRequest
	users atomic.Int64
}

// letGo closes the dataset behind its last user.
func (d *openDataset) letGo() error {
	if d.users.Add(-1) > 0 {
		return nil
	}
	return d.Close()
}

// job is one loader of the backend, and the ranks that share its mini-batches: batch i is of rank i
// mod world. One goroutine (run) has the backend make batches, in one pass over all ranks that
// wanted the same epoch when it began. A pass ends early, and another one begins where each rank
// is, when a rank comes or goes, or when one whose slots are full holds the others up.
type job struct {
	key    string
	q      LoaderRequest
	world  int
	wait   time.Duration // Config.patience
	rest   time.Duration // Config.rest
	data   *openDataset
	ctx    context.Context
	cancel context.CancelFunc

	opened chan struct{}
	from   Loader // once opened, unless err or resting
	err    error
	ended  chan struct{} // run has returned
	endErr error
	read   atomic.Int64 // bytes from SSDs, as of the last batch
	taken  int64        // by its nodes, of the memory that clients share; a session's to set
	named  bool         // it was opened with nodes

	// run's own.
	begun   bool  // an epoch was
	resting bool  // from is closed
	before  int64 // bytes that loaders before from read

	wake chan struct{} // something has changed that run may wait for

	mu         sync.Mutex
	nodes      []int64 // of later epochs; nil: they stay as they are
	ranks      map[int]*loader
	pass       *pass          // under way, or nil
	claims     map[int]*claim // of batches that are being made
	delivering *loader        // whose slot run is filling
	delivered  *sync.Cond
}

// pass is one walk over batches of an epoch.
type pass struct {
	epoch  int
	of     []*loader // by rank; those that got all of their batches are no longer among them
	stale  bool      // one of them was stopped, and may have begun anew
	cancel context.CancelFunc
}

// errRegroup ends a pass whose ranks are no longer those to serve.
var errRegroup = errors.New("other ranks are to be served")

// keyOf returns what loaders of one job have in common.
func keyOf(d *openDataset, name string, q LoaderRequest) (string, error) {
	sum := sha256.Sum256(hostmem.Bytes(q.Nodes))
	visible := q.Visible
	if q.World > 1 { // ranks see a GPU each, and are one job all the same: on that of the first
		visible = nil
	}
	all := []any{name, d.q, d.Info().UUID, q.Options, q.Split, q.Nodes == nil, sum, q.Shuffle,
		q.Anew, q.AllLabels, q.Positions, q.World, q.Device, visible, q.Type,
		q.NoBlocks}
	key, err := json.Marshal(all)
	return string(key), err
}

// join makes a loader a rank of a job that lacks it, or the first of a new one.
func (s *Server) join(parent context.Context, l *loader, d *openDataset, name string,
	q LoaderRequest) (j *job, first bool, err error) {
	key, err := keyOf(d, name, q)
	if err != nil {
		return nil, false, err
	}
	if q.Rests {
		key = "" // nobody else joins it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.jobs {
		j.mu.Lock()
		was := j.ranks[l.rank] // of a session that ends, if any
		fits := key != "" && j.key == key && (was == nil || was.of.ctx.Err() != nil)
		if fits {
			j.ranks[l.rank] = l
		}
		j.mu.Unlock()
		if fits {
			return j, false, nil
		}
	}
	j = &job{key: key, q: q, world: q.World, wait: s.patience, rest: s.rest, data: d,
		opened: make(chan struct{}), ended: make(chan struct{}), wake: make(chan struct{}, 1),
		claims: map[int]*claim{}, ranks: map[int]*loader{l.rank: l}, named: q.Nodes != nil}
	j.delivered = sync.NewCond(&j.mu)
	j.ctx, j.cancel = context.WithCancel(parent)
	d.users.Add(1)
	s.jobs = append(s.jobs, j)
	go j.run()
	return j, true, nil
}

// leave takes a loader out of its job, and returns what went wrong at the end of the job if it was
// the last.
func (s *Server) leave(l *loader) error {
	j := l.job
	s.mu.Lock()
	j.mu.Lock()
	mine := j.ranks[l.rank] == l // else another session has taken the place
	if mine {
		delete(j.ranks, l.rank)
	}
	last := mine && len(j.ranks) == 0
	if last {
		s.jobs = slices.DeleteFunc(s.jobs, func(o *job) bool { return o == j })
		s.read.Add(j.read.Load())
		j.cancel()
	}
	j.mu.Unlock()
	s.mu.Unlock()
	j.stop(l)
	if !last {
		return nil
	}
	<-j.ended
	s.memory.used.Add(-j.taken)
	return j.endErr
}

// keep makes the job hold a request's nodes, until it ends or gets others.
func (j *job) keep(q *request) {
	bytes := int64(len(q.nodes)) * 8
	q.taken -= bytes - j.taken // what it held goes with the request
	j.taken = bytes
}

// device returns the loader where batches go to its device's memory; else nil.
func (j *job) device() DeviceLoader {
	if on, ok := j.from.(DeviceLoader); ok && on.DeviceName() != "" {
		return on
	}
	return nil
}

// poke has run look again.
func (j *job) poke() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// run serves the ranks until the last one has left.
func (j *job) run() {
	defer close(j.ended)
	j.from, j.err = j.data.Loader(j.ctx, j.q)
	close(j.opened)
	if j.err != nil {
		<-j.ctx.Done()
		j.endErr = j.data.letGo()
		return
	}
	for {
		p, ctx := j.gather()
		if p == nil {
			break
		}
		j.serve(ctx, p)
	}
	if !j.resting {
		j.endErr = errors.Join(j.endErr, j.from.Close())
	}
	j.endErr = errors.Join(j.endErr, j.data.letGo())
}

// giveBack closes the loader, with the SSDs that it may hold, until an epoch is asked for.
func (j *job) giveBack() {
	j.mu.Lock()
	for _, l := range j.ranks {
		l.of.mu.Lock()
		j.endErr = errors.Join(j.endErr, l.ring.closePlaces())
		l.of.mu.Unlock()
	}
	j.mu.Unlock()
	j.before = j.read.Load()
	j.endErr = errors.Join(j.endErr, j.from.Close())
	j.resting = true
}

// takeBack opens the loader again.
func (j *job) takeBack() error {
	from, err := j.data.Loader(j.ctx, j.q)
	if err != nil {
		return err
	}
	j.from, j.resting = from, false
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.ranks {
		l.of.mu.Lock()
		if l.ring.placer != nil {
			l.ring.placer = j.placer()
		}
		l.of.mu.Unlock()
	}
	return nil
}

// gather waits for ranks that want an epoch, and a moment for the others of the job. It returns nil
// when the job ends.
func (j *job) gather() (*pass, context.Context) {
	var since time.Time
	for j.ctx.Err() == nil {
		j.mu.Lock()
		epoch, group := j.choose()
		all := true
		for _, l := range j.ranks {
			all = all && l.want
		}
		if len(group) > 0 && (all || !since.IsZero() && time.Since(since) >= gatherTime) {
			p := &pass{epoch: epoch, of: group}
			var ctx context.Context
			ctx, p.cancel = context.WithCancel(j.ctx)
			j.pass = p
			j.mu.Unlock()
			return p, ctx
		}
		j.mu.Unlock()
		var late, rest <-chan time.Time
		if len(group) > 0 {
			if since.IsZero() {
				since = time.Now()
			}
			late = time.After(gatherTime - time.Since(since))
		} else {
			since = time.Time{}
			if j.q.Rests && j.begun && !j.resting && j.device() == nil {
				rest = time.After(j.rest)
			}
		}
		select {
		case <-j.wake:
		case <-late:
		case <-rest:
			j.giveBack()
		case <-j.ctx.Done():
		}
	}
	return nil, nil
}

// choose returns the ranks to serve, by rank: of those that want the earliest epoch, all but the
// ones that were left behind and do not yet have all of their slots free, unless there is nobody
// else. j.mu is held.
func (j *job) choose() (epoch int, group []*loader) {
	pick := func(also bool) {
		for rank := range j.world {
			l := j.ranks[rank]
			if l == nil || !l.want {
				continue
			}
			if l.out = l.out && !also && len(l.free) < cap(l.free); l.out {
				continue
			}
			if len(group) == 0 || l.epoch < epoch {
				epoch, group = l.epoch, group[:0]
			}
			if l.epoch == epoch {
				group = append(group, l)
			}
		}
	}
	if pick(false); len(group) == 0 {
		pick(true)
	}
	return epoch, group
}

// orderOf merges what ranks still have to get: in the order of the epoch, but for a rank that is
// ahead of another by more than its slots, which goes on beside it.
func orderOf(group []*loader, world int) (batches []int) {
	type turn struct{ pos, batch int }
	var all []turn
	least := group[0].next
	for _, l := range group {
		least = min(least, l.next)
	}
	for _, l := range group {
		ahead := max(0, l.next-least-cap(l.free))
		for k := l.next; k < l.count; k++ {
			all = append(all, turn{k - ahead, k*world + l.rank})
		}
	}
	slices.SortStableFunc(all, func(a, b turn) int { return a.pos - b.pos })
	for _, t := range all {
		batches = append(batches, t.batch)
	}
	return batches
}

// serve makes the batches of a pass.
func (j *job) serve(ctx context.Context, p *pass) {
	defer p.cancel()
	var err error
	if j.begun = true; j.resting {
		err = j.takeBack()
	}
	j.mu.Lock()
	if err == nil {
		err = j.seed()
	}
	batches := orderOf(p.of, j.world)
	j.mu.Unlock()
	if err == nil {
		err = j.make(ctx, p, batches)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pass = nil
	if err == nil || errors.Is(err, errRegroup) || ctx.Err() != nil {
		return
	}
	for _, l := range p.of {
		if l.want && l.epoch == p.epoch {
			l.end(err)
		}
	}
}

// seed gives the loader the nodes that came with the last epoch message, if any. j.mu is held.
func (j *job) seed() error {
	nodes := j.nodes
	if j.nodes = nil; nodes == nil {
		return nil
	}
	err := j.from.Seed(nodes)
	if err == nil {
		j.q.Nodes = nodes
	}
	for _, l := range j.ranks {
		l.count = j.from.Batches()
	}
	return err
}

// make makes the batches of a pass.
func (j *job) make(ctx context.Context, p *pass, batches []int) error {
	err := j.from.Epoch(ctx, p.epoch, batches, func(i int) Place { return j.claim(p, i) },
		func(b *Batch) error { return j.emit(ctx, p, b) })
	j.unclaim()
	return err
}

// emit hands a batch to its rank, once that has a slot for it.
func (j *job) emit(ctx context.Context, p *pass, b *Batch) error {
	var since time.Time // others wait
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if epoch, group := j.choose(); p.stale || epoch != p.epoch || !slices.Equal(group, p.of) {
			return errRegroup
		}
		l := j.ranks[b.Index%j.world]
		if l == nil || l.next != b.Index/j.world {
			return errs.New(errs.Failed, "batch %d came out of turn", b.Index)
		}
		select {
		case <-l.free:
			j.deliver(p, l, b)
			return nil
		default:
		}
		var late <-chan time.Time
		if !j.starving(l) {
			since = time.Time{}
		} else {
			if since.IsZero() {
				since = time.Now()
			}
			left := j.wait - time.Since(since)
			if l.lagging || left <= 0 {
				l.out, l.lagging = true, true
				continue
			}
			late = time.After(left)
		}
		j.mu.Unlock()
		select {
		case <-j.wake:
		case <-late:
		case <-ctx.Done():
		}
		j.mu.Lock()
	}
}

// starving reports whether another rank wants batches and has slots for them. j.mu is held.
func (j *job) starving(but *loader) bool {
	for _, l := range j.ranks {
		if l != but && l.want && len(l.free) > 0 {
			return true
		}
	}
	return false
}

// deliver puts a batch into a rank's slot. j.mu is held, though not meanwhile.
func (j *job) deliver(p *pass, l *loader, b *Batch) {
	j.delivering = l
	c := j.claims[b.Index]
	delete(j.claims, b.Index)
	j.mu.Unlock()
	err := l.put(b, c)
	j.read.Store(j.before + j.from.BytesRead())
	j.mu.Lock()
	j.delivering = nil
	j.delivered.Broadcast()
	if !l.want { // it was stopped meanwhile
		return
	}
	l.next++
	if err != nil || l.next == l.count {
		p.of = slices.DeleteFunc(p.of, func(o *loader) bool { return o == l })
		p.stale = err != nil // there are batches for it
		l.end(err)
	}
}

// start makes a rank get the batches of an epoch: those behind q.First, or all of other nodes.
func (j *job) start(l *loader, q *request) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	switch {
	case l.want:
		return errs.New(errs.Usage, "loader %d: an epoch is under way; stop it first", l.id)
	case q.nodes != nil && (!j.named || j.world > 1 || q.First != 0):
		return errs.New(errs.Usage,
			"loader %d: other nodes are for one rank that was opened with some, and first is 0", l.id)
	case q.First < 0 || q.First > l.count && q.nodes == nil:
		return errs.New(errs.Usage, "batch %d is not between 0 and %d", q.First, l.count)
	}
	l.want, l.out, l.lagging, l.epoch, l.next = true, false, false, q.Epoch, q.First
	if q.nodes != nil {
		j.nodes, j.key = q.nodes, "" // nobody else joins it
		j.keep(q)
	} else if q.First == l.count && j.nodes == nil {
		l.end(nil)
		return nil
	}
	j.poke()
	return nil
}

// stop ends a rank's epoch. No batch comes behind it.
func (j *job) stop(l *loader) {
	j.mu.Lock()
	l.want = false
	if p := j.pass; p != nil {
		p.stale = p.stale || slices.Contains(p.of, l)
		if !slices.ContainsFunc(p.of, func(o *loader) bool { return o.want }) {
			p.cancel()
		}
	}
	for j.delivering == l {
		j.delivered.Wait()
	}
	j.mu.Unlock()
	j.poke()
}
