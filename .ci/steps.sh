# shellcheck shell=bash
# The runner of steps that .ci/run and .ci/nightly share. Source it in the folder of the repository,
# with the names of the steps to run; without any, all run.
# With --needs first, each prints its missing needs, and nothing runs.
needs=
if [ "${1:-}" = --needs ]; then
	needs=1
	shift
fi
only=("$@")

export DEBIAN_FRONTEND=noninteractive
# ptxas and the headers of CUDA 12 (tools/cudatools.sh): programs that we run, so in a folder that only
# this user writes to.
HELIOS_CUDA_TOOLS=$(realpath -m "${HELIOS_CUDA_TOOLS:-${XDG_CACHE_HOME:-${HOME:?is not set}/.cache}/heliosctl/cuda-tools}")
HELIOS_PTXAS=$HELIOS_CUDA_TOOLS/bin/ptxas
export HELIOS_CUDA_TOOLS HELIOS_PTXAS
# As make has it, so that all steps share what they compile.
GOFLAGS="$({ go env GOFLAGS 2>/dev/null || true; } | sed 's/-trimpath//') -trimpath"
export GOFLAGS
unset HELIOS_STATE

# An environment with no more in it than what finds tools, modules and caches.
clean=(env -i)
for v in $(compgen -e | grep -E '^(PATH|HOME|USER|TMPDIR|XDG_CACHE_HOME|DEBIAN_FRONTEND|GO.*|(PIP|SSL|CARGO|RUSTUP)_.*|.*_(proxy|PROXY))$'); do
	clean+=("$v=${!v}")
done

report=()
failed=0

# there NAME: a command, a shared library (lib….so.N), a module of Python (py.NAME), a package in apt's
# lists (apt.NAME) or a path is there.
there() {
	case $1 in
	apt.*) apt-cache show "${1#apt.}" >/dev/null 2>&1 ;;
	py.*) python3 -c "import ${1#py.}" 2>/dev/null ;;
	lib*.so*) ldconfig -p | grep -qF "$1" ;;
	*/*) [ -e "$1" ] ;;
	*) command -v "$1" >/dev/null ;;
	esac
}

# need NAME[=PACKAGE]…: has apt install what is not there. Sets lacks to what is not there after that.
need() {
	local n missing=() update='' sudo=()
	for n in "$@"; do
		if [[ $n == apt.* || $n == *=* ]] && ! there "${n%%=*}"; then update=1; fi
		if [[ $n == *=* ]] && ! there "${n%%=*}"; then missing+=("${n#*=}"); fi
	done
	if [ -n "$update" ]; then
		if [ "$(id -u)" -ne 0 ]; then sudo=(sudo -n); fi
		echo "apt: fetching the lists; installing ${missing[*]:-nothing}"
		if ! { "${sudo[@]}" apt-get update -qq &&
			"${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"; }; then
			echo "apt failed" >&2 # what lacks is found below
		fi
	fi
	lacks=()
	for n in "$@"; do
		if ! there "${n%%=*}"; then lacks+=("${n%%=*}"); fi
	done
}

# processor: the seconds of processor time of the steps so far (utime and stime of children).
processor() {
	local stat
	read -ra stat <"/proc/$$/stat"
	used=$(((stat[15] + stat[16]) / $(getconf CLK_TCK)))
}

# step NAME LIMIT_S [NEED…] -- COMMAND…: runs it in this folder, no longer than its limit, where the
# machine has or gets what it needs. Leaves outcome (passed, FAILED …, lacks …, or not asked for) and
# took, in seconds.
step() {
	local name=$1 limit=$2 began=$SECONDS before rc=0 n needed=()
	if [ ${#only[@]} -ne 0 ] && ! printf '%s\n' "${only[@]}" | grep -qxF -- "$name"; then
		outcome='not asked for'
		return
	fi
	shift 2
	while [ "$1" != -- ]; do
		needed+=("$1")
		shift
	done
	shift
	if [ -n "$needs" ]; then
		lacks=()
		for n in "${needed[@]}"; do
			if ! there "${n%%=*}"; then lacks+=("${n#*=}"); fi
		done
		printf '%-14s %s\n' "$name" "${lacks[*]:+lacks }${lacks[*]:-ready}"
		return
	fi
	printf '\n=== %s: %s\n' "$name" "$*"
	processor
	before=$used
	need "${needed[@]}"
	if [ ${#lacks[@]} -ne 0 ]; then
		outcome="lacks ${lacks[*]}"
	else
		timeout --kill-after=10 "$limit" "$@" </dev/null || rc=$?
		case $rc in
		0) outcome=passed ;;
		124 | 137) outcome="FAILED (over its limit of $limit s)" ;;
		*) outcome="FAILED (exit code $rc)" ;;
		esac
	fi
	processor
	took=$((SECONDS - began)) used=$((used - before))
	if [ "$outcome" != passed ]; then failed=$((failed + 1)); fi
	report+=("$(printf '%-12s %6d %10d  %s' "$name" "$took" "$used" "$outcome")")
	printf '=== %s: %s after %d s\n' "$name" "$outcome" "$took"
}

# summary prints the steps, a line each, and fails where one did, or where there is no such step.
summary() {
	local n
	for n in "${only[@]}"; do
		if ! printf '%s\n' "${report[@]}" | grep -q "^$n "; then
			report+=("$n: THERE IS NO SUCH STEP")
			failed=$((failed + 1))
		fi
	done
	printf '\n%-12s %6s %10s  %s\n' step seconds processor result
	printf '%s\n' "${report[@]}"
	printf '%-12s %6d\n' total "$SECONDS"
	[ "$failed" -eq 0 ]
}
