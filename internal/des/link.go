package des

// ticks divide a nanosecond: a 512-byte row takes 20 ns on a fast link, and rounding each to whole
// ones would change its bandwidth by percents.
const ticks = 1024

// Link moves one thing after another at a bandwidth, in the order in which they are sent, and then
// takes a latency that does not occupy it.
type Link struct {
	sim     *Sim
	perByte float64 // ticks
	latency int64
	free    int64 // ticks: when the last thing has been sent
	bytes   int64
	busy    int64 // ticks
}

// NewLink makes a link of bytesPerSec (0: as fast as can be) and a latency in ns.
func NewLink(sim *Sim, bytesPerSec float64, latencyNS int64) *Link {
	l := &Link{sim: sim, latency: latencyNS}
	if bytesPerSec > 0 {
		l.perByte = 1e9 * ticks / bytesPerSec
	}
	return l
}

// Send sends bytes from now on and returns when the last of them has arrived.
func (l *Link) Send(bytes int64) int64 {
	d := int64(float64(bytes)*l.perByte + 0.5)
	l.free = max(l.free, l.sim.now*ticks) + d
	l.bytes += bytes
	l.busy += d
	return (l.free+ticks-1)/ticks + l.latency
}

// Time returns how long bytes take on an idle link, latency included.
func (l *Link) Time(bytes int64) int64 {
	return (int64(float64(bytes)*l.perByte+0.5)+ticks-1)/ticks + l.latency
}

// Backlog returns how long what was sent now would wait, in ns.
func (l *Link) Backlog() int64 { return max(l.free/ticks-l.sim.now, 0) }

// Bytes returns what was sent so far.
func (l *Link) Bytes() int64 { return l.bytes }

// BusyNS returns how long the link has been or will be busy with what was sent so far.
func (l *Link) BusyNS() int64 { return l.busy / ticks }
