package hostmem

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHugePool(t *testing.T) {
	root := t.TempDir()
	if _, _, err := HugePool(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a machine without huge pages: %v", err)
	}
	dir := filepath.Join(root, "sys/kernel/mm/hugepages/hugepages-2048kB")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	put := func(nr, free, resv string) {
		for name, text := range map[string]string{"nr_hugepages": nr, "free_hugepages": free,
			"resv_hugepages": resv} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o644))
		}
	}
	put("9", "7", "3")
	if total, free, err := HugePool(root); err != nil || total != 9*HugePageBytes ||
		free != 4*HugePageBytes {
		t.Errorf("%d %d %v", total, free, err)
	}
	put("2", "1", "5") // surplus pages were promised
	if _, free, err := HugePool(root); err != nil || free != 0 {
		t.Errorf("%d %v", free, err)
	}
	put("2", "x", "0")
	if _, _, err := HugePool(root); err == nil {
		t.Error("no number accepted")
	}
}

// Runs where huge pages are reserved, as in a guest of tools/vmtest.
func TestReservedHugePages(t *testing.T) {
	_, before, err := HugePool("")
	if err != nil || before < 4*HugePageBytes || before > 1<<30 {
		t.Skipf(
			"%d bytes of reserved huge pages are free (%v); want 8 MiB to 1 GiB (sysctl vm.nr_hugepages=4)",
			before, err)
	}
	available, err := AvailableBytes()
	require.NoError(t, err)
	r0, err := ReadRSS()
	require.NoError(t, err)
	b, err := Alloc(2*HugePageBytes-4097, "huge")
	require.NoError(t, err)
	_, left, err := HugePool("")
	if err != nil || before-left != 2*HugePageBytes || HugeBytes() != 2*HugePageBytes {
		t.Errorf("%d bytes left the pool, %d counted, %v", before-left, HugeBytes(), err)
	}
	for i := range b {
		if b[i] != 0 {
			t.Fatalf("byte %d is not zero", i)
		}
		b[i] = 1
	}
	r1, err := ReadRSS()
	if err != nil || r1.HugeTLB-r0.HugeTLB != 2*HugePageBytes {
		t.Errorf("resident huge pages %d, then %d, %v", r0.HugeTLB, r1.HugeTLB, err)
	}
	if now, err := AvailableBytes(); err != nil || now < available-2*HugePageBytes {
		t.Errorf("available %d, then %d: the pool's pages counted", available, now)
	}
	// Ordinary memory: too small, mostly waste in the last page, more than the pool has.
	for _, size := range []int64{HugePageBytes - 1, HugePageBytes + 1, left + HugePageBytes/2} {
		o, err := Alloc(size, "ordinary")
		require.NoError(t, err)
		o[size-1] = 1
		if HugeBytes() != 2*HugePageBytes {
			t.Errorf("%d bytes: on huge pages", size)
		}
		if err := Free(o); err != nil {
			t.Error(err)
		}
	}
	if err := Free(b); err != nil {
		t.Error(err)
	}
	if _, after, err := HugePool(""); err != nil || after != before || HugeBytes() != 0 {
		t.Errorf("pool %d, then %d; %d counted, %v", before, after, HugeBytes(), err)
	}
}
