// Package columns makes features of the columns of tables. A Spec describes how one column becomes
// numbers; a Fitter learns means, categories and their like from some of the rows; an Encoder makes
// every row's features. Learned values depend on the rows and their order alone, and are kept as
// JSON, so that another table gets the same columns.
package columns

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"helios/dataset/table"
	"helios/internal/errs"
)

// The transforms of a column.
const (
	None     = "none"     // the number
	Standard = "standard" // less the mean, by the standard deviation (0 deviation: by 1)
	MinMax   = "minmax"   // least to most become 0 to 1
	Log      = "log"      // log(1+x)
	Boolean  = "boolean"  // 0 or 1
	Date     = "date"     // chosen parts, or the number of days since 1970, each standardised
	OneHot   = "one-hot"  // a feature for each category, by the categories' order
	Ordinal  = "ordinal"  // the place of the category in their order, from 0
	Hash     = "hash"     // size features, of which the category's hash chooses one
	Bag      = "bag"      // size features that count the hashes of a text's words, of length 1
)

// Transforms lists all transforms.
var Transforms = []string{None, Standard, MinMax, Log, Boolean, Date, OneHot, Ordinal, Hash, Bag}

// Words for what a cell without a value becomes. Any other text is taken as the cell's.
const (
	Mean      = "mean"      // the mean of the rows that were learned from
	Zero      = "zero"      // its features are 0
	Category  = "category"  // a category of its own
	Indicator = "indicator" // its features are 0, and one more feature is 1
)

// Parts of a date. Weekdays count from Monday, 0.
var dateParts = []string{"number", "year", "month", "day", "weekday", "hour"}

// Spec is the way in which a column becomes features.
type Spec struct {
	Column    string `json:"column"`
	Transform string `json:"transform"`
	// Missing stands in place of a cell without a value; empty refuses one.
	Missing string `json:"missing,omitempty"`
	// Unknown, Zero or Category, stands in place of a category that was not learned; empty refuses.
	Unknown string   `json:"unknown,omitempty"`
	Size    int      `json:"size,omitempty"` // numbers of a vector, or features of Hash and Bag
	Parts   []string `json:"parts,omitempty"`
	// Categories are those of OneHot and Ordinal; nil: learned.
	Categories []string `json:"categories,omitempty"`
	// NA are texts that stand for no value, beside an empty cell.
	NA  []string `json:"na,omitempty"`
	All bool     `json:"all,omitempty"` // learned from all rows, not from those in use
}

func (s *Spec) is(transforms ...string) bool { return slices.Contains(transforms, s.Transform) }

// categorical reports whether the transform is of categories that are learned.
func (s *Spec) categorical() bool { return s.is(OneHot, Ordinal) }

// texts reports whether cells are read as texts, not as numbers.
func (s *Spec) texts() bool { return s.is(OneHot, Ordinal, Hash, Bag) }

// fixed reports whether no row is needed to know the column, but for the length of its lists.
func (s *Spec) fixed() bool { return s.is(None, Log, Boolean, Hash, Bag) && s.Missing != Mean }

// Fixed reports whether no row is learned from, where the column's cells are lists or not.
func (s *Spec) Fixed(list bool) bool { return s.fixed() && (!list || s.Size > 0) }

// maxSize bounds the features of one column.
const maxSize = 1 << 18

// Check reports what is wrong with a spec, as a text that begins with the word to mend.
func (s *Spec) Check() error {
	bad := func(format string, args ...any) error {
		return errs.New(errs.Usage, "column %s: "+format, append([]any{table.Brief(s.Column)}, args...)...)
	}
	if !slices.Contains(Transforms, s.Transform) {
		return bad("transform %s is none of %s", table.Brief(s.Transform), strings.Join(Transforms, ", "))
	}
	if s.Size < 0 || s.Size > maxSize {
		return bad("size %d is outside 1..%d", s.Size, maxSize)
	}
	if s.is(Hash, Bag) && s.Size == 0 {
		return bad("%s needs a size: the number of features", s.Transform)
	}
	if s.Size > 0 && s.is(OneHot, Ordinal, Boolean, Date) {
		return bad("%s takes no size", s.Transform)
	}
	if len(s.Parts) > 0 && !s.is(Date) {
		return bad("parts are for %s", Date)
	}
	for i, p := range s.Parts {
		if !slices.Contains(dateParts, p) {
			return bad("part %s is none of %s", table.Brief(p), strings.Join(dateParts, ", "))
		}
		if slices.Contains(s.Parts[:i], p) {
			return bad("part %s is there twice", p)
		}
	}
	if len(s.Categories) > 0 && !s.categorical() {
		return bad("categories are for %s and %s", OneHot, Ordinal)
	}
	for i, c := range s.Categories {
		if slices.Contains(s.Categories[:i], c) {
			return bad("category %s is there twice", table.Brief(c))
		}
	}
	return s.checkPolicies(bad)
}

func (s *Spec) checkPolicies(bad func(string, ...any) error) error {
	switch {
	case s.Unknown != "" && !s.categorical():
		return bad("unknown is for %s and %s", OneHot, Ordinal)
	case s.Unknown != "" && s.Unknown != Zero && s.Unknown != Category:
		return bad("unknown %s is none of %s, %s", table.Brief(s.Unknown), Zero, Category)
	case s.is(Ordinal) && (s.Unknown == Zero || s.Missing == Zero || s.Missing == Indicator):
		return bad("0 is the first category of %s; take %s", Ordinal, Category)
	case s.Missing == Mean && s.texts():
		return bad("a text has no mean; take %s, %s, %s or a text", Zero, Category, Indicator)
	case s.Missing == Category && (!s.texts() || s.Transform == Bag):
		return bad("missing %s is for %s, %s and %s; take %s, %s, %s or a value", Category, OneHot,
			Ordinal, Hash, Mean, Zero, Indicator)
	}
	if v := s.Missing; v != "" && !s.texts() && !slices.Contains([]string{Mean, Zero, Indicator}, v) {
		if _, err := s.parse([]byte(v)); err != nil {
			return bad("missing %s is none of %s, %s, %s, and no value of the column: %w", table.Brief(v), Mean, Zero,
				Indicator, err)
		}
	}
	return nil
}

// Learned is a column with what was learned of it.
type Learned struct {
	Spec
	Rows  int64  `json:"rows"`            // that were learned from, with a value
	Stats []Stat `json:"stats,omitempty"` // of each number of a cell; none where no row is needed
}

// Stat are the statistics of one number.
type Stat struct {
	Mean float64 `json:"mean"`
	Std  float64 `json:"std"` // of all rows: divided by their number
	Min  float64 `json:"min"`
	Max  float64 `json:"max"`
}

// Width returns the number of features.
func (l *Learned) Width() int {
	n := 1
	switch l.Transform {
	case OneHot:
		n = len(l.Categories) + one(l.Unknown == Category) + one(l.Missing == Category)
	case Hash, Bag:
		n = l.Size + one(l.Missing == Category)
	case Ordinal, Boolean:
	default:
		n = l.numbers()
	}
	return n + one(l.Missing == Indicator)
}

// numbers returns how many numbers a cell holds.
func (s *Spec) numbers() int { return max(1, s.Size, len(s.Parts)) }

// Names returns a name for each feature, for people.
func (l *Learned) Names() (names []string) {
	switch {
	case l.Transform == OneHot:
		for _, c := range l.Categories {
			names = append(names, l.Column+"="+c)
		}
		if l.Unknown == Category {
			names = append(names, l.Column+" unknown")
		}
	case len(l.Parts) > 0:
		for _, p := range l.Parts {
			names = append(names, l.Column+" "+p)
		}
	case l.is(Hash, Bag) || l.Size > 0:
		for i := range l.Size {
			names = append(names, l.Column+" "+strconv.Itoa(i))
		}
	default:
		names = append(names, l.Column)
	}
	if len(names) < l.Width() { // of its own category, or its indicator
		names = append(names, l.Column+" missing")
	}
	return names
}

func one(b bool) int {
	if b {
		return 1
	}
	return 0
}

// CheckLearned reports what is wrong with columns that were read from a file.
func CheckLearned(all []Learned) error {
	for i := range all {
		l := &all[i]
		if err := l.Check(); err != nil {
			return err
		}
		if !l.texts() && len(l.Stats) != l.numbers() && (len(l.Stats) > 0 || !l.fixed()) {
			return fmt.Errorf("column %s: %d statistics of %d numbers", table.Brief(l.Column), len(l.Stats),
				l.numbers())
		}
		for _, s := range l.Stats {
			if s.Std < 0 || s.Max < s.Min || math.IsInf(s.Max-s.Min, 0) {
				return fmt.Errorf("column %s: statistics that no numbers have", table.Brief(l.Column))
			}
		}
		if l.categorical() && len(l.Categories) == 0 {
			return fmt.Errorf("column %s: no categories", table.Brief(l.Column))
		}
	}
	return nil
}
