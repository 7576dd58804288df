// Package progress is how a long step tells how far it is.
package progress

// Func hears how far a stage is; total 0 means that nobody knows. It is called from one goroutine
// at a time and must return quickly. A nil Func is silent.
type Func func(stage string, done, total int64)

// Report calls f, where there is one.
func (f Func) Report(stage string, done, total int64) {
	if f != nil {
		f(stage, done, total)
	}
}
