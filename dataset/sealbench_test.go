package dataset_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"helios/dataset"
)

// BenchmarkOpenSealed reads all that a run reads at its start of the dataset in
// HELIOS_SEAL_DATASET, with the checks and without them.
func BenchmarkOpenSealed(b *testing.B) {
	dir := os.Getenv("HELIOS_SEAL_DATASET")
	if dir == "" {
		b.Skip("HELIOS_SEAL_DATASET names no dataset")
	}
	for _, sealed := range []bool{false, true} {
		name := "unchecked"
		if sealed {
			name = "checked"
		}
		b.Run(name, func(b *testing.B) {
			var info dataset.SealInfo
			before := processorTime(b)
			for b.Loop() {
				d, err := dataset.Open(dir)
				require.NoError(b, err)
				require.True(b, d.Sealed())
				if !sealed {
					dataset.Uncheck(d)
				}
				_, err = d.TopologyInMemory()
				require.NoError(b, err)
				_, err = d.Labels()
				require.NoError(b, err)
				for _, s := range dataset.Splits {
					_, err = d.Split(s)
					require.NoError(b, err)
				}
				info = d.SealInfo()
				require.NoError(b, d.Close())
			}
			b.ReportMetric(float64(info.CheckedBytes)/1e6, "checked-MB")
			b.ReportMetric(1e3*info.Seconds, "check-ms")
			b.ReportMetric(float64((processorTime(b)-before).Milliseconds())/float64(b.N),
				"cpu-ms/op")
		})
	}
}

// processorTime returns what the process has taken so far; unlike wall time it says something on a
// busy machine.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
