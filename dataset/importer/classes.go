package importer

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"helios/internal/errs"
)

// Labels are classes where they look like some. Beyond these bounds they are taken for a stray
// number or for numbers to predict, and refused unless NumClasses gives the number of classes:
// the last layer of a model has a column for each.
const (
	freeClasses   = 1000    // up to here, any of the classes may be without a node
	mostGaps      = 10      // beyond, at most so many classes for each that has a node
	mostClasses   = 1 << 24 // beyond, they are not even counted
	mostDistinct  = 20      // from so many different labels on, they are classes only if …
	nodesPerLabel = 2       // … so many nodes share each, on average
)

// classSet is a set of classes.
type classSet []uint64

func newClassSet(classes int64) classSet { return make(classSet, (classes+63)/64) }

func (s classSet) add(c int32)      { s[c/64] |= 1 << (c % 64) }
func (s classSet) has(c int64) bool { return s[c/64]&(1<<(c%64)) != 0 }

func (s classSet) count() (n int64) {
	for _, w := range s {
		n += int64(bits.OnesCount64(w))
	}
	return n
}

// without names the classes below n that are among a set (nil: all) and not in this one, as ranges,
// and counts them.
func (s classSet) without(n int64, among classSet) (text string, total int64) {
	var ranges []string
	more := 0
	for c := int64(0); c < n; c++ {
		first := c
		for c < n && !s.has(c) && (among == nil || among.has(c)) {
			c++
		}
		switch total += c - first; {
		case c == first:
		case len(ranges) == maxNames:
			more++
		case c == first+1:
			ranges = append(ranges, fmt.Sprint(first))
		default:
			ranges = append(ranges, fmt.Sprintf("%d to %d", first, c-1))
		}
	}
	if more > 0 {
		ranges = append(ranges, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(ranges, ", "), total
}

// countClasses sets the number of classes: that of the options, or else the largest label plus 1,
// where the labels look like classes. Classes without a node are named. Formats call it once the
// labels are read, before what takes long.
func (im *importer) countClasses(labels []int32, file string) error {
	if !im.plain() {
		if im.targets != nil {
			im.m.Classes = int(im.targets.columns)
		}
		return nil
	}
	largest, node, labelled := int32(noLabel), int64(0), int64(0)
	for v, l := range labels {
		if l > largest {
			largest, node = l, im.idOf(int64(v))
		}
		if l != noLabel {
			labelled++
		}
	}
	classes, stated := int64(largest)+1, im.o.NumClasses
	from := errs.Text(im.classesFrom)
	if from == "" {
		from = errs.Textf("{num-classes}")
	}
	switch {
	case labelled == 0: // none to count, whatever is told
		return nil
	case stated > 0 && classes > stated:
		if im.classesFrom != "" {
			from = errs.Textf("%s, which {num-classes} overrides,", from)
		}
		return errs.New(errs.Usage, "%s: label %d of node %d, but %s says %d classes, 0 to %d",
			file, largest, node, from, stated, stated-1)
	case stated == 0 && classes > mostClasses:
		return errs.New(errs.Usage,
			"%s: label %d of node %d would make %d classes; mend the label, or give {num-classes} %d if it is right",
			file, largest, node, classes, classes)
	case stated > 0:
		classes = stated
	}
	if err := im.needMemory(file+": the classes", classes, 1); err != nil {
		return err
	}
	used := newClassSet(classes)
	for _, l := range labels {
		if l != noLabel {
			used.add(l)
		}
	}
	if err := im.looksLikeClasses(file, used.count(), classes, labelled, node); err != nil {
		return err
	}
	im.m.Classes = int(classes)
	if gaps, n := used.without(classes, nil); n > 0 {
		im.o.note("%s of the %d classes %s no node: %s", are(n, "one", "%d"), classes,
			are(n, "has", "have"), gaps)
	}
	im.used = used
	return nil
}

func are(n int64, one, more string) string {
	if n == 1 {
		return one
	}
	return strings.ReplaceAll(more, "%d", strconv.FormatInt(n, 10))
}

// looksLikeClasses refuses labels that a stray number or regression targets are among. at is the
// id of the node with the largest.
func (im *importer) looksLikeClasses(file string, distinct, classes, labelled,
	node int64) error {
	switch {
	case im.o.NumClasses > 0:
	case classes > max(freeClasses, mostGaps*distinct):
		return errs.New(errs.Usage,
			"%s: label %d of node %d would make %d classes, and only %d have a node; mend the label, or give {num-classes} %d if it is right",
			file, classes-1, node, classes, distinct, classes)
	case distinct >= mostDistinct && nodesPerLabel*distinct > labelled:
		return errs.New(errs.Usage,
			"%s: %d different labels on %d labelled nodes; these look like numbers to predict or ids, not like classes: give {target} regression for numbers, group them, or give {num-classes} %d if they are classes",
			file, distinct, labelled, classes)
	}
	return nil
}

// noteUntrained names the classes that have a node and none in train.
func (im *importer) noteUntrained(trained classSet) {
	if im.m.Train == 0 {
		im.o.note("no labelled node is in train: there is nothing to train on")
		return
	}
	if names, n := trained.without(int64(im.m.Classes), im.used); n > 0 {
		im.o.note("%s no node in train: %s", are(n, "one class has", "%d classes have"),
			names)
	}
}

// quotas returns the number of nodes of each class for train, val and test. The totals are the
// shares of all nodes, rounded by the largest remainder; each class is divided as near to the
// shares as the totals allow. Where train has a node for each class, each gets one.
func quotas(counts []int64, shares [3]float64) [][3]int64 {
	order := make([]int, 0, len(counts))
	n := int64(0)
	for c, k := range counts {
		if n += k; k > 0 {
			order = append(order, c)
		}
	}
	// Small classes first: the large ones take up what the small ones cannot.
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(counts[a], counts[b]) })
	left := apportion(n, shares)
	each := left[0] >= int64(len(order))
	out := make([][3]int64, len(counts))
	var dealt [3]int64
	p := 0.0
	for _, c := range order {
		for i := range counts[c] {
			p++
			best, mostLacking := -1, math.Inf(-1)
			for s, share := range shares {
				// Apart, since a fused operation rounds differently.
				due := float64(share * p)
				if lack := due - float64(dealt[s]); left[s] > 0 && lack > mostLacking {
					best, mostLacking = s, lack
				}
			}
			if i == 0 && each && left[0] > 0 {
				best = 0
			}
			out[c][best]++
			dealt[best]++
			left[best]--
		}
	}
	return out
}

// apportion divides n by the shares, by the largest remainders.
func apportion(n int64, shares [3]float64) (out [3]int64) {
	var rest [3]float64
	left := n
	for s, share := range shares {
		due := float64(share * float64(n))
		out[s] = min(int64(due+1e-9), left)
		rest[s] = due - float64(out[s])
		left -= out[s]
	}
	for ; left > 0; left-- {
		best := 0
		for s := range rest {
			if rest[s] > rest[best]+1e-9 {
				best = s
			}
		}
		out[best]++
		rest[best]--
	}
	return out
}
