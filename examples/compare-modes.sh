#!/usr/bin/env bash
# Trains the same model through several data paths on two software SSDs and checks that the parameters
# are equal to the bit. Usage: examples/compare-modes.sh [FOLDER]; heliosctl must be in PATH.
# Everything stays in FOLDER (helios-example); remove it to clean up.
set -euo pipefail
config=$(realpath "$(dirname "$0")/train.yaml")
mkdir -p "${1:-helios-example}"
cd "${1:-helios-example}"
export HELIOS_STATE=$PWD/state # the list of bound SSDs, kept apart from yours

heliosctl generate --nodes 5000 --avg-degree 10 --dim 64 --seed 1 --out g
heliosctl bind-ssds --proxy a.img,b.img --size 16MiB
heliosctl load g
trap 'heliosctl unbind-ssds' EXIT

first=
for mode in helios gids cpu mmap; do
	heliosctl train g --config "$config" --mode "$mode" --quiet --results "$mode.jsonl" >/dev/null
	sum=$(grep '"event":"result"' "$mode.jsonl" | grep -oE '"params_sha256":"[0-9a-f]+"' | cut -d'"' -f4)
	echo "$mode: parameters $sum"
	if [ "$sum" != "${first:=$sum}" ]; then
		echo "the parameters of $mode differ" >&2
		exit 1
	fi
done
echo "the same parameters in every mode"
