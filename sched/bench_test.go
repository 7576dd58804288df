package sched

import (
	"context"
	"syscall"
	"testing"
	"time"

	"helios/cuda"
	"helios/dataset"
	"helios/gnn"
	"helios/sched/plan"
	"helios/sched/prepare"
	"helios/sched/report"
	"helios/sched/tiers/static"
)

// BenchmarkEpoch trains one epoch of the reference size on four RAM SSDs: 200,000 nodes
// of 512-byte rows, fanout 10,10, batches of 1024, 128 hidden units.
func BenchmarkEpoch(b *testing.B) {
	if testing.Short() {
		b.Skip("takes minutes")
	}
	d := graphSpec{nodes: 200_000, dim: 128, degree: 12}.generate(b)
	benchEpoch(b, d, bind(b, d, 4, ""), 128)
}

// BenchmarkEpochFile is bound by its SSDs: two files with O_DIRECT, a smaller model and fewer
// seeds.
func BenchmarkEpochFile(b *testing.B) {
	if testing.Short() {
		b.Skip("takes minutes")
	}
	d := graphSpec{nodes: 200_000, dim: 128, degree: 12, train: 0.2}.generate(b)
	benchEpoch(b, d, bindIn(b, d, 2, b.TempDir(), true, ""), 32)
}

func benchEpoch(b *testing.B, d *dataset.Dataset, s *ssdSet, hidden int) {
	for _, v := range []struct{ mode, pipe string }{
		{static.ModeHelios, plan.PipelineNone}, {static.ModeHelios, plan.PipelineIntra},
		{static.ModeHelios, plan.PipelinePrefetch}, {static.ModeHelios, plan.DefaultPipeline},
		{static.ModeInmem, plan.DefaultPipeline}, {static.ModeCPU, plan.PipelinePrefetch},
		{static.ModeMmap, plan.PipelinePrefetch},
	} {
		b.Run(v.mode+"/"+v.pipe, func(b *testing.B) {
			for b.Loop() {
				dev, err := cuda.NewHost(cuda.HostOptions{})
				if err != nil {
					b.Fatal(err)
				}
				cpu := cpuSeconds(b)
				r, err := Train(context.Background(), plan.Config{
					ModelSettings: gnn.ModelSettings{Hidden: hidden},
					Mode:          v.mode,
					Pipeline:      v.pipe,
					Seed:          1,
					NoEval:        true,
					GPUCache:      percent(5),
					CPUCache:      percent(10),
				}, prepare.Inputs{Dev: dev, Dataset: d, SSDs: s.ssds}, report.Observer{})
				if err != nil {
					b.Fatal(err)
				}
				if err := dev.Close(); err != nil {
					b.Fatal(err)
				}
				e := r.Epochs[0]
				b.ReportMetric(cpuSeconds(b)-cpu, "cpu-s")
				b.ReportMetric(e.Seconds, "epoch-s")
				b.ReportMetric(e.Overlap, "overlap")
				b.ReportMetric(e.Stall, "stall")
				b.ReportMetric(e.StageSeconds.Sample, "sample-s")
				b.ReportMetric(e.StageSeconds.Lookup, "lookup-s")
				b.ReportMetric(e.StageSeconds.Submit, "submit-s")
				b.ReportMetric(e.StageSeconds.Complete, "complete-s")
				b.ReportMetric(e.StageSeconds.Gather, "gather-s")
				b.ReportMetric(e.StageSeconds.Train, "train-s")
				b.ReportMetric(float64(r.PeakMemoryBytes)/(1<<20), "peak-MiB")
			}
		})
	}
}

// cpuSeconds is the processor time of this process, which other work on the machine disturbs less
// than wall time.
func cpuSeconds(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return (time.Duration(u.Utime.Nano()) + time.Duration(u.Stime.Nano())).Seconds()
}
