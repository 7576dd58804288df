package ui

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// object is a JSON object whose fields keep their order.
type object []field

type field struct {
	name  string
	value any
}

func (o object) sort() {
	slices.SortFunc(o, func(a, b field) int { return strings.Compare(a.name, b.name) })
}

// MarshalJSON writes the fields in their order.
func (o object) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range o {
		if i > 0 {
			b.WriteByte(',')
		}
		k, err := json.Marshal(f.name)
		if err != nil {
			return nil, err
		}
		v, err := json.Marshal(f.value)
		if err != nil {
			return nil, err
		}
		b.Write(k)
		b.WriteByte(':')
		b.Write(v)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
