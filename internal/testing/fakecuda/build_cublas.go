package fakecuda

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"helios/internal/cachedir"
)

// BuildBLAS is Build for a libcublas that works with the fake libcuda; cublas/cublas.cc has its
// commands. It finds the libcuda that the process has loaded; where there are several, one must be
// named by the command libcuda=PATH.
func BuildBLAS(t testing.TB) string {
	t.Helper()
	return buildBeside(t, BuildBLASIn)
}

// BuildNCCL is BuildBLAS for a libnccl; nccl/nccl.cc has its commands.
func BuildNCCL(t testing.TB) string {
	t.Helper()
	return buildBeside(t, func(dir string, opts ...Option) (string, error) {
		return buildLibrary(dir, "nccl/nccl.cc", "libnccl", "libnccl.so.2", opts)
	})
}

// buildBeside builds a library in the cache of a test's machine.
func buildBeside(t testing.TB, in func(dir string, opts ...Option) (string, error)) string {
	t.Helper()
	dir, err := cachedir.Private("helios-fakecuda")
	if err != nil {
		t.Fatal(err)
	}
	path, err := in(dir)
	if errors.Is(err, ErrNoCompiler) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// BuildBLASIn is BuildBLAS in a directory of the caller's.
func BuildBLASIn(dir string, opts ...Option) (string, error) {
	return buildLibrary(dir, "cublas/cublas.cc", "libcublas", "libcublas.so.12", opts)
}

// buildLibrary makes a library of a source that works with the fake libcuda.
func buildLibrary(dir, source, name, soname string, opts []Option) (string, error) {
	return lockedBuild(dir, opts, func(b *builder, _ options) (string, error) {
		object, err := b.object("internal/testing/fakecuda/" + source)
		if err != nil {
			return "", err
		}
		sum := sha256.Sum256([]byte(object))
		out := filepath.Join(dir, name+"-"+hex.EncodeToString(sum[:12])+".so")
		if fresh(out) {
			return out, nil
		}
		if err := b.run([]string{"-shared", "-pthread", "-Wl,-soname," + soname,
			"-Wl,-Bsymbolic", "-Wl,-z,defs", "-o", out + ".new", object, "-ldl"}); err != nil {
			return "", fmt.Errorf("link the fake %s: %w", name, err)
		}
		return out, os.Rename(out+".new", out)
	})
}
