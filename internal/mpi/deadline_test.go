package mpi

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// A call of the library that does not end keeps neither Start nor Close from it.
func TestCallsThatDoNotEnd(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errs.New(errs.Interrupted, "stopped"))
	w := &World{jobs: make(chan func()), done: make(chan struct{})} // nobody serves it
	err := w.await(ctx, make(chan error))
	require.ErrorContains(t, err, "joining the other ranks: stopped")
	require.Equal(t, errs.Interrupted, errs.ClassOf(err))
	require.ErrorContains(t, w.Close(ctx), "leaving the other ranks: stopped")
	began := make(chan error, 1)
	began <- nil
	require.NoError(t, w.await(context.Background(), began))
}
