package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFindsUsers: used in a test, in what it calls, in a method, in a variable, under another
// name; a test of the same package that uses none of it is left out.
func TestFindsUsers(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("a_test.go", `package p
import ("testing"; "helios/internal/testing/wide")
func TestItself(t *testing.T) { wide.Only(t) }
func cases() int { if wide.Lean() { return 1 }; return 9 }
type rig struct{}
func (rig) seeds() int { return cases() }
var many = cases()
`)
	write("b_test.go", `package p
import ("testing"; w "helios/internal/testing/wide")
func TestByMethod(t *testing.T) { _ = rig{}.seeds() }
func TestByVariable(t *testing.T) { _ = many }
func TestRenamed(t *testing.T) { t.Run("x", func(t *testing.T) { w.Only(t) }) }
func TestPlain(t *testing.T) { t.Log("wide") }
func TestMain(m *testing.M) { _ = many }
`)
	const wide = "helios/internal/testing/wide"
	got, err := arguments(dir, wide, "")
	require.NoError(t, err)
	require.Equal(t, []string{"-run", "^(TestByMethod|TestByVariable|TestItself|TestRenamed)$", "./."},
		got)

	below := filepath.Join(dir, "x", "y")
	require.NoError(t, os.MkdirAll(below, 0o700))
	write("x/y/c_test.go", `package p
import "helios/internal/testing/wide"
func TestBelow(t *testing.T) { wide.Only(t) }
`)
	got, err = arguments(dir, wide, "")
	require.NoError(t, err)
	require.Equal(t, []string{"./.", "./x/y"}, got[2:])
	got, err = arguments(dir, wide, "x")
	require.NoError(t, err)
	require.Equal(t, []string{"./."}, got[2:])
	_, err = arguments(dir, "helios/internal/none", "x,y")
	require.ErrorContains(t, err, "no test uses helios/internal/none")
}
