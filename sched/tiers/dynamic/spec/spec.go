// Package spec declares the settings of a GPU tier whose lines come and go.
package spec

// DynamicSettings shape a GPU tier whose lines come and go by accesses.
type DynamicSettings struct {
	// CacheLine is the bytes of a line, or LineRow.
	CacheLine int64  `option:"cache-line" hint:"give row, or a number of bytes such as 4096" group:"Tiers" named:"row=-1" size:"1" range:"512..1048576" shown:"4096 in bam and gids, else row" arg:"BYTES" usage:"what a dynamic GPU tier reads and keeps at once: lines of BYTES, or \"row\""`
	Directory string `option:"directory" group:"Tiers" use:"setting" oneof:"@directories" shown:"sets" usage:"what knows where a dynamic GPU tier's lines are (sets: sets of 32 lines, each under {policy} by itself, worked on by all cores; queues: any line in any place, on one core)"`
	// Window is the number of coming batches whose lines stay (window buffer of GIDS), 0 for none.
	Window int `option:"window" group:"Tiers" range:"0..64" zero:"-1" usage:"coming mini-batches whose lines a dynamic GPU tier keeps (GIDS's window buffer), 0 for none"`
	// Accumulate is the share of the SSDs' peak rate that merging the reads of coming batches aims
	// at (accumulator of GIDS); 0: reads are not merged.
	Accumulate float64 `option:"accumulate" hint:"the whole of the peak would take infinitely many reads in flight; 0.95 is usual" group:"Tiers" share:"yes" below:"1" zero:"-1" arg:"SHARE" usage:"merge the reads of coming mini-batches until they reach this SHARE of the SSDs' peak rate (GIDS's accumulator), 0 for never"`
}

// LineRow as CacheLine: a line is a row.
const LineRow = -1
