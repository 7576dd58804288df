package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"helios/internal/errs"
)

// The flags of GIDS's scripts become ours; what would do nothing there, or has no counterpart, is
// told.
func TestGIDSFlags(t *testing.T) {
	for _, c := range []struct{ in, want, err string }{
		{"train g --GIDS --cache_size 8192 --page_size 4096",
			"train --mode=gids --gpu-cache=8192MiB --cache-line=4096 -- g", ""},
		{"train g --GIDS --window_buffer --wb_size 8", "train --mode=gids --window=8 -- g", ""},
		{"train g --wb_size 8 --window_buffer", "train --window=8 -- g", ""},
		{"train g --window_buffer", "train --window=6 -- g", ""},
		{"train g --accumulator --peak_percent 0.9", "train --accumulate=0.9 -- g", ""},
		{"train --accumulator g", "train --accumulate=0.95 -- g", ""},
		{"--accumulator train g", "train --accumulate=0.95 -- g", ""},
		{"train g --cpu_buffer --cpu_buffer_percent 0.1 --pin_file pr.npy",
			"train --cpu-cache=10% --hotness=pr.npy -- g", ""},
		{"train g --cpu_buffer", "train --cpu-cache=20% -- g", ""},
		{
			"train --batch_size 4096 --fan_out 10,5,5 --hidden_channels=128 --model_type sage --learning_rate 0.01 --decay 0.001 g",
			"train --batch-size=4096 --fanout=10,5,5 --hidden=128 --model=sage --lr=0.01 --weight-decay=0.001 -- g",
			""},
		{"eval g --window_buffer", "eval --window=6 -- g", ""},
		{"train --path g", "train --dataset=g --", ""},

		{"train g --wb_size 8", "",
			"--wb_size of GIDS does nothing without its --window_buffer; give both, or --window"},
		{"train g --window 4 --window_buffer", "",
			"--window_buffer of GIDS and --window together; give one"},
		{"train g --num_ssd 4", "", "the bound SSDs are used"},
		{"train g --bw 5.8", "", "measures the SSDs itself"},
		{"train g --cpu_buffer --cpu_buffer_percent 10", "", "not a share between 0 and 1"},
		{"train g --cache_size big", "", "not a number of MiB"},
		{"train g --batch_size many", "", `--batch_size "many" is not a whole number`},
		{"load g --window_buffer", "", "unknown flag --window_buffer"},
		{"eval g --learning_rate 1", "", "unknown flag --learning_rate"},
	} {
		got, _, err := arrange(newApp(&bytes.Buffer{}, &bytes.Buffer{}), strings.Fields(c.in))
		if c.want == "" {
			require.Error(t, err, c.in)
			require.Contains(t, errs.Spell(err, errs.Key.Flag), c.err, c.in)
			continue
		}
		require.NoError(t, err, c.in)
		require.Equal(t, c.want, strings.Join(got, " "), c.in)
	}
	// The page for people names every one of them.
	doc, err := os.ReadFile("../../docs/reference/gids-flags.md")
	require.NoError(t, err)
	for _, f := range gidsFlags {
		require.Contains(t, string(doc), "`--"+f.name+"`")
	}
}
