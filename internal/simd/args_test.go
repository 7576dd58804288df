package simd

import (
	"bufio"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// No assembly changes a pointer in its struct of arguments. One that moves on ends behind an array,
// where another object begins, and the garbage collector, which may read the struct at any time
// where that is on the heap, ends the program if this object is free. Arguments on the stack and
// registers are nothing that it reads while a goroutine is in assembly, nor afterwards.
func TestAssemblyKeepsPointers(t *testing.T) {
	structs := map[string]reflect.Type{
		"dotHeads": reflect.TypeFor[dotArgs](), "sumHeads": reflect.TypeFor[headArgs](),
		"softmax": reflect.TypeFor[softmaxArgs](), "sumLists": reflect.TypeFor[rowsArgs](),
	}
	files, err := filepath.Glob("*_amd64.s")
	require.NoError(t, err)
	found := map[string]int{}
	for _, name := range files {
		for _, s := range argumentStores(t, name) {
			// The others have nothing that changes.
			var args reflect.Type
			for prefix, of := range structs {
				if strings.HasPrefix(s.function, prefix) {
					args = of
					found[prefix]++
				}
			}
			require.NotNil(t, args, "%s: %s stores to its arguments", name, s.function)
			require.False(t, isPointer(args, s.offset), "%s: %s changes the pointer at %d", name,
				s.function, s.offset)
		}
	}
	require.Len(t, found, len(structs), "functions that store to their arguments")
}

// argumentStore is a store to the struct that a function's parameter a points to.
type argumentStore struct {
	function string
	offset   int
}

var (
	textLine  = regexp.MustCompile(`^TEXT ·(\w+)\(SB\)`)
	argsLoad  = regexp.MustCompile(`^MOVQ\s+a\+0\(FP\), (\w+)$`)
	lastPlace = regexp.MustCompile(`(\d*)\((\w+)\)$`)
	// Instructions that only read what they name last.
	readers = regexp.MustCompile(`^(CMP|TEST|PREFETCH|VUCOM|J)`)
)

// argumentStores lists these of the functions of a file that take such a struct. It follows the
// lines: the generator gives the struct a register that stays its own until the last use.
func argumentStores(t *testing.T, name string) (stores []argumentStore) {
	f, err := os.Open(name)
	require.NoError(t, err)
	defer f.Close()
	function, args := "", ""
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if m := textLine.FindStringSubmatch(line); m != nil {
			function, args = m[1], ""
			continue
		}
		if m := argsLoad.FindStringSubmatch(line); m != nil {
			require.Empty(t, args, "%s: %s loads its arguments twice", name, function)
			args = m[1]
			continue
		}
		if args == "" || readers.MatchString(line) {
			continue
		}
		require.False(t, strings.HasPrefix(line, "MOVQ ") && strings.Contains(line, " "+args+","),
			"%s: %s copies the address of its arguments", name, function)
		if m := lastPlace.FindStringSubmatch(line); m != nil && m[2] == args {
			offset, _ := strconv.Atoi(m[1]) // none is 0
			stores = append(stores, argumentStore{function, offset})
		}
	}
	require.NoError(t, lines.Err())
	return stores
}

// isPointer reports whether a struct has a pointer at an offset.
func isPointer(s reflect.Type, offset int) bool {
	if s.Kind() == reflect.Array {
		return isPointer(s.Elem(), offset%int(s.Elem().Size()))
	}
	if s.Kind() != reflect.Struct {
		return s.Kind() == reflect.Pointer
	}
	for i := s.NumField() - 1; i >= 0; i-- {
		if f := s.Field(i); int(f.Offset) <= offset {
			return isPointer(f.Type, offset-int(f.Offset))
		}
	}
	return false
}
