#!/usr/bin/env bash
# Runs every fuzz target of the module for a while, one after the other: tools/fuzz.sh [TIME]
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-6s}
count=0
while IFS=: read -r file target; do
	dir=./$(dirname "$file")
	echo "fuzz $dir $target for $time"
	go test -run '^$' -fuzz "^${target}\$" -fuzztime "$time" -timeout 5m "$dir"
	count=$((count + 1))
done < <(git ls-files -co --exclude-standard '*_test.go' | xargs grep -Eo '^func Fuzz[A-Za-z0-9_]+' | sed -E 's/:func /:/' | sort)
if [ "$count" -eq 0 ]; then
	echo "no fuzz target found" >&2
	exit 1
fi
echo "$count fuzz targets ran"
