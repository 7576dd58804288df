# shellcheck shell=bash
# For scripts that keep programs which we run later: source it. owned FOLDER ends (exit code 4) unless
# it is a folder of this user's, or root's, that no one else may write to; owned_parent DIR makes the
# folder that DIR is to be in, for this user alone, or holds it to that.
owned() {
	local uid mode script
	script=$(basename "$0" .sh)
	if [ -L "$1" ] || [ ! -d "$1" ]; then
		echo "$script: $1 is not a folder; move it away or name another DIR" >&2
		exit 4
	fi
	uid=$(stat -c %u "$1") mode=$(stat -c %a "$1")
	if { [ "$uid" -ne "$(id -u)" ] && [ "$uid" -ne 0 ]; } || [ $((8#$mode & 8#022)) -ne 0 ]; then
		echo "$script: $1 belongs to user $uid with mode $mode: others can put programs there that we would run;" \
			"remove it or name a DIR below a folder that only you can write to" >&2
		exit 4
	fi
}

owned_parent() {
	local parent
	parent=$(dirname "$1")
	if [ ! -e "$parent" ]; then
		mkdir -p "$(dirname "$parent")"
		mkdir -m 0700 "$parent"
	fi
	owned "$parent"
	if [ -e "$1" ] || [ -L "$1" ]; then owned "$1"; fi
}
