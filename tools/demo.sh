#!/usr/bin/env bash
# The main job from nothing: bind file-backed SSDs, lay a real graph's features out on them,
# train out of core in helios mode, and train the CPU-managed comparison with the same seed.
# Everything, results included, stays in ./demo-out (or the folder given as the argument).
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-demo-out}
hc=$PWD/bin/heliosctl
marker=.heliosctl-demo
start=$SECONDS
if [ ! -x "$hc" ]; then
	echo "demo: bin/heliosctl is not built; run \"make demo\"" >&2
	exit 1
fi

# Only a folder that an earlier demo made is removed.
if [ -e "$out" ]; then
	if [ ! -f "$out/$marker" ]; then
		echo "demo: $out is there and no demo made it; move it away or name another folder: tools/demo.sh DIR" >&2
		exit 1
	fi
	rm -rf -- "$out"
fi
mkdir -p "$out"
touch "$out/$marker"
cd "$out"
export HELIOS_STATE=$PWD/state

say() { printf '\n== %s\n' "$*"; }
# field FILE KEY: a scalar of the last JSON line of FILE.
field() { tail -n 1 "$1" | grep -oE "\"$2\":(\"[^\"]*\"|[^],}]*)" | tail -n 1 | cut -d: -f2- | tr -d '"'; }

say "two SSDs, played by software controllers over files"
"$hc" bind-ssds --proxy ssd-a.img,ssd-b.img --size 512MiB

say "a graph"
if "$hc" import debian --out graph --json >import.jsonl 2>import.err; then
	source="the Debian package index of this machine"
else
	code=$?
	if [ "$code" -eq 130 ]; then exit 130; fi
	echo "no Debian package lists to import ($(tail -n 1 import.err)); generating a stochastic block model instead"
	"$hc" generate --kind sbm --nodes 60000 --avg-degree 10 --classes 16 --dim 128 --seed 1 --out graph
	source="a generated graph (stochastic block model, 60,000 nodes)"
fi
echo "training on $source"

say "features onto the SSDs, and checked there"
"$hc" load --dataset graph
"$hc" verify --dataset graph

flags=(--dataset graph --model sage --fanout "10,10" --batch-size 1024 --hidden 128 --epochs 3 --lr 0.003 --seed 1 --workers 2)
say "GraphSAGE out of core, Helios: reads submitted by the device, GPU and CPU tiers, deep pipeline"
"$hc" train "${flags[@]}" --mode helios --gpu-cache 5% --cpu-cache 10% --pipeline deep --results helios.jsonl

say "the same training, CPU-managed: io_uring threads, CPU tier, prefetch"
"$hc" train "${flags[@]}" --mode cpu --cpu-cache 10% --results cpu.jsonl

say "random reads of the loaded rows, nothing else running"
"$hc" bench io --dataset graph --blocks 8 --stack async,cpu --results io.jsonl

say "result"
a=$(field helios.jsonl params_sha256)
b=$(field cpu.jsonl params_sha256)
echo "trained on    $source"
LC_ALL=C printf 'test accuracy helios %.4f, cpu %.4f\n' "$(field helios.jsonl test_acc)" "$(field cpu.jsonl test_acc)"
if [ -n "$a" ] && [ "$a" = "$b" ]; then
	echo "parameters    identical in both modes: sha256 $a"
else
	echo "demo: parameters differ between the modes: helios $a, cpu $b" >&2
	exit 5
fi
echo "results       $PWD/helios.jsonl, cpu.jsonl, io.jsonl (one JSON object per line)"
echo "time          $((SECONDS - start)) s"
