package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// verbs that take a device, on the dataset g.
var verbs = [][]string{
	{"train", "g", "--epochs", "1"},
	{"eval", "g", "--checkpoint", "none"},
	{"predict", "g", "--checkpoint", "none"},
	{"compare", "g", "--epochs", "1"},
	{"bench", "io"},
}

const deviceFiles = "/dev/nvidia*"

const noDevice = "cuInit: CUDA_ERROR_NO_DEVICE (100)"

// nodevice runs heliosctl with each driver's own libcuda on this machine, which has no GPU: doctor
// says so, and each verb with --device cuda ends with exit code 3 and the driver's words.
func (r *run) nodevice(ctx context.Context) error {
	const module = "/proc/driver/nvidia/version"
	if _, err := os.Stat(module); err == nil {
		r.skip("no device", 1, "this machine has NVIDIA's kernel module (%s)", module)
		return nil
	}
	// NVIDIA's library makes device files where it may. Those that come now go again.
	before, err := filepath.Glob(deviceFiles)
	if err != nil {
		return err
	}
	defer func() {
		after, _ := filepath.Glob(deviceFiles)
		for _, f := range after {
			if !slices.Contains(before, f) {
				_ = os.Remove(f)
			}
		}
	}()
	dir, err := os.MkdirTemp("", "nvidiatest-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if _, err := command(ctx, dir, nil, r.heliosctl, "generate", "--nodes", "1000",
		"--out", "g"); err != nil {
		return err
	}
	t := r.table("no device", "driver", "doctor", "verbs that end with code 3 and say so")
	for _, l := range r.drivers {
		env := append(os.Environ(), "LD_LIBRARY_PATH="+l.dir, "HELIOS_LIBCUDA=")
		helios := func(args ...string) (string, string, int, error) {
			var out, errs strings.Builder
			c := exec.CommandContext(ctx, r.heliosctl, args...)
			c.Dir, c.Env, c.Stdout, c.Stderr = dir, env, &out, &errs
			err := c.Run()
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return "", "", 0, err
			}
			return out.String(), errs.String(), c.ProcessState.ExitCode(), nil
		}
		out, _, code, err := helios("doctor", "--json")
		if err != nil {
			return err
		}
		said := "nothing about the driver"
		for line := range strings.Lines(out) {
			var f struct{ Part, Answer, Detail string }
			if json.Unmarshal([]byte(line), &f) == nil && f.Part == "cuda" {
				said = f.Answer + ": " + f.Detail
			}
		}
		r.check("no device", code == 0 && strings.HasPrefix(said, "not there: no CUDA device") &&
			strings.Contains(said, noDevice), "driver %s: doctor ends with code %d and says %q",
			l.version, code, said)
		ended := 0
		for _, v := range verbs {
			_, text, code, err := helios(append(append([]string{}, v...), "--device", "cuda")...)
			if err != nil {
				return err
			}
			ok := code == 3 && strings.Contains(text, "no CUDA device") &&
				strings.Contains(text, noDevice)
			if ok {
				ended++
			}
			r.check("no device", ok, "driver %s: %s --device cuda ends with code %d and says %q",
				l.version, strings.Join(v, " "), code, strings.TrimSpace(text))
		}
		t.row(l.version, "not there, CUDA_ERROR_NO_DEVICE (100)", of(ended, len(verbs)))
	}
	return nil
}

// findHeliosctl is the built binary.
func findHeliosctl(root, asked string) (string, error) {
	if asked == "" {
		asked = filepath.Join(root, "bin", "heliosctl")
	}
	if _, err := os.Stat(asked); err != nil {
		return "", fmt.Errorf("%w; run \"make build\" first, or name another with -heliosctl", err)
	}
	return filepath.Abs(asked)
}
