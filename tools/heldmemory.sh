#!/usr/bin/env bash
# An epoch of Ginex beside what its paper compares with, and beside helios, with memory held: all of
# them may take SHARE % of the feature rows for caches, and OTHER for the rest. The rows are 2 GiB on
# two files that play SSDs. The variants train in turns, ROUNDS times; the table has median, least
# and most.
#
# usage: tools/heldmemory.sh HELIOSCTL [FOLDER]
#
# HELIOSCTL is the program. FOLDER is where data is made (about 3 GB; it must not be there), by
# default below TMPDIR. All of it is removed at the end; compare.csv stays if RESULTS names a file.
#
# How memory is held. The runs are in a control group of their own (memory controller, version 1 or
# 2), below the one that the script is in, without swap. The kernel charges to it what the process
# allocates, and every page of files that it reads through the page cache: mapped rows (pyg+) have
# what is left of the same limit, all of OTHER that nothing else needs included, and no more. O_DIRECT
# reads take none. Caches:
#   pyg+                  none but the page cache; PYG_LISTS % of the budget hold neighbour lists
#   ginex, ginex-pg, helios with belady   all of the budget, by turns for lists and rows
#   ali+pg, cpu, helios   LISTS % of the budget hold neighbour lists, the others rows
# Neighbour lists of all variants stay on disk beside that. OTHER is for offsets, checksums, labels,
# mini-batches in flight, the model, planning, and the program.
#
# Sizes: NODES DIM DEGREE SEEDS BATCH FANOUT EPOCHS ROUNDS SHARE LISTS PYG_LISTS OTHER (MiB)
# SUPERBATCH (mini-batches, or auto; by default the whole epoch). ONLY names the variants to run, as "ginex,ali+pg". CGROUP is a folder of the memory controller in which to make
# the group, where the script's own cannot have one. Needs a user who may make one: root, or
# "systemd-run --user --scope -p Delegate=yes tools/heldmemory.sh …".
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ ! -x "$1" ]; then
	echo "usage: $0 HELIOSCTL [FOLDER], where HELIOSCTL is the program (make build)" >&2
	exit 2
fi
ctl=$(realpath "$1")
nodes=${NODES:-2097152}
dim=${DIM:-256}
degree=${DEGREE:-15}
seeds=${SEEDS:-59800}
batch=${BATCH:-500}
fanout=${FANOUT:-10,5}
epochs=${EPOCHS:-1}
rounds=${ROUNDS:-3}
share=${SHARE:-10}
lists=${LISTS:-50}
pyg=${PYG_LISTS:-10}
other=${OTHER:-256}
superbatch=${SUPERBATCH:-120}

dir=${2:-$(mktemp -d -u "${TMPDIR:-/tmp}/heldmemory.XXXXXX")}
group=
pid=

fail() {
	echo "heldmemory: $1" >&2
	exit "${2:-1}"
}

cleanup() {
	if [ -n "$pid" ] && kill "$pid" 2>/dev/null; then # it was interrupted
		wait "$pid" || true
	fi
	[ -z "$group" ] || rmdir "$group" || true
	if [ -n "${made:-}" ]; then
		rm -rf -- "$dir"
	fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

# holdMemory BYTES makes $group, in which nothing takes more.
holdMemory() {
	local at=${CGROUP:-} own limit swap
	if [ -z "$at" ]; then
		own=$(awk -F: '$2 == "memory" { print $3 }' /proc/self/cgroup)
		if [ -n "$own" ]; then
			at=$(awk '$9 == "cgroup" && $NF ~ /(^|,)memory(,|$)/ { print $5; exit }
				$8 == "cgroup" && $NF ~ /(^|,)memory(,|$)/ { print $5; exit }' /proc/self/mountinfo)$own
		else
			own=$(awk -F: '$1 == "0" { print $3 }' /proc/self/cgroup)
			at=$(awk '$8 == "cgroup2" || $9 == "cgroup2" { print $5; exit }' /proc/self/mountinfo)$own
		fi
	fi
	[ -d "$at" ] || fail "no memory controller is mounted; mount one (cgroup v1 or v2), or name a folder of it with CGROUP" 3
	if [ -e "$at/cgroup.controllers" ]; then
		limit=memory.max swap=memory.swap.max
		# In version 2 a group with groups below it has no processes of its own.
		if [ -z "${CGROUP:-}" ] && ! grep -qw memory "$at/cgroup.subtree_control"; then
			if ! { mkdir -p "$at/heldmemory-script" && echo $$ >"$at/heldmemory-script/cgroup.procs" &&
				echo +memory >"$at/cgroup.subtree_control"; }; then
				fail "the control group $at cannot hold memory: run as root or in \"systemd-run --user --scope -p Delegate=yes\", or name another with CGROUP" 3
			fi
		fi
	else
		limit=memory.limit_in_bytes swap=memory.memsw.limit_in_bytes
	fi
	mkdir "$at/heldmemory.$$" 2>/dev/null ||
		fail "no group can be made in $at: run as root, or name another folder of the memory controller with CGROUP" 3
	group=$at/heldmemory.$$
	echo "$1" >"$group/$limit" || fail "$group/$limit cannot be set" 3
	case $swap in
	memory.swap.max) [ ! -e "$group/$swap" ] || echo 0 >"$group/$swap" ;;
	*) [ ! -e "$group/$swap" ] || echo "$1" >"$group/$swap" ;;
	esac
}

rows=$((nodes * dim * 4))
budget=$((rows * share / 100))
listBytes=$((budget * lists / 100))
holdMemory $((budget + other * 1048576))

[ ! -e "$dir" ] || fail "$dir is there already; name a folder that is not"
mkdir -p "$dir"
made=1
export HELIOS_STATE=$dir/state
cd "$dir"
"$ctl" generate --kind rmat --nodes "$nodes" --avg-degree "$degree" --dim "$dim" --feature-fn hash --seed 3 \
	--train-fraction "$(awk -v s="$seeds" -v n="$nodes" 'BEGIN { printf "%.9f", s / n }')" \
	--val-fraction 0 --test-fraction 0 --out g --quiet >generate.out
"$ctl" bind-ssds --proxy a.img,b.img --size "$((rows / 2 / 1048576 + 96))MiB" >bind.out
"$ctl" load g --quiet >load.out

divided="--topology ssd --cpu-cache $((budget - listBytes)) --neighbor-cache $listBytes"
moved="--cpu-cache $budget --neighbor-cache shared --superbatch $superbatch"
variants="ginex=--mode ginex $moved
; pyg+=--mode mmap --topology ssd --neighbor-cache $((budget * pyg / 100))
; ali+pg=--mode cpu --hotness out-degree $divided
; ginex-pg=--mode ginex --policy static --hotness out-degree $moved
; cpu=--mode cpu $divided
; helios=--mode helios --gpu-cache 0 $divided
; belady=--mode helios --gpu-cache 0 --policy belady --topology ssd $moved"

variants=$(tr -d '\n' <<<"$variants")
if [ -n "${ONLY:-}" ]; then
	variants=$(awk -v only=",$ONLY," -v RS=';' '{ sub(/^ */, ""); split($0, name, "=") }
		index(only, "," name[1] ",") { printf "%s; ", $0 }' <<<"$variants")
fi

echo "$(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg); $nodes rows of $((dim * 4)) bytes, $(tail -n 1 generate.out)"
echo "held to $((budget >> 20)) MiB for caches and $other MiB for the rest; batches of $batch, fanout $fanout, superbatches of $superbatch"
# shellcheck disable=SC2016 # the shell in the group expands $$
sh -c 'echo $$ >"$1/cgroup.procs" || exit 3; shift; exec "$@"' held "$group" \
	"$ctl" compare g --variants "$variants" --fanout "$fanout" --batch-size "$batch" \
	--epochs "$epochs" --repeats "$rounds" --hotness-dir "$dir/hotness" --csv compare.csv &
pid=$!
status=0
wait "$pid" || status=$?
pid=""
for f in memory.max_usage_in_bytes memory.peak; do
	[ ! -e "$group/$f" ] || echo "most memory of the group, page cache included: $(($(cat "$group/$f") >> 20)) MiB"
done
if [ "$status" -eq 137 ]; then
	fail "the kernel ended the comparison: $other MiB do not suffice for the rest; raise OTHER"
fi
[ "$status" -eq 0 ] || exit "$status"
if [ -n "${RESULTS:-}" ]; then
	cp compare.csv "$RESULTS"
fi
