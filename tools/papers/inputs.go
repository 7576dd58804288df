package main

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// randomRows is a file with all rows in an order of chance, for a buffer that knows nothing of the
// graph.
func (l *lab) randomRows() (path string, err error) {
	path = filepath.Join(l.dir, fmt.Sprintf("random-%d.txt", l.ds.Meta.Nodes))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	f, err := os.Create(path + ".part")
	if err != nil {
		return "", err
	}
	w := bufio.NewWriter(f)
	r := rand.New(rand.NewPCG(1, 2))
	n := int32(l.ds.Meta.Nodes)
	order := make([]int32, n)
	for i := range order {
		j := r.IntN(i + 1)
		order[i], order[j] = order[j], int32(i)
	}
	for _, v := range order[:n/4] { // more than any buffer here holds
		if _, err := fmt.Fprintln(w, v); err != nil {
			return "", errors.Join(err, f.Close())
		}
	}
	if err := errors.Join(w.Flush(), f.Close()); err != nil {
		return "", err
	}
	return path, os.Rename(path+".part", path)
}
