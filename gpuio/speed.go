package gpuio

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"helios/cuda"
	"helios/internal/hostmem"
	"helios/nvme"
)

// Speed is how fast SSDs read together, whatever bounds them: their media, a link, a processor.
// Only the quotient matters here. The zero value: not known.
type Speed struct {
	Commands float64 // a second, of one row each
	Bytes    float64 // a second, in reads of measuredPiece
	// OfFiles: they are files, or software over files, which bears the costs of a command and of
	// its bytes one after the other. Media and a link bear them side by side.
	OfFiles bool
}

// maxReach bounds the distance between the beginnings of two rows that share a command. It is the
// distance where the speed is not known: flash is read and corrected in units of about 4 KiB, so
// such an SSD reads so many bytes at the cost of one block.
const maxReach = 4096

// reachBytes is the distance that pays, for rows of so many bytes: one command for two rows and
// what lies between takes no longer than two commands. It is short where media have no such units
// (3D XPoint), and where bytes fill a link. Of files it is as many bytes as take the time of a
// command, in whole maxReach, so that most measurements of a machine give the same commands.
func (s Speed) reachBytes(row int) int {
	if !(s.Commands > 0 && s.Bytes > 0) || row >= maxReach { // whole pages land without gaps
		return maxReach
	}
	if s.OfFiles {
		one := 1 / s.Commands
		more := max(measuredPiece/s.Bytes-one, one/measuredPiece) // of the bytes beyond a row
		reach := math.Round(one / more * float64(measuredPiece-row) / maxReach)
		return int(min(max(reach, 1), measuredPiece/maxReach)) * maxReach
	}
	return int(min(2*s.Bytes/s.Commands-float64(row), maxReach))
}

// How speed is measured: each kind of reads runs in two rounds, and the second counts. Files, which
// other programs read too, have four rounds, and the fastest of the last three counts: others make
// reads slower and never faster.
const (
	measuredRows   = 4096 // of each SSD
	measuredPieces = 128  // of each SSD
	measuredFiles  = 8    // of files such a part, which takes 10 to 50 ms
	// measuredLeast is the fewest pieces, of all files together. A disk is not busy yet when it has
	// read 16 pieces of one file.
	measuredLeast = 64
	measuredPiece = 64 << 10
	measuredLimit = 2 * time.Second // of all of it
)

// SSDKind is the kind of what answers reads.
type SSDKind uint8

const (
	Hardware SSDKind = iota
	Files            // files, or software over files that models no times
	Played           // software that plays a model
)

// SpeedBy returns how fast SSDs of a kind read the rows of a layout for the stack, where that
// decides about commands; else the zero value. rate returns the rows of a layout that are read in a
// second, measured or modelled. A stack whose kernels drive queues takes no speed of SSDs that are
// played or have injected faults, which belong to the run. One without queues reads files, whatever
// stands before them.
func (st *Stack) SpeedBy(l Layout, kind SSDKind, rate func(l Layout, files bool) (float64,
	error)) (s Speed, err error) {
	pieces := l.LBAsOn(int(l.SSDs)-1) * int64(l.LBABytes) / measuredPiece
	if !st.Coalesces || st.Queued && kind == Played || l.ReadBytes() >= maxReach ||
		pieces < measuredPieces { // so little data is read in no time
		return Speed{}, nil
	}
	long, err := NewLayout(pieces*int64(l.SSDs), measuredPiece, int(l.SSDs), int(l.LBABytes))
	if err != nil {
		return Speed{}, err
	}
	s.OfFiles = !st.Queued || kind == Files
	if s.Commands, err = rate(l, s.OfFiles); err != nil {
		return Speed{}, err
	}
	if s.Bytes, err = rate(long, s.OfFiles); err != nil {
		return Speed{}, err
	}
	s.Bytes *= measuredPiece
	return s, nil
}

// MeasureSpeed is SpeedBy by measurements. A read that fails, or reads that take too long, leave
// the speed unknown: the run meets the failure again, names it, and recovers from it.
func (st *Stack) MeasureSpeed(ctx context.Context, dev cuda.Device, ssds []*SSD, l Layout,
	o StackOptions) (Speed, error) {
	if o.CoalesceBytes < 0 {
		return Speed{}, nil
	}
	// Recovery is the run's: here it would cost time, and resets that are counted.
	o.Retries, o.Timeout = -1, 10*measuredLimit
	limited, cancel := context.WithTimeout(ctx, measuredLimit)
	defer cancel()
	s, err := st.SpeedBy(l, kindOf(ssds), st.rates(limited, dev, ssds, o))
	if err != nil && ctx.Err() == nil {
		return Speed{}, nil
	}
	return s, err
}

// rates measures for SpeedBy.
func (st *Stack) rates(ctx context.Context, dev cuda.Device, ssds []*SSD,
	o StackOptions) func(l Layout, files bool) (float64, error) {
	o.CoalesceBytes = -1
	return func(l Layout, files bool) (float64, error) {
		n, rounds := measuredRows, 2
		if l.RowBytes == measuredPiece {
			n = measuredPieces
		}
		if files {
			n, rounds = max(n/measuredFiles, measuredLeast/len(ssds)), 4
		}
		return st.readSpeed(ctx, dev, ssds, l, o, n, rounds)
	}
}

// kindOf returns the kind of all SSDs; of several kinds, the one of which least is known.
func kindOf(ssds []*SSD) (kind SSDKind) {
	for _, d := range ssds {
		if d.Ctrl == nil {
			return Played
		}
		if overFile(d) {
			kind = Files
		} else if _, hardware := d.Ctrl.Bus().(nvme.Preparer); !hardware {
			return Played
		}
	}
	return kind
}

// OverFiles reports whether there are SSDs, all software over files that take what time they take.
func OverFiles(ssds []*SSD) bool {
	return len(ssds) > 0 &&
		!slices.ContainsFunc(ssds, func(d *SSD) bool { return d.Ctrl == nil || !overFile(d) })
}

// overFile reports whether an SSD is software over a file that takes what time it takes.
func overFile(d *SSD) bool {
	b, ok := d.Ctrl.Bus().(interface{ Modelled() bool })
	return ok && !b.Modelled() && inKernel([]*SSD{d})
}

// readSpeed returns how many rows a second the stack reads of n random ones of each SSD, read in
// so many rounds.
func (st *Stack) readSpeed(ctx context.Context, dev cuda.Device, ssds []*SSD, l Layout,
	o StackOptions, n, rounds int) (rate float64, err error) {
	rd, err := st.Open(dev, ssds, l, o)
	if err != nil {
		return 0, err
	}
	total := n * len(ssds)
	// Data is written over: only how long it takes matters.
	places := min(total, measuredPieces*measuredPiece/int(l.RowBytes))
	list, lerr := dev.Alloc(cuda.MemPinned, int64(total)*12, "gpuio speed")
	dst, derr := dev.Alloc(cuda.MemDevice, int64(places)*int64(l.RowBytes), "gpuio speed")
	// After Close, which gives up at once what ctx has ended, no SSD writes to them any more; the
	// CPU's reads may.
	defer func() {
		if err = errors.Join(err, rd.Close(ctx)); errors.Is(err, errInFlight) {
			return
		}
		for _, b := range []cuda.Buffer{list, dst} {
			if b != nil {
				err = errors.Join(err, b.Free())
			}
		}
	}()
	if err := errors.Join(lerr, derr); err != nil {
		return 0, err
	}
	rows := hostmem.View[int64](list.Bytes()[:total*8])
	pos := hostmem.View[uint32](list.Bytes()[total*8:])
	offsets := make([]int64, len(ssds)+1)
	rng := rand.New(rand.NewPCG(1, 2))
	for s := range ssds {
		offsets[s+1] = offsets[s] + int64(n)
		for i := s * n; i < (s+1)*n; i++ {
			rows[i] = rng.Int64N(l.RowsOn(s))*int64(len(ssds)) + int64(s)
			pos[i] = uint32(i % places)
		}
	}
	var rates []float64
	for range rounds {
		began := time.Now()
		p, err := rd.Submit(ctx, &ReadSet{Rows: list.Ptr(),
			Pos: list.Ptr() + cuda.DevicePtr(total*8), SSDOffset: offsets, Dst: dst,
			DstStride: int64(l.RowBytes)})
		if err != nil {
			return 0, err
		}
		if _, err := p.Wait(ctx); err != nil {
			return 0, err
		}
		rates = append(rates, float64(total)/time.Since(began).Seconds())
	}
	return slices.Max(rates[1:]), nil
}
