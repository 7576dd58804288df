package state

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// stores gives a test a user's folder and a machine's.
func stores(t *testing.T) (*Store, *Machine) {
	t.Helper()
	t.Setenv(EnvRun, filepath.Join(t.TempDir(), "run", "heliosctl"))
	s, err := Open(filepath.Join(t.TempDir(), "state"))
	require.NoError(t, err)
	return s, s.Machine()
}

func record(name, addr, serial string, p Phase) *Record {
	group := 7
	return &Record{Phase: p, Disks: []string{"nvme3n1"}, SSD: SSD{
		Name: name, Kind: KindVFIO, Path: "/sys/bus/pci/devices/" + addr, PCI: addr, Serial: serial,
		Bytes: 64 << 20, LBABytes: 512, Group: &group, Driver: "nvme",
	}}
}

// put writes records as bind-ssds does.
func put(t *testing.T, m *Machine, rs ...*Record) {
	t.Helper()
	unlock, err := m.Lock(t.Context())
	require.NoError(t, err)
	defer unlock()
	for _, r := range rs {
		require.NoError(t, m.Put(r))
		require.NoError(t, m.Share(r.Name, os.Getgid()))
	}
}

func TestRecordsJoinTheUsersSSDs(t *testing.T) {
	s, m := stores(t)
	records, err := m.Records()
	require.NoError(t, err, "no folder is no records")
	require.Empty(t, records)
	own := SSD{Name: "ssd0", Kind: KindProxy, Path: "/x/a.img", Serial: "S0"}
	require.NoError(t,
		s.Update(t.Context(), func(st *State) error { st.SSDs = append(st.SSDs, own); return nil }))
	put(t, m, record("vfio10", "0000:05:00.0", "A", Bound), record("vfio2", "0000:04:00.0", "B",
		Bound), record("vfio3", "0000:06:00.0", "C", Binding))

	st, err := s.Load()
	require.NoError(t, err)
	require.Len(t, st.SSDs, 3)
	require.Equal(t, own, st.SSDs[0])
	require.Equal(t, "vfio2", st.SSDs[1].Name, "by number, not by letter")
	require.Equal(t, "vfio10", st.SSDs[2].Name)
	require.Len(t, st.Unfinished, 1)
	for in, want := range map[string]string{"vfio2": "vfio2", "B": "vfio2", "0000:04:00.0": "vfio2",
		"04:00.0": "vfio2", "0000:05:00.0": "vfio10", "A": "vfio10", "S0": "ssd0"} {
		d, err := st.Find(in)
		require.NoError(t, err, in)
		require.Equal(t, want, d.Name, in)
	}
	_, err = st.Find("vfio3")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, "binding was cut off")
	require.ErrorContains(t, err, "sudo heliosctl bind-ssds 0000:06:00.0")

	// A user's change to them has no effect, and the user's file never holds them.
	require.NoError(t,
		s.Update(t.Context(), func(st *State) error { st.SSDs = st.SSDs[:2]; return nil }))
	b, err := os.ReadFile(s.file())
	require.NoError(t, err)
	require.NotContains(t, string(b), "vfio")
	st, err = s.Load()
	require.NoError(t, err)
	require.Len(t, st.SSDs, 3)

	require.Equal(t, "vfio0", NextMachineName(nil))
	records, err = m.Records()
	require.NoError(t, err)
	require.Equal(t, "vfio0", NextMachineName(records))
	put(t, m, record("vfio0", "0000:07:00.0", "D", Bound), record("vfio1", "0000:08:00.0",
		"E", Bound))
	records, err = m.Records()
	require.NoError(t, err)
	require.Equal(t, "vfio4", NextMachineName(records))
}

func TestRecordFiles(t *testing.T) {
	_, m := stores(t)
	defer syscall.Umask(syscall.Umask(0o077))
	r := record("vfio0", "0000:04:00.0", "B", Binding)
	put(t, m, r)
	di, err := os.Stat(m.Dir())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o755), di.Mode().Perm(), "whatever the umask")
	require.Equal(t, os.Getpid(), r.PID)
	require.WithinDuration(t, time.Now(), r.Since, 2*time.Second)
	fi, err := os.Stat(m.file("vfio0"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o644), fi.Mode().Perm(), "all may read")
	fi, err = os.Stat(m.lockPath("vfio0"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o660), fi.Mode().Perm(), "the group may lease")
	require.NoError(t, m.Share("vfio0", -1))
	fi, err = os.Stat(m.lockPath("vfio0"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), fi.Mode().Perm(), "root alone")

	require.True(t, r.Was("nvme3n1"))
	require.True(t, r.Was("/dev/nvme3"))
	require.False(t, r.Was("nvme"), "part of a name")
	require.False(t, r.Was("nvme30"))
	require.Contains(t, r.NextStep(), "bind-ssds 0000:04:00.0")
	r.Phase = Unbinding
	require.Contains(t, r.NextStep(), "finish with \"sudo heliosctl unbind-ssds 0000:04:00.0\"")

	require.Error(t, m.Put(&Record{SSD: SSD{Name: "ssd0", Kind: KindVFIO, PCI: "x"}}),
		"not a machine's name")
	require.NoError(t, os.WriteFile(m.file("vfio1"), []byte(`{"version":1,"name":"vf`), 0o644))
	_, err = m.Records()
	require.Equal(t, errs.Device, errs.ClassOf(err))
	require.ErrorContains(t, err, m.file("vfio1"))
	require.NoError(t, os.WriteFile(m.file("vfio1"),
		[]byte(`{"version":9,"name":"vfio1","pci":"0000:01:00.0"}`), 0o644))
	_, err = m.Records()
	require.ErrorContains(t, err, "format 9")
	require.NoError(t, m.Remove("vfio1"))
	require.NoError(t, m.Remove("vfio0"))
	require.NoError(t, m.Remove("vfio0"), "gone is gone")
	left, err := os.ReadDir(m.Dir())
	require.NoError(t, err)
	require.Len(t, left, 1, "the machine's lock")
}

func TestMachineLease(t *testing.T) {
	s, m := stores(t)
	put(t, m, record("vfio0", "0000:04:00.0", "B", Bound))
	l, err := s.Acquire("heliosctl train", "vfio0")
	require.NoError(t, err)
	other, err := Open(t.TempDir()) // another user, the same machine
	require.NoError(t, err)
	_, err = other.Acquire("heliosctl load", "vfio0")
	require.Equal(t, errs.Refused, errs.ClassOf(err))
	require.ErrorContains(t, err, "heliosctl train")

	// Unbound under the lease: the old file does not pass for the SSD.
	require.NoError(t, m.Remove("vfio0"))
	l.Release()
	_, err = other.Acquire("heliosctl load", "vfio0")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, "not bound any more")
}

func TestMachineLockWaits(t *testing.T) {
	_, m := stores(t)
	unlock, err := m.Lock(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = m.Lock(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	unlock()
	unlock, err = m.Lock(t.Context())
	require.NoError(t, err)
	unlock()
}

func TestNotPermittedSaysWhichGroup(t *testing.T) {
	f := filepath.Join(t.TempDir(), "vfio0.lock")
	require.NoError(t, os.WriteFile(f, nil, 0o600))
	require.Contains(t, NotPermitted(f), "only root may use it")
	require.Contains(t, NotPermitted(f), "heliosctl vfio-setup setup")
	if os.Getuid() != 0 {
		return // only root gives files to groups that it is not in
	}
	require.NoError(t, os.Chown(f, 0, 54321))
	require.NoError(t, os.Chmod(f, 0o660))
	require.Contains(t, NotPermitted(f), "usermod -aG 54321")
	require.Contains(t, NotPermitted(f), "log in again")
}
