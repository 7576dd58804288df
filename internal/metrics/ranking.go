package metrics

import "math"

// rank adds the figures that depend on the order of the probabilities.
func (r *Report) rank(s *Scores) {
	var auc, ap mean
	keys, spare := make([]uint64, 0, r.Nodes), make([]uint64, r.Nodes)
	for c := range s.Classes {
		keys = keys[:0]
		for i, y := range s.Labels {
			if y < 0 {
				continue
			}
			k := uint64(math.Float32bits(s.Proba[i*s.Classes+c])) << 1
			if int(y) == c {
				k++
			}
			keys = append(keys, k)
		}
		x := &r.Classes[c]
		x.ROCAUC, x.AveragePrecision = ranking(keys, spare)
		if x.ROCAUC != nil && (c == 1 || s.Classes > 2) && s.Classes <= MaxCurves {
			r.Curves = append(r.Curves, curveOf(c, keys, x.Nodes))
		}
		auc.add(x.ROCAUC)
		ap.add(x.AveragePrecision)
	}
	if s.Classes == 2 {
		r.ROCAUC, r.AveragePrecision = r.Classes[1].ROCAUC, r.Classes[1].AveragePrecision
		return
	}
	r.ROCAUC, r.AveragePrecision = auc.value(), ap.value()
}

// ranking returns area under the ROC curve and average precision. A key is twice the bits of a
// node's probability, plus 1 for a positive node; bits of floats from 0 on are in their order.
// Nodes of equal probability count together, so their order does not matter. The area's numerator
// is an integer: of each positive node twice the negatives below it, plus those beside it. spare is
// as long as keys.
func ranking(keys, spare []uint64) (auc, ap *float64) {
	sortKeys(keys, spare)
	n := int64(len(keys))
	var positives, wins, above, below int64
	for _, k := range keys {
		positives += int64(k & 1)
	}
	if positives == 0 {
		return nil, nil
	}
	precision := 0.0
	for begin, end := 0, 0; begin < len(keys); begin = end { // from the least
		var up int64
		for end = begin; end < len(keys) && keys[end]>>1 == keys[begin]>>1; end++ {
			up += int64(keys[end] & 1)
		}
		down := int64(end-begin) - up
		// Every node from here on is predicted as positive at this threshold.
		left := positives - above
		precision += float64(float64(up) * (float64(left) / float64(n-int64(begin))))
		wins += up * (2*below + down)
		above, below = above+up, below+down
	}
	precision /= float64(positives)
	ap = &precision
	if below > 0 {
		area := float64(wins) / (2 * float64(positives) * float64(below))
		auc = &area
	}
	return auc, ap
}

// curveStep is by how much recall and the rate of false positives together move from one point of a
// curve to the next.
const curveStep = 0.01

// curveOf walks through sorted keys from the most probable, of which some are positive.
func curveOf(class int, keys []uint64, positives int64) Curve {
	c := Curve{Class: class, FPR: []float64{0}, Recall: []float64{0}, Precision: []float64{1}}
	short := func(x float64) float64 { return math.Round(x*1e5) / 1e5 }
	var hit, missed int64
	last := 0.0
	for end := len(keys); end > 0; {
		begin := end
		for begin > 0 && keys[begin-1]>>1 == keys[end-1]>>1 {
			begin--
			hit += int64(keys[begin] & 1)
		}
		end = begin
		missed = int64(len(keys)-end) - hit
		recall := float64(hit) / float64(positives)
		rate := float64(missed) / float64(int64(len(keys))-positives)
		if end > 0 && recall+rate-last < curveStep {
			continue
		}
		last = recall + rate
		c.FPR, c.Recall = append(c.FPR, short(rate)), append(c.Recall, short(recall))
		c.Precision = append(c.Precision, short(float64(hit)/float64(hit+missed)))
	}
	return c
}

// sortKeys sorts by 11 bits at a time, from the lowest: a key has at most 33, as probabilities are
// not negative.
func sortKeys(keys, spare []uint64) {
	const width = 11
	from, to := keys, spare
	for shift := 0; shift < 3*width; shift += width {
		var at [1 << width]int
		for _, k := range from {
			at[k>>shift&(1<<width-1)]++
		}
		sum := 0
		for i, n := range at {
			at[i], sum = sum, sum+n
		}
		for _, k := range from {
			i := &at[k>>shift&(1<<width-1)]
			to[*i] = k
			*i++
		}
		from, to = to, from
	}
	copy(keys, from)
}
