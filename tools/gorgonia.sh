#!/usr/bin/env bash
# The binding of -tags gorgonia (cgo, gorgonia.org/cu) without a GPU: builds and links heliosctl against
# CUDA 12 headers and the fake libcuda, runs the conformance suite on it, and measures what a call and a launch
# cost on both bindings. tools/gorgonia.sh INCLUDE, the folder with cuda.h (tools/cudatools.sh).
set -euo pipefail
include=$(realpath "${1:?usage: tools/gorgonia.sh FOLDER_WITH_cuda.h}")
cd "$(dirname "$0")/.."
if [ ! -f "$include/cuda.h" ]; then
	echo "gorgonia: no cuda.h in $include; tools/cudatools.sh fetches it" >&2
	exit 1
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

CGO_ENABLED=0 go run ./tools/fakelib -o "$dir/lib"

# with COMMAND…: builds and runs as users of the tag do.
with() {
	CGO_ENABLED=1 CGO_CFLAGS="-I$include" CGO_LDFLAGS="-L$dir/lib" LD_LIBRARY_PATH="$dir/lib" "$@"
}

with go vet -tags gorgonia ./cuda/driver
with go build -tags gorgonia -o "$dir/heliosctl" ./cmd/heliosctl
if [[ $(readelf -d "$dir/heliosctl") != *'[libcuda.so.1]'* ]]; then
	echo "gorgonia: heliosctl of -tags gorgonia is not linked to libcuda" >&2
	exit 1
fi
with "$dir/heliosctl" version
# Why it is not the default: where there is no driver, the program does not start.
if LD_LIBRARY_PATH='' "$dir/heliosctl" version >"$dir/out" 2>&1; then
	echo "gorgonia: note: a libcuda of this machine was found without LD_LIBRARY_PATH"
else
	echo "gorgonia: without libcuda: $(head -n 1 "$dir/out")"
fi

with env HELIOS_LINKED_LIBCUDA="$dir/lib/libcuda.so.1" go test -tags gorgonia -count=1 -timeout 5m -run 'Gorgonia' ./cuda/driver

bench=(-run '^$' -bench '^Benchmark(Call|Launch)$' -benchtime 20000x -count 5 -timeout 5m ./cuda/driver)
echo "calls and launches on gorgonia.org/cu (cgo):"
with env HELIOS_LINKED_LIBCUDA="$dir/lib/libcuda.so.1" go test -tags gorgonia "${bench[@]}" | grep -E '^(Benchmark|FAIL|ok)'
echo "calls and launches on purego (no cgo):"
CGO_ENABLED=0 go test "${bench[@]}" | grep -E '^(Benchmark|FAIL|ok)'
