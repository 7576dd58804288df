package iobench

import (
	"context"
	"fmt"
	"time"

	"helios/gpuio"
	"helios/internal/hostmem"
)

// Open holds what a run at a given rate has beyond a closed loop's. Rows arrive as a Poisson
// process at that rate, whatever comes back. All that have arrived go into one set as soon as one
// is free. Like fio, a run that cannot keep up drops nothing: rows wait for their turn, and since
// their latency counts from the moment they were to arrive, it grows with the queue.
type Open struct {
	Rate     float64 `json:"rate"`     // rows a second, asked for
	Offered  float64 `json:"offered"`  // that arrived in the time that was measured
	Achieved float64 `json:"achieved"` // of all rows, that were there in that time
	KeptUp   bool    `json:"kept_up"`  // at most 1 % of them waited for their turn at the end
	// Unserved rows had arrived and waited for their turn when the measurement ended. They are not
	// read; the latencies have them with what they had waited by then, less than they would have.
	Unserved int64   `json:"unserved"`
	SetRows  float64 `json:"mean_set_rows"`
	// The part of the latency that is the commands': from the making to the completion.
	CommandP50 float64 `json:"command_p50_us"`
	CommandP99 float64 `json:"command_p99_us"`
}

// arrivals is a Poisson process, and what became of the rows that arrived.
type arrivals struct {
	draw   *draw
	l      *gpuio.Layout
	rate   float64
	from   time.Duration // the measured time
	to     time.Duration
	next   time.Duration
	exact  float64 // next, in seconds, unrounded
	lists  [][]int64
	dues   [][]time.Duration
	res    Open
	lat    gpuio.Histogram
	sets   int64
	rows   int64
	inTime int64 // arrived in the measured time
	done   int64 // were there in it
}

func newArrivals(d *draw, l *gpuio.Layout, c *Config) *arrivals {
	a := &arrivals{draw: d, l: l, rate: c.Rate, from: c.WarmUp, to: c.WarmUp + c.Duration,
		lists: make([][]int64, l.SSDs), dues: make([][]time.Duration, l.SSDs)}
	a.step()
	return a
}

func (a *arrivals) step() {
	a.exact += a.draw.exponential() / a.rate
	a.next = time.Duration(a.exact * 1e9)
}

func (a *arrivals) measured(t time.Duration) bool { return t >= a.from && t < a.to }

// take draws the rows that have arrived by now, as many as a set has room for, ordered by SSD.
func (a *arrivals) take(now time.Duration, room int, rows, offsets []int64,
	due []time.Duration) ([]int64, []time.Duration) {
	for i := range a.lists {
		a.lists[i], a.dues[i] = a.lists[i][:0], a.dues[i][:0]
	}
	for n := 0; n < room && a.next <= now && a.next < a.to; n++ {
		ssd := a.draw.below(int64(a.l.SSDs))
		a.lists[ssd] = append(a.lists[ssd], a.draw.below(a.l.RowsOn(int(ssd)))*int64(a.l.SSDs)+ssd)
		a.dues[ssd] = append(a.dues[ssd], a.next)
		if a.measured(a.next) {
			a.inTime++
		}
		a.step()
	}
	rows, due = rows[:0], due[:0]
	for i := range a.lists {
		offsets[i] = int64(len(rows))
		rows, due = append(rows, a.lists[i]...), append(due, a.dues[i]...)
	}
	offsets[len(a.lists)] = int64(len(rows))
	a.sets++
	a.rows += int64(len(rows))
	return rows, due
}

// ended counts a set that was there at a time.
func (a *arrivals) ended(due []time.Duration, now time.Duration) {
	for _, t := range due {
		if a.measured(t) {
			a.lat.Add(now - t)
		}
	}
	if a.measured(now) {
		a.done += int64(len(due))
	}
}

// result closes the books at the end of the measured time.
func (a *arrivals) result(row *Row, commands *gpuio.Histogram) {
	for ; a.next < a.to; a.step() {
		a.res.Unserved++
		if a.measured(a.next) {
			a.inTime++
			a.lat.Add(a.to - a.next)
		}
	}
	seconds := (a.to - a.from).Seconds()
	a.res.Rate, a.res.Offered, a.res.Achieved = a.rate, float64(a.inTime)/seconds,
		float64(a.done)/seconds
	a.res.KeptUp = a.res.Unserved <= a.inTime/100+1
	a.res.SetRows = float64(a.rows) / float64(max(a.sets, 1))
	a.res.CommandP50, a.res.CommandP99 = us(commands.Quantile(0.5)), us(commands.Quantile(0.99))
	row.latency(&a.lat)
	row.Open, row.RowsPerSecond = &a.res, a.res.Achieved
}

// open asks for rows at a rate. One goroutine makes the sets, and each set has one that waits for
// it.
func (b *bench) open(ctx context.Context) error {
	if err := b.makeSets(); err != nil {
		return err
	}
	a := newArrivals(&b.draw, &b.l, &b.cfg)
	type ended struct {
		s   *benchSet
		at  time.Time
		err error
	}
	done := make(chan ended, len(b.sets))
	free := append([]*benchSet(nil), b.sets...)
	start := time.Now()
	var from, to mark
	timer := time.NewTimer(0)
	defer timer.Stop()
	end := func(e ended) error {
		free = append(free, e.s)
		if e.err == nil {
			a.ended(e.s.due, e.at.Sub(start))
		}
		return b.ended(ctx, e.s, e.err, func() time.Time { return e.at })
	}
	var err error
	for b.failed == nil && err == nil {
		now := time.Since(start)
		if from.at.IsZero() && now >= a.from {
			from = b.mark(start.Add(now))
		}
		if now >= a.to {
			to = b.mark(start.Add(now))
			break
		}
		if len(free) > 0 && a.next <= now {
			s := free[len(free)-1]
			free = free[:len(free)-1]
			s.rowIDs, s.due = a.take(now, b.cfg.SetRows, hostmem.View[int64](s.rows.Bytes()),
				s.rs.SSDOffset, s.due)
			if err = b.submit(ctx, s); s.pending == nil {
				free = append(free, s)
				continue
			}
			go func() {
				err := s.await(ctx, b.cfg.patience)
				done <- ended{s, time.Now(), err}
			}()
			select {
			case e := <-done:
				err = end(e)
			default:
			}
			continue
		}
		wake := a.to
		if len(free) > 0 {
			wake = min(wake, a.next)
		}
		if from.at.IsZero() {
			wake = min(wake, a.from)
		}
		timer.Reset(max(wake-now, 0))
		select {
		case e := <-done:
			err = end(e)
		case <-timer.C:
		}
	}
	for len(free) < len(b.sets) { // also when something failed: nobody may write to the sets later
		if e := end(<-done); err == nil {
			err = e
		}
	}
	if err != nil || to.at.IsZero() {
		return err
	}
	if took := to.at.Sub(from.at); took < b.cfg.Duration/2 {
		return fmt.Errorf(
			"the machine was too busy to keep time: the measurement of %v began %v before its end; measure longer, or give the machine less to do",
			b.cfg.Duration, took.Round(time.Millisecond))
	}
	lat := b.between(from, to)
	a.result(b.row, &lat)
	return nil
}
