#!/usr/bin/env bash
# Runs every fuzz target of both modules for a while, one after the other: tools/fuzz.sh [TIME]
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-6s}
count=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
while IFS=: read -r file target; do
	module=.
	if [[ $file == tools/* ]]; then module=tools; fi
	dir=./$(dirname "${file#tools/}")
	echo "fuzz $dir $target of module $module for $time"
	# Without a bound on minimising, one input whose coverage varies (goroutines, timers) may take
	# go's default of 60 s, in which nothing is tried ("0/sec"): the whole of a short run.
	status=0
	timeout -k 10 300 go test -C "$module" -run '^$' -fuzz "^${target}\$" -fuzztime "$time" -fuzzminimizetime 20x -timeout 5m "$dir" >"$log" 2>&1 || status=$?
	# When the time ends while a worker is busy, go may report its own deadline as a failure (golang.org/issue/75804).
	# A real one names the input that it wrote.
	if [ "$status" -eq 1 ] && ! grep -q 'Failing input\|panic\|\.go:[0-9]' "$log" && grep -q '^ *context deadline exceeded' "$log"; then
		grep '^fuzz: elapsed' "$log" || true
		echo "fuzz $dir $target: the time ended in the middle of an input"
	else
		cat "$log"
		if [ "$status" -ne 0 ]; then
			echo "fuzz $dir $target failed" >&2
			exit 1
		fi
	fi
	count=$((count + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -Eo '^func Fuzz[A-Za-z0-9_]+' | sed -E 's/:func /:/' | sort)
if [ "$count" -eq 0 ]; then
	echo "no fuzz target found" >&2
	exit 1
fi
echo "$count fuzz targets ran"
