package plan

import "helios/gnn"

// ModelConfig is the model that c trains, but for the numbers of features and classes, which the
// dataset has, and for the seed.
func (c *Config) ModelConfig() gnn.ModelConfig {
	return gnn.ModelConfig{ModelSettings: c.ModelSettings, LossSettings: c.LossSettings,
		Layers: len(c.Fanouts)}
}
