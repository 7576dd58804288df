package iobench

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"helios/cuda"
	"helios/gpuio"
	"helios/internal/errs"
	"helios/nvme"
)

// planted is a device with a mistake of a benchmark's host side.
type planted struct {
	cuda.Device
	missing string // a kernel that is not there
	// what becomes of a launch: its error, and whether it happens
	launch func(name string) (error, bool)
}

func (d planted) Kernel(name string) (cuda.Kernel, error) {
	if name == d.missing {
		return nil, errs.New(errs.Capability, "no kernel %q", name)
	}
	return d.Device.Kernel(name)
}

func (d planted) NewStream(o cuda.StreamOptions) (cuda.Stream, error) {
	s, err := d.Device.NewStream(o)
	return plantedStream{s, d}, err
}

type plantedStream struct {
	cuda.Stream
	d planted
}

func (s plantedStream) LaunchRaw(k cuda.Kernel, cfg cuda.LaunchConfig, params unsafe.Pointer,
	size uintptr) error {
	if s.d.launch != nil {
		if err, happens := s.d.launch(k.Name()); err != nil || !happens {
			return err
		}
	}
	return s.Stream.LaunchRaw(k, cfg, params, size)
}

// TestPlantedBugs: whatever is wrong with launches, data or counts makes the row failed, not a
// number.
func TestPlantedBugs(t *testing.T) {
	undercount := func(change func(*nvme.SMARTLog)) func(context.Context,
		*gpuio.SSD) (nvme.SMARTLog, error) {
		readings := 0
		return func(ctx context.Context, s *gpuio.SSD) (nvme.SMARTLog, error) {
			l, err := s.Ctrl.SMART(ctx)
			if readings++; readings == 4 && err == nil { // the second SSD's, afterwards
				change(&l)
			}
			return l, err
		}
	}
	for _, c := range []struct {
		name   string
		stacks []string
		fault  string
		plant  func(*Config)
		want   string
	}{
		{"every launch fails", []string{"async", "sync"}, "", func(c *Config) {
			c.Dev = planted{Device: c.Dev, launch: func(string) (error,
				bool) {
				return errors.New("launch failed: out of resources"), false
			}}
		}, "out of resources"},
		{"a late launch fails", []string{"async", "sync"}, "", func(c *Config) {
			var n atomic.Int32
			c.Duration = 2 * time.Second // that the launch comes; the run ends with it
			c.Dev = planted{Device: c.Dev, launch: func(string) (error, bool) {
				if n.Add(1) > 4 {
					return errors.New("launch failed: unspecified failure"), false
				}
				return nil, true
			}}
		}, "unspecified failure"},
		{"kernel missing", []string{"async"}, "",
			func(c *Config) { c.Dev = planted{Device: c.Dev, missing: "complete"} }, "no kernel"},
		{"kernel missing", []string{"sync"}, "",
			func(c *Config) { c.Dev = planted{Device: c.Dev, missing: "read_sync"} }, "no kernel"},
		{"reads dropped", []string{"async", "sync"}, "short(op=read,bytes=0)", nil,
			"is not what the SSD holds"},
		{"reads cut short", []string{"async"}, "short(op=read,bytes=4095)", nil,
			"is not what the SSD holds"},
		{"reads elsewhere", []string{"async", "sync"}, "misdirect(op=read,shift=8)", nil,
			"is not what the SSD holds"},
		{"a bit flips", []string{"async"}, "flip(op=read,byte=9)", nil,
			"is not what the SSD holds"},
		{"completions twice", []string{"async"}, "dup(op=read,times=3)", nil,
			"named no command in flight"},
		{"media error", []string{"async", "sync"},
			"error(op=read,sct=2,sc=0x81,dnr=1,after=10,times=1)", nil, "unrecovered read error"},
		{"SMART counts too few commands", []string{"async", "sync"}, "", func(c *Config) {
			c.smart = undercount(func(l *nvme.SMARTLog) { l.HostReads.Lo-- })
		}, "SSD ssd1 counted"},
		{"SMART counts too many commands", []string{"async", "cpu", "mmap"}, "", func(c *Config) {
			c.smart = undercount(func(l *nvme.SMARTLog) { l.HostReads.Lo++ })
		}, "SSD ssd1 counted"},
		{"SMART counts too little data", []string{"async", "sync"}, "", func(c *Config) {
			c.smart = undercount(func(l *nvme.SMARTLog) { l.DataUnitsRead.Lo -= 2 })
		}, "data units"},
		{"SMART counts data for nothing", []string{"async", "cpu"}, "", func(c *Config) {
			c.smart = undercount(func(l *nvme.SMARTLog) { l.DataUnitsRead.Lo += 2 })
		}, "data units"},
		{"no SMART log", []string{"async"}, "", func(c *Config) {
			n := 0
			c.smart = func(ctx context.Context, s *gpuio.SSD) (nvme.SMARTLog, error) {
				if n++; n > 2 {
					return nvme.SMARTLog{}, errors.New("log page gone")
				}
				return s.Ctrl.SMART(ctx)
			}
		}, "log page gone"},
	} {
		for _, stack := range c.stacks {
			t.Run(c.name+"/"+stack, func(t *testing.T) {
				dev, disks := ssds(t, 2, 1<<20, true, c.fault)
				cfg := Config{Dev: dev, SSDs: disks, Stack: stack, Depth: 16,
					Duration: 20 * time.Millisecond, Coalesce: -1}
				if c.plant != nil {
					c.plant(&cfg)
				}
				row, err := Run(t.Context(), cfg)
				require.NoError(t, err)
				require.False(t, row.Audited)
				require.Contains(t, row.AuditError, c.want)
			})
		}
	}
}

// TestSilentLaunch: launches that report success and do not happen, which a benchmark that does not
// look at its data counts as instant reads.
func TestSilentLaunch(t *testing.T) {
	for _, stack := range []string{"async", "sync"} {
		dev, disks := ssds(t, 1, 1<<20, true, "")
		row, err := Run(t.Context(), Config{
			Dev:  planted{Device: dev, launch: func(string) (error, bool) { return nil, false }},
			SSDs: disks, Stack: stack, Depth: 16, Duration: 20 * time.Millisecond, Coalesce: -1,
			patience: 200 * time.Millisecond,
		})
		require.NoError(t, err)
		require.False(t, row.Audited)
		require.Contains(t, row.AuditError, "wait for 256 rows")
		require.Zero(t, row.IOPS)
	}
}

// TestDropOnZeros: SSDs that were never written hold what a fresh destination does. Reads that
// bring nothing are found there as well; that nothing more can be said is in the row.
func TestDropOnZeros(t *testing.T) {
	for _, fault := range []string{"", "short(op=read,bytes=0)"} {
		dev, disks := ssds(t, 1, 1<<20, true, fault)
		require.NoError(t, os.WriteFile(disks[0].BackingPath, make([]byte, 1<<20), 0o600))
		row, err := Run(t.Context(), Config{Dev: dev, SSDs: disks, Depth: 16,
			Duration: 20 * time.Millisecond, Coalesce: -1})
		require.NoError(t, err)
		require.Equal(t, fault == "", row.Audited, row.AuditError)
		if row.Audited {
			require.False(t, row.ContentVaries)
		}
	}
}

// TestHealed: reads that a retry healed are shown, and the row stands.
func TestHealed(t *testing.T) {
	for fault, errors := range map[string]int64{"error(op=read,sct=0,sc=0x06,after=100,times=2)": 2,
		"lost(op=read,after=50,times=2)": 2} {
		for _, stack := range []string{"async", "sync"} {
			dev, disks := ssds(t, 1, 1<<20, true, fault)
			row, err := Run(t.Context(), Config{Dev: dev, SSDs: disks, Stack: stack, Depth: 16,
				Duration: 50 * time.Millisecond, Timeout: 50 * time.Millisecond})
			require.NoError(t, err)
			require.True(t, row.Audited, "%s: %s", fault, row.AuditError)
			require.GreaterOrEqual(t, row.Errors, errors)
			require.GreaterOrEqual(t, row.Retries, errors)
			require.Equal(t, row.Retries, row.PerSSD[0].Retries)
			require.LessOrEqual(t, row.SMARTReads, row.Commands)
		}
	}
}

// TestReconcile: the bounds of what may differ.
func TestReconcile(t *testing.T) {
	for _, c := range []struct {
		stack string
		s     SSDRow
		ok    bool
	}{
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1000, SMARTUnits: 8}, true},
		// rounded up
		{"async", SSDRow{Commands: 1001, Bytes: 4100096, SMARTReads: 1001, SMARTUnits: 9}, true},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1000, SMARTUnits: 7}, false},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1000, SMARTUnits: 9}, false},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 999, SMARTUnits: 8}, false},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 999, SMARTUnits: 8, Errors: 5,
			Retries: 5}, false},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 998, SMARTUnits: 7,
			Timeouts: 2, Retries: 2}, true},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 997, SMARTUnits: 8,
			Timeouts: 2, Retries: 2}, false},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1000, SMARTUnits: 7, Errors: 1,
			Retries: 1}, true},
		{"async", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1000, SMARTUnits: 9, Errors: 1,
			Retries: 1}, false},
		{"cpu", SSDRow{Commands: 1000, Bytes: 4096000}, true},
		{"cpu", SSDRow{Commands: 1000, Bytes: 4096000, SMARTReads: 1}, false},
	} {
		err := (&Row{Stack: c.stack}).reconcile(&c.s)
		require.Equal(t, c.ok, err == nil, "%s %+v: %v", c.stack, c.s, err)
	}
}
