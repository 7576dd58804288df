// Package spec declares the settings of packed mini-batches, and their figures in results.
package spec

import (
	"fmt"
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"helios/internal/errs"
	"helios/internal/units"
)

// PackedSettings place mini-batches that are laid out on disk before training.
type PackedSettings struct {
	// PackedDir is their folder; empty: beside the dataset. DiskBudget bounds their bytes; zero:
	// three times the features. Segment is how many of them share a disk cache; 0: what is best
	// under the budget.
	PackedDir  string     `option:"packed" group:"Tiers" use:"aside" shown:"packed in the dataset's folder" arg:"FOLDER" usage:"FOLDER of mini-batches that are laid out before training ({mode} {@packed-modes}); what is not there yet is prepared"`
	DiskBudget DiskBudget `option:"disk-budget" group:"Tiers" shown:"3x" arg:"SIZE" usage:"room that their pages may take: a SIZE, or a multiple of the features such as 5x"`
	Segment    int        `option:"segment" group:"Tiers" positive:"yes" range:"1.." shown:"searched for" usage:"mini-batches that share a disk cache"`
}

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

// PackedFolder returns the folder of the mini-batches; dataset is the dataset's own.
func (s PackedSettings) PackedFolder(dataset string) string {
	if s.PackedDir == "" {
		return filepath.Join(dataset, "packed")
	}
	return s.PackedDir
}

// SetText reads a size, or a multiple of the features.
func (b *DiskBudget) SetText(text string) (err error) {
	*b, err = ParseDiskBudget(text)
	return err
}

// IsZero reports whether nothing is given.
func (b DiskBudget) IsZero() bool { return b == DiskBudget{} }

// IsSize reports whether it can be a size.
func (b DiskBudget) IsSize() bool {
	return b.Bytes >= 0 && b.Times >= 0 && (b.Bytes == 0 || b.Times == 0)
}
