package stripe

import (
	"context"
	"fmt"
	"math/rand/v2"

	"helios/gpuio"
	"helios/internal/errs"
	"helios/internal/signatures"
	"helios/nvme"
)

// ForeignContent reads an SSD's two ends through our own queues and names what others left there:
// partition tables, file systems, RAID, LVM, encryption, swap. A dataset of ours is not among them.
func ForeignContent(ctx context.Context, s *gpuio.SSD) (marks []string, err error) {
	err = withTargets(ctx, []*gpuio.SSD{s}, func(ts []*target) error {
		head, tail, err := ts[0].readEnds(ctx)
		if err == nil {
			marks = signatures.All(head, tail, ts[0].bytes())
		}
		return err
	})
	return marks, err
}

func (t *target) bytes() int64 { return int64(t.lbas) * int64(t.lbaBytes) }

// readEnds reads the first and last bytes of an SSD, as many as signatures and blankness are looked
// for in.
func (t *target) readEnds(ctx context.Context) (head, tail []byte, err error) {
	n := min(max(int64(signatures.ProbeBytes), signatures.BlankBytes), t.bytes())
	head, tail = make([]byte, n), make([]byte, n)
	if err = t.dev.ReadAt(ctx, 0, head); err == nil {
		err = t.dev.ReadAt(ctx, nvme.LBA((t.bytes()-n)/int64(t.lbaBytes)), tail)
	}
	if err != nil {
		return nil, nil, errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
	}
	return head, tail, nil
}

// sample looks at places in the middle of an SSD, and describes the first content that it finds.
func (t *target) sample(ctx context.Context) (what string, err error) {
	block := make([]byte, signatures.SampleBytes)
	for _, place := range signatures.Places(t.bytes(), rand.Int64N) {
		if err := t.dev.ReadAt(ctx, nvme.LBA(place/int64(t.lbaBytes)), block); err != nil {
			return "", errs.With(errs.Device, fmt.Errorf("ssd %s: %w", t.name, err))
		}
		if what := signatures.Sampled(place, block); what != "" {
			return what, nil
		}
	}
	return "", nil
}
