package fakecuda

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"helios/internal/privatedir"
)

// BuildBLAS is Build for a libcublas that works with the fake libcuda; cublas/cublas.cc has its
// commands. It finds the libcuda that the process has loaded; where there are several, one must be
// named by the command libcuda=PATH.
func BuildBLAS(t testing.TB) string {
	t.Helper()
	dir, err := privatedir.Cache("helios-fakecuda")
	if err != nil {
		t.Fatal(err)
	}
	path, err := BuildBLASIn(dir)
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
	root, err := findRoot(collect(opts).root)
	if err != nil {
		return "", err
	}
	b, err := newBuilder(root, dir)
	if err != nil {
		return "", err
	}
	unlock, err := lock(filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	object, err := b.object("cuda/fakecuda/cublas/cublas.cc")
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(object))
	out := filepath.Join(dir, "libcublas-"+hex.EncodeToString(sum[:12])+".so")
	if fresh(out) {
		return out, nil
	}
	if err := b.run([]string{"-shared", "-pthread", "-Wl,-soname,libcublas.so.12", "-Wl,-Bsymbolic",
		"-Wl,-z,defs", "-o", out + ".new", object, "-ldl"}); err != nil {
		return "", fmt.Errorf("link the fake libcublas: %w", err)
	}
	return out, os.Rename(out+".new", out)
}
