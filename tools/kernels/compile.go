package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// The lowest architecture and PTX version that every kernel gets: scoped loads, stores, fences and
// atomics of the PTX memory model come with sm_70, st.mmio with PTX 8.2, which drivers from CUDA
// 12.2 on (535) compile. A module that needs more says so in a line of its source, "// arch:
// sm_80".
const (
	lowestArch = "sm_70"
	isa        = "ptx82"
	clangMajor = "19" // another major version gives other bytes
)

// limit of one run of a compiler.
const toolLimit = 2 * time.Minute

// errNoClang says that no compiler of the right version is there.
var errNoClang = errors.New("clang " + clangMajor + " is not there (apt-get install clang-" +
	clangMajor + ", or --clang)")

var clangVersion = regexp.MustCompile(`clang version (\d+)\.`)

// findClang returns the first compiler of the right major version.
func findClang(asked string) (string, error) {
	candidates := []string{"clang-" + clangMajor, "clang"}
	if asked != "" {
		candidates = []string{asked}
	}
	seen := ""
	for _, c := range candidates {
		p, err := exec.LookPath(c)
		if err != nil {
			continue
		}
		out, err := execute("", p, "--version")
		if err != nil {
			return "", err
		}
		v := clangVersion.FindSubmatch(out)
		if v != nil && string(v[1]) == clangMajor {
			return p, nil
		}
		first, _, _ := strings.Cut(string(out), "\n")
		seen += fmt.Sprintf("; %s is %q", p, first)
	}
	return "", fmt.Errorf("%w%s", errNoClang, seen)
}

// execute runs a tool in a folder and returns its standard output; anything on standard error is
// an error, since a warning must not pass.
func execute(dir, name string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), toolLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	err := cmd.Run()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err,
			complaints.Bytes())
	}
	if complaints.Len() > 0 {
		return nil, fmt.Errorf("%s %s says:\n%s", name, strings.Join(args, " "), complaints.Bytes())
	}
	return out.Bytes(), nil
}

var archLine = regexp.MustCompile(`(?m)^// arch: (sm_\d+)$`)

// archOf is the architecture that a source is compiled for.
func archOf(source []byte) string {
	if m := archLine.FindSubmatch(source); m != nil {
		return string(m[1])
	}
	return lowestArch
}

// cudaFlags are common to compiling and to preprocessing. File names are relative, and no name is
// made from a hash of the path, so the output does not depend on where the checkout is.
func cudaFlags(arch string) []string {
	return []string{"-nocudalib", "-nocudainc", "-x", "cuda", "--cuda-device-only", "-std=c++17",
		"-fuse-cuid=none",
		"--cuda-gpu-arch=" + arch, "--cuda-feature=+" + isa, "-I", ".", "-Wall", "-Wextra",
		"-Werror"}
}

// compile turns dir/name.cu into PTX.
func compile(clang, dir, name string) ([]byte, error) {
	source, err := os.ReadFile(filepath.Join(dir, name+".cu"))
	if err != nil {
		return nil, err
	}
	return execute(dir, clang, append(cudaFlags(archOf(source)), "-O3", "-S", name+".cu", "-o",
		"-")...)
}

// preprocess expands a header.
func preprocess(clang, dir, file string) ([]byte, error) {
	return execute(dir, clang, append(cudaFlags(lowestArch), "-E", "-P", "-include", file,
		os.DevNull, "-o", "-")...)
}
