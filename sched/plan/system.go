package plan

import (
	"slices"
	"strings"

	"helios/internal/errs"
	"helios/internal/options"
)

// System is a way to keep rows and to bring them to mini-batches, as a configuration asks for it.
// Its folder in sched/tiers declares it, and has how it runs, is simulated and is predicted. A
// function that is nil has nothing to say.
type System struct {
	// Runs reports whether runs keep rows this way under the policy of c; nil: only those of modes
	// whose own system it is, under any policy.
	Runs func(c *Config) bool
	// Settings returns those of c that mean something to the system alone, and Shared the keys of
	// those that it shares with other systems.
	Settings func(c *Config) any
	Shared   []string
	// Fill sets what c leaves open. Modes come first.
	Fill func(c *Config)
	// Check refuses what the system can't do; c is filled.
	Check func(c Config) error
	// Keeps names the rows that it keeps in memory, whatever is hot; "": those that are hot, or
	// CheckAsked says.
	Keeps string
	// CheckAsked refuses what only shows before defaults are filled in: filled is asked with them.
	CheckAsked func(asked, filled Config) error
	// Elsewhere is the error of its setting key in a run of another system; nil: the setting needs
	// one of its modes.
	Elsewhere func(c Config, key string) error
	// Traits returns what the rest of a run has to know.
	Traits func(c *Config) Traits
	// Draws returns the settings that decide which nodes a mini-batch may have.
	Draws func(c *Config) []any
	// Apart returns the setting of a folder whose content depends on the sizes of the tiers; nil:
	// there is none, or it is set.
	Apart func(c *Config) *string
	// Divide divides budgets that serve sampling and training, of a graph whose features take so
	// many bytes and whose neighbour cache is of least to limit bytes.
	Divide func(c *Config, features, least, limit int64)
}

// Traits describe a system to the engine, the operator graph and comparisons.
type Traits struct {
	ByHotness bool // rows are placed by hotness
	Inclusive bool // a row may be in both tiers
	OneBudget bool // what runs have in memory comes out of the CPU tier's budget
	// Staged: reads land beside their places, so that a gather waits for them. LateTensor: a
	// mini-batch has its tensor of features from its gather on, not from its lookup.
	Staged, LateTensor bool
	// Ahead: many mini-batches are sampled before the first of them trains. Changes: it is found
	// then which rows move between tiers.
	Ahead, Changes bool
	// Lends: the CPU tier's memory is the neighbour cache's while mini-batches are sampled.
	Lends bool
	// Writes: it keeps mini-batches on the dataset's file system.
	Writes bool
	// Untyped gives the reason that it can't train on typed graphs; "": it can.
	Untyped string
	// OneProcess gives the reason that ranks can't share its work; "": they can.
	OneProcess string
}

// Catalog lists what a run can be. The list is that of sched/tiers.
type Catalog struct {
	// Modes in the order of lists. Comparisons run them in this order and report figures relative
	// to the first.
	Modes []*Mode
	// Systems: a run has its mode's own, or else the first that runs its policy.
	Systems []*System
}

// catalog has what the program's runs can be. Without package tiers it is empty, and every
// configuration is refused.
var catalog = &Catalog{}

// Use makes k what the program's runs can be, before the first configuration is filled in.
func Use(k *Catalog) bool {
	catalog = k
	return true
}

// Names returns the names of the modes.
func (k *Catalog) Names() []string {
	names := make([]string, len(k.Modes))
	for i, m := range k.Modes {
		names[i] = m.Name
	}
	return names
}

// Mode returns the mode of a name.
func (k *Catalog) Mode(name string) (*Mode, error) {
	if i := slices.IndexFunc(k.Modes, func(m *Mode) bool { return m.Name == name }); i >= 0 {
		return k.Modes[i], nil
	}
	return nil, unknown("mode", name, k.Names())
}

// Baselines returns those of all modes.
func (k *Catalog) Baselines() (all []Baseline) {
	for _, m := range k.Modes {
		for _, b := range m.Baselines {
			b.Mode = m.Name
			all = append(all, b)
		}
	}
	return all
}

// Variants returns the defaults of all modes, for help, and the mode of a run that names none.
func (k *Catalog) Variants() (names []string, each []any, usual string) {
	for _, m := range k.Modes {
		d := m.Defaults()
		names, each = append(names, m.Name), append(each, &d)
	}
	return names, each, DefaultMode
}

// Options returns the keys of the options of all systems.
func (k *Catalog) Options() (keys []string) {
	for _, s := range k.Systems {
		keys = append(keys, s.options()...)
	}
	return keys
}

// With returns the names of the modes whose own system has an option.
func (k *Catalog) With(key string) (names []string) {
	for _, m := range k.Modes {
		if m.Own != nil && slices.Contains(m.Own.options(), key) {
			names = append(names, m.Name)
		}
	}
	return names
}

// options returns the keys of the system's options.
func (s *System) options() []string {
	if s.Settings == nil {
		return s.Shared
	}
	return append(options.Names(s.Settings(&Config{})), s.Shared...)
}

// System returns the system that keeps the rows of c's runs. Static tiers run every policy.
func (c *Config) System() *System {
	if own := c.mode().Own; own != nil && !c.Unpacked {
		return own
	}
	for _, s := range catalog.Systems {
		if s.Runs != nil && s.Runs(c) {
			return s
		}
	}
	return &System{}
}

// Traits returns those of the system.
func (c Config) Traits() Traits {
	if t := c.System().Traits; t != nil {
		return t(&c)
	}
	return Traits{}
}

// checkSystem refuses what the system that runs can't do, and settings of others.
func (c Config) checkSystem() error {
	runs := c.System()
	if runs.Check != nil {
		if err := runs.Check(c); err != nil {
			return err
		}
	}
	has := runs.options()
	if own := c.mode().Own; own != nil { // evaluation leaves its settings alone
		has = append(has, own.options()...)
	}
	for _, s := range catalog.Systems {
		if s == runs {
			continue
		}
		for _, key := range s.options() {
			o, _ := options.Find(&c, key)
			switch {
			case !o.IsSet() || slices.Contains(has, key):
			case s.Elsewhere != nil:
				return s.Elsewhere(c, key)
			default:
				return errs.New(errs.Usage, "%v is a setting of %v %s, and this run has %s; leave it out, or change the mode",
					errs.Key(key), errs.Key("mode"), strings.Join(catalog.With(key), " or "), c.Mode)
			}
		}
	}
	return nil
}

// HotnessAsked reports whether c has a setting of how hotness places rows.
func (c Config) HotnessAsked() bool {
	return c.Hotness != "" || c.Presample != 0 || c.HotnessDir != "" && c.HotnessDir != NoFolder
}

// checkShared refuses a shared budget that nothing could move.
func (c Config) checkShared() error {
	if c.NeighborShared && c.System().Divide == nil {
		return errs.New(errs.Usage,
			"%v shared is memory that the CPU cache lends while a superbatch is sampled, and under %v %s none is; give a size, or use %v %s",
			errs.Key("neighbor-cache"), errs.Key("policy"), c.Policy, errs.Key("policy"),
			PolicyBelady)
	}
	return nil
}

// Where pages are that a system has laid out: Config.PagesOn.
const (
	PagesFolder = "folder" // in files of a folder
	PagesSSDs   = "ssds"   // on the bound SSDs, behind the features
)

// PagePlaces are the names of where pages can be.
var PagePlaces = []string{PagesFolder, PagesSSDs}
