package work

// Spare keeps things for those who need one next: buffers, which are costly to make again.
type Spare[T any] chan T

// NewSpare returns a Spare that keeps up to n things.
func NewSpare[T any](n int) Spare[T] { return make(Spare[T], n) }

// Take returns a thing that was given, or the zero value.
func (s Spare[T]) Take() (x T) {
	select {
	case x = <-s:
	default:
	}
	return x
}

// Give keeps a thing, where there is room for it.
func (s Spare[T]) Give(x T) {
	select {
	case s <- x:
	default:
	}
}
