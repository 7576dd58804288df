#!/usr/bin/env bash
# Two runs at scale, with time, peak memory and disk of each step:
#
#   rmat      an R-MAT graph of NODES nodes and EDGES drawn edges: generated, sorted, sampled
#   billion   NODES rows of DIM values that are computed (--feature-fn hash), over SSDS computed
#             SSDs; the index is built and an epoch of sampled reads verified, row by row
#
# usage: tools/bigrun.sh rmat|billion|both [SCALE]
#
# SCALE 1 (default) is 100 M nodes and 1.5 G edges, and 1 G rows x 1024 with 1 G edges; 0.1 is a tenth of
# both. All sizes can be set: NODES EDGES DIM SSDS MEMORY BATCHES BATCH FANOUT KIND. DIR is where
# datasets are made (needs about 40 GB for rmat, 50 GB for billion at scale 1), HELIOSCTL the program. KEEP=1 keeps what was made.
set -euo pipefail

what=${1:-both}
scale=${2:-1}
here=$(cd "$(dirname "$0")/.." && pwd)
dir=${DIR:-$(mktemp -d "${TMPDIR:-/tmp}/bigrun.XXXXXX")}
ctl=${HELIOSCTL:-}
memory=${MEMORY:-4GiB}
ssds=${SSDS:-4}
dim=${DIM:-1024}
batch=${BATCH:-1000}
batches=${BATCHES:-500}
fanout=${FANOUT:-10,5}

case $what in rmat | billion | both) ;; *)
	echo "usage: $0 rmat|billion|both [SCALE]" >&2
	exit 2
	;;
esac
mkdir -p "$dir"
if [ -z "$ctl" ]; then
	ctl=$dir/heliosctl
	(cd "$here" && go build -o "$ctl" ./cmd/heliosctl)
fi
export HELIOS_STATE=$dir/state

pid=
cleanup() {
	if [ -n "$pid" ] && kill "$pid" 2>/dev/null; then # a step that was interrupted
		wait "$pid" || true
	fi
	"$ctl" unbind-ssds >/dev/null 2>&1 || true
	if [ -z "${KEEP:-}" ]; then
		rm -rf "$dir/rmat" "$dir/billion" "$dir/state" "$dir/out" "$dir/err" "$dir/result.json" "$dir/heliosctl"
		rmdir "$dir" 2>/dev/null || true
	fi
}
trap cleanup EXIT

times() { awk -v n="$1" -v s="$scale" 'BEGIN { printf "%.0f", n * s }'; }
kb() { awk -v k="$1:" '$1 == k { print $2 }' "/proc/$2/status" 2>/dev/null || true; }
gib() { awk -v k="$1" 'BEGIN { printf "%.2f GiB", k / 1048576 }'; }

# step NAME COMMAND…: runs it and prints its time, the peak of its resident memory (VmHWM; anonymous and shared memory, which
# it owns, and pages of files, which the kernel may take back, sampled), and the most that $dir took on disk.
step() {
	local name=$1 t0 t1 hwm=0 own=0 file=0 disk=0 a b c n=0
	shift
	t0=$(date +%s.%N)
	"$@" >"$dir/out" 2>"$dir/err" &
	pid=$!
	while kill -0 "$pid" 2>/dev/null; do
		a=$(kb VmHWM "$pid")
		hwm=$((${a:-0} > hwm ? ${a:-0} : hwm))
		a=$(kb RssAnon "$pid")
		b=$(kb RssShmem "$pid")
		c=$((${a:-0} + ${b:-0}))
		own=$((c > own ? c : own))
		a=$(kb RssFile "$pid")
		file=$((${a:-0} > file ? ${a:-0} : file))
		if [ $((n++ % 10)) -eq 0 ]; then
			a=$(du -sk "$dir" 2>/dev/null | cut -f1 || true)
			disk=$((${a:-0} > disk ? ${a:-0} : disk))
		fi
		sleep 0.2
	done
	if ! wait "$pid"; then
		pid=
		cat "$dir/out" "$dir/err" >&2
		echo "$name failed" >&2
		exit 1
	fi
	pid=
	t1=$(date +%s.%N)
	a=$(du -sk "$dir" | cut -f1)
	disk=$((a > disk ? a : disk))
	printf '%-10s %9.1f s   peak memory %s (own %s, pages of files %s)   disk at most %s\n' "$name" \
		"$(awk -v a="$t0" -v b="$t1" 'BEGIN { print b - a }')" "$(gib $hwm)" "$(gib $own)" "$(gib $file)" "$(gib $disk)"
	sed 's/^/    /' "$dir/out" | grep -v '^ *{' || true
}

# memory of a run by purpose, from its JSON result: what is resident at the end, from 1 MiB on.
purposes() {
	grep '"event":"result"' "$1" | tail -n 1 | sed -n 's/.*"memory":\[\([^]]*\)\].*/\1/p' | tr '{' '\n' |
		sed -n 's/"purpose":"\([^"]*\)".*"resident_bytes":\([0-9]*\).*/\1:\2/p' |
		awk -F: '$2 >= 1048576 { printf "    memory for %-24s %8.1f MiB\n", $1, $2 / 1048576 }'
}

# run DATASET: verifies an epoch of sampled reads on computed SSDs.
run() {
	step "bind" "$ctl" bind-ssds --computed "$1" --ssd-count "$ssds" --lba 4096
	step "train" "$ctl" train "$1" --no-eval --verify-rows --batch-size "$batch" --fanout "$fanout" --hidden 32 \
		--gpu-cache "${GPU_CACHE:-0}" --cpu-cache "${CPU_CACHE:-256MiB}" --overwrite --results "$dir/result.json"
	purposes "$dir/result.json"
	step "unbind" "$ctl" unbind-ssds
	rm -f "$dir/result.json"
}

# fraction NODES: the share of nodes that makes BATCHES batches.
fraction() { awk -v n="$1" -v k="$((batch * batches))" 'BEGIN { f = k / n; print (f > 0.5 ? 0.5 : f) }'; }

rmat() {
	local nodes=${NODES:-$(times 100000000)} edges=${EDGES:-$(times 1500000000)}
	echo "rmat: $nodes nodes, $edges edges drawn, sort in $memory"
	step "generate" "$ctl" generate --kind rmat --nodes "$nodes" --avg-degree "$(awk -v a="$edges" -v b="$nodes" 'BEGIN { print a / b }')" \
		--dim 128 --feature-fn hash --memory "$memory" --train-fraction "$(fraction "$nodes")" --val-fraction 0 --test-fraction 0 --out "$dir/rmat"
	run "$dir/rmat"
	[ -n "${KEEP:-}" ] || rm -rf "$dir/rmat"
}

billion() {
	local nodes=${NODES:-$(times 1000000000)} edges=${EDGES:-$(times 1000000000)}
	echo "billion: $nodes rows of $dim values over $ssds computed SSDs, $edges edges"
	step "generate" "$ctl" generate --kind "${KIND:-rmat}" --nodes "$nodes" --avg-degree "$(awk -v a="$edges" -v b="$nodes" 'BEGIN { print a / b }')" \
		--dim "$dim" --feature-fn hash --memory "$memory" --train-fraction "$(fraction "$nodes")" --val-fraction 0 --test-fraction 0 --out "$dir/billion"
	run "$dir/billion"
	[ -n "${KEEP:-}" ] || rm -rf "$dir/billion"
}

echo "$(nproc) cores, $(awk '/MemTotal/ { printf "%.1f GiB", $2 / 1048576 }' /proc/meminfo) of memory, $(df -h --output=avail "$dir" | tail -1 | tr -d ' ') free in $dir"
[ "$what" = billion ] || rmat
[ "$what" = rmat ] || billion
