package plan

import "helios/internal/errs"

// ModeInmem is the upper bound: no batch reads an SSD.
const ModeInmem = "inmem"

var inmemMode = &Mode{
	Name:     ModeInmem,
	Summary:  "every row is in memory before the first batch: the bound that the others aim at",
	InMemory: true,
	Fill:     func(c *Config) { c.autoGPUTier() },
	Check: func(c Config) error {
		if c.Dynamic() || c.Planned() {
			return errs.New(errs.Usage,
				"%v %s: %v %s has every row in memory, so that nothing comes or goes; leave it out, or use %v %s",
				errs.Key("policy"), c.Policy, errs.Key("mode"), c.Mode, errs.Key("mode"),
				DefaultMode)
		}
		return nil
	},
}
