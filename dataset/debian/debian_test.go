package debian

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pierrec/lz4/v4"
	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

const sample = `Package: libfoo-perl
Source: foo (1.2)
Version: 1:2.0-3
Depends: perl (>= 5.6), libc6:any | libc6.1 [amd64] <!nocheck>,
 libbar1 (= 2)
Suggests: foo-doc
Description: Foo bindings, fast foo for Perl 5
 A long text about widgets.
 .
 More of it.
Section: contrib/perl
Tag: a::b, c::d,
 e::f

# a comment
Package: foo-doc
Version: 2.0-3
Enhances: libfoo-perl
Description-en: documentation
Section: doc
`

func parse(t testing.TB, text string) []Package {
	t.Helper()
	var ps []Package
	require.NoError(t, Parse(strings.NewReader(text),
		func(p Package) error { ps = append(ps, p); return nil }))
	return ps
}

func TestParse(t *testing.T) {
	for _, text := range []string{sample, sample + "\n\n\n", "\n\n" + sample,
		strings.ReplaceAll(sample, "\n", "\r\n"), strings.TrimRight(sample, "\n")} {
		ps := parse(t, text)
		require.Len(t, ps, 2)
		p := ps[0]
		require.Equal(t, "libfoo-perl", p.Name)
		require.Equal(t, "1:2.0-3", p.Version)
		require.Equal(t, "foo (1.2)", p.Source)
		require.Equal(t, "perl", p.Section)
		require.Equal(t, []string{"perl", "libc6", "libc6.1", "libbar1"}, Targets(p.Relations[0]))
		require.Equal(t, []string{"foo-doc"}, Targets(p.Relations[3]))
		require.Empty(t, p.Relations[1])
		require.Equal(t, Package{Name: "foo-doc", Version: "2.0-3", Section: "doc",
			Description: "documentation",
			Relations:   [5]string{"", "", "", "", "libfoo-perl"}}, ps[1])
	}
	require.Empty(t, parse(t, ""))
	long := "Package: a\nDepends: " + strings.Repeat("libsomething (>= 1.0), ", 50_000) + "z\n"
	require.Len(t, Targets(parse(t, long)[0].Relations[0]), 50_001)
}

func TestParseBad(t *testing.T) {
	for text, want := range map[string]string{
		"hello\n":                                "line 1: \"hello\" is no",
		"Package: a\nnonsense\n":                 "line 2",
		" continued\n":                           "line 1: a continuation",
		"Version: 1\n\nPackage: a\n":             "line 2: a stanza without Package",
		"Version: 1":                             "without Package",
		"\x7fELF\x02: x y":                       "without Package",
		"a b: c\n":                               "line 1",
		strings.Repeat("x", maxStanzaLine+1<<20): "longer than",
	} {
		err := Parse(strings.NewReader(text), func(Package) error { return nil })
		require.ErrorContains(t, err, want)
	}
	stop := errors.New("stop")
	require.ErrorIs(t, Parse(strings.NewReader(sample), func(Package) error { return stop }), stop)
	require.ErrorIs(t, Parse(io.MultiReader(strings.NewReader(sample), errReader{stop}),
		func(Package) error { return nil }), stop)
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

func TestOpenAndFindLists(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, wrap func(io.Writer) (io.WriteCloser, error)) {
		var b bytes.Buffer
		w, err := wrap(&b)
		require.NoError(t, err)
		_, err = io.WriteString(w, sample)
		require.NoError(t, err)
		require.NoError(t, w.Close())
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), b.Bytes(), 0o644))
	}
	write("a_Packages.gz", func(w io.Writer) (io.WriteCloser,
		error) {
		return gzip.NewWriter(w), nil
	})
	write("b_Packages.lz4", func(w io.Writer) (io.WriteCloser,
		error) {
		return lz4.NewWriter(w), nil
	})
	// The content decides how it is unpacked, not the name.
	write("c_Packages.xz", func(w io.Writer) (io.WriteCloser, error) {
		return gzip.NewWriter(w), nil
	})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "d_Packages"), []byte(sample), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "Packages"), []byte(sample), 0o644))
	for _, no := range []string{"e_Packages.diff", "f_Release", "g_Packages.zst", "lock"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, no), nil, 0o644))
	}
	files, err := FindLists(dir)
	require.NoError(t, err)
	require.Len(t, files, 5)
	for _, f := range files {
		r, err := Open(f)
		require.NoError(t, err)
		b, err := io.ReadAll(r)
		require.NoError(t, err)
		require.NoError(t, r.Close())
		require.Equal(t, sample, string(b), f)
	}
	for name, content := range map[string]string{"x.gz": "\x1f\x8b\b\x00", "x.xz": "\xfd7zXZ\x00no"} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		_, err := Open(path)
		require.ErrorContains(t, err, path)
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	_, err = Open(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = FindLists(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// The order of Debian Policy 5.6.12 and of dpkg's own tests.
func TestCompareVersions(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"1.0", "1.0", 0}, {"1.0-1", "1.0-1", 0}, {"0:1.0", "1.0", 0}, {"1.0-0", "1.0", 0},
		{"01", "1", 0}, {"1.0a", "1.0a0", 0},
		{"1.0", "1.1", -1}, {"1.9", "1.10", -1}, {"1:1.0", "2.0", 1}, {"1.0-1", "1.0-2", -1},
		{"1.0-10", "1.0-9", 1},
		{"1.0~rc1", "1.0", -1}, {"1.0~~", "1.0~", -1}, {"1.0~~a", "1.0~", -1}, {"1.0", "1.0a", -1},
		{"1.0a", "1.0+", -1}, {"1.0+", "1.0-1", 1},
		{"2.36-9+deb12u13", "2.36-9+deb12u4", 1}, {"1.2.3-4", "1.2-3-4", 1}, {"a", "b", -1},
		{"1.a", "1.", 1},
		{"99999999999999999999999", "100000000000000000000000", -1}, {"", "0", 0}, {"", "1", -1},
		{"a1b", "a1", 1}, {"1a", "a", -1},
	} {
		sign := func(n int) int { return min(max(n, -1), 1) }
		require.Equal(t, c.want, sign(CompareVersions(c.a, c.b)), "%q and %q", c.a, c.b)
		require.Equal(t, -c.want, sign(CompareVersions(c.b, c.a)), "%q and %q", c.b, c.a)
	}
}

func TestWordsLeaveTheNameOut(t *testing.T) {
	p := parse(t, sample)[0]
	require.Equal(t, []string{"bindings", "fast", "for"}, p.DescriptionWords(false),
		"neither foo nor perl, which are in the name, nor 5")
	require.Contains(t, p.DescriptionWords(true), "widgets")
	p = Package{Name: "xml2", Source: "libxml", Description: "XML2 tool from libxml: Naïve C++ x"}
	require.Equal(t, []string{"tool", "from", "naïve"}, p.DescriptionWords(true))
}

func TestVocabulary(t *testing.T) {
	docs := [][]string{{"a1", "b1", "a1"}, {"b1", "c1"}, {"c1", "b1"}, {"once"}}
	v := NewVocabulary(docs, 2)
	require.Equal(t, []string{"b1", "c1"}, v.Words)
	v = NewVocabulary(docs, 9)
	require.Equal(t, []string{"b1", "c1"}, v.Words, "a1 is in one document only")
	row := []float32{9, 9, 9}
	v.Row([]string{"c1", "unknown", "c1", "b1"}, row)
	require.Greater(t, row[1], 2*row[0]*0.99, "twice the word, and a rarer one")
	require.Zero(t, row[2])
	require.InDelta(t, 1, row[0]*row[0]+row[1]*row[1], 1e-6)
	v.Row([]string{"unknown"}, row)
	require.Equal(t, []float32{0, 0, 0}, row)
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(sample))
	f.Add([]byte("Package: a\n\tb\n\n\n"))
	f.Add([]byte("Package:\r\n :"))
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = Parse(bytes.NewReader(b), func(p Package) error {
			if p.Name == "" {
				t.Fatal("a package without a name")
			}
			for _, r := range p.Relations {
				for _, n := range Targets(r) {
					if n == "" || strings.ContainsAny(n, " ,|(") {
						t.Fatalf("target %q of %q", n, r)
					}
				}
			}
			_ = p.DescriptionWords(true)
			return nil
		})
	})
}

func FuzzCompareVersions(f *testing.F) {
	f.Add("1:2.0~rc1-3", "2.0-3")
	f.Fuzz(func(t *testing.T, a, b string) {
		x, y := CompareVersions(a, b), CompareVersions(b, a)
		if (x > 0) != (y < 0) || CompareVersions(a, a) != 0 {
			t.Fatalf("%q and %q: %d, %d", a, b, x, y)
		}
	})
}
