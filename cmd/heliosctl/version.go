package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda/driver"
)

// version is set by the Makefile to what git describes.
var version = ""

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:   "version",
		Usage:  "print the version of heliosctl and what this build can do",
		Action: action(0, runVersion),
	}
}

func runVersion(_ context.Context, e *env) error {
	v, revision := version, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if v == "" {
			v = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	if v == "" {
		v = "(devel)"
	}
	devices, buses := []string{"host"}, []string{"vfio", "proxy"}
	if driver.Binding != "" {
		devices = append(devices, "cuda")
	}
	e.ui.Printf("heliosctl %s (%s, %s/%s); devices: %s; SSDs: NVMe by VFIO, proxied files, block devices, shared memory", v, runtime.Version(), runtime.GOOS, runtime.GOARCH, strings.Join(devices, ", "))
	return e.ui.Object(map[string]any{
		"version": v, "revision": revision, "go": runtime.Version(), "os": runtime.GOOS, "arch": runtime.GOARCH,
		"devices": devices, "cuda_binding": driver.Binding, "buses": buses,
	})
}
