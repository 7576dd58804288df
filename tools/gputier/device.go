package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"time"
)

// deviceRow has the fields of a row of "bench clock", "queues", "pcie" or "start" that selftest looks at.
type deviceRow struct {
	Kind        string `json:"kind"`
	Values      int    `json:"values"`
	LeastNS     int64  `json:"least_ns"`
	Streams     int    `json:"streams"`
	AtOnce      int    `json:"at_once"`
	Connections string `json:"connections"`
	Kernels     int    `json:"kernels"`
	ForcedPTX   bool   `json:"forced_ptx"`
	Prices      []any  `json:"prices"`
}

// deviceJobs are the steps of these measurements, and of a refill.
func (r *runner) deviceJobs() []job {
	verb := func(name, verb string, env ...string) job {
		return job{name: name, limit: 60 * time.Second, env: env,
			args: []string{r.bin("bench"), verb}, then: r.measured}
	}
	rounds := "200x"
	if r.small {
		rounds = "2x"
	}
	noCache := "CUDA_CACHE_DISABLE=1"
	return []job{
		verb("clock", "clock"),
		verb("hardware queues", "queues"),
		verb("pcie", "pcie"),
		verb("start as shipped", "start", noCache),
		verb("start from PTX", "start", noCache, "CUDA_FORCE_PTX_JIT=1"),
		{name: "refill", limit: 60 * time.Second, then: refilled, args: []string{r.bin("gpuio.test"),
			"-test.run", "^$", "-test.bench", "^BenchmarkGPURefill$", "-test.benchtime", rounds}},
	}
}

// measured keeps the row of a measurement, and returns what it said of it in words.
func (r *runner) measured(out, both []byte) (string, error) {
	if !json.Valid(out) {
		return "", errors.New("no row")
	}
	r.res.Device = append(r.res.Device, bytes.TrimSpace(out))
	words := ""
	for line := range strings.Lines(string(both)) {
		if line[0] != '{' {
			words = line
		}
	}
	return words, nil
}

// refilled finds the metrics of the benchmark.
func refilled(out, _ []byte) (string, error) {
	for _, l := range strings.Split(string(out), "\n") {
		f := strings.Fields(l)
		var found []string
		for i := 3; i < len(f); i++ {
			if f[i] == "ns/refill" || f[i] == "ns/submit" {
				found = append(found, f[i-1]+" "+f[i])
			}
		}
		if len(found) == 2 {
			return strings.Join(found, ", "), nil
		}
	}
	return "", errors.New("no figure of a refill")
}
