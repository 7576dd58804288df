package gpuio

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// The registry finds each stack by its name, the default by none, and names all of them when it
// does not know one.
func TestStacks(t *testing.T) {
	require.Equal(t, StackAsync, StackNames(nil)[0])
	var direct, indirect []string
	readsDirect := func(s *Stack) bool { return !s.Queued && !s.PageCache }
	for i, s := range allStacks {
		require.Equal(t, s.Name, StackNames(nil)[i])
		if readsDirect(s) {
			direct = append(direct, s.Name)
		} else {
			indirect = append(indirect, s.Name)
		}
		found, err := FindStack(s.Name)
		require.NoError(t, err)
		require.Same(t, s, found)
		require.NotEmpty(t, s.Summary, s.Name)
		require.NotNil(t, s.Open, s.Name)
		require.Equal(t, s.Queued, s.Threads > 0, "%s: only queued stacks have kernels", s.Name)
		require.False(t, s.Overlaps && !s.Queued || s.PageCache && s.Queued, s.Name)
	}
	s, err := FindStack("")
	require.NoError(t, err)
	require.Equal(t, StackAsync, s.Name)
	_, err = FindStack("aio")
	require.Equal(t, errs.Usage, errs.ClassOf(err))
	require.ErrorContains(t, err, strings.Join(StackNames(nil), ", "))
	require.Subset(t, StackNames(func(s *Stack) bool { return s.Queued }),
		[]string{StackAsync, StackSync})
	require.Equal(t, direct, StackNames(readsDirect))
	require.Contains(t, indirect, StackMmap)
	require.True(t, AnyStack(append(indirect, direct[0]), readsDirect))
	require.False(t, AnyStack(append(indirect, "aio"), readsDirect))
}
