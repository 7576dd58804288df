package packs

import (
	"fmt"
	"reflect"
	"strings"

	"helios/internal/errs"
	"helios/internal/units"
)

// Key has the facts that a folder's packs depend on. Its JSON names are those of options where
// there is one.
type Key struct {
	Dataset string `json:"dataset"` // UUID
	Edges   int64  `json:"edges"`
	// Train is a hash of the training nodes in their order.
	Train      string `json:"training nodes"`
	Seed       uint64 `json:"seed"`
	Sampler    string `json:"sampler"`
	Dependency int    `json:"batch-dependency"`
	Fanouts    []int  `json:"fanout"`
	Relations  string `json:"relation-fanout,omitempty"`
	Batch      int    `json:"batch-size"`
	Degrees    bool   `json:"degrees"` // samples have the nodes' degrees, which some models need
	// Loopless: they leave out edges of a node to itself.
	Loopless     bool   `json:"self-loops,omitempty"`
	SampleEpochs int    `json:"sample-epochs"`
	RowDType     string `json:"row-dtype"`
	RowBytes     int64  `json:"row bytes"`
	PagesOn      string `json:"pages-on"`
	LBABytes     int64  `json:"lba bytes"`   // of where the pages are
	Segment      int    `json:"segment"`     // 0: searched for
	Budget       int64  `json:"disk-budget"` // bytes of the pages of SampleEpochs; 0: no bound
}

// notOptions are the fields of a Key that no option sets, as errors name them.
var notOptions = map[string]string{"dataset": "dataset", "edges": "number of edges",
	"training nodes": "training nodes", "degrees": "use of degrees (a model's)",
	"self-loops": "remaining self loops",
	"row bytes":  "bytes in a row", "lba bytes": "LBA size"}

// samples is the part of a key that samples depend on: equal where the samples are.
func (k Key) samples(first, end int) string {
	text := fmt.Sprintf("%q %d %q %d %q %d %v %d %t %d %d", k.Dataset, k.Edges, k.Train, k.Seed,
		k.Sampler, k.Dependency, k.Fanouts, k.Batch, k.Degrees, first, end)
	if k.Relations != "" {
		text += " " + k.Relations
	}
	if k.Loopless {
		text += " loopless"
	}
	return text
}

// same refuses a key that differs, and names what does.
func (k Key) same(was Key, dir string) error {
	a, b := reflect.ValueOf(k), reflect.ValueOf(was)
	for i := range a.NumField() {
		x, y := a.Field(i).Interface(), b.Field(i).Interface()
		if reflect.DeepEqual(x, y) {
			continue
		}
		name, _, _ := strings.Cut(a.Type().Field(i).Tag.Get("json"), ",")
		plain, ok := notOptions[name]
		what := errs.Text(plain)
		if !ok {
			what = errs.Textf("%v", errs.Key(name))
		}
		return errs.New(errs.Usage,
			"the mini-batches in %s were prepared with %s %v, and this run has %v; give the same, or another folder with %v",
			dir, what, shown(name, y), shown(name, x), errs.Key("packed"))
	}
	return nil
}

// shown is a field's value for people.
func shown(name string, v any) string {
	switch n, ok := v.(int64); {
	case v != false && reflect.ValueOf(v).IsZero():
		return "none"
	case ok && (name == "disk-budget" || name == "row bytes" || name == "lba bytes"):
		return units.FormatBytes(n)
	}
	return fmt.Sprint(v)
}
