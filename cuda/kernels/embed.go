package kernels

import "embed"

//go:embed ptx
var ptx embed.FS
