package metrics

import "math"

// NumberScores are the outputs of a model of numbers for some nodes.
type NumberScores struct {
	Columns int
	Targets []float32 // nodes × columns; NaN: none, it does not count
	Outputs []float32 // by Set
}

// NewNumberScores makes room for nodes with these targets.
func NewNumberScores(columns int, targets []float32) *NumberScores {
	return &NumberScores{columns, targets, make([]float32, len(targets))}
}

// Set takes the outputs of node i, in the unit of the targets.
func (s *NumberScores) Set(i int, outputs []float32) { copy(s.Outputs[i*s.Columns:], outputs) }

// Parts implements Judge.
func (s *NumberScores) Parts(from, to int) []any {
	return []any{s.Outputs[from*s.Columns : to*s.Columns]}
}

// NumberFigures are those of one of a node's numbers.
type NumberFigures struct {
	Number int      `json:"number"` // its place, from 0
	Nodes  int64    `json:"nodes"`  // that have it
	RMSE   *float64 `json:"rmse,omitempty"`
	MAE    *float64 `json:"mae,omitempty"`
	R2     *float64 `json:"r2,omitempty"`
}

// Report implements Judge.
func (s *NumberScores) Report() *Report {
	r := &Report{}
	for i := 0; i < len(s.Targets); i += s.Columns {
		for _, t := range s.Targets[i : i+s.Columns] {
			if t == t {
				r.Nodes++
				break
			}
		}
	}
	if r.Nodes == 0 {
		return nil
	}
	var rmse, mae, r2 mean
	for c := range s.Columns {
		x := s.column(c)
		rmse.add(x.RMSE)
		mae.add(x.MAE)
		r2.add(x.R2)
		r.Numbers = append(r.Numbers, x)
	}
	r.RMSE, r.MAE, r.R2 = rmse.value(), mae.value(), r2.value()
	return r
}

func (s *NumberScores) column(c int) NumberFigures {
	x := NumberFigures{Number: c}
	sum, squares, absolute := 0.0, 0.0, 0.0
	each := func(f func(target, off float64)) {
		for i := c; i < len(s.Targets); i += s.Columns {
			if t := float64(s.Targets[i]); t == t {
				f(t, float64(s.Outputs[i])-t)
			}
		}
	}
	each(func(t, off float64) {
		x.Nodes++
		sum += t
		squares += float64(off * off)
		absolute += math.Abs(off)
	})
	n := float64(x.Nodes)
	if n == 0 {
		return x
	}
	root := math.Sqrt(squares / n)
	x.RMSE, x.MAE = &root, ratio(absolute, n)
	center, spread := sum/n, 0.0
	each(func(t, _ float64) { spread += float64((t - center) * (t - center)) })
	if share := ratio(squares, spread); share != nil {
		*share = 1 - *share
		x.R2 = share
	}
	return x
}
