package region

import (
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	var tab Table
	add := func(lo, hi uint64, purpose string, fresh bool) *Region {
		t.Helper()
		r, f, err := tab.Add(lo, hi, purpose)
		if err != nil || f != fresh {
			t.Fatalf("add [%d, %d): fresh %v, %v", lo, hi, f, err)
		}
		return r
	}
	b := add(200, 300, "b", true)
	add(100, 200, "a", true)
	again := add(250, 300, "part of b", false)
	if again != b {
		t.Fatal("a part of a region is another region")
	}
	for _, c := range [][2]uint64{{150, 250}, {50, 101}, {299, 301}, {100, 300}} {
		if _, _, err := tab.Add(c[0], c[1], "x"); err == nil || !strings.Contains(err.Error(),
			"overlaps") {
			t.Errorf("[%d, %d) was taken: %v", c[0], c[1], err)
		}
	}
	for p, want := range map[uint64]string{99: "", 100: "a", 199: "a", 200: "b", 299: "b",
		300: ""} {
		got := ""
		if r := tab.Find(p); r != nil {
			got = r.Purpose
		}
		if got != want {
			t.Errorf("address %d is in %q, want %q", p, got, want)
		}
	}
	for _, c := range []struct {
		p    uint64
		n    int64
		want string
	}{{250, 50, ""}, {250, 51, "out of bounds by 1 bytes"}, {150, 60, "offset 50 of a"}, {7, 0, ""},
		{7, 1, "no live buffer"}, {100, -1, "negative"}} {
		err := tab.Check("copy", "source", c.p, c.n)
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%d bytes at %d: %v, want %q", c.n, c.p, err, c.want)
		}
	}
	if tab.Drop(b, false) || tab.Find(250) == nil {
		t.Error("a region went with its first reference of two")
	}
	if !tab.Drop(b, false) || tab.Find(250) != nil {
		t.Error("a region stayed after its last reference")
	}
	c := add(200, 300, "c", true)
	add(200, 210, "part of c", false)
	if !tab.Drop(c, true) || tab.Find(205) != nil {
		t.Error("a region stayed after its owner went")
	}
}
