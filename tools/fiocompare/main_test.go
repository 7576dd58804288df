package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// script writes an executable stand-in for a program.
func script(t *testing.T, name, body string) string {
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
	return path
}

func TestReport(t *testing.T) {
	t.Chdir(t.TempDir())
	o := options{
		fio: script(t, "fio", `echo 'note: something'
echo '{"jobs":[{"error":0,"usr_cpu":10,"sys_cpu":30,"read":{"iops":1000,"total_ios":2000,"runtime":2000,"clat_ns":{"percentile":{"50.000000":90000,"99.000000":200000}}}}]}'`),
		heliosctl: script(t, "heliosctl",
			`[ "$1" = bench ] && echo '{"iops":950,"cpu_us_per_io":500,"p50_us":95,"p99_us":210,"audited":true}'; exit 0`),
		size: 1 << 20, runs: 3, seconds: 0.1, depths: []int{32}, bytes: 4096, check: true,
	}
	var out bytes.Buffer
	require.NoError(t, run(context.Background(), o, &out))
	require.Contains(t, out.String(),
		"0.950 (0.950-0.950) of fio's IOPS, 1.25 (1.25-1.25) of fio's CPU per read")
	left, err := os.ReadDir(".")
	require.NoError(t, err)
	require.Empty(t, left, "nothing is left behind")

	o.heliosctl = script(t, "heliosctl",
		`[ "$1" = bench ] && echo '{"iops":800,"cpu_us_per_io":500,"audited":true}'; exit 0`)
	require.ErrorContains(t, run(context.Background(), o, &out), "0.800 of fio's IOPS")
	o.heliosctl = script(t, "heliosctl",
		`[ "$1" = bench ] && echo '{"iops":800,"audited":false}'; exit 0`)
	require.ErrorContains(t, run(context.Background(), o, &out), "failed its audit")
	o.heliosctl = script(t, "heliosctl", `echo "no such file" >&2; exit 5`)
	require.ErrorContains(t, run(context.Background(), o, &out), "no such file")
	o.fio = filepath.Join(t.TempDir(), "none")
	require.Error(t, run(context.Background(), o, &out))
}
