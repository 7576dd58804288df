package plan

import "helios/gnn"

// Network is the model that c trains, but for the numbers of features and classes, which the
// dataset has, and what decides no shape: dropout of activations and features, and the seed.
func (c *Config) Network() gnn.ModelConfig {
	return gnn.ModelConfig{
		Kind: c.Model, Hidden: c.Hidden, Layers: len(c.Fanouts), LearnEps: c.LearnEps,
		Heads: c.Heads, OutHeads: c.OutHeads,
		AttentionDropout: float32(c.AttentionDropout), Activation: c.Activation, Norm: c.Norm,
		Residual: c.Residual,
	}
}
