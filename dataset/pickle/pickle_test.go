package pickle

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/dataset/npy"
	"helios/internal/errs"
)

// What Python writes, opcode by opcode.

func bin(n uint32) string { return string(binary.LittleEndian.AppendUint32(nil, n)) }

func num(n int) string { return "J" + bin(uint32(n)) }

// arr is a NumPy array in protocol 2, as Python 2 wrote it.
func arr(kind string, data []byte, shape ...int) string {
	s := "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01("
	for _, n := range shape {
		s += num(n)
	}
	return s + "tcnumpy\ndtype\nU" + string(rune(len(kind)-1)) + kind[1:] +
		"K\x00K\x01\x87R(K\x03U\x01" + kind[:1] +
		"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + bin(uint32(len(data))) +
		string(data) + "tb"
}

func i4(v ...int32) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(x))
	}
	return b
}

func matrix(rows, cols int, indptr, indices []int32, data string) string {
	return "cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shape" + num(rows) + num(cols) +
		"\x86U\x06indptr" + arr("<i4", i4(indptr...), len(indptr)) +
		"U\x07indices" + arr("<i4", i4(indices...), len(indices)) + "U\x04data" + data + "ub"
}

func TestParse(t *testing.T) {
	parse := func(s string) any {
		v, err := Parse("p", []byte("\x80\x02"+s+"."), 0)
		require.NoError(t, err)
		return v
	}
	for s, want := range map[string]any{
		"N": nil, "\x88": true, "K\x07": int64(7), "M\x01\x02": int64(513), num(-3): int64(-3),
		"\x8a\x00": int64(0), "\x8a\x01\xff": int64(-1), "\x8a\x02\xff\x00": int64(255),
		"G\x3f\xf8\x00\x00\x00\x00\x00\x00": 1.5, "X\x03\x00\x00\x00abc": "abc", "\x8c\x01a": "a",
		"U\x02\xff\x00": Bytes{255, 0}, "C\x01a": Bytes("a"),
		"c_codecs\nencode\nX\x04\x00\x00\x00a\xc3\xbfb" + "U\x06latin1\x86R": Bytes{'a', 255, 'b'},
	} {
		require.Equal(t, want, parse(s), "%q", s)
	}
	require.Equal(t, Tuple{int64(1), int64(1)}, parse("K\x01q\x05K\x020h\x05\x86"))
	require.Equal(t, &List{Items: []any{int64(1), int64(2), int64(3)}},
		parse("](K\x01K\x02eK\x03a"))
	d := parse("ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(K\x05](K\x06K\x07eK\x08]u").(*Dict)
	require.Equal(t, []any{int64(5), int64(8)}, d.Keys)
	require.Equal(t, []any{int64(6), int64(7)}, d.Values[0].(*List).Items)
	a := parse(arr("<i4", i4(1, -2, 3, 4), 2, 2)).(*Array)
	require.Equal(t, npy.Int32, a.DType)
	require.Equal(t, []int64{2, 2}, a.Shape)
	ints, err := a.Ints()
	require.NoError(t, err)
	require.Equal(t, []int64{1, -2, 3, 4}, ints)
	for kind, data := range map[string][]byte{"<f4": i4(0x3fc00000), ">f4": {0x3f, 0xc0, 0, 0},
		"<f8": {0, 0, 0, 0, 0, 0, 0xf8, 0x3f}, "<f2": {0, 0x3e}} {
		a := parse(arr(kind, data, 1)).(*Array)
		f, err := a.Floats()
		require.NoError(t, err)
		require.Equal(t, []float64{1.5}, f, kind)
		_, err = a.Ints()
		require.ErrorContains(t, err, "integers are needed")
	}
	m := parse(matrix(2, 3, []int32{0, 1, 3}, []int32{2, 0, 1}, arr("<i4", i4(7, 8, 9), 3))).(*CSR)
	require.Equal(t, &CSR{Rows: 2, Cols: 3, Indptr: []int64{0, 1, 3}, Indices: []int64{2, 0, 1},
		Values: []float64{7, 8, 9}}, m)
}

func TestRefused(t *testing.T) {
	one := arr("<i4", i4(1), 1)
	for want, s := range map[string]string{
		`offset 2: "os system" is not among the classes`:    "cos\nsystem\nU\x02ls\x85R.",
		`offset 2: "__builtin__ eval" is not among`:         "c__builtin__\neval\nU\x011\x85R.",
		"offset 23: a known class is called with arguments": "c__builtin__\nlist\nK\x01\x85R.",
		"offset 0: pickle protocol 5":                       "",
		"offset 2: opcode 0x49":                             "I1\n.",
		"ends without its STOP":                             "K\x01",
		"offset 2: the pickle ends in an opcode":            "T" + bin(9) + "abc.",
		"1 bytes follow the end":                            "K\x01.x",
		"1 values are left over":                            "K\x01K\x02.",
		"empty stack":                                       "0.",
		"needs a mark":                                      "K\x01e.",
		"offset 3: the opcode takes a value":                "(0.",
		"memo 9 is used before":                             "h\x09.",
		"no dictionary":                                     "](K\x01K\x02u.",
		"no list":                                           "}K\x01a.",
		"is no known name":                                  "K\x01)R.",
		"not (version, shape, dtype, order, data)":          "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87RK\x01b.",
		"has no content":                                    "cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R.",
		`element type "<O8"`:                                arr("<O8", nil, 0) + ".",
		"has 4 bytes of data, not 8":                        arr("<i4", i4(1), 2) + ".",
		"shape (-1)":                                        arr("<i4", nil, -1) + ".",
		"row offset 1 of a csr_matrix is 3: offsets must rise": matrix(1, 3, []int32{0, 3},
			[]int32{1}, one) + ".",
		"row offset 2 of a csr_matrix is 0: offsets must rise": matrix(2, 3, []int32{0, 1, 0},
			[]int32{1}, one) + ".",
		"end at 0 of 1": matrix(1, 3, []int32{0, 0},
			[]int32{1}, one) + ".",
		"value 0 of a csr_matrix is in column 3": matrix(1, 3, []int32{0, 1},
			[]int32{3}, one) + ".",
		"of 2 rows has 2 row offsets": matrix(2, 3, []int32{0, 1},
			[]int32{1}, one) + ".",
		`no array "data"`: matrix(1, 3, []int32{0, 1},
			[]int32{1}, "N") + ".",
		"a whole number of 9 bytes":     "\x8a\x09123456789.",
		"a name without an end of line": "cnumpy",
	} {
		b := "\x80\x02" + s
		if s == "" {
			b = "\x80\x05N."
		}
		v, err := Parse("file.x", []byte(b), 0)
		require.Error(t, err, "%q gives %v", s, v)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "file.x: offset ")
		require.Equal(t, errs.Usage, errs.ClassOf(err))
	}
	// Every shorter piece of a good file is refused.
	good := "\x80\x02" + matrix(2, 3, []int32{0, 1, 3}, []int32{2, 0, 1},
		arr("<i4", i4(7, 8, 9), 3)) + "."
	for i := range good {
		_, err := Parse("x", []byte(good[:i]), 0)
		require.Equal(t, errs.Usage, errs.ClassOf(err), "%d bytes", i)
	}
	path := filepath.Join(t.TempDir(), "big")
	f, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, f.Truncate(MaxBytes+1))
	require.NoError(t, f.Close())
	_, err = Load(path, 0)
	require.ErrorContains(t, err, fmt.Sprint("pickles of at most ", MaxBytes))
	_, err = Load(path+"er", 0)
	require.Equal(t, errs.Usage, errs.ClassOf(err))
}

// nested are small files that stand for much: the last levels of a shared tuple would be 2^60 words
// in a message.
func nested() map[string]string {
	pairs := "K\x01" + strings.Repeat("q\x00h\x00\x86", 60)
	state := "cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shape"
	enc := "c_codecs\nencode\nq\x00X" + bin(1<<16) + strings.Repeat("a", 1<<16) +
		"q\x010U\x06latin1q\x02"
	zeros := arr("|i1", make([]byte, 1<<16), 1<<16) + "q\x050" + arr("<i4", nil, 0) + "q\x060"
	return map[string]string{
		"has shape (a tuple of 2, 1)": state + pairs + "K\x01\x86ub.",
		"has shape (a tuple of 1, 1)": state + "K\x01" + strings.Repeat("\x85", 1<<16) +
			"K\x01\x86ub.",
		"than 64 times its size": "K\x01" + strings.Repeat("\x85", 1<<19) + ".",
		"takes more memory":      enc + strings.Repeat("h\x00h\x01h\x02\x86R0", 1<<12) + "N.",
		"more memory than": zeros +
			strings.Repeat("cscipy.sparse.csr\ncsr_matrix\n)\x81}(U\x06_shapeJ"+bin(1<<16-1)+
				"K\x02\x86U\x06indptrh\x05U\x07indicesh\x06U\x04datah\x06ub0", 1<<10) + "N.",
		"holds itself": "]q\x00h\x00a.",
	}
}

// TestBudget: what nests, or repeats itself by a memo, costs neither time nor memory out of
// proportion.
func TestBudget(t *testing.T) {
	for want, s := range nested() {
		began := allocated()
		v, err := Parse("x", []byte("\x80\x02"+s), 0)
		require.Less(t, allocated()-began, uint64(perByte*len(s)+3*floor), want)
		if want == "holds itself" {
			require.NoError(t, err)
			require.Equal(t, "a list of 1", Describe(v))
			continue
		}
		require.ErrorContains(t, err, want)
		require.Less(t, len(err.Error()), 300)
	}
	_, err := Parse("x", []byte("\x80\x02U\xff"+strings.Repeat("a", 255)+strings.Repeat("0N", 1000)+
		"."), 1<<10)
	require.ErrorContains(t, err, "or than there is")
}

func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("\x80\x02" + matrix(2, 3, []int32{0, 1, 3}, []int32{2, 0, 1},
		arr("<i4", i4(7, 8, 9), 3)) + "."))
	f.Add(
		[]byte(
			"\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(K\x05](K\x06K\x07eK\x08]u."))
	f.Add(
		[]byte(
			"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02i4\x89\x88\x87R."))
	for _, s := range nested() {
		if len(s) < 1<<12 {
			f.Add([]byte("\x80\x02" + s))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		began := allocated()
		v, err := Parse("x", b, 0)
		if used := allocated() - began; used > uint64(perByte*len(b)+3*floor) {
			t.Fatalf("%d bytes allocate %d", len(b), used)
		}
		_ = Describe(v)
		if err != nil {
			require.Equal(t, errs.Usage, errs.ClassOf(err), "%v", err)
			return
		}
		if m, ok := v.(*CSR); ok {
			for r := range m.Rows {
				for i := m.Indptr[r]; i < m.Indptr[r+1]; i++ {
					require.Less(t, m.Indices[i], m.Cols)
				}
			}
		}
		if a, ok := v.(*Array); ok {
			_, _ = a.Floats()
			_, _ = a.Ints()
		}
	})
}
