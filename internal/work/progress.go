// Package work divides long work over the cores, and reports how far it is.
package work

// Progress hears how far a stage is; total 0 means that nobody knows. It is called from one
// goroutine at a time and must return quickly. A nil Progress is silent.
type Progress func(stage string, done, total int64)

// Report calls p, where there is one.
func (p Progress) Report(stage string, done, total int64) {
	if p != nil {
		p(stage, done, total)
	}
}
