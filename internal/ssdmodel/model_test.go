package ssdmodel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

func load(t *testing.T, name string) *Model {
	t.Helper()
	m, err := Load(name)
	require.NoError(t, err)
	return m
}

// The models reproduce the figures that they were made from.
func TestBuiltins(t *testing.T) {
	require.Equal(t, []string{"980pro", "optane", "p5510", "pm1753", "slow"}, Names())
	for _, c := range []struct {
		name     string
		readUS   float64 // mean
		writeUS  float64
		iops4k   float64
		iops512  float64
		bytes128 float64 // bytes a second at 128 KiB
	}{
		{"p5510", 82, 15, 700e3, 700e3, 6.5e9},
		{"optane", 11, 11, 1.5e6, 4.9e6, 7.2e9},
		{"980pro", 45.4, 17, 700e3, 700e3, 7e9},
		{"pm1753", 41.3, 14, 3.2e6, 3.86e6, 14.8e9},
		{"slow", 200, 101, 50e3, 50e3, 400e6},
	} {
		m := load(t, c.name)
		require.Equal(t, c.name, m.Name)
		require.NotEmpty(t, m.Title)
		require.NotEmpty(t, m.Summary())
		require.InEpsilon(t, c.readUS, m.MeanLatency(Read).Seconds()*1e6, 0.03, c.name)
		require.InEpsilon(t, c.writeUS, m.MeanLatency(Write).Seconds()*1e6, 0.2, c.name)
		require.InEpsilon(t, c.iops4k, m.Peak(Read, 4096), 1e-3, c.name)
		require.InEpsilon(t, c.iops512, m.Peak(Read, 512), 1e-3, c.name)
		require.InEpsilon(t, c.bytes128, m.Peak(Read, 131072)*131072, 0.01, c.name)
		require.NotEmpty(t, m.LBAs.Source, c.name)
		require.NotEmpty(t, m.Capacity.Source, c.name)
	}
	require.True(t, load(t, "980pro").Fits(1<<39))
	require.False(t, load(t, "980pro").Fits(1<<40))
	require.True(t, load(t, "slow").Fits(1<<40))
	require.False(t, load(t, "980pro").LBAOK(4096))
	require.True(t, load(t, "p5510").LBAOK(4096))
}

func TestLoadFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.yaml")
	const one = "{latency: {quantiles: [{q: 1, us: 20}], source: mine}}"
	text := "name: mine\ntitle: t\nread: " + one + "\nwrite: " + one + "\nflush: " + one + "\n"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	m := load(t, path)
	require.Equal(t, 20*time.Microsecond, m.MeanLatency(Read))
	require.True(t, m.LBAOK(512) && m.LBAOK(4096))

	_, err := Load("nosuch")
	require.ErrorContains(t, err, "980pro, optane, p5510, pm1753, slow")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

func TestBadModels(t *testing.T) {
	const fine = "{latency: {quantiles: [{q: 1, us: 20}], source: mine}}"
	for name, c := range map[string]struct{ read, says string }{
		"none":   {"{}", "no quantiles"},
		"source": {"{latency: {quantiles: [{q: 1, us: 20}]}}", "no source"},
		"descending": {"{latency: {source: x, quantiles: [{q: 0, us: 20}, {q: 1, us: 10}]}}",
			"ascend"},
		"open": {"{latency: {source: x, quantiles: [{q: 0, us: 1}, {q: 0.9, us: 10}]}}",
			"from 0 to 1"},
		"share":    {"{latency: {source: x, quantiles: [{q: 1.5, us: 1}]}}", "between 0 and 1"},
		"nan":      {"{latency: {source: x, quantiles: [{q: 1, us: .nan}]}}", "µs"},
		"negative": {"{latency: {source: x, quantiles: [{q: 1, us: -1}]}}", "µs"},
		"unknown":  {"{latency: {source: x, quantile: []}}", "quantile"},
		"iops": {strings.Replace(fine, "}}",
			"}, iops: {source: x, caps: [{bytes: 512, iops: 0}]}}", 1), "iops"},
		"sizes": {strings.Replace(fine, "}}",
			"}, iops: {source: x, caps: [{bytes: 512, iops: 5}, {bytes: 512, iops: 5}]}}", 1),
			"ascend"},
		"iops source": {strings.Replace(fine, "}}", "}, iops: {caps: [{bytes: 512, iops: 5}]}}", 1),
			"source"},
		"bandwidth": {strings.Replace(fine, "}}", "}, bandwidth: {source: x, mb_s: -1}}", 1),
			"bandwidth"},
		"curve": {strings.Replace(fine, "}}",
			"}, curve: {source: x, points: [{depth: 0, iops: 5}]}}", 1), "depth"},
		"falling": {strings.Replace(fine, "}}",
			"}, curve: {source: x, points: [{depth: 1, iops: 5}, {depth: 2, iops: 4}]}}", 1),
			"ascend"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte("name: x\nread: " + c.read + "\nwrite: " + fine + "\nflush: " +
				fine + "\n"))
			require.ErrorContains(t, err, c.says)
		})
	}
	_, err := Parse([]byte("read: " + fine + "\nwrite: " + fine + "\nflush: " + fine + "\n"))
	require.ErrorContains(t, err, "no name")
	for text, says := range map[string]string{"": "is empty", "# no more\n": "is empty",
		"\nroot:x:0:0\n": `line 2 is not "key: value"`, "- a\n": `line 1 is not`} {
		_, err := Parse([]byte(text))
		require.ErrorContains(t, err, says)
	}
}
