package options

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Use classifies the text of an option by its effects. Those who take it from somebody else, a file
// of results or a client of another user, go by it.
type Use int

// Uses of options.
const (
	Unknown Use = iota // nobody has said: it is not taken from others
	Setting            // a result may depend on it; it names no file and starts nothing
	Input              // a file or folder that the verb reads
	Aside              // where a run writes, or how it reports
)

// UsesText is a struct of options that decides by itself what the text of an option can do.
type UsesText interface {
	UseOf(name, text string) (use Use, decided bool)
}

// UseOf returns what a text of the option can do. Numbers, sizes and what else has a form of its
// own are settings; texts and switches have to say what they are.
func (o Option) UseOf(text string) Use {
	if s, is := o.owner.Addr().Interface().(UsesText); is {
		if use, decided := s.UseOf(o.Name, text); decided {
			return use
		}
	}
	use := map[string]Use{"setting": Setting, "input": Input, "aside": Aside}[o.tag.Get("use")]
	if list := words(o.tag.Get("words")); list != nil || use != Unknown {
		if use != Setting && areWords(text, list) {
			return Setting
		}
		return use
	}
	switch o.Value().(type) {
	case string, []string, bool:
		return Unknown
	}
	return Setting
}

// Words returns the texts of an option that names a file which name none.
func (o Option) Words() []string { return words(o.tag.Get("words")) }

// areWords reports whether a text is a list of words, each perhaps with a number as in presample:2.
func areWords(text string, words []string) bool {
	for part := range strings.SplitSeq(text, ",") {
		word, n, numbered := strings.Cut(part, ":")
		_, err := strconv.ParseUint(n, 10, 16)
		if !slices.Contains(words, word) || numbered && err != nil {
			return false
		}
	}
	return true
}

// Text returns the value for JSON: a text, a number, a switch or a list of texts.
func (o Option) Text() any {
	if s, is := o.Value().(fmt.Stringer); is {
		return s.String()
	}
	switch o.value.Kind() {
	case reflect.Bool, reflect.String, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Float64:
		return o.Value()
	case reflect.Slice:
		texts := make([]string, o.value.Len())
		for i := range texts {
			texts[i] = fmt.Sprint(o.value.Index(i).Interface())
		}
		return texts
	}
	return fmt.Sprintf("%+v", o.Value())
}

// ShownDefault returns what help says of the default: the tag's words or, where the struct around
// has variants, the value that each of them has; empty: the value says it.
func (o Option) ShownDefault() string {
	if o.Shown != "" || o.many() == nil {
		return o.Shown
	}
	switch o.Value().(type) {
	case bool, []int:
		return ""
	}
	if o.value.Type() == durationType || o.IsSwitch() {
		return ""
	}
	o.variants.Do(func() { o.variantsText = o.describeVariants() })
	return o.variantsText
}

// describeVariants returns the value of each variant, as "4 in bam, else 2".
func (o Option) describeVariants() string {
	names, each, usual := o.many()()
	var values []string
	having := map[string][]string{}
	for i, ptr := range each {
		x, ok := Find(ptr, o.Name)
		if !ok {
			panic("options: a variant without " + o.Name)
		}
		v := x.defaultText()
		if having[v] == nil {
			values = append(values, v)
		}
		having[v] = append(having[v], names[i])
	}
	if len(values) == 1 {
		return values[0]
	}
	// Most variants' value comes last; of equals, the usual one's.
	weight := func(v string) int {
		n := 2 * len(having[v])
		if slices.Contains(having[v], usual) {
			n++
		}
		return n
	}
	slices.SortStableFunc(values, func(a, b string) int { return weight(a) - weight(b) })
	var parts []string
	for _, v := range values[:len(values)-1] {
		parts = append(parts, v+" in "+and(having[v]))
	}
	return strings.Join(parts, ", ") + ", else " + values[len(values)-1]
}

// DefaultTexts is a struct of options that has words for some defaults.
type DefaultTexts interface{ DefaultText(name string) string }

func (o Option) defaultText() string {
	if s, is := o.owner.Addr().Interface().(DefaultTexts); is {
		if text := s.DefaultText(o.Name); text != "" {
			return text
		}
	}
	return fmt.Sprint(o.Value())
}

func and(s []string) string {
	if len(s) == 1 {
		return s[0]
	}
	return strings.Join(s[:len(s)-1], ", ") + " and " + s[len(s)-1]
}
