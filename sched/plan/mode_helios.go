package plan

// ModeHelios is the data path of Helios.
const ModeHelios = "helios"

// DefaultMode is the mode of a configuration that names none.
const DefaultMode = ModeHelios

var heliosMode = &Mode{
	Name:    ModeHelios,
	Summary: "the GPU submits reads and goes on; static GPU and CPU tiers hold the hottest rows",
	Fill: func(c *Config) {
		c.autoGPUTier()
		c.cpuTier(10)
	},
}
