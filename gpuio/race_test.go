//go:build race

package gpuio

const raceEnabled = true
