package kernels

import "fmt"

// faults has the meanings of kernels' dev::fail codes: faults[kernel][code-1] is a format whose %d
// are the record's A, B and C as signed numbers (in order, or by %[n]d). The owner of a kernel adds
// its lines here; a test compares with the codes in the .cu files.
var faults = map[string][]string{
	"conf_fail":  {"conf_fail was told to fail"},
	"conf_price": {"conf_price: kind %d, lines of %d bytes"},

	"coalesce": {
		"coalesce: %d passes over the slot, which has 64 bits",
		"coalesce: a window of %d LBAs is no whole number of rows of %d LBAs",
	},

	"lookup": {"lookup: row %d at position %d: the dataset has rows 0 to %d"},
	"gather": {"gather: slot %d of hit %d: the tier has %d rows",
		"gather: position %d of hit %d: the tensor has %d rows"},
	"convert_rows": {"convert_rows: rows of type %d with %d bytes for %d features",
		"convert_rows: row %d is of node %d, there are scales of %d"},

	"sage_mean":         aggFaults,
	"sage_weighted":     aggFaults,
	"agg_weights":       aggFaults,
	"self_weights":      aggFaults,
	"gcn_agg":           aggFaults,
	"sage_mean_bwd":     aggFaults,
	"gcn_agg_bwd":       aggFaults,
	"gin_sum":           aggFaults,
	"gat_softmax":       aggFaults,
	"gin_weighted":      aggFaults,
	"gin_sum_bwd":       aggFaults,
	"transpose_scatter": {"transpose: source %d of edge %d: the block has sources 0 to %d"},
	"xent_count": {
		"label %d of seed %d is out of range: -1 (none) to %d; check the dataset's labels"},

	"sets_lines":    {"sets_lines: row %d at position %d: the dataset has rows 0 to %d"},
	"sets_announce": {"sets_announce: row %d at position %d: the dataset has rows 0 to %d"},

	"hotness": {"hotness: row %d at position %d: the dataset has rows 0 to %d"},

	"check_rows": {"check_rows: row %d at index %d: the layout has %d rows",
		"check_rows: position %d at index %d is outside the destination of %d bytes"},

	"sample_begin":    sampleFaults[:3],
	"sample_loopless": sampleFaults[:1],
	"sample_count":    sampleFaults[:2],
	"sample_fill":     sampleFaults[:5],
	"labor_count":     sampleFaults[:2],
	"labor_fill":      sampleFaults[:5],
	"unique_assign":   sampleFaults,
	"unique_types":    sampleFaults,
	"layer_assign":    sampleFaults,
}

// aggFaults are shared by the aggregations.
var aggFaults = []string{
	"aggregation: row %d at edge %d: rows are 0 to %d",
	"aggregation: row %d: %d to %d are no edges of the block",
}

// sampleFaults are shared by the kernels of the sampler; each uses its part.
var sampleFaults = []string{
	"sample: node %d: nodes are 0 to %d",
	"sample: node %d: %d to %d are no offsets of the topology",
	"sample: the position table of %d slots is full",
	"sample: %d edges, room for %d",
	"sample: id %d of edge %d: nodes are 0 to %d",
	"sample: frontier index %d: room for %d",
}

// FaultText puts a fault record of a kernel into words.
func FaultText(kernel string, code uint32, a, b, c uint64) string {
	words := faults[kernel]
	if code == 0 || int64(code) > int64(len(words)) {
		return fmt.Sprintf("unknown fault %d (%d, %d, %d)", code, int64(a), int64(b), int64(c))
	}
	// The indexed fourth operand, which is empty, lets a format leave operands unused.
	return fmt.Sprintf(words[code-1]+"%[4]s", int64(a), int64(b), int64(c), "")
}
