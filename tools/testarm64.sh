#!/usr/bin/env bash
# arm64 on this machine, by QEMU's user mode: the binary of a release shows its version and runs
# a job from generate to report, tests of packages run, nothing that makes results fuses a product into a sum, and models have the
# parameters of amd64: tools/testarm64.sh. Needs qemu-aarch64-static, and apt for arm64's C library.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CGO_ENABLED=0
./tools/debianroot.sh arm64 "$work/root"
GOARCH=arm64 go build -o "$work/arm64" ./cmd/heliosctl
GOARCH=amd64 go build -o "$work/amd64" ./cmd/heliosctl
printf '#!/bin/sh\nexec qemu-aarch64-static -L "%s" "%s" "$@"\n' "$work/root" "$work/arm64" >"$work/heliosctl"
chmod +x "$work/heliosctl"
"$work/heliosctl" version | grep -F linux/arm64

fused=$(go tool objdump -s '^helios/(gnn|graph|dataset|cache/packed|internal/(simd|rowtype|metrics)|sched/engine)' "$work/arm64" |
	awk '$1 == "TEXT" { f = $2 } / FN?M(ADD|SUB)[SD] / && f !~ /graph.expDown/ && $1 !~ /^work.go/ { print f, $1 }')
if [ -n "$fused" ]; then
	echo "testarm64: these round once where amd64 rounds twice; write float64(x*y) or float32(x*y):" >&2
	echo "$fused" >&2
	exit 1
fi

export HELIOS_STATE=$work/state
# The demo's verbs: its own 342 mini-batches would take QEMU, which computes floats in software, two hours.
"$work/heliosctl" generate --nodes 3000 --dim 48 --classes 5 --seed 1 --out "$work/g"
"$work/heliosctl" bind-ssds --proxy "$work/a.img" --size 16MiB
"$work/heliosctl" load "$work/g"
"$work/heliosctl" verify "$work/g"
"$work/heliosctl" compare "$work/g" --modes helios,cpu --repeats 1 --epochs 1 --hidden 16 --results "$work/compare.jsonl"
"$work/heliosctl" report "$work/compare.jsonl" --out "$work/report.html"
for settings in '--mode inmem --model sage --label-smoothing 0.1 --norm batch' '--mode helios --model gat --heads 4 --dropout 0.3' \
	'--mode gids --model gcn --gpu-cache 10%' '--mode cpu --model gin --norm layer'; do
	for program in "$work/amd64" "$work/heliosctl"; do
		# shellcheck disable=SC2086 # several words
		"$program" train "$work/g" $settings --epochs 2 --hidden 32 --batch-size 256 --kernels generic --json --quiet |
			grep -oE '"params_sha256":"[0-9a-f]+"' | tail -n 1
	done | uniq -c | { read -r times sum && echo "$settings: $sum" && [ "$times" = 2 ]; } || {
		echo "testarm64: train $settings: arm64 has other parameters than amd64" >&2
		exit 1
	}
done

# Tests on the fake libcuda, which a C++ compiler makes for this processor, skip.
# A test of a file that is cut while it is mapped can't pass: QEMU's SIGBUS does not say where it was.
GOARCH=arm64 CXX=none go test -tags nocuda -vet=off -short -timeout 40m -exec qemu-aarch64-static \
	-skip '^TestTruncatedBacking$' ./internal/simd ./internal/rowtype ./gnn ./graph ./cache ./dataset ./nvme/proxy
