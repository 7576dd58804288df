// Command fakecuda leaves the fake libcuda (cuda/fakecuda) in a folder, as libcuda.so.1 for
// HELIOS_LIBCUDA and as libcuda.so for linkers.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"helios/cuda/fakecuda"
)

func main() {
	dir := flag.String("o", "", "folder to fill; it also keeps objects for the next build")
	missing := flag.String("missing", "", "symbols to leave out, separated by commas")
	flag.Parse()
	if err := run(*dir, *missing); err != nil {
		fmt.Fprintln(os.Stderr, "fakecuda:", err)
		os.Exit(1)
	}
}

func run(dir, missing string) error {
	if dir == "" {
		return fmt.Errorf("name a folder with -o")
	}
	objects, err := filepath.Abs(filepath.Join(dir, "objects"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(objects, 0o755); err != nil {
		return err
	}
	var opts []fakecuda.Option
	if missing != "" {
		opts = append(opts, fakecuda.Missing(strings.Split(missing, ",")...))
	}
	lib, err := fakecuda.BuildIn(objects, opts...)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(lib)
	if err != nil {
		return err
	}
	for _, name := range []string{"libcuda.so.1", "libcuda.so"} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o755); err != nil {
			return err
		}
	}
	fmt.Println(filepath.Join(dir, "libcuda.so.1"))
	return nil
}
