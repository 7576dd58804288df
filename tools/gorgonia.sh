#!/usr/bin/env bash
# The binding of -tags gorgonia (cgo, gorgonia.org/cu), which needs no GPU to build: builds heliosctl against
# CUDA 12 headers and the fake libcuda, and runs the conformance suite on it. tools/gorgonia.sh INCLUDE [OUT]:
# INCLUDE is the folder with cuda.h (tools/cudatools.sh), OUT the binary, with LDFLAGS for the Go linker.
# Without OUT the binary is tried and thrown away, and the cost of a call and a launch is measured on both
# bindings.
set -euo pipefail
include=$(realpath "${1:?usage: tools/gorgonia.sh FOLDER_WITH_cuda.h [OUT]}")
out=${2:+$(realpath -m "$2")}
cd "$(dirname "$0")/.."
if [ ! -f "$include/cuda.h" ]; then
	echo "gorgonia: no cuda.h in $include; tools/cudatools.sh fetches it" >&2
	exit 1
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

CGO_ENABLED=0 go -C tools run ./fakelib -o "$dir/lib"

# with COMMAND…: builds and runs as users of the tag do.
with() {
	CGO_ENABLED=1 CGO_CFLAGS="-I$include" CGO_LDFLAGS="-L$dir/lib" LD_LIBRARY_PATH="$dir/lib" "$@"
}

with go vet -tags gorgonia ./cuda/driver
with go build -tags gorgonia -ldflags "${LDFLAGS:-}" -o "$dir/heliosctl" ./cmd/heliosctl
if [[ $(readelf -d "$dir/heliosctl") != *'[libcuda.so.1]'* ]]; then
	echo "gorgonia: heliosctl of -tags gorgonia is not linked to libcuda" >&2
	exit 1
fi
with "$dir/heliosctl" version
with env HELIOS_LINKED_LIBCUDA="$dir/lib/libcuda.so.1" go test -tags gorgonia -count=1 -timeout 5m -run 'Gorgonia' ./cuda/driver
if [ -n "$out" ]; then
	install -D "$dir/heliosctl" "$out"
	echo "gorgonia: $out calls libcuda by gorgonia.org/cu, and starts where libcuda.so.1 of an NVIDIA driver is"
	exit
fi

# Why it is not the default: where there is no driver, the program does not start.
if LD_LIBRARY_PATH='' "$dir/heliosctl" version >"$dir/out" 2>&1; then
	echo "gorgonia: note: a libcuda of this machine was found without LD_LIBRARY_PATH"
else
	echo "gorgonia: without libcuda: $(head -n 1 "$dir/out")"
fi
bench=(-run '^$' -bench '^Benchmark(Call|Launch)$' -benchtime 20000x -count 5 -timeout 5m ./cuda/driver)
echo "calls and launches on gorgonia.org/cu (cgo):"
with env HELIOS_LINKED_LIBCUDA="$dir/lib/libcuda.so.1" go test -tags gorgonia "${bench[@]}" | grep -E '^(Benchmark|FAIL|ok)'
echo "calls and launches on purego (no cgo):"
CGO_ENABLED=0 go test "${bench[@]}" | grep -E '^(Benchmark|FAIL|ok)'
