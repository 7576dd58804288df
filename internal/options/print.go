package options

import (
	"encoding/json"
	"fmt"
	"reflect"
)

// A checkpoint keeps the settings whose tag print says so, under their names; those that have the
// value of the tag omit are left out, as files of programs that knew no other value have them.

// printed returns the options that a checkpoint keeps.
func printed(ptr any) (all []Option) {
	for _, o := range Of(ptr) {
		if o.tag.Get("print") != "" {
			all = append(all, o)
		}
	}
	return all
}

func (o Option) omitted() bool {
	omit, may := o.tag.Lookup("omit")
	return may && (o.value.IsZero() || fmt.Sprint(o.Value()) == omit)
}

// CopyPrinted copies what a checkpoint keeps from one struct of options to another of its type.
func CopyPrinted(to, from any) {
	source := printed(from)
	for i, o := range printed(to) {
		o.value.Set(source[i].value)
	}
}

// EncodePrinted returns what a checkpoint keeps as JSON by name.
func EncodePrinted(ptr any) (map[string]json.RawMessage, error) {
	out := map[string]json.RawMessage{}
	for _, o := range printed(ptr) {
		if o.omitted() {
			continue
		}
		text, err := json.Marshal(o.Value())
		if err != nil {
			return nil, err
		}
		out[o.Name] = text
	}
	return out, nil
}

// DecodePrinted sets what a checkpoint keeps from JSON by name. An omitted value is set to the one
// that the omission stands for.
func DecodePrinted(ptr any, from map[string]json.RawMessage) error {
	for _, o := range printed(ptr) {
		o.value.SetZero()
		if text, ok := from[o.Name]; ok {
			if err := json.Unmarshal(text, o.Pointer()); err != nil {
				return fmt.Errorf("%s: %w", o.Name, err)
			}
		}
		if omit, may := o.tag.Lookup("omit"); may && o.value.IsZero() {
			if err := o.set(omit); err != nil {
				return fmt.Errorf("%s: %w", o.Name, err)
			}
		}
	}
	return nil
}

// DifferPrinted returns the first option that a checkpoint keeps and that differs between two
// structs, with its values; omitted ones are equal to what the omission stands for.
func DifferPrinted(is, was any) (name string, now, old any, differ bool) {
	before := printed(was)
	for i, o := range printed(is) {
		if o.omitted() && before[i].omitted() ||
			reflect.DeepEqual(o.Value(), before[i].Value()) {
			continue
		}
		return o.Name, o.Value(), before[i].Value(), true
	}
	return "", nil, nil, false
}
