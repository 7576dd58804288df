#!/usr/bin/env bash
# The main job from nothing: bind file-backed SSDs, lay a real graph's features out on them,
# train out of core in helios mode, and train the CPU-managed comparison with the same seed.
# Everything, results included, stays in ./demo-out (or the folder given as the argument).
# "heliosctl demo" runs it.
set -euo pipefail

out=${1:-demo-out}
hc=${HELIOSCTL:?names heliosctl}
marker=.heliosctl-demo
start=$SECONDS
trap 'exit 130' INT # what falls back would go on

# Only a folder that an earlier demo made is removed.
if [ -e "$out" ]; then
	if [ ! -f "$out/$marker" ]; then
		echo "demo: $out is there and no demo made it; move it away or name another folder: heliosctl demo DIR" >&2
		exit 1
	fi
	rm -rf -- "$out"
fi
mkdir -p "$out"
touch "$out/$marker"
cd "$out"
export HELIOS_STATE=$PWD/state

say() { printf '\n== %s\n' "$*"; }
# field FILE KEY: a scalar of the result in FILE.
field() { grep '"event":"result"' "$1" | tail -n 1 | grep -oE "\"$2\":(\"[^\"]*\"|[^],}]*)" | tail -n 1 | cut -d: -f2- | tr -d '"'; }
# total FILE KEY: the sum of a number over the epochs in FILE.
total() { grep '"event":"epoch"' "$1" | grep -oE "\"$2\":[0-9.eE+-]+" | cut -d: -f2 | awk '{ s += $1 } END { printf "%.17g", s }'; }
# caches FILE: bytes that the tiers may hold.
caches() { calc "%.1f MB" "($(field "$1" gpu_cache_bytes)+$(field "$1" cpu_cache_bytes))/1e6"; }
# calc FORMAT EXPRESSION: arithmetic, the same in every locale.
calc() { LC_ALL=C awk "BEGIN { printf \"$1\", $2 }"; }
# tiers FILE: the share of rows that each tier served, over the epochs in FILE.
tiers() {
	local gpu cpu ssd
	gpu=$(total "$1" rows_gpu) cpu=$(total "$1" rows_cpu) ssd=$(total "$1" rows_ssd)
	calc "GPU tier %.1f%%, CPU tier %.1f%%, SSDs %.1f%%" "100*$gpu/($gpu+$cpu+$ssd), 100*$cpu/($gpu+$cpu+$ssd), 100*$ssd/($gpu+$cpu+$ssd)"
}
# reading FILE: bytes from the SSDs by the time of the epochs, and by the time that reads were in flight.
reading() {
	local bytes
	bytes=$(total "$1" bytes_ssd)
	calc "%.1f MB/s over the epochs, %.1f MB/s while reading" "$bytes/1e6/$(total "$1" seconds), $bytes/1e6/$(total "$1" complete)"
}
# alone STACK: what "bench io" measured for a stack.
alone() {
	local row
	row=$(grep "\"stack\":\"$1\"" io.jsonl)
	calc "%.1f MB/s, %.0f reads/s" "$(grep -oE '"bytes_per_second":[^,}]*' <<<"$row" | cut -d: -f2)/1e6, $(grep -oE '"iops":[^,}]*' <<<"$row" | cut -d: -f2)"
}

say "two SSDs, played by software controllers over files"
"$hc" bind-ssds --proxy ssd-a.img,ssd-b.img --size 512MiB

say "a graph"
if "$hc" import debian --out graph --json >import.jsonl 2>import.err; then
	source="the Debian package index of this machine"
else
	echo "no Debian package lists to import ($(tail -n 1 import.err)); generating a stochastic block model instead"
	"$hc" generate --kind sbm --nodes 60000 --avg-degree 10 --classes 16 --dim 128 --seed 1 --out graph
	source="a generated graph (stochastic block model, 60,000 nodes)"
fi
echo "training on $source"

say "features onto the SSDs, and checked there"
"$hc" load --dataset graph
"$hc" verify --dataset graph

mini=(--model sage --fanout "10,10" --batch-size 1024 --hidden 128 --seed 1)
flags=(--dataset graph "${mini[@]}" --epochs 3 --lr 0.003 --workers 2)
# Both tiers are this machine's memory here, so the CPU-managed run has the sum of the others'.
two=(--gpu-cache 5% --cpu-cache 10%) one=(--cpu-cache 15%)
say "GraphSAGE out of core, Helios: reads submitted by the device, GPU and CPU tiers, deep pipeline"
"$hc" train "${flags[@]}" --mode helios "${two[@]}" --pipeline deep --results helios.jsonl

say "the same training, CPU-managed: io_uring threads, as much cache in a CPU tier, prefetch"
"$hc" train "${flags[@]}" --mode cpu "${one[@]}" --results cpu.jsonl

say "random reads of the loaded rows, nothing else running"
"$hc" bench io --dataset graph --io-blocks 8 --io-stack async,cpu --results io.jsonl

# The machine of the Helios paper, played on the virtual clock.
machine=a100-p5510x12
say "the same run on one A100 and twelve SSDs, modelled: equal caches; a graph this small would fit into that GPU"
for mode in helios cpu gids; do
	tiers=("${two[@]}")
	if [ $mode = cpu ]; then tiers=("${one[@]}"); fi
	"$hc" plan graph "${mini[@]}" --hardware $machine --mode $mode "${tiers[@]}" --quiet --results plan-$mode.jsonl >/dev/null
done
# modelled MODE: an epoch, and what bounds it.
modelled() { echo "$1 $(calc "%.4f" "$(grep -oE '"seconds":[0-9.e-]+' plan-"$1".jsonl | head -n 1 | cut -d: -f2)") s ($(grep -oE '"bottleneck":"[^"]*' plan-"$1".jsonl | cut -d'"' -f4))"; }

# The types need no SSD of their own: rows come from the dataset's files.
typed=
if [ -s import.jsonl ] && "$hc" import debian --typed --out typed --json >typed.jsonl 2>&1; then
	say "the index as a typed graph: packages, sources, maintainers, tags; R-SAGE over their relations"
	HELIOS_STATE=$PWD/typed-state "$hc" train typed --model rsage --fanout 5,5 --batch-size 1024 --hidden 64 --epochs 1 --seed 1 --workers 2 --results rsage.jsonl
	typed=$(calc %.4f "$(field rsage.jsonl test_acc)")
fi

say "result"
a=$(field helios.jsonl params_sha256)
b=$(field cpu.jsonl params_sha256)
if [ -z "$a" ] || [ "$a" != "$b" ]; then
	echo "demo: parameters differ between the modes: helios $a, cpu $b" >&2
	exit 5
fi
hs=$(total helios.jsonl seconds)
cs=$(total cpu.jsonl seconds)
epochs=$(grep -c '"event":"epoch"' helios.jsonl)
echo "trained on       $source"
echo "test accuracy    helios $(calc %.4f "$(field helios.jsonl test_acc)"), cpu $(calc %.4f "$(field cpu.jsonl test_acc)")"
if [ -n "$typed" ]; then echo "typed graph      test accuracy $typed after one epoch"; fi
echo "parameters       identical in both modes: sha256 $a"
echo "caches           helios $(caches helios.jsonl) in both tiers, cpu $(caches cpu.jsonl)"
echo "hits, helios     $(tiers helios.jsonl)"
echo "hits, cpu        $(tiers cpu.jsonl)"
echo "SSDs, helios     $(reading helios.jsonl)"
echo "SSDs, cpu        $(reading cpu.jsonl)"
echo "SSDs alone       device-submitted: $(alone async); cpu threads: $(alone cpu)"
echo "overlap          helios $(calc %.2f "$(field helios.jsonl overlap)"), cpu $(calc %.2f "$(field cpu.jsonl overlap)") (share of stage time hidden behind other stages, last epoch)"
echo "epoch            helios $(calc %.2f "$hs/$epochs") s, cpu $(calc %.2f "$cs/$epochs") s: cpu takes $(calc %.2f "$cs/$hs") times as long (one run of each)"
echo "modelled         an epoch of the same run on an A100 and 12 SSDs, as much cache in each mode: $(modelled helios), $(modelled cpu), $(modelled gids)"
"$hc" report helios.jsonl cpu.jsonl io.jsonl plan-{helios,cpu,gids}.jsonl --out demo.html --quiet >/dev/null
echo "picture          $PWD/demo.html: what was measured here and what is modelled"
echo "results          $PWD/*.jsonl (one JSON object per line)"
echo "time             $((SECONDS - start)) s"
echo "your own data    heliosctl import tables --help; a graph that memory has no room for, modelled: heliosctl plan --graph ig --hardware $machine"
