// Command fakelib builds the fake libcuda (internal/testing/fakecuda) into a folder under the names
// that linkers and programs look for, libcuda.so and libcuda.so.1:
//
//	bin/lab/fakelib -o DIR
//	LD_LIBRARY_PATH=DIR bin/heliosctl …
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"helios/internal/testing/fakecuda"
)

func main() {
	dir := flag.String("o", "", "folder for the library")
	flag.Parse()
	if *dir == "" || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "fakelib:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	objects := filepath.Join(dir, "build")
	if err := os.MkdirAll(objects, 0o777); err != nil {
		return err
	}
	path, err := fakecuda.BuildIn(objects)
	if err != nil {
		return err
	}
	to, err := filepath.Rel(dir, path)
	if err != nil {
		return err
	}
	for _, name := range []string{"libcuda.so", "libcuda.so.1"} {
		link := filepath.Join(dir, name)
		if err := os.Remove(link); err != nil && !os.IsNotExist(err) {
			return err
		}
		if err := os.Symlink(to, link); err != nil {
			return err
		}
	}
	fmt.Println(filepath.Join(dir, "libcuda.so.1"))
	return nil
}
