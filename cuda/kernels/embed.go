package kernels

import "embed"

//go:generate go run helios/tools/kernels generate

//go:embed ptx
var ptx embed.FS
