package kernels

import "embed"

//go:generate go -C ../../tools run ./kernels generate

//go:embed ptx
var ptx embed.FS
