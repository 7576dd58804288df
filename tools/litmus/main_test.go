package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const repoRoot = "../.."

func repoTests(t *testing.T) []*test {
	tests, err := readTests(filepath.Join(repoRoot, folder))
	require.NoError(t, err)
	return tests
}

// Each file models the tagged source, and each tag has a file.
func TestLitmusAgreesWithSource(t *testing.T) {
	tests := repoTests(t)
	src, err := readSource(repoRoot, "", nil)
	require.NoError(t, err)
	require.NoError(t, checkAll(tests, src))
	require.GreaterOrEqual(t, len(tests), 33)
	for _, x := range tests {
		require.NotEmpty(t, x.title, x.file)
		require.GreaterOrEqual(t, len(x.variants()), 3, x.file)
		texts := map[string]string{}
		for _, v := range x.variants() {
			require.Empty(t, texts[v.text], "%s: %s is the same program as %s", x.file, v.name,
				texts[v.text])
			texts[v.text] = v.name
		}
	}
}

// The mistakes that the kernels' tests plant, as far as they change an order, are changes here,
// too.
func TestPlantedMistakesAreNoticed(t *testing.T) {
	for plant, place := range map[string]string{
		"HX_PLANT_REFILL_BEFORE_HANDOVER": "pending-list",
		"HX_PLANT_MISSING_BARRIER":        "sqe-doorbell",
		"HX_PLANT_DOORBELL_BEFORE_SQE":    "sqe-doorbell",
		"HX_PLANT_COMPLETION_BEFORE_DATA": "data-to-copy",
		"HX_PLANT_CID_BEFORE_COPY":        "staging-reuse",
		"HX_PLANT_STAGING_EARLY":          "staging-slots",
	} {
		src, err := readSource(repoRoot, plant, nil)
		require.NoError(t, err)
		require.ErrorContains(t, checkAll(repoTests(t), src), folder+"/"+place+".litmus", plant)
	}
}

// A weaker order, a narrower scope, another order of the lines: each is noticed.
func TestChangedSourceIsNoticed(t *testing.T) {
	for _, c := range []struct{ file, old, new, want string }{
		{"cuda/kernels/queue.h", "cas_gpu<dev::acq_rel>(&q->Own, ownFree", "cas_gpu<dev::acquire>(&q->Own, ownFree", "own-fields.litmus"},
		{"cuda/kernels/queue.h", "dev::fence_sys();\n\t\tdev::ring(bell, tail);", "dev::fence_gpu();\n\t\tdev::ring(bell, tail);", "sqe-doorbell.litmus"},
		{"cuda/kernels/queue.h", "st_release_gpu(&c->State, state)", "st_relaxed_gpu(&c->State, state)", "deadline.litmus"},
		{"cuda/kernels/queue.h", "ld_acquire_gpu(&q->PendTail)", "ld_relaxed_gpu(&q->PendTail)", "pending-list.litmus"},
		{"cuda/kernels/queue.h", "or_gpu<dev::release>(&q->Free[w], bits)", "or_sys<dev::release>(&q->Free[w], bits)", "staging-reuse.litmus"},
		{"cuda/kernels/complete.cu", "or_gpu<dev::release>(&q->Retry", "add_gpu<dev::release>(&q->Retry", "retry-state.litmus"},
		{"cuda/kernels/complete.cu", "dev::ld_acquire_sys(word)", "dev::ld_acquire_gpu(word)", "data-to-copy.litmus"},
		{"cuda/kernels/read_sync.cu", "dev::st_release_gpu(&q->Reap, 0u);\n\treturn n", "dev::st_relaxed_gpu(&q->Reap, 0u);\n\treturn n", "sync-leave.litmus"},
		{"cuda/kernels/device.h", "fence_sys();", "fence_gpu();", "fault-record.litmus"},
		{"gpuio/rungbell.go", "atomic.LoadUint32(sqBell)", "atomic.LoadUint32(cqBell)", "bell-room.litmus"},
		{"cuda/driver/faults.go", "return atomic.LoadUint64(&f.Seq)", "return f.Seq", "fault-record.litmus"},
		{"cuda/kernels/queue.h", "// litmus: take\n", "", "own-handover.litmus"},
		{"cuda/kernels/lookup.cu", "litmus: lookup-line", "litmus: lookup-line, nobody", "nobody"},
	} {
		seen := false
		src, err := readSource(repoRoot, "", func(file, text string) string {
			if file != c.file || !strings.Contains(text, c.old) {
				return text
			}
			seen = true
			return strings.Replace(text, c.old, c.new, 1)
		})
		require.NoError(t, err)
		require.True(t, seen, c.old)
		require.ErrorContains(t, checkAll(repoTests(t), src), c.want, c.old)
	}
}

func TestOperations(t *testing.T) {
	text := `
HX_DEVICE inline void inner(Q *q) { dev::st(&q->A, 1); }
template <typename T> HX_DEVICE inline T other(T v) { return v; }
// litmus: outer
HX_DEVICE void outer(Q *q, u64 *c) {
	if (leader()) dev::st_relaxed_sys(c, dev::ld_relaxed_sys(c) + n);
	inner(q); // dev::st(&q->B, 1)
#ifdef HX_PLANT_X
	dev::fence_sys();
#else
	dev::fence_gpu();
#endif
	u32 r = dev::and_gpu<dev::acquire>(&q->Free[w], ~bit) & bit;
	else dev::add_gpu<release>(dev::at<u32>(io::set(sets, of)->Left, g), 1u);
	dev::st16(to + 16, x); // one; litmus: line
	dev::cas_gpu<dev::relaxed>((u64 *)&s->Start, 0, 1);
}
`
	r := &reader{files: map[string][]line{"k.h": plainLines("k.h", text, "")},
		functions: map[string]map[string]function{}}
	src, err := r.source()
	require.NoError(t, err)
	var got []string
	for _, o := range src.places["outer"] {
		got = append(got, fmt.Sprintf("%v %v", o, o.dropped))
	}
	require.Equal(t, []string{
		"ld.relaxed.sys c false", "st.relaxed.sys c false", "st.weak A false",
		"fence.acq_rel.gpu false", "and.acquire.gpu Free false", "add.release.gpu Left true",
		"st.weak to false", "cas.relaxed.gpu Start true",
	}, got)
	require.Len(t, src.places["line"], 1)

	r.files["k.h"] = plainLines("k.h", "code();\n// litmus: last\n", "")
	_, err = r.source()
	require.ErrorContains(t, err, "no code after it")
	r.files["k.h"] = plainLines("k.h", "code(); // litmus: two", "")
	r.files["l.h"] = plainLines("l.h", "code(); // litmus: two", "")
	_, err = r.source()
	require.ErrorContains(t, err, "is in k.h, too")
}

const sample = `PTX sample
(*
What it is about, in
two lines.

where: x = X, free = Free
assumed: done = the end
P0: put(x) give()
P1: put() give(free)
P2: assumed SSD
reach: P2:r0 == 1
control weak: P1:2 release -> relaxed; P0:2 drop
control turned: P1:1 swap 2
*)
{
x=0; free=0; done=0;
P2:r0=0;
}
 P0@cta 0,gpu 0 | P1@cta 0,gpu 0             | P2@cta 1,gpu 1          ;
 st.weak x, 1   | bar.cta.sync 1             | ld.acquire.sys r0, free ;
 bar.cta.sync 1 | red.release.gpu.or free, 1 |                         ;
                | st.relaxed.sys done, 1     |                         ;
exists
(P2:r0 == 2)
`

const sampleSource = `
// litmus: put
HX_DEVICE void put() {
	dev::st(&q->X, 1);
	dev::syncwarp();
}
// litmus: give
HX_DEVICE void give() {
	dev::syncwarp();
	dev::or_gpu<dev::release>(&q->Free[w], 1u);
}
`

func sampleOf(t *testing.T, source string) *source {
	r := &reader{files: map[string][]line{"k.h": plainLines("k.h", source, "")},
		functions: map[string]map[string]function{}}
	src, err := r.source()
	require.NoError(t, err)
	return src
}

func TestSample(t *testing.T) {
	x, err := parseTest("sample.litmus", sample)
	require.NoError(t, err)
	require.Equal(t, "What it is about, in two lines.", x.title)
	require.NoError(t, checkAll([]*test{x}, sampleOf(t, sampleSource)))
	var names []string
	for _, v := range x.variants() {
		names = append(names, v.name)
	}
	require.Equal(t, []string{"safe", "reach", "weak", "turned"}, names)
	weak := x.variants()[2].text
	require.Contains(t, weak, "red.relaxed.gpu.or")
	require.NotContains(t, weak, "| ld.acquire.sys r0, free ;\n bar")
	require.Contains(t, x.variants()[3].text, " st.weak x, 1 | red.release.gpu.or free, 1 |")

	for name, c := range map[string]struct{ old, new, want string }{
		"a barrier less":     {"\tdev::syncwarp();\n", "", "bar.cta.sync 1"},
		"an access more":     {"dev::st(&q->X, 1);", "dev::st(&q->X, 1); dev::st(&q->X, 2);", "the source has st.weak X"},
		"result used":        {"dev::or_gpu", "r = dev::or_gpu", "so it is an atom"},
		"a fence more":       {"dev::st(&q->X, 1);", "dev::st(&q->X, 1); dev::fence_sys();", ""},
		"another variable":   {"q->X", "q->Y", "has 0 accesses to X"},
		"no such place":      {"litmus: put", "litmus: put2", "has the tag"},
		"a place too many":   {"\n// litmus: put", "\n// litmus: put, more", `the place "more"`},
		"barrier after both": {"\tdev::or_gpu", "\tdev::or_gpu<dev::relaxed>(&q->Y, 1);\n\tdev::or_gpu", ""},
	} {
		require.Contains(t, sampleSource, c.old, name)
		source := strings.Replace(sampleSource, c.old, c.new, 1)
		if name == "a barrier less" {
			source = strings.ReplaceAll(sampleSource, c.old, c.new)
		}
		err := checkAll([]*test{x}, sampleOf(t, source))
		if c.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, c.want, name)
		}
	}
}

func TestBadFiles(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{"PTX sample", "PTX other", "the file's name"},
		{"(*\n", "", "no header"},
		{"exists\n", "", "no condition"},
		{"reach: P2:r0 == 1\n", "", "has a reach line"},
		{"P1: put() give(free)\n", "", "P1 names no place"},
		{"P1: put() give(free)", "P7: put()", "no thread P7"},
		{"give(free)", "give(other)", "not under where"},
		{"give(free)", "give(free)#2-1", "accesses"},
		{"P1:2 release -> relaxed", "P1:9 drop", "has no row 9"},
		{"P1:2 release -> relaxed", "P1:2 acquire -> relaxed", `does not have "acquire"`},
		{"P1:2 release -> relaxed", "P1:2 weaken", "want P0:2 old -> new"},
		{"control turned", "contrl turned", "is no line"},
		{"P2@cta 1,gpu 1", "P3@cta 1,gpu 1", "want P2@cta"},
	} {
		require.Contains(t, sample, c.old)
		_, err := parseTest("sample.litmus", strings.Replace(sample, c.old, c.new, 1))
		require.ErrorContains(t, err, c.want, c.new)
	}
	x, err := parseTest("sample.litmus", strings.Replace(sample, "st.weak x", "st.strange x", 1))
	require.NoError(t, err)
	require.ErrorContains(t, x.check(sampleOf(t, sampleSource)), "no instruction that the check knows")
}

// fakeDartagnan is a folder with a jar that wants a library, and a PATH with a java that answers
// for each program what its name says, and with a mvn, or without.
func fakeDartagnan(t *testing.T, java, mvn string) string {
	dir, bin := t.TempDir(), t.TempDir()
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for name, text := range map[string]string{"java": java, "mvn": mvn} {
		if text != "" {
			require.NoError(t, os.WriteFile(filepath.Join(bin, name),
				[]byte("#!/bin/sh\n"+text), 0o700))
		}
	}
	if java == "" || mvn == "" { // the system's would be found
		t.Setenv("PATH", bin)
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "cat"), 0o700))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "dartagnan"), 0o700))
	for _, f := range []string{"cat/ptx-v7.5.cat", "pom.xml", "dartagnan/pom.xml"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, f), []byte("x"), 0o600))
	}
	writeJar(t, filepath.Join(dir, "dartagnan.jar"))
	return dir
}

// answers is a java that decides each program by its name: "safe" cannot be reached.
const answers = `[ "$1" = -version ] && exit 0
for f; do case $f in
*.safe.litmus) printf 'Test: %s\nResult: FAIL\nReason: x\nTime: 1.5 secs\n\n' "$f" ;;
*.litmus) printf 'Test: %s\nResult: PASS\nTime: 0.250 secs\n\n' "$f" ;;
esac; done
`

const fetches = "mkdir -p dartagnan/target/libs && touch dartagnan/target/libs/a.jar dartagnan/target/libs/libz3.so dartagnan/target/libs/libz3java.so; exit 1\n"

func TestMachineWithout(t *testing.T) {
	var lacks *lackError
	_, err := findDartagnan(t.Context(), "", io.Discard)
	require.ErrorAs(t, err, &lacks)
	_, err = findDartagnan(t.Context(), t.TempDir(), io.Discard)
	require.False(t, errors.As(err, &lacks), err)
	require.ErrorContains(t, err, "HELIOS_DARTAGNAN")

	_, err = findDartagnan(t.Context(), fakeDartagnan(t, "", fetches), io.Discard)
	require.ErrorAs(t, err, &lacks)
	require.ErrorContains(t, err, "java")
	_, err = findDartagnan(t.Context(), fakeDartagnan(t, answers, ""), io.Discard)
	require.ErrorAs(t, err, &lacks)
	require.ErrorContains(t, err, "mvn")

	// A program that is there and does not work is an error.
	_, err = findDartagnan(t.Context(), fakeDartagnan(t, "exit 3\n", fetches), io.Discard)
	require.ErrorContains(t, err, "exit status 3")
	require.False(t, errors.As(err, &lacks))
	_, err = findDartagnan(t.Context(), fakeDartagnan(t, answers, "echo no network; exit 1\n"),
		io.Discard)
	require.ErrorContains(t, err, "no network")
	require.False(t, errors.As(err, &lacks))
}

func TestRun(t *testing.T) {
	dir := fakeDartagnan(t, answers, fetches)
	d, err := findDartagnan(t.Context(), dir, io.Discard)
	require.NoError(t, err)
	again, err := findDartagnan(t.Context(), dir, io.Discard)
	require.NoError(t, err)
	require.Equal(t, d, again)

	tests := repoTests(t)
	src, err := readSource(repoRoot, "", nil)
	require.NoError(t, err)
	results, err := d.run(t.Context(), tests, io.Discard)
	require.NoError(t, err)
	var out strings.Builder
	require.NoError(t, report(results, &out))
	variants := 0
	for _, x := range tests {
		variants += len(x.variants())
	}
	require.Len(t, results, len(models)*variants)
	require.Contains(t, out.String(), fmt.Sprintf("%d unreachable and %d reachable as expected, 0 wrong",
		2*len(tests), 2*(variants-len(tests))))
	require.Contains(t, table(tests, src, results), "| unreachable | 1.5 |")

	results[0].reachable = true
	results[3].reachable = false
	err = report(results, io.Discard)
	require.ErrorContains(t, err, "2 results")
	require.ErrorContains(t, err, results[0].test.name+" safe under PTX 6.0 is reachable")

	file := filepath.Join(t.TempDir(), "chapter.md")
	require.NoError(t, os.WriteFile(file, []byte("a\n"+tableBegins+"before\n"+tableEnds+"z\n"), 0o600))
	require.NoError(t, writeTable(file, tests, src, results))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Regexp(t, regexp.MustCompile(`(?s)^a\n.*\| unreachable \| 1.5 \|.*z\n$`), string(text))
	require.NotContains(t, string(text), "\nbefore\n")
	require.NoError(t, os.WriteFile(file, []byte("no place"), 0o600))
	require.ErrorContains(t, writeTable(file, tests, src, results), "no place for the table")
}

func TestAnswersThatAreNone(t *testing.T) {
	for answer, want := range map[string]string{
		"Test: x.litmus\\nResult: UNKNOWN\\nReason: bound\\n":          "UNKNOWN",
		"Test: x.litmus\\nResult: ERROR\\nReason: ParsingException\\n": "ParsingException",
		"Test: x.litmus\\nResult: PASS\\n":                             "no time",
		"Exception in thread main":                                     "Exception in thread main",
	} {
		dir := fakeDartagnan(t, "[ \"$1\" = -version ] && exit 0\nprintf '"+answer+"\\n'\n", fetches)
		d, err := findDartagnan(t.Context(), dir, io.Discard)
		require.NoError(t, err)
		_, err = d.run(t.Context(), repoTests(t)[:1], io.Discard)
		require.ErrorContains(t, err, want)
	}
}

// The chapter's table has these programs, and the expected result of each.
func TestTableIsOfTheseTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(repoRoot, chapter))
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(text), tableBegins)
	body, _, closed := strings.Cut(rest, tableEnds)
	require.True(t, ok && closed)
	tests := repoTests(t)
	const next = `run "make test-litmus TABLE=--table" where Dartagnan is, and commit the chapter`
	require.Contains(t, body, digestLine(tests), next)
	src, err := readSource(repoRoot, "", nil)
	require.NoError(t, err)
	require.Contains(t, body, handOvers(tests, src), next)
	var rows []string
	for l := range strings.SplitSeq(body, "\n") {
		if strings.HasPrefix(l, "| ") && !strings.HasPrefix(l, "| litmus test") {
			rows = append(rows, l)
		}
	}
	for _, x := range tests {
		for _, v := range x.variants() {
			require.NotEmpty(t, rows, next)
			says := map[bool]string{true: "reachable", false: "unreachable"}[v.reachable]
			want := "^" + regexp.QuoteMeta(rowStart(v)) + strings.Repeat(` `+says+` \| [0-9.]+ \|`,
				len(models)) + "$"
			require.Regexp(t, want, rows[0], next)
			rows = rows[1:]
		}
	}
	require.Empty(t, rows, next)
}
