package units

import (
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseBytes(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "4096": 4096, "512B": 512, "1KiB": 1024, "1k": 1024, "1kB": 1000, "1.5GiB": 3 << 29,
		"2GiB": 2 << 30, "2G": 2 << 30, "2GB": 2e9, " 256 MiB ": 256 << 20,
		"8388607TiB": 8388607 << 40,
	} {
		got, err := ParseBytes(in)
		require.NoError(t, err, in)
		require.Equal(t, want, got, in)
	}
	for _, in := range []string{"", "GiB", "-1", "-1GiB", "1.5", "1.2.3KiB", "five", "10%", "9PiBs",
		"9000000TiB", "1e3", "0x10", "NaN", "Inf"} {
		_, err := ParseBytes(in)
		require.Error(t, err, in)
	}
}

func TestFormatBytes(t *testing.T) {
	require.Equal(t, "0 B", FormatBytes(0))
	require.Equal(t, "1.5 KiB", FormatBytes(1536))
	require.Equal(t, "2 GiB", FormatBytes(2<<30))
	require.Equal(t, "1.23 M", FormatCount(1234567))
	require.Equal(t, "12.3 k", FormatCount(12345))
	require.Equal(t, "999", FormatCount(999))
	require.Equal(t, "6699", FormatCount(6699.388))
	require.Equal(t, "10 k", FormatCount(9999.9))
	require.Equal(t, "9999", FormatCount(9999))
	require.Equal(t, "0.125", FormatCount(0.125))
	require.Equal(t, "999 k", FormatCount(999_400))
	require.Equal(t, "1 M", FormatCount(999_600))
	require.Equal(t, "-1 G", FormatCount(-999.7e6))
}

func TestBudget(t *testing.T) {
	b, err := ParseBudget("5%")
	require.NoError(t, err)
	require.Equal(t, int64(50), b.Of(1000))
	require.Equal(t, "5%", b.String())
	b, err = ParseBudget("256MiB")
	require.NoError(t, err)
	require.Equal(t, int64(256<<20), b.Of(1000))
	back, err := ParseBudget(b.String())
	require.NoError(t, err)
	require.Equal(t, b, back)
	b, err = ParseBudget("5B")
	require.NoError(t, err)
	require.Equal(t, Budget{Bytes: 5}, b)
	require.Equal(t, "5B", b.String())
	for _, in := range []string{"", "%", "101%", "-1%", "x%", "NaN%", "ten", "-5", "5", "100"} {
		_, err := ParseBudget(in)
		require.Error(t, err, in)
	}
}

func TestParseInts(t *testing.T) {
	got, err := ParseInts("1, 2,4", 1)
	require.NoError(t, err)
	require.Equal(t, []int{1, 2, 4}, got)
	for _, in := range []string{"", "1,,2", "0", "1;2", "1.5"} {
		_, err := ParseInts(in, 1)
		require.Error(t, err, in)
	}
}

// Whatever is typed, the answer is an error or a size that reads back the same.
func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"1GiB", "9223372036854775807", "1.5KiB", "-", ".", "..b", "1", "5",
		"100", "101", "5.", "5B"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseBytes(s)
		if err != nil {
			return
		}
		if n < 0 {
			t.Fatalf("%q gives %d", s, n)
		}
		b, err := ParseBudget(s)
		last := strings.TrimSpace(s)
		if noUnit := last[len(last)-1] <= '9'; noUnit && n >= 1 && n <= 100 {
			if err == nil {
				t.Fatalf("%q as budget is %+v; it could be a percentage", s, b)
			}
			return
		}
		if err != nil || b.Bytes != n {
			t.Fatalf("%q as budget gives %+v, %v", s, b, err)
		}
	})
}

func TestFormatSeconds(t *testing.T) {
	for v, want := range map[float64]string{0: "0 s", 1: "1 s", 0.0123: "12.3 ms", 0.9999: "1 s",
		85e-6: "85 µs", 7e-9: "7 ns", 119: "119 s", 150: "2.5 min", 7200: "2 h", math.NaN(): "-"} {
		require.Equal(t, want, FormatSeconds(v))
	}
}

func TestParseCount(t *testing.T) {
	for s, want := range map[string]int64{"1": 1, "-1": -1, "20000": 20000, "1M": 1e6, "1.5k": 1500,
		"2G": 2e9, "3t": 3e12, "1e3": 1000, "9223372036854775807": math.MaxInt64} {
		got, err := ParseCount(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got, s)
	}
	for _, s := range []string{"", "k", "1.5", "1Mi", "x", "1kk", "1 k", "NaN", "InfM", "0x10k", "1_0k",
		"9e18k", "1.0001k"} {
		_, err := ParseCount(s)
		require.Error(t, err, s)
	}
	list, err := ParseInts("1k, 2", 1)
	require.NoError(t, err)
	require.Equal(t, []int{1000, 2}, list)
}

func TestShare(t *testing.T) {
	for in, want := range map[string]float64{"5%": 0.05, "0.05": 0.05, "1.09%": 0.0109, "0": 0,
		"0%": 0, "1": 1, "100%": 1, " 12.5 % ": 0.125, "1e-3": 0.001} {
		v, err := ParseShare(in)
		require.NoError(t, err, in)
		require.InDelta(t, want, v, 1e-15, in)
	}
	for _, in := range []string{"", "%", "5", "1.01", "100.1%", "-1%", "-0.1", "nan", "nan%", "inf",
		"5%%", "5 percent", "0,5", "0.5.1"} {
		_, err := ParseShare(in)
		require.Error(t, err, in)
	}
}

// Two budgets together are a share and bytes.
func TestBudgetsTogether(t *testing.T) {
	b := Budget{Percent: 10}.Plus(Budget{Percent: 5})
	require.Equal(t, int64(150), b.Of(1000))
	b = b.Plus(Budget{Bytes: 64 << 10})
	require.Equal(t, int64(150+64*1024), b.Of(1000))
	require.Equal(t, "15% and 64 KiB", b.String())
}
