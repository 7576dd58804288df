package nvmewalk

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/nvme"
	"helios/nvme/proxy"
)

// A judge looks at more than the status: the words, the place, and that no byte was moved.
func TestJudge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ssd.img")
	require.NoError(t, proxy.Create(path, 1<<20))
	target := Target{Open: func(context.Context) (nvme.Bus,
		error) {
		return proxy.Open(proxy.Config{Path: path, RAM: true})
	}}
	past := ioCase(func(w *walker) nvme.Command { return w.readCommand(2, pastEnd(w), 1) })
	all, err := walkLeg(t.Context(), target, "", []step{
		{name: "right", want: is(lbaRange), says: readAt(pastEnd, blocks(1)), run: past},
		{name: "words", want: is(answer{lbaRange.status, "LBA is out of range"}),
			says: readAt(pastEnd, blocks(1)), run: past},
		{name: "block", want: is(lbaRange), says: readAt(lastBlock, blocks(1)), run: past},
		{name: "queue", want: is(lbaRange), run: past},
		{name: "moved", want: is(lbaRange), says: readAt(pastEnd, blocks(1)),
			run: func(ctx context.Context, w *walker) error {
				err := w.read(ctx, 0, 1)
				require.NoError(t, err)
				return past(ctx, w)
			}},
		{name: "let pass", want: is(invalidField), let: []lenience{{lbaRange, QEMU, "why"}},
			says: readAt(pastEnd, blocks(1)), run: past},
	}, true)
	require.NoError(t, err)
	why := []string{"", `the error does not say "LBA is out of range (SCT 0h, SC 80h)"`,
		`the error does not say " q1: read LBA 2047+1: "`,
		`the error does not say " q0: "`, "the command failed, and byte 0 of its memory changed",
		"no such answer is known"}
	require.Len(t, all, len(why))
	for i, r := range all {
		require.Equal(t, why[i], r.Why, r.Step)
		require.Equal(t, i == 0, r.Verdict == Right, r.Step)
	}
	target.Reading = Any
	all, err = walkLeg(t.Context(), target, "", []step{
		{name: "let pass", want: is(invalidField), let: []lenience{{lbaRange, QEMU, "why"}},
			says: readAt(pastEnd, blocks(1)), run: past},
	}, true)
	require.NoError(t, err)
	require.Equal(t, Lenient, all[0].Verdict)
}
