// Package probe is what a look at the machine found, in three answers: there, not there, and could
// not tell. A test may skip only on "not there", and only the first two are worth remembering.
package probe

// Answer is the outcome of a probe. The zero value claims nothing.
type Answer int

// The three answers.
const (
	Unknown Answer = iota
	There
	NotThere
)

// String is the answer in words.
func (a Answer) String() string {
	switch a {
	case There:
		return "there"
	case NotThere:
		return "not there"
	}
	return "could not tell"
}

// MarshalText gives JSON the words.
func (a Answer) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// Finding is one probe's result for people and programs.
type Finding struct {
	Name   string `json:"name"`
	Answer Answer `json:"answer"`
	Detail string `json:"detail,omitempty"`
	Next   string `json:"next,omitempty"` // what gets it, when it is not there
}
