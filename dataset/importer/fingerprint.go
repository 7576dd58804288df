package importer

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"helios/dataset"
	"helios/internal/errs"
	"helios/internal/options"
)

// maxListed bounds the files whose sizes and times tell one input from another.
const maxListed = 1 << 16

// fingerprint is a hash of what an import's result depends on: the options, and names, sizes and
// times of the input files.
func fingerprint(r request) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n", r.kind)
	for _, o := range options.Of(r.options) {
		if slices.Contains([]string{"memory", "restart", "out"}, o.Name) {
			continue
		}
		b, err := json.Marshal(o.Value())
		if err != nil {
			return "", errs.Errorf("%v: %w", errs.Key(o.Name), err)
		}
		fmt.Fprintf(h, "%s %s\n", o.Name, b)
	}
	for _, path := range slices.Concat([]string{r.In, r.Features, r.Labels, r.SplitDir}, r.inputs) {
		if path == "" {
			continue
		}
		if abs, err := filepath.Abs(path); err == nil {
			path = abs
		}
		n := 0
		if err := listed(path, &n, nil, func(p string, st fs.FileInfo) {
			if st.IsDir() {
				fmt.Fprintf(h, "%q\n", p)
			} else {
				// A file that is put in another's place, or written without a change of its time,
				// has another time of change.
				changed := int64(0)
				if sys, ok := st.Sys().(*syscall.Stat_t); ok {
					changed = sys.Ctim.Nano()
				}
				fmt.Fprintf(h, "%q %d %d %d\n", p, st.Size(), st.ModTime().UnixNano(), changed)
			}
		}); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

// listed calls fn with a file, or a folder and what is in it, up to maxListed of them. Links are
// followed, since datasets often are some; above are the folders on the way.
func listed(path string, n *int, above []fs.FileInfo, fn func(path string, st fs.FileInfo)) error {
	st, err := os.Stat(path)
	switch {
	case *n >= maxListed || err != nil && len(above) > 0:
		// A dangling link is no input; what is needed says so when it is opened.
		return nil //nolint:nilerr
	case err != nil:
		return err
	}
	*n++
	fn(path, st)
	if !st.IsDir() ||
		slices.ContainsFunc(above, func(a fs.FileInfo) bool { return os.SameFile(a, st) }) {
		return nil
	}
	entries, err := os.ReadDir(path)
	if err != nil && len(above) > 0 {
		return nil //nolint:nilerr // such as lost+found
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.Contains(e.Name(), dataset.PartialMark) { // --out may be in --in
			continue
		}
		if err := listed(filepath.Join(path, e.Name()), n, append(slices.Clip(above), st),
			fn); err != nil {
			return err
		}
	}
	return nil
}
