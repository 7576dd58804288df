//go:build !race

package gpuio

const raceEnabled = false
