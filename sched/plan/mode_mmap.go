package plan

import "helios/gpuio"

// ModeMmap is the data path of PyG+ and of DGL on a mapped file.
const ModeMmap = "mmap"

var mmapMode = &Mode{
	Name:    ModeMmap,
	Summary: "rows are read through a mapping of the file, by the kernel's page cache",
	Fill: func(c *Config) {
		orText(&c.IOStack, gpuio.StackMmap)
		orText(&c.Pipeline, PipelinePrefetch)
	},
	Baselines: []Baseline{
		// maps the topology, too (Park et al., VLDB 2022, section 5.1)
		{Name: "pyg+", Options: [][2]string{{"topology", TopologySSD}}},
	},
}
