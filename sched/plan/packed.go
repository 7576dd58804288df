package plan

import (
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
	"helios/internal/units"
)

// PackedOptions returns the keys of the options that mean something where mini-batches are laid out
// beforehand alone.
func PackedOptions() []string { return append(options.Names(&PackedSettings{}), "pages-on") }

// Where the pages of laid out mini-batches are: Config.PagesOn.
const (
	PagesFolder = "folder" // in files beside their samples
	PagesSSDs   = "ssds"   // on the bound SSDs, behind the features
)

// PagePlaces are the names of where pages can be.
var PagePlaces = []string{PagesFolder, PagesSSDs}

// defaultDiskTimes is the default of DiskBudget: the first that the paper's evaluation names.
const defaultDiskTimes = 3

// DiskBudget is the room that laid out mini-batches may take: bytes, or times the features' bytes.
// The zero value is the default.
type DiskBudget struct {
	Bytes int64
	Times float64
}

// ParseDiskBudget reads a size such as 200GiB, or a multiple such as 3x.
func ParseDiskBudget(text string) (b DiskBudget, err error) {
	if times, ok := strings.CutSuffix(text, "x"); ok {
		if b.Times, err = strconv.ParseFloat(times, 64); err == nil && !(b.Times > 0 &&
			b.Times <= 1<<20) {
			err = strconv.ErrRange
		}
	} else if b.Bytes, err = units.ParseBytes(text); err == nil && b.Bytes < 1 {
		err = strconv.ErrRange
	}
	if err != nil {
		return DiskBudget{}, errs.New(errs.Usage,
			"%v %s is neither a multiple of the features such as 3x nor a size such as 200GiB",
			errs.Key("disk-budget"), text)
	}
	return b, nil
}

// Of returns the bytes for features of so many.
func (b DiskBudget) Of(features int64) int64 {
	if b.Times > 0 {
		return int64(math.Min(b.Times*float64(features), math.MaxInt64/4))
	}
	return b.Bytes
}

func (b DiskBudget) String() string {
	if b.Times > 0 {
		return fmt.Sprintf("%gx", b.Times)
	}
	return units.FormatBytes(b.Bytes)
}

// PackedModes returns the names of the modes whose mini-batches are laid out beforehand.
func PackedModes() (names []string) {
	for _, m := range modes {
		if m.Packed {
			names = append(names, m.Name)
		}
	}
	return names
}

// LaidOut reports whether mini-batches are sampled and laid out on disk before training.
func (c Config) LaidOut() bool { return c.mode().Packed && !c.Unpacked }

// PackEpochs returns the sample epochs first to end-1 of the pack that has one of them: those that
// training begins with, or those of a refresh.
func (c Config) PackEpochs(sampleEpoch int) (first, end int) {
	n := c.SampleEpochs
	if n == 0 {
		n = c.Epochs
	}
	if sampleEpoch < n || c.Refresh == 0 {
		return 0, n
	}
	first = n + (sampleEpoch-n)/c.Refresh*c.Refresh
	return first, first + c.Refresh
}

// PackNumber returns which pack, counted from 0, has a sample epoch.
func (c Config) PackNumber(sampleEpoch int) int {
	first, _ := c.PackEpochs(sampleEpoch)
	if first == 0 {
		return 0
	}
	_, end := c.PackEpochs(0)
	return 1 + (first-end)/c.Refresh
}

// PackedFolder returns the folder that has the laid out mini-batches; dataset is the dataset's own.
func (c Config) PackedFolder(dataset string) string {
	if c.PackedDir == "" {
		return filepath.Join(dataset, "packed")
	}
	return c.PackedDir
}

// checkPacked refuses options of laid out mini-batches where there are none, and those that can't
// be.
func (c Config) checkPacked() error {
	key := options.FirstSet(&c.PackedSettings)
	if key == "" && c.PagesOn != "" && !c.mode().Mega() {
		key = "pages-on"
	}
	if key != "" && !c.mode().Packed {
		return errs.New(errs.Usage,
			"%v is of mini-batches that are laid out before training; use %v %s, or leave it out",
			errs.Key(key), errs.Key("mode"), strings.Join(PackedModes(), " or "))
	}
	b := c.DiskBudget
	switch {
	case b.Bytes < 0 || !(b.Times >= 0) || b.Bytes > 0 && b.Times > 0:
		return errs.New(errs.Usage, "%v of %d bytes and %v times the features is no size",
			errs.Key("disk-budget"), b.Bytes, b.Times)
	}
	return nil
}
