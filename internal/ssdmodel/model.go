// Package ssdmodel times the requests of an SSD, from the figures of its data sheet: a latency
// distribution, IOPS by request size, bandwidth, and what is reached at small queue depths.
//
// A model has no clock of its own. A Server is told when a command arrives and answers when it
// completes, so the software controller of nvme/proxy plays the same model in wall time that a
// discrete-event simulation plays in virtual time.
//
// In a closed loop of d commands the throughput is min(d / latency, curve at d, IOPS cap,
// bandwidth / bytes), a little rounded where two of them meet.
package ssdmodel

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"helios/internal/errs"
	"helios/internal/infile"
	"helios/internal/units"
)

// Op names what a command does.
type Op uint8

// The operations of a model.
const (
	Read Op = iota
	Write
	Flush
	numOps
)

func (o Op) String() string { return [...]string{"read", "write", "flush"}[o] }

// Model is an SSD in figures. Every group of figures names its source; one that nobody published
// begins with "assumed" and gives the reason.
type Model struct {
	Name     string   `yaml:"name"`
	Title    string   `yaml:"title"` // what it stands for, in a line
	Capacity Capacity `yaml:"capacity"`
	LBAs     LBAs     `yaml:"lbas"`
	Read     Ops      `yaml:"read"`
	Write    Ops      `yaml:"write"`
	Flush    Ops      `yaml:"flush"`

	ops [numOps]timing
}

// Capacity is the size of the SSD that the figures belong to; 0 means any.
type Capacity struct {
	Bytes  int64  `yaml:"bytes"`
	Source string `yaml:"source"`
}

// LBAs are the block sizes that the SSD can be formatted with; none given means any.
type LBAs struct {
	Bytes  []int  `yaml:"bytes,flow"`
	Source string `yaml:"source"`
}

// Ops are the figures of one kind of command. Only the latency has to be there.
type Ops struct {
	Latency   Latency   `yaml:"latency"`
	IOPS      IOPS      `yaml:"iops,omitempty"`
	Bandwidth Bandwidth `yaml:"bandwidth,omitempty"`
	Curve     Curve     `yaml:"curve,omitempty"`
}

// Latency is the time from a command's arrival at an idle SSD to its completion, as quantiles with
// straight lines in between: the first is that of 0 and the last of 1, or there is only one.
// The transfer of Bytes (default 4096) is contained; the rest of a larger command comes on top.
type Latency struct {
	Quantiles []Quantile `yaml:"quantiles,flow"`
	Bytes     int64      `yaml:"bytes,omitempty"`
	Source    string     `yaml:"source"`
}

// Quantile says that a share Q of the commands takes at most US microseconds.
type Quantile struct {
	Q  float64 `yaml:"q"`
	US float64 `yaml:"us"`
}

// IOPS caps the commands a second by their size. Between two sizes the time per command is
// interpolated; outside them the nearest counts, and the bandwidth.
type IOPS struct {
	Caps   []Cap  `yaml:"caps,flow"`
	Source string `yaml:"source"`
}

// Cap is the most commands a second of one size.
type Cap struct {
	Bytes int64   `yaml:"bytes"`
	IOPS  float64 `yaml:"iops"`
}

// Bandwidth is that of the link or of the medium, whichever is smaller, in 10^6 bytes a second.
type Bandwidth struct {
	MBs    float64 `yaml:"mb_s"`
	Source string  `yaml:"source"`
}

// Curve is the throughput reached with Depth commands outstanding, for commands of the latency's
// size; smaller ones gain as their cap does. Straight lines in between, flat after the last point.
// Where the latency alone allows less than the curve, the latency holds.
type Curve struct {
	Points []Point `yaml:"points,flow"`
	Source string  `yaml:"source"`
}

// Point is a point of a queue-depth curve.
type Point struct {
	Depth int     `yaml:"depth"`
	IOPS  float64 `yaml:"iops"`
}

//go:embed models/*.yaml
var builtin embed.FS

// Names returns the models that are built in, in alphabetical order.
func Names() []string {
	var names []string
	entries, _ := builtin.ReadDir("models") // compiled in: it is there
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// Load returns the built-in model of that name, or the one that a YAML file describes.
func Load(nameOrPath string) (*Model, error) {
	text, err := builtin.ReadFile("models/" + nameOrPath + ".yaml")
	from := "built-in model " + nameOrPath
	if err != nil {
		from = nameOrPath
		if text, err = infile.Read(nameOrPath, 1<<20); err != nil {
			return nil, errs.New(errs.Usage,
				"SSD model %q is neither built in (%s) nor a file that can be read: %w",
				nameOrPath, strings.Join(Names(), ", "), err)
		}
	}
	m, err := Parse(text)
	if err != nil {
		return nil, errs.New(errs.Usage, "SSD model %s: %w", from, err)
	}
	return m, nil
}

// Parse reads a model from YAML and checks it.
func Parse(text []byte) (*Model, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(text, &root); err != nil {
		return nil, err
	}
	if len(root.Content) == 0 {
		return nil, errors.New("is empty")
	}
	if n := root.Content[0]; n.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("line %d is not \"key: value\"", n.Line)
	}
	m := new(Model)
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(m); err != nil {
		return nil, err
	}
	if err := m.init(); err != nil {
		return nil, err
	}
	return m, nil
}

// Fixed is the model of an SSD that answers every command after d and is bounded by nothing else.
func Fixed(d time.Duration) (*Model, error) {
	ops := Ops{Latency: Latency{Quantiles: []Quantile{{Q: 1, US: float64(d) / 1e3}},
		Source: "given"}}
	m := &Model{Name: d.String(), Title: "every command takes " + d.String(), Read: ops, Write: ops,
		Flush: ops}
	if err := m.init(); err != nil {
		return nil, errs.New(errs.Usage, "an SSD that takes %v: %w", d, err)
	}
	return m, nil
}

// The largest figures that a model may have keep all sums far inside 64 bits.
const (
	maxLatencyUS = 10e6
	maxIOPS      = 1e9
	maxDepth     = 1 << 16
	maxBytes     = 1 << 40
)

func (m *Model) init() error {
	if m.Name == "" {
		return fmt.Errorf("it has no name")
	}
	if m.Capacity.Bytes < 0 || m.Capacity.Bytes > 0 && m.Capacity.Source == "" {
		return fmt.Errorf("capacity: %d bytes, source %q; give a size and where it is from",
			m.Capacity.Bytes, m.Capacity.Source)
	}
	for _, b := range m.LBAs.Bytes {
		if b != 512 && b != 4096 {
			return fmt.Errorf("lbas: blocks of %d bytes; 512 and 4096 are possible", b)
		}
	}
	for op, f := range []*Ops{&m.Read, &m.Write, &m.Flush} {
		t, err := f.timing()
		if err != nil {
			return fmt.Errorf("%s: %w", Op(op), err)
		}
		m.ops[op] = t
	}
	return nil
}

// Fits reports whether the SSD is as large as that.
func (m *Model) Fits(bytes int64) bool { return m.Capacity.Bytes == 0 || bytes <= m.Capacity.Bytes }

// LBAOK reports whether the SSD can have blocks of that size.
func (m *Model) LBAOK(bytes int) bool {
	return len(m.LBAs.Bytes) == 0 || slices.Contains(m.LBAs.Bytes, bytes)
}

// MeanLatency returns the mean time of a command of the latency's size at an idle SSD.
func (m *Model) MeanLatency(op Op) time.Duration { return time.Duration(m.ops[op].mean / 1000) }

// Peak returns the most commands a second of one size; +Inf where nothing bounds them.
func (m *Model) Peak(op Op, bytes int64) float64 {
	t := &m.ops[op]
	ps := max(float64(t.interval(bytes)), float64(bytes)*t.psPerByte)
	if ps == 0 {
		return math.Inf(1)
	}
	return 1e12 / ps
}

// Summary is the model in a few words: latency, IOPS at 4 KiB and bandwidth of reads.
func (m *Model) Summary() string {
	s := fmt.Sprintf("reads: %v", m.MeanLatency(Read).Round(100*time.Nanosecond))
	if p := m.Peak(Read, 4096); !math.IsInf(p, 1) {
		s += fmt.Sprintf(", %s IOPS of 4 KiB", units.FormatCount(p))
	}
	if b := m.Read.Bandwidth.MBs; b > 0 {
		s += fmt.Sprintf(", %sB/s", units.FormatCount(b*1e6))
	}
	return s
}
