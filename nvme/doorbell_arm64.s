//go:build !race && arm64

#include "textflag.h"

// func StoreDoorbell(ptr *uint32, v uint32)
TEXT ·StoreDoorbell(SB), NOSPLIT, $0-12
	MOVD ptr+0(FP), R0
	MOVW v+8(FP), R1
	DMB  $2 // OSHST: outer shareable, stores
	MOVW R1, (R0)
	RET
