// Package options reads what a struct of options says about itself in the tags of its fields, so
// that one declaration is the field, its flag and key, its help, its default and its check. A
// command line makes flags of them (internal/cli); a library checks, hashes or prints them. Structs
// that are embedded or have the tag options count as if their fields stood in their place.
//
//	type Options struct {
//		Out    string `option:"out" arg:"DIR" usage:"DIR to create"`
//		Loops  string `option:"self-loops" usage:"edges from a node to itself" oneof:"keep,drop"`
//		Seed   uint64 `option:"seed" usage:"seed of the splits" default:"1"`
//		Memory int64  `option:"memory" arg:"SIZE" usage:"SIZE to take" size:"64MiB" shown:"half of all"`
//	}
//
// The tags:
//
//	option    its name: flag, YAML key, keyword
//	usage     help; {out} is the flag of another option, {@modes} a list of Define
//	arg       the word of usage that stands for the value
//	group     the heading of help that it stands under
//	common    yes: the short help of a verb has it
//	also      other names
//	default   what Defaults sets
//	shown     what help says of the default where the value does not
//	oneof     all values, between commas or as @name of Define; of a list, of each part
//	words     values beside others: a shell offers them, and they are settings whatever use says
//	offers    values that a shell offers
//	there     dataset, checkpoint or ssd: a shell offers those that are there
//	named     words for numbers, as auto=0,row=-1
//	positive  yes: 0 is refused
//	zero      what a given 0 is stored as, where the field's 0 stands for a default
//	range     least and most, as 1..64 or 1ms..; of a field that is not 0
//	size      the text is a size such as 2GiB, at least what the tag says
//	below     what the value is below
//	share     the text is a share such as 5% or 0.05
//	text      yes: the struct reads the text (Setter)
//	ints      the text is a list of whole numbers, none below what the tag says
//	hint      what the error of a wrong text adds
//	use       setting, input or aside: see Use
//	print     yes: a checkpoint keeps the value; omit: unless it is this one
//
// An option whose text is more than that is set by its struct, which is a Setter.
package options

import (
	"encoding"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"helios/internal/errs"
	"helios/internal/units"
)

// Option is one field of a struct of options.
type Option struct {
	*declared
	value reflect.Value
	owner reflect.Value // the struct that has the field
}

// declared has the tags of a field.
type declared struct {
	Name    string
	Aliases []string
	Group   string
	Common  bool
	Arg     string   // the word of the usage that stands for the value
	Shown   string   // what help says of the default; empty: the value
	Choices []string // all values; nil: any
	Offers  []string // what a shell offers
	There   string   // the kind of things that a shell offers
	Default string   // the text of the tag

	usage  string
	tag    reflect.StructTag
	path   []int // from the struct that Of got
	owner  []int
	around []reflect.Type // the structs around it, from the outermost

	variants     sync.Once
	variantsText string // help's words for the defaults of many
}

// Setter sets an option whose text says more than its field holds, and names the option in errors.
// done is false for what the tags are enough for.
type Setter interface {
	SetOption(name, text string) (done bool, err error)
}

// Texter is a field's type that reads its text itself.
type Texter interface{ SetText(text string) error }

// Variants returns the defaults of a struct of options whose defaults differ by a setting, for
// help: their names, and for each a pointer to a struct of the same type; usual is the one that a
// run takes that chooses none.
type Variants func() (names []string, each []any, usual string)

var variants = map[reflect.Type]Variants{}

// DefineVariants gives the variants of the type of a struct.
func DefineVariants(of any, v Variants) bool {
	variants[reflect.TypeOf(of)] = v
	return true
}

var lists = map[string]func() []string{}

// Define names a list for tags: oneof:"@modes".
func Define(name string, list func() []string) bool {
	if lists[name] != nil {
		panic("options: a second list " + name)
	}
	lists[name] = list
	return true
}

// known holds the declarations of each type of struct.
var known sync.Map // reflect.Type → []*declared

// Of returns the options of a struct, in the order of its fields. It panics where a tag or a type
// is wrong, which is a mistake of the program.
func Of(ptr any) []Option {
	v, all := declarations(ptr)
	out := make([]Option, len(all))
	for i, d := range all {
		out[i] = d.in(v)
	}
	return out
}

// declarations returns the struct that ptr points to and the declarations of its options.
func declarations(ptr any) (reflect.Value, []*declared) {
	v := reflect.ValueOf(ptr)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		panic(fmt.Sprintf("options: %T is no pointer to a struct", ptr))
	}
	v = v.Elem()
	found, ok := known.Load(v.Type())
	if !ok {
		var all []*declared
		collect(v.Type(), nil, nil, &all)
		found, _ = known.LoadOrStore(v.Type(), all)
	}
	return v, found.([]*declared)
}

// in returns the option of a struct.
func (d *declared) in(v reflect.Value) Option {
	return Option{declared: d, value: writable(v, d.path), owner: writable(v, d.owner)}
}

// writable returns a field by its path; a verb's options need not be exported.
func writable(v reflect.Value, path []int) reflect.Value {
	f := v.FieldByIndex(path)
	return reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem()
}

func collect(t reflect.Type, path []int, around []reflect.Type, out *[]*declared) {
	around = append(slices.Clone(around), t)
	for i := range t.NumField() {
		f := t.Field(i)
		place := append(slices.Clone(path), i)
		_, inside := f.Tag.Lookup("options")
		name, ok := f.Tag.Lookup("option")
		switch {
		case f.Type.Kind() == reflect.Struct && (inside || f.Anonymous):
			collect(f.Type, place, around, out)
			continue
		case !ok:
			continue
		}
		d := &declared{Name: name, usage: f.Tag.Get("usage"), Arg: f.Tag.Get("arg"),
			Shown: f.Tag.Get("shown"), Aliases: words(f.Tag.Get("also")),
			Group: f.Tag.Get("group"), There: f.Tag.Get("there"),
			Common: f.Tag.Get("common") != "", Choices: words(f.Tag.Get("oneof")),
			Default: strings.Join(words(f.Tag.Get("default")), ","), tag: f.Tag, path: place, owner: path,
			around: around}
		d.Offers = slices.Concat(d.Choices, words(f.Tag.Get("words")), words(f.Tag.Get("offers")))
		if d.usage == "" || !strings.Contains(d.usage, d.Arg) {
			panic(fmt.Sprintf("options: %s.%s: no usage, or no arg in it", t, f.Name))
		}
		if i := slices.IndexFunc(*out, func(x *declared) bool { return x.Name == name }); i >= 0 {
			// As with Go's embedded fields, an outer one hides those within.
			switch was := (*out)[i]; {
			case len(was.path) == len(place):
				panic(fmt.Sprintf("options: %s.%s: a second option %s", t, f.Name, name))
			case len(was.path) < len(place):
				continue
			}
			*out = slices.Delete(*out, i, i+1)
		}
		*out = append(*out, d)
	}
}

// words splits the list of a tag, which may name one of Define.
func words(list string) (out []string) {
	if list == "" {
		return nil
	}
	for part := range strings.SplitSeq(list, ",") {
		if name, is := strings.CutPrefix(part, "@"); is {
			out = append(out, listOf(name)...)
		} else {
			out = append(out, part)
		}
	}
	return out
}

func listOf(name string) []string {
	if lists[name] == nil {
		panic("options: no list " + name)
	}
	return lists[name]()
}

// many returns the variants of the outermost struct that has some; nil: none has.
func (d *declared) many() Variants {
	for _, t := range d.around {
		if v := variants[t]; v != nil {
			return v
		}
	}
	return nil
}

// IsSet reports whether the field is not its zero value.
func (o Option) IsSet() bool { return !o.value.IsZero() }

// Find returns the option of a name, of those of a struct.
func Find(ptr any, name string) (o Option, ok bool) {
	v, all := declarations(ptr)
	if i := slices.IndexFunc(all, func(d *declared) bool { return d.Name == name }); i >= 0 {
		return all[i].in(v), true
	}
	return o, false
}

// Names returns the names of a struct's options.
func Names(ptr any) (names []string) {
	for _, o := range Of(ptr) {
		names = append(names, o.Name)
	}
	return names
}

// Defaults sets the fields of a struct of options to the defaults of their tags.
func Defaults(ptr any) {
	for _, o := range Of(ptr) {
		if _, ok := o.tag.Lookup("default"); ok {
			if err := o.Set(o.Default); err != nil {
				panic(fmt.Sprintf("options: the default of %s: %v", o.Name, err))
			}
		}
	}
}

// Usage returns the help text; flag is how it writes the name of an option.
func (o Option) Usage(flag func(name string) string) string {
	text := Expand(o.usage, flag)
	if len(o.Choices) > 0 {
		text += ": " + strings.Join(o.Choices, ", ")
	}
	return text
}

// Expand writes the {names} of options in a text as flags, and {@names} of lists as what is in
// them. Other text in braces stays.
func Expand(text string, flag func(name string) string) string {
	return errs.Braces(text, func(name string) string {
		if list, is := strings.CutPrefix(name, "@"); is {
			return strings.Join(listOf(list), ", ")
		}
		return flag(name)
	})
}

// Tag returns a tag of the field.
func (o Option) Tag(name string) (text string, is bool) { return o.tag.Lookup(name) }

// Value returns the field's value.
func (o Option) Value() any { return o.value.Interface() }

// Pointer returns the field's address.
func (o Option) Pointer() any { return o.value.Addr().Interface() }

// IsSwitch reports whether the option is on or off.
func (o Option) IsSwitch() bool {
	own, is := o.Pointer().(interface{ IsBoolFlag() bool })
	return o.value.Kind() == reflect.Bool && !o.ownText() || is && own.IsBoolFlag()
}

// ownText reports whether the field's type reads its text itself.
func (o Option) ownText() bool {
	switch o.Pointer().(type) {
	case Texter, encoding.TextUnmarshaler:
		return true
	}
	return false
}

// IsText reports whether the option is written as text that Set reads in a way of its own: a
// string, a list, a size, a share, words for numbers, or a type with UnmarshalText.
func (o Option) IsText() bool {
	if o.IsSwitch() {
		return false
	}
	for _, tag := range []string{"size", "share", "named", "ints"} {
		if _, is := o.tag.Lookup(tag); is {
			return true
		}
	}
	_, budget := o.Value().(units.Budget)
	_, reads := o.tag.Lookup("text")
	k := o.value.Kind()
	return budget || reads || k == reflect.String || k == reflect.Slice || o.ownText()
}

// Set sets the field from text. Its errors are of class usage and name the option (errs.Key).
func (o Option) Set(text string) error {
	if s, is := o.owner.Addr().Interface().(Setter); is {
		if done, err := s.SetOption(o.Name, text); done || err != nil {
			return err
		}
	}
	err := o.setChecked(text)
	if hint := o.tag.Get("hint"); err != nil && hint != "" {
		return errs.Errorf("%w; %s", err, hint)
	}
	return err
}

// setChecked sets the field from text as the tags say.
func (o Option) setChecked(text string) error {
	for _, w := range words(o.tag.Get("named")) {
		if word, number, _ := strings.Cut(w, "="); word == text {
			return o.refusal(o.setNumber(number))
		}
	}
	if err := o.set(text); err != nil {
		return o.refusal(err)
	}
	if err := o.checkChoice(); err != nil {
		return err
	}
	if o.tag.Get("positive") != "" && o.value.IsZero() {
		return errs.New(errs.Usage, "%v %s is not a positive number", errs.Key(o.Name), text)
	}
	if err := o.checkRange(); err != nil {
		return err
	}
	if zero := o.tag.Get("zero"); zero != "" && o.value.IsZero() {
		return o.refusal(o.setNumber(zero))
	}
	return nil
}

// refusal is the error of a text that the option can't have.
func (o Option) refusal(err error) error {
	if err == nil || errs.Names(err, errs.Key(o.Name)) {
		return err
	}
	return errs.New(errs.Usage, "%v %w", errs.Key(o.Name), err)
}

// Check refuses values that the tags of a struct's options do not allow, where a field is set.
func Check(ptr any) error {
	for _, o := range Of(ptr) {
		if o.value.IsZero() {
			continue
		}
		if err := o.checkChoice(); err != nil {
			return err
		}
		if err := o.checkRange(); err != nil {
			return err
		}
	}
	return nil
}

// checkChoice refuses a value that is none of the choices.
func (o Option) checkChoice() error {
	if len(o.Choices) == 0 {
		return nil
	}
	values := []string{fmt.Sprint(o.Value())}
	if list, is := o.Value().([]string); is {
		values = list
	}
	for _, v := range values {
		switch {
		case slices.Contains(o.Choices, v):
		case o.value.CanInt():
			return errs.New(errs.Usage, "%v %s is none of %s", errs.Key(o.Name), v,
				strings.Join(o.Choices, ", "))
		default:
			return errs.New(errs.Usage, "unknown %v %q; %s", errs.Key(o.Name), v,
				OneOf(v, o.Choices))
		}
	}
	return nil
}

// checkRange refuses a value outside the range of the tag, and a share outside its own.
func (o Option) checkRange() error {
	_, share := o.tag.Lookup("share")
	if share && !(o.value.Float() <= 1 && o.value.Float() >= 0) && o.tag.Get("below") == "" {
		return errs.New(errs.Usage, "%v %v is not a share of 0%% to 100%%", errs.Key(o.Name),
			o.Value())
	}
	if x := o.value; x.CanFloat() && (math.IsNaN(x.Float()) || math.IsInf(x.Float(), 0)) {
		return errs.New(errs.Usage, "%v %v is not a number", errs.Key(o.Name), o.Value())
	}
	if limit := o.tag.Get("below"); limit != "" {
		if x, err := strconv.ParseFloat(limit, 64); err != nil || !(o.value.Float() >= 0 &&
			o.value.Float() < x) {
			return errs.New(errs.Usage, "%v %v is not in [0, %s)", errs.Key(o.Name), o.Value(), limit)
		}
	}
	bounds := o.tag.Get("range")
	if bounds == "" || o.value.IsZero() || o.isNamed() {
		return nil
	}
	low, high, _ := strings.Cut(bounds, "..")
	refused := func(text string) error {
		return errs.New(errs.Usage, "%v %v is not %s", errs.Key(o.Name), o.Value(), text)
	}
	switch below, above := o.beyond(low, high); {
	case !below && !above:
		return nil
	case high == "":
		return errs.New(errs.Usage, "%v %v is below %s", errs.Key(o.Name), o.Value(), low)
	default:
		return refused("between " + low + " and " + high)
	}
}

// isNamed reports whether the value is the number of a word.
func (o Option) isNamed() bool {
	return slices.ContainsFunc(words(o.tag.Get("named")), func(w string) bool {
		_, number, _ := strings.Cut(w, "=")
		return number == fmt.Sprint(o.Value())
	})
}

// beyond compares the value with bounds; an empty one is none.
func (o Option) beyond(low, high string) (below, above bool) {
	number := func(text string) float64 {
		if d, err := time.ParseDuration(text); err == nil && o.value.Type() == durationType {
			return float64(d)
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			panic("options: the range of " + o.Name)
		}
		return v
	}
	v := 0.0
	switch {
	case o.value.CanInt():
		v = float64(o.value.Int())
	case o.value.CanUint():
		v = float64(o.value.Uint())
	default:
		v = o.value.Float()
	}
	return low != "" && !(v >= number(low)), high != "" && !(v <= number(high))
}

var durationType = reflect.TypeFor[time.Duration]()

func (o Option) set(text string) error {
	switch u := o.Pointer().(type) {
	case Texter:
		return u.SetText(text)
	case encoding.TextUnmarshaler:
		return u.UnmarshalText([]byte(text))
	case *units.Budget:
		b, err := units.ParseBudget(text)
		if err == nil {
			*u = b
		}
		return err
	}
	if least, ok := o.tag.Lookup("size"); ok {
		return o.setSize(text, least)
	}
	if _, ok := o.tag.Lookup("share"); ok {
		v, err := units.ParseShare(text)
		if err == nil {
			o.value.SetFloat(v)
		}
		return err
	}
	if least, ok := o.tag.Lookup("ints"); ok {
		low, err := strconv.Atoi(least)
		if err != nil {
			panic("options: the ints of " + o.Name)
		}
		list, err := units.ParseInts(text, low)
		if err == nil {
			o.value.Set(reflect.ValueOf(list))
		}
		return err
	}
	switch k := o.value.Kind(); k {
	case reflect.String:
		o.value.SetString(text)
	case reflect.Slice:
		list, err := List(text)
		if err != nil {
			return err
		}
		o.value.Set(reflect.ValueOf(list))
	default:
		return o.setNumber(text)
	}
	return nil
}

// setNumber sets a field that is a number, a time or a switch.
func (o Option) setNumber(text string) error {
	if o.value.Type() == durationType {
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not a time such as 500ms or 5s", text)
		}
		o.value.SetInt(int64(d))
		return nil
	}
	switch k := o.value.Kind(); k {
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		o.value.SetBool(b)
	case reflect.Int, reflect.Int64:
		n, err := strconv.ParseInt(text, 10, o.value.Type().Bits())
		if err != nil {
			return fmt.Errorf("%q is not a whole number in range", text)
		}
		o.value.SetInt(n)
	case reflect.Uint64:
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return fmt.Errorf("%q is not a whole number from 0", text)
		}
		o.value.SetUint(n)
	case reflect.Float64:
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return fmt.Errorf("%q is not a number", text)
		}
		o.value.SetFloat(x)
	default:
		panic(fmt.Sprintf("options: %s is of kind %s, which has no text", o.Name, k))
	}
	return nil
}

func (o Option) setSize(text, least string) error {
	n, err := units.ParseBytes(text)
	if err != nil {
		return err
	}
	if least == "" {
		least = "0"
	}
	if m, err := units.ParseBytes(least); err != nil || n < m {
		return fmt.Errorf("%s is too little; give at least %s", text, least)
	}
	o.value.SetInt(n)
	return nil
}

// List splits a,b; white space around the parts goes, and an empty part is refused. An empty text
// is no list.
func List(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, ",")
	for i, p := range parts {
		if parts[i] = strings.TrimSpace(p); parts[i] == "" {
			return nil, fmt.Errorf("%q has an empty part; write it like a,b", text)
		}
	}
	return parts, nil
}
