package main

import (
	"cmp"
	"context"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/urfave/cli/v2"

	"helios/cuda/driver"
	hcli "helios/internal/cli"
	"helios/internal/licenses"
)

// version is set by the Makefile to what git describes.
var version = ""

// programVersion is the version for people.
func programVersion() string {
	v := version
	if info, ok := debug.ReadBuildInfo(); ok && v == "" {
		v = info.Main.Version
	}
	return cmp.Or(v, "(devel)")
}

func versionCommand() *cli.Command {
	return verb(&cli.Command{
		Name:  "version",
		Usage: "print the version of heliosctl and what this build can do",
	}, 0, hcli.Of[versionArgs](), runVersion)
}

type versionArgs struct {
	licenses bool `option:"licenses" usage:"print the licences of everything that is linked into heliosctl"`
}

// printLicenses prints the licences and notices of the modules in this binary.
func printLicenses(e *env) error {
	all, err := licenses.All()
	if err != nil {
		return err
	}
	for _, m := range all {
		name := m.Path + " " + m.Version
		if m.Path == licenses.Std {
			m.Version = runtime.Version()
			name = "Go's standard library and runtime, " + m.Version
		}
		for _, f := range m.Files {
			e.ui.Printf("==== %s: %s", name, f.Name)
			e.ui.Printf("")
			for l := range strings.Lines(f.Text) {
				e.ui.Printf("%s", strings.TrimRight(l, "\r\n"))
			}
			e.ui.Printf("")
		}
		if err := e.ui.Event("license", m); err != nil {
			return err
		}
	}
	return nil
}

func runVersion(_ context.Context, e *env, a *versionArgs) error {
	if a.licenses {
		return printLicenses(e)
	}
	v, revision := programVersion(), ""
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	devices, buses := []string{"host"}, []string{"vfio", "proxy"}
	if driver.Binding != "" {
		devices = append(devices, "cuda")
	}
	e.ui.Printf(
		"heliosctl %s (%s, %s/%s); devices: %s; SSDs: NVMe by VFIO, proxied files, block devices, shared memory",
		v, runtime.Version(), runtime.GOOS, runtime.GOARCH, strings.Join(devices, ", "))
	return e.ui.Event("version", versionLine{Schema: resultsSchema, Version: v, Revision: revision,
		Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH, Devices: devices,
		CUDA: driver.Binding, Buses: buses})
}

// versionLine describes this build.
type versionLine struct {
	Schema   int      `json:"schema"` // of the lines of --json
	Version  string   `json:"version"`
	Revision string   `json:"revision"`
	Go       string   `json:"go"`
	OS       string   `json:"os"`
	Arch     string   `json:"arch"`
	Devices  []string `json:"devices"`
	CUDA     string   `json:"cuda_binding"`
	Buses    []string `json:"buses"`
}
