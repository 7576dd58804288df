package plan

import (
	"helios/internal/errs"
	"helios/internal/options"
)

// Sample epochs: an epoch of training draws its mini-batches, their seeds' order and their
// neighbours, under a number. Usually that is the epoch's own. With Config.SampleEpochs E there are
// E numbers at a time, each in a slot of its own, and training goes round the slots: what was
// sampled once trains often, as where it was laid out on disk beforehand. With Config.Refresh K the
// K oldest give way to new numbers after every Config.RefreshEvery epochs of training. Everything
// but the sampling, such as dropout, keeps the epoch's own number.

// EpochOptions returns the keys of SampleEpochs, Refresh and RefreshEvery.
func EpochOptions() []string { return options.Names(&EpochSettings{}) }

// SampleEpoch returns the number under which an epoch of training, counted from 0, is sampled. A
// number n is in slot n mod SampleEpochs while it is one of LiveEpochs.
func (c Config) SampleEpoch(epoch int) int {
	if c.SampleEpochs == 0 {
		return epoch
	}
	_, end := c.LiveEpochs(epoch)
	last := end - 1 // and of the epoch's slot, the number at or below it
	return last - ((last-epoch)%c.SampleEpochs+c.SampleEpochs)%c.SampleEpochs
}

// LiveEpochs returns the numbers first to end-1 that are in slots while an epoch trains.
func (c Config) LiveEpochs(epoch int) (first, end int) {
	if c.SampleEpochs == 0 {
		return epoch, epoch + 1
	}
	if c.Refresh > 0 {
		first = epoch / c.RefreshEvery * c.Refresh
	}
	return first, first + c.SampleEpochs
}

// SampledAs returns SampleEpoch for the first n epochs, at most those of the run.
func (c Config) SampledAs(n int) []int {
	all := make([]int, min(n, c.Epochs))
	for e := range all {
		all[e] = c.SampleEpoch(e)
	}
	return all
}

// Resamples reports whether one of the first n epochs is not sampled under its own number.
func (c Config) Resamples(n int) bool {
	for e, s := range c.SampledAs(n) {
		if e != s {
			return true
		}
	}
	return false
}

// checkEpochs refuses sample epochs that can't be.
func (c Config) checkEpochs() error {
	samples, refresh, every := errs.Key(EpochOptions()[0]), errs.Key(EpochOptions()[1]),
		errs.Key(EpochOptions()[2])
	switch {
	case c.RefreshEvery > 0 && c.Refresh == 0:
		return errs.New(errs.Usage,
			"%v %d: say with %v how many sample epochs are new after so many epochs, or leave it out",
			every, c.RefreshEvery, refresh)
	case c.Refresh > 0 && c.SampleEpochs == 0:
		return errs.New(errs.Usage,
			"%v %d: without %v every epoch has new samples anyhow; give it, or leave this out",
			refresh, c.Refresh, samples)
	case c.Refresh > c.SampleEpochs:
		return errs.New(errs.Usage, "%v %d: there are %d sample epochs; give at most so many",
			refresh, c.Refresh, c.SampleEpochs)
	}
	if _, end := c.LiveEpochs(max(c.Epochs-1, 0)); c.SampleEpochs > 0 && end > MaxEpochs {
		return errs.New(errs.Usage,
			"%v %d after every %d epochs comes to %d sample epochs, and there are at most %d; give a larger %v",
			refresh, c.Refresh, c.RefreshEvery, end, MaxEpochs, every)
	}
	return nil
}
