package metrics

import "math"

const calibrationBins = 15

// calibration counts nodes by their confidence: the probability of their prediction. A bin has its
// upper bound.
type calibration [calibrationBins]struct {
	nodes, right int64
	confidence   float64
}

func (c *calibration) add(confidence float64, right bool) {
	b := &c[min(max(int(math.Ceil(confidence*calibrationBins))-1, 0), calibrationBins-1)]
	b.nodes++
	b.confidence += confidence
	if right {
		b.right++
	}
}

// err returns the expected calibration error over n nodes.
func (c *calibration) err(n int64) float64 {
	sum := 0.0
	for _, b := range c {
		sum += math.Abs(float64(b.right) - b.confidence)
	}
	return sum / float64(n)
}
