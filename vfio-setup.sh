#!/bin/sh
# Prepares a Linux machine so that an ordinary user can drive NVMe SSDs through VFIO with heliosctl,
# and takes back what it did. POSIX sh: runs under dash and busybox. "vfio-setup.sh --help" says how.
#
# It never edits the boot loader, and it works with the IOMMU on only. Every file that it writes
# begins with the line in $marker; what else it changes is noted in $record, so that reset finds all
# of it and nothing else.
set -u
umask 022
LC_ALL=C
export LC_ALL
PATH=$PATH:/usr/sbin:/sbin
export PATH

R=${HELIOS_SYSROOT:-}
new= # a file that is being written
trap 'if [ -n "$new" ]; then rm -f -- "$new"; fi; exit 130' HUP INT TERM
marker='# Written by "vfio-setup.sh setup" of heliosctl; "vfio-setup.sh reset" removes it.'
record=/etc/heliosctl/vfio-setup.record
modules_file=/etc/modules-load.d/heliosctl-vfio.conf
sysctl_file=/etc/sysctl.d/80-heliosctl-hugepages.conf
limits_file=/etc/security/limits.d/80-heliosctl-memlock.conf
rules_file=/etc/udev/rules.d/72-heliosctl-vfio.rules
default_group=helios
nvme_class=0x010802        # NVM Express I/O controller
least_memlock_kib=65536    # what setup sets at least: queues and buffers of the smallest run
needed_memlock_kib=262144  # what a run with default settings locks, and some
most_default_huge_mib=1024 # what setup reserves unasked, at most

self=${0:-vfio-setup.sh}

usage() {
	cat <<'END'
vfio-setup.sh: prepare this machine for NVMe SSDs that heliosctl drives itself, through VFIO

  vfio-setup.sh status [--user NAME] [--group NAME]
      What is there and what lacks, each lack with its next step. Needs no root.
      Exit code 0: an ordinary user has all that he needs; 3: something lacks.

  vfio-setup.sh setup [--hugepages SIZE|0] [--memlock SIZE|unlimited] [--user NAME] [--group NAME]
      Loads vfio-pci and vfio_iommu_type1, now and at boot; reserves huge pages (at most 1 GiB and
      an eighth of the memory unless SIZE is given; 0: none); makes the group (helios) and adds the
      user (the one who called sudo); lifts the group's limit of locked memory; gives the group the
      VFIO nodes of SSDs that heliosctl bound, now and by a udev rule. Running it again changes only
      what differs.

  vfio-setup.sh bind ARGUMENT…       heliosctl bind-ssds ARGUMENT…
  vfio-setup.sh unbind ARGUMENT…     heliosctl unbind-ssds ARGUMENT…

  vfio-setup.sh reset
      Unbinds the SSDs that heliosctl bound and takes back what setup did, nothing else.

  --dry-run   print each command that would run, and change nothing (any verb)
  --help      this text

Sizes are like 512MiB, 2GiB or 2GB. setup, bind, unbind and reset need root.
Exit codes: 0 done, 1 failed, 2 usage, 3 the machine lacks something, 4 refused for safety.
HELIOS_SYSROOT=DIR (for tests) stands for / in every path; commands that change the machine are then
taken from DIR/bin only.
END
}

say() { printf '%s\n' "$*"; }
# die CODE TEXT: ends with an error that says what to do.
die() {
	code=$1
	shift
	printf 'vfio-setup: %s\n' "$*" >&2
	exit "$code"
}
bad() { die 2 "$*; \"$self --help\" shows what there is"; }

# quoted WORD…: the words as one could type them.
quoted() {
	line=
	for word in "$@"; do
		case $word in
		'' | *[!A-Za-z0-9_@%+=:,./-]*) word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
		esac
		line="$line${line:+ }$word"
	done
	printf '%s\n' "$line"
}

# tool NAME: where a command is that changes the machine. Under HELIOS_SYSROOT only what the test gives.
tool() {
	if [ -n "$R" ]; then
		[ -x "$R/bin/$1" ] && printf '%s\n' "$R/bin/$1"
	else
		command -v "$1"
	fi
}
# tool_or_own NAME: the same, else the system's: for commands that only touch paths below HELIOS_SYSROOT.
tool_or_own() { tool "$1" || printf '%s\n' "$1"; }

# stat_of FORMAT PATH
stat_of() { "$(tool_or_own stat)" -c "$@"; }

# change TEXT COMMAND…: runs a command that changes the machine and says TEXT; a dry run shows it.
change() {
	text=$1
	shift
	if [ "$dry" = 1 ]; then
		case $1 in
		write_number) printf 'would run: echo %s >%s\n' "$2" "$(quoted "$3")" ;;
		edit_groups) printf 'would edit: %s\n' "$text" ;;
		quiet)
			shift
			printf 'would run: %s\n' "$(quoted "$@")"
			;;
		*) printf 'would run: %s\n' "$(quoted "$@")" ;;
		esac
		return 0
	fi
	"$@" || return
	say "$text"
}

# first FILE: its first line.
first() { head -n 1 "$1" 2>/dev/null; }
# word FILE: its first word, or nothing. Not with read, which takes a byte at a time: /proc/sys gives
# only the first one then.
word() { awk '{ print $1; exit }' "$1" 2>/dev/null; }
# link PATH: the last part of what a link points at.
link() {
	l=$(readlink "$1" 2>/dev/null) || l=
	printf '%s\n' "${l##*/}"
}
ours() { [ -f "$1" ] && [ ! -L "$1" ] && [ "$(first "$1")" = "$marker" ]; }
# kib_text KIB: a size for people.
kib_text() {
	if [ "$1" = unlimited ]; then
		say unlimited
	else
		awk -v k="$1" 'BEGIN {
			split("KiB MiB GiB TiB PiB", u, " ")
			for (i = 1; k >= 1024 && i < 5; i++) k /= 1024
			printf (k == int(k)) ? "%.0f %s\n" : "%.1f %s\n", k, u[i] }'
	fi
}
# size_kib SIZE: KiB, rounded up; fails for what is no size.
size_kib() {
	case $1 in
	'' | *[!0-9A-Za-z.]*) return 1 ;;
	esac
	awk -v s="$1" 'BEGIN {
		s = tolower(s)
		if (match(s, /^([0-9]+\.?[0-9]*|\.[0-9]+)/) == 0) exit 1
		v = substr(s, 1, RLENGTH) + 0; u = substr(s, RLENGTH + 1)
		if (u == "" || u == "b") f = 1
		else {
			p = index("kmgt", substr(u, 1, 1)); if (p == 0) exit 1
			rest = substr(u, 2)
			if (rest == "" || rest == "ib") base = 1024
			else if (rest == "b") base = 1000
			else exit 1
			for (f = 1; p > 0; p--) f *= base
		}
		k = v * f / 1024; if (k > 1e15) exit 1
		r = int(k); if (r < k) r++
		printf "%.0f\n", r }'
}
# meminfo KEY: its number, in KiB or pages.
meminfo() { awk -v k="$1:" '$1 == k { print $2; exit }' "$R/proc/meminfo" 2>/dev/null; }

# --- the record of what setup changed: lines "key value"

rec_has() { grep -qxF -e "$1" "$R$record" 2>/dev/null; }
rec_all() { sed -n "s/^$1 //p" "$R$record" 2>/dev/null; }
rec_get() { rec_all "$1" | tail -n 1; }
# replace FILE TEXT: the new content, or the old one if anything fails; mode and owner stay.
replace() {
	new=$1.heliosctl-new
	rm -f -- "$new" || return 1
	if [ -e "$1" ]; then cp -p -- "$1" "$new" || return 1; fi
	if printf '%s\n' "$2" >"$new" && mv -f -- "$new" "$1"; then
		new=
		return 0
	fi
	rm -f -- "$new"
	new=
	return 1
}
# rec_start makes the record. It is written ahead of each change: after a crash, reset knows.
rec_start() {
	if [ "$dry" = 1 ] || [ -f "$R$record" ]; then return 0; fi
	fresh=
	[ -d "$R${record%/*}" ] || fresh="
dir ${record%/*}"
	mkdir -p -- "$R${record%/*}" || die 1 "cannot make ${record%/*}"
	replace "$R$record" "$marker$fresh" || die 1 "cannot write $record"
}
rec_add() {
	if [ "$dry" = 1 ] || rec_has "$1"; then return 0; fi
	replace "$R$record" "$(cat "$R$record")
$1" || die 1 "cannot write $record"
}
# rec_drop KEY: forgets the lines of a key.
rec_drop() {
	if [ "$dry" = 1 ]; then return 0; fi
	replace "$R$record" "$(sed "/^$1 /d" "$R$record")" || die 1 "cannot write $record"
}
rec_set() {
	if rec_has "$1 $2"; then return 0; fi
	rec_drop "$1"
	rec_add "$1 $2"
}

# --- files

# check_file PATH: refuses before anything is changed.
check_file() {
	if [ -e "$R$1" ] || [ -L "$R$1" ]; then
		ours "$R$1" || die 4 "$1 is there and is not ours; move it away, then run setup again"
	fi
}
make_dir() {
	if [ -d "$R$1" ]; then return 0; fi
	case $1 in
	/*/*) make_dir "${1%/*}" ;;
	esac
	rec_add "dir $1"
	change "made $1" mkdir -- "$R$1" || die 1 "cannot make $1"
}
# put PATH TEXT: our file with these lines.
put() {
	if [ -f "$R$1" ] && [ "$(cat "$R$1")" = "$marker
$2" ]; then
		say "kept $1"
		return 0
	fi
	make_dir "${1%/*}"
	if [ "$dry" = 1 ]; then
		printf 'would write %s:\n' "$1"
		printf '%s\n' "$marker" "$2" | sed 's/^/    /'
		return 0
	fi
	rec_add "file $1"
	replace "$R$1" "$marker
$2" || die 1 "cannot write $1"
	say "wrote $1"
}
# drop PATH: removes our file.
drop() {
	if ours "$R$1"; then
		change "removed $1" rm -f -- "$R$1" || die 1 "cannot remove $1"
	elif [ -e "$R$1" ] || [ -L "$R$1" ]; then
		say "left $1: somebody else's by now"
	fi
}

# --- users and groups

group_line() {
	if [ -z "$R" ] && command -v getent >/dev/null; then
		getent group "$1"
	else
		awk -F: -v n="$1" '$1 == n { print; exit }' "$R/etc/group" 2>/dev/null
	fi
}
group_id() { group_line "$1" | cut -d: -f3; }
group_members() { group_line "$1" | cut -d: -f4 | tr ',' ' '; }
user_line() {
	if [ -z "$R" ] && command -v getent >/dev/null; then
		getent passwd "$1"
	else
		awk -F: -v n="$1" '$1 == n { print; exit }' "$R/etc/passwd" 2>/dev/null
	fi
}
# primary_users GID: those who have it as their own group.
primary_users() {
	if [ -z "$1" ]; then return 0; fi
	awk -F: -v g="$1" '$4 == g { printf "%s ", $1 }' "$R/etc/passwd" 2>/dev/null
}
in_group() {
	for m in $(group_members "$2") $(primary_users "$(group_id "$2")"); do
		if [ "$m" = "$1" ]; then return 0; fi
	done
	return 1
}
# user_groups NAME: the names of all his groups.
user_groups() {
	if [ -z "$R" ]; then
		id -Gn -- "$1" 2>/dev/null || id -Gn "$1" 2>/dev/null
	else
		awk -F: -v n="$1" -v g="$(user_line "$1" | cut -d: -f4)" '
			{ k = split($4, m, ","); hit = ($3 == g); for (i = 1; i <= k; i++) if (m[i] == n) hit = 1
			  if (hit) printf "%s ", $1 }' "$R/etc/group" 2>/dev/null
	fi
}
check_name() { # WHAT NAME
	case $2 in
	'' | -* | *[!A-Za-z0-9_.@-]*) bad "\"$2\" is no name of a $1" ;;
	esac
	[ ${#2} -le 64 ] || bad "\"$2\" is too long for the name of a $1"
}
# edit_groups PROGRAM VAR=VALUE…: an awk program over /etc/group and /etc/gshadow, for systems
# without groupadd and addgroup. The program sees the file's kind in g (0 or 1).
edit_groups() {
	prog=$1
	shift
	kind=0
	for gf in "$R/etc/group" "$R/etc/gshadow"; do
		if [ -f "$gf" ] || [ "$kind" = 0 ]; then
			new=$gf.heliosctl-new
			if ! { cp -p -- "$gf" "$new" && awk -F: -v OFS=: -v g="$kind" "$@" "$prog" "$gf" >"$new" && mv -f -- "$new" "$gf"; }; then
				rm -f -- "$new"
				new=
				return 1
			fi
			new=
		fi
		kind=1
	done
}
# The member list is the fourth field of both files.
add_line='{ print } END { if (g) print n, "!", "", ""; else print n, "x", id, "" }'
# shellcheck disable=SC2016 # awk's, not the shell's
del_line='$1 != n { print }'
# shellcheck disable=SC2016
add_user='$1 == n { $4 = ($4 == "") ? u : $4 "," u } { print }'
# shellcheck disable=SC2016
del_user='$1 == n { k = split($4, m, ","); s = ""; for (i = 1; i <= k; i++) if (m[i] != u) s = s (s == "" ? "" : ",") m[i]; $4 = s } { print }'
free_gid() {
	awk -F: '{ used[$3] = 1 } END { for (i = 999; i >= 100; i--) if (!(i in used)) { print i; exit } }' "$R/etc/group"
}
group_make() {
	if t=$(tool groupadd); then
		change "made group $1" "$t" -r "$1"
	elif t=$(tool addgroup); then
		change "made group $1" "$t" -S "$1"
	else
		gid=$(free_gid)
		change "made group $1 in /etc/group" edit_groups "$add_line" -v "n=$1" -v "id=${gid:-999}"
	fi
}
group_remove() {
	if t=$(tool groupdel); then
		change "removed group $1" "$t" "$1"
	elif t=$(tool delgroup); then
		change "removed group $1" "$t" "$1"
	else
		change "removed group $1 from /etc/group" edit_groups "$del_line" -v "n=$1"
	fi
}
group_join() { # GROUP USER
	if t=$(tool gpasswd); then
		change "added $2 to group $1" quiet "$t" -a "$2" "$1"
	elif t=$(tool usermod); then
		change "added $2 to group $1" "$t" -a -G "$1" "$2"
	elif t=$(tool addgroup); then
		change "added $2 to group $1" "$t" "$2" "$1"
	else
		change "added $2 to group $1 in /etc/group" edit_groups "$add_user" -v "n=$1" -v "u=$2"
	fi
}
group_leave() { # GROUP USER
	if t=$(tool gpasswd); then
		change "removed $2 from group $1" quiet "$t" -d "$2" "$1"
	elif t=$(tool delgroup); then
		change "removed $2 from group $1" "$t" "$2" "$1"
	else
		change "removed $2 from group $1 in /etc/group" edit_groups "$del_user" -v "n=$1" -v "u=$2"
	fi
}
quiet() { "$@" >/dev/null; }

# --- the machine

# loaded MODULE: by name with underscores; also when it is built in.
loaded() {
	[ -d "$R/sys/module/$1" ] ||
		grep -q "/$(printf '%s' "$1" | sed 's/_/[-_]/g')\.ko" "$R/lib/modules/$(word "$R/proc/sys/kernel/osrelease")/modules.builtin" 2>/dev/null
}
# translates GROUP: whether an IOMMU group is one. VFIO makes up groups in its mode without an IOMMU.
translates() { [ "$(word "$R/sys/kernel/iommu_groups/$1/name")" != vfio-noiommu ]; }
# count_groups: how many IOMMU groups there are.
count_groups() {
	k=0
	for g in "$R"/sys/kernel/iommu_groups/[0-9]*; do
		if [ -d "$g" ] && translates "${g##*/}"; then k=$((k + 1)); fi
	done
	say $k
}
# ssds_only GROUP: whether an IOMMU group holds NVMe controllers and PCI bridges only.
ssds_only() {
	any=1
	for c in "$R/sys/kernel/iommu_groups/$1/devices"/*/class; do
		case $(word "$c") in
		"$nvme_class") any=0 ;;
		0x0604*) ;;
		*) return 1 ;;
		esac
	done
	return $any
}
# ours_only GROUP: the same, and heliosctl has finished the bind of each of them: before that nobody has
# looked at what is on it. Whoever opens a group's node has all of its devices, and another program's SSDs
# are not the group's.
ours_only() {
	ssds_only "$1" || return 1
	for c in "$R/sys/kernel/iommu_groups/$1/devices"/*/class; do
		if [ "$(word "$c")" = "$nvme_class" ]; then
			d=${c%/class}
			has_bound "${d##*/}" || return 1
		fi
	done
}
# nodes_of CHECK: the nodes of IOMMU groups for which CHECK succeeds, and of their devices.
nodes_of() {
	for n in "$R"/dev/vfio/[0-9]*; do
		if [ -e "$n" ] && "$1" "${n##*/}"; then printf '%s\n' "${n#"$R"}"; fi
	done
	for n in "$R"/dev/vfio/devices/vfio[0-9]*; do
		if [ -e "$n" ] && "$1" "$(link "$R/sys/class/vfio-dev/${n##*/}/device/iommu_group")"; then
			printf '%s\n' "${n#"$R"}"
		fi
	done
	if [ -e "$R/dev/iommu" ] && iommu_free; then say /dev/iommu; fi
}
# nodes: the device nodes that the group gets, those that are there.
nodes() { nodes_of ours_only; }
# iommu_free: whether /dev/iommu has no owner but root and us; some distributions give it to kvm.
iommu_free() {
	[ -e "$R/dev/iommu" ] || return 0
	ig=$(stat_of %g "$R/dev/iommu")
	[ "$ig" = 0 ] || [ "$ig" = "$(group_id "$group")" ] || rec_all node | grep -q '^/dev/iommu '
}
# owned PATH GID: whether the group can read and write it.
owned() {
	# shellcheck disable=SC2046 # three words
	set -- "$2" $(stat_of '%g %a' "$R$1" 2>/dev/null)
	[ $# = 3 ] && [ "$1" = "$2" ] && case $3 in *[67]?) true ;; *) false ;; esac
}
# open_to_all PATH
open_to_all() { case $(stat_of %a "$R$1" 2>/dev/null) in *[67]) true ;; *) false ;; esac }

# limit_at_login USER: locked memory in KiB as pam_limits will set it, then where from.
limit_at_login() {
	set -- "$1" "$(user_groups "$1")"
	for lf in "$R/etc/security/limits.conf" "$R"/etc/security/limits.d/*.conf; do
		if [ -r "$lf" ]; then
			sed "s|^|${lf#"$R"} |" "$lf"
		fi
	done | awk -v user="$1" -v groups="$2" '
		BEGIN { k = split(groups, m, " "); for (i = 1; i <= k; i++) in_it["@" m[i]] = 1; soft = hard = ""; ps = ph = 9 }
		{ file = $1; sub(/#.*/, ""); if ($4 != "memlock" || NF < 5) next
		  if ($2 == user) p = 0; else if ($2 in in_it) p = 1; else if ($2 == "*") p = 2; else next
		  v = $5; if (v == "infinity" || v == "-1") v = "unlimited"
		  if (v != "unlimited" && v !~ /^[0-9]+$/) next
		  if (($3 == "soft" || $3 == "-") && p <= ps) { ps = p; soft = v; from = file }
		  if (($3 == "hard" || $3 == "-") && p <= ph) { ph = p; hard = v } }
		END { if (soft == "") exit
		  if (hard != "" && hard != "unlimited" && (soft == "unlimited" || hard + 0 < soft + 0)) soft = hard
		  print soft, from }'
}
# limit_by_default: what processes get without pam_limits, in KiB.
limit_by_default() {
	awk '/^Max locked memory/ { if ($4 == "unlimited") print $4; else printf "%.0f\n", $4 / 1024 }' "$R/proc/1/limits" 2>/dev/null
}
# enough_memlock KIB [LEAST]
enough_memlock() { [ "$1" = unlimited ] || [ "$1" -ge "${2:-$needed_memlock_kib}" ]; }

# --- status
#
# What an ordinary user needs. heliosctl's doctor and bind-ssds ask the same (internal/vfio/require.go),
# so that none of the three says ready where another fails: a change here is a change there.

row() { printf '%-15s %s\n' "$1" "$2"; }
lacks=
lack_count=0
# lack TEXT NEXT-STEP
lack() {
	lack_count=$((lack_count + 1))
	lacks="$lacks  $lack_count. $1
     next: $2
"
}
notes=
note() { notes="$notes  - $*
"; }

how_to_add() {
	printf '%s' "to add kernel arguments on Debian or Ubuntu, put them into GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, run \"sudo update-grub\" and reboot; on RHEL, Fedora and their kin run \"sudo grubby --update-kernel=ALL --args='$1'\" and reboot; with another boot loader see its manual. This script leaves boot loaders alone"
}

status_iommu() {
	args=
	against=
	# shellcheck disable=SC2013 # words are what is wanted
	for a in $(cat "$R/proc/cmdline" 2>/dev/null); do
		case $a in
		intel_iommu=* | amd_iommu=* | iommu=* | iommu.*) args="$args${args:+ }$a" ;;
		esac
		case $a in
		intel_iommu=*off* | amd_iommu=*off* | iommu=*off*) against="$against${against:+ }$a" ;;
		esac
	done
	cpu=$(awk -F': *' '/^vendor_id/ { print $2; exit } /^CPU implementer/ { print "arm"; exit }' "$R/proc/cpuinfo" 2>/dev/null)
	iommu=
	for u in "$R"/sys/class/iommu/*; do
		case ${u##*/} in
		dmar*) iommu="Intel VT-d" ;;
		ivhd*) iommu="AMD-Vi" ;;
		smmu* | arm-smmu*) iommu="Arm SMMU" ;;
		'*') ;;
		*) iommu=${u##*/} ;;
		esac
	done
	count=$(count_groups)
	iommu_on=0
	if [ "$count" -gt 0 ]; then
		iommu_on=1
		row IOMMU "on (${iommu:-of an unknown kind}), $count groups; kernel arguments: ${args:-none about it}"
		case " $args " in
		*" iommu=pt "* | *" iommu.passthrough=1 "*) ;;
		*) note "without iommu=pt the devices that VFIO does not have are translated too, which costs GPUs and network cards some speed; iommu=pt beside the other kernel arguments spares them, and SSDs under VFIO stay translated" ;;
		esac
		return
	fi
	row IOMMU "off; kernel arguments: ${args:-none about it}"
	for g in "$R"/sys/kernel/iommu_groups/[0-9]*; do
		if [ -d "$g" ]; then
			note "IOMMU group ${g##*/} is of VFIO's mode without an IOMMU, which protects no memory and is not used"
		fi
	done
	firmware=unknown
	if [ -d "$R/sys/firmware/acpi/tables" ]; then
		firmware=0
		for u in DMAR IVRS IORT VIOT; do
			if [ -e "$R/sys/firmware/acpi/tables/$u" ]; then firmware=1; fi
		done
	fi
	viot=0
	if [ -e "$R/sys/firmware/acpi/tables/VIOT" ] && [ ! -e "$R/sys/firmware/acpi/tables/DMAR" ] && [ ! -e "$R/sys/firmware/acpi/tables/IVRS" ]; then viot=1; fi
	in_firmware="turn it on in the firmware (BIOS or UEFI): \"Intel VT for Directed I/O\" or VT-d, \"AMD-Vi\" or IOMMU, or SMMU; in a virtual machine, its host must give it a virtual IOMMU (QEMU: -device intel-iommu)"
	if [ $viot = 1 ] && ! loaded virtio_iommu; then
		lack "the IOMMU is off: the firmware offers a virtual one (VIOT), whose driver virtio_iommu is not loaded" "sudo modprobe virtio_iommu, and put virtio_iommu into the initramfs (on Debian or Ubuntu /etc/initramfs-tools/modules, then \"sudo update-initramfs -u\"; on RHEL, Fedora and their kin a line add_drivers+=virtio_iommu in /etc/dracut.conf.d/virtio_iommu.conf, then \"sudo dracut -f\") and reboot, for devices must come after it"
	elif [ $viot = 1 ]; then
		lack "the IOMMU is off: the firmware offers a virtual one (VIOT) and virtio_iommu is loaded, but no device is behind it" "see why in the kernel's log: \"sudo dmesg | grep -i iommu\""
	elif [ -n "$against" ]; then
		lack "the IOMMU is off: the kernel argument $against turns it off" "remove $against from the kernel arguments and reboot, on Debian or Ubuntu in /etc/default/grub followed by \"sudo update-grub\", on RHEL and its kin with \"sudo grubby --update-kernel=ALL --remove-args='$against'\". This script leaves boot loaders alone"
	elif [ "$firmware" = 0 ]; then
		lack "the IOMMU is off: the firmware reports none" "$in_firmware"
	elif [ "$cpu" = GenuineIntel ]; then
		case " $args " in
		*" intel_iommu=on"*) lack "the IOMMU is off, although intel_iommu=on is given" "$in_firmware" ;;
		*) lack "the IOMMU is off: on Intel this kernel may need the argument intel_iommu=on" "add intel_iommu=on iommu=pt (pt: devices that VFIO does not have are not translated and keep their speed). $(how_to_add "intel_iommu=on iommu=pt")" ;;
		esac
	elif [ "$firmware" = 1 ] && [ "$cpu" = AuthenticAMD ]; then
		lack "the IOMMU is off, although the firmware offers it (AMD-Vi) and this kernel would use it unasked" "see why in the kernel's log: \"sudo dmesg | grep AMD-Vi\"; often a firmware update helps, or a kernel with CONFIG_AMD_IOMMU"
	elif [ "$cpu" = AuthenticAMD ] || [ "$cpu" = HygonGenuine ]; then
		lack "the IOMMU is off: on AMD the kernel uses it unasked when the firmware offers it" "$in_firmware. iommu=pt is worth adding as well; $(how_to_add iommu=pt)"
	else
		lack "the IOMMU is off" "$in_firmware"
	fi
}

# status_remapping: without interrupt remapping a device can raise any interrupt by a write, and the kernel
# gives none to user space unless its parameter allow_unsafe_interrupts says so.
status_remapping() {
	if [ "$iommu_on" = 0 ]; then return 0; fi
	if grep -qs ' IR-' "$R/proc/interrupts"; then # the kernel's names of remapped interrupts
		row interrupts "remapped"
		return 0
	fi
	off=
	if grep -qsE 'IO-APIC|PCI-MSI' "$R/proc/interrupts"; then off="the kernel uses none"; fi
	# shellcheck disable=SC2013 # words are what is wanted
	for a in $(cat "$R/proc/cmdline" 2>/dev/null); do
		case $a in
		intremap=off | nointremap) off="the kernel argument $a turns it off" ;;
		esac
	done
	for u in "$R"/sys/class/iommu/dmar*/intel-iommu/ecap; do
		case $(word "$u") in
		'' | *[89abcdefABCDEF]) ;; # bit 3: IR (VT-d, section 11.4.3)
		*) off="the IOMMU has none" ;;
		esac
	done
	if [ -z "$off" ]; then return 0; fi # the kernel does not show it here; a bind tells
	u=vfio_iommu_type1
	if [ ! -d "$R/sys/module/$u" ]; then u=iommufd; fi
	if [ "$(word "$R/sys/module/$u/parameters/allow_unsafe_interrupts")" = Y ]; then
		row interrupts "not remapped: $off; $u does without"
		note "$u takes devices without interrupt remapping (allow_unsafe_interrupts): a device can raise any interrupt"
		return 0
	fi
	row interrupts "not remapped: $off"
	lack "there is no interrupt remapping ($off), without which the kernel gives no device to user space" "turn on interrupt remapping beside VT-d or AMD-Vi in the firmware, and take intremap=off out of the kernel arguments; in a virtual machine its host gives it: QEMU with -machine kernel-irqchip=split -device intel-iommu,intremap=on, libvirt with <ioapic driver='qemu'/> and <iommu model='intel'><driver intremap='on'/></iommu>"
}

status_modules() {
	have=
	miss=
	for m in vfio_pci vfio_iommu_type1; do
		if loaded $m; then have="$have${have:+ and }$m"; else miss="$miss${miss:+ and }$m"; fi
	done
	boot="not loaded at boot by us"
	if ours "$R$modules_file"; then boot="at boot by $modules_file"; fi
	row modules "${have:-none} loaded${miss:+, $miss not}; $boot"
	case $miss in
	'') ;;
	vfio_iommu_type1) if [ ! -e "$R/dev/iommu" ]; then lack "module vfio_iommu_type1 is not loaded" "sudo $self setup"; fi ;;
	*) lack "$miss: not loaded" "sudo $self setup" ;;
	esac
	if [ "$(word "$R/sys/module/vfio/parameters/enable_unsafe_noiommu_mode")" = Y ]; then
		note "VFIO's unsafe mode without an IOMMU is enabled here; heliosctl does not use it, and with it a device can write to any memory: take enable_unsafe_noiommu_mode out of /etc/modprobe.d and the kernel arguments"
	fi
}

status_huge() {
	page=$(meminfo Hugepagesize)
	total=$(meminfo HugePages_Total)
	if [ -z "$page" ]; then
		row "huge pages" "this kernel has none; heliosctl uses ordinary pages"
		return
	fi
	text="${total:-0} of $(kib_text "$page"), $(meminfo HugePages_Free) free"
	for n in "$R"/sys/devices/system/node/node[0-9]*; do
		f=$n/hugepages/hugepages-${page}kB/nr_hugepages
		if [ -r "$f" ]; then text="$text; NUMA node ${n##*/node}: $(word "$f")"; fi
	done
	row "huge pages" "$text"
	if [ "${total:-0}" = 0 ]; then
		note "no huge pages are reserved: heliosctl goes on with ordinary ones, which take more mappings; \"sudo $self setup --hugepages 2GiB\" reserves some"
	fi
}

# status_user: the group, its members, the user and his limit.
status_user() {
	gid=$(group_id "$group")
	if [ -z "$gid" ]; then
		row group "$group: not there"
		lack "there is no group $group" "sudo $self setup"
	else
		members="$(group_members "$group") $(primary_users "$gid")"
		# shellcheck disable=SC2086 # words
		set -- $members
		row group "$group (gid $gid), members: ${*:-none}"
		if [ $# = 0 ] && [ -z "$user" ]; then
			lack "nobody is in group $group" "sudo $self setup --user NAME"
		fi
		if [ -z "$user" ] && [ $# -gt 0 ]; then user=$1; fi
	fi
	if [ -z "$user" ]; then
		row user "root only; --user NAME looks at somebody"
		return
	fi
	if [ -n "$gid" ]; then
		if ! in_group "$user" "$group"; then
			row user "$user, not in group $group"
			lack "$user is not in group $group" "sudo $self setup --user $user"
		elif [ "$user" = "$me" ] && case " $(id_of -G) " in *" $gid "*) false ;; *) true ;; esac then
			row user "$user, in group $group at his next login"
			lack "this session of $user began before he was in group $group" "log out and in again (for one shell: newgrp $group)"
		else
			row user "$user, in group $group"
		fi
	else
		row user "$user"
	fi
	# shellcheck disable=SC2046 # words
	set -- $(limit_at_login "$user")
	limit=${1:-}
	from=${2:-}
	if [ -z "$limit" ]; then
		limit=$(limit_by_default)
		from=${limit:+the default}
	fi
	if [ -n "$limit" ]; then
		text="$user: $(kib_text "$limit") at login, from $from"
	else
		text="$user: unknown"
	fi
	# shellcheck disable=SC3045 # dash, busybox and bash have -l
	session=$(ulimit -l 2>/dev/null) || session=
	if [ "$user" = "$me" ] && [ -n "$session" ]; then
		text="$text; this session $(kib_text "$session")"
	fi
	row memlock "$text"
	if ! grep -qs pam_limits "$R"/etc/pam.d/*; then
		note "nothing here reads /etc/security/limits.d at login (no pam_limits in /etc/pam.d): raise the limit of locked memory where $user's session starts"
	fi
	if [ -z "$limit" ] || ! enough_memlock "$limit"; then
		case $from in
		'' | 'the default' | "$limits_file") raise="sudo $self setup --memlock $(kib_text $((2 * needed_memlock_kib)) | tr -d ' ')${user:+ --user $user}" ;;
		*) raise="raise memlock in $from" ;;
		esac
		lack "$user may lock too little memory for SSDs to reach (train with default settings needs $(kib_text $needed_memlock_kib))" "$raise, then log in again"
	elif [ "$user" = "$me" ] && [ -n "$session" ] && ! enough_memlock "$session"; then
		lack "this session may lock $(kib_text "$session") only" "log out and in again; where that does not help (a service, a desktop's terminal), raise LimitMEMLOCK= of that systemd unit"
	fi
}

status_nodes() {
	if ours "$R$rules_file"; then
		if grep -qF "GROUP=\"$group\"" "$R$rules_file"; then
			row "udev rule" "$rules_file"
		else
			row "udev rule" "$rules_file, for another group"
			lack "the udev rule is not for group $group" "sudo $self setup --group $group"
		fi
	else
		row "udev rule" "none of ours"
		lack "there is no udev rule that gives the group $group the VFIO nodes of SSDs" "sudo $self setup"
	fi
	if [ ! -e "$R/dev/vfio/vfio" ]; then
		if [ -e "$R/dev/iommu" ]; then
			row /dev/vfio "no container node; /dev/iommu is there"
		else
			row /dev/vfio "not there"
			lack "/dev/vfio/vfio is not there: VFIO is not loaded" "sudo $self setup"
			return
		fi
	else
		list=
		for n in "$R"/dev/vfio/[0-9]*; do
			if [ -e "$n" ]; then list="$list ${n##*/}"; fi
		done
		if open_to_all /dev/vfio/vfio || { [ -n "$gid" ] && owned /dev/vfio/vfio "$gid"; }; then
			row /dev/vfio "container open to the user; groups:${list:- none (no device is bound)}"
		else
			row /dev/vfio "container closed to the user; groups:${list:- none (no device is bound)}"
			lack "/dev/vfio/vfio is closed to ordinary users" "sudo $self setup"
		fi
	fi
	for n in $(nodes); do
		if [ -n "$gid" ] && ! owned "$n" "$gid"; then
			lack "$n does not belong to group $group" "sudo $self setup"
		fi
	done
}

status_ssds() {
	say "NVMe devices"
	any=0
	for d in "$R"/sys/bus/pci/devices/*; do
		if [ "$(word "$d/class")" != "$nvme_class" ]; then continue; fi
		any=1
		g=$(link "$d/iommu_group")
		drv=$(link "$d/driver")
		what=
		for c in "$d"/nvme/nvme*; do
			if [ -d "$c" ]; then
				what="$(sed 's/ *$//' "$c/model" 2>/dev/null), serial $(sed 's/ *$//' "$c/serial" 2>/dev/null), ${c##*/}"
				for b in "$c"/nvme*n*; do
					if [ -d "$b" ]; then what="$what ${b##*/}"; fi
				done
			fi
		done
		rec=$(record_of "${d##*/}")
		if has_bound "${d##*/}"; then
			what="${what:+$what, }SSD $rec of heliosctl"
		elif [ -n "$rec" ]; then
			what="${what:+$what, }heliosctl's record $rec is unfinished or stale: \"heliosctl ssds\" says what to do"
		elif [ "$drv" = vfio-pci ]; then
			what="${what:+$what, }bound by another program, or heliosctl's record was lost"
		fi
		others=
		for o in "$d"/iommu_group/devices/*; do
			case $(word "$o/class") in
			'' | 0x0604*) ;;
			*) if [ "${o##*/}" != "${d##*/}" ]; then others="$others ${o##*/}"; fi ;;
			esac
		done
		printf '  %s  driver %s, IOMMU group %s%s%s\n' "${d##*/}" "${drv:-none}" "${g:-none}" "${what:+, $what}" "${others:+, shares the group with$others}"
	done
	if [ "$any" = 0 ]; then say "  none"; fi
}

# look: everything that status shows; sets lacks and iommu_on.
look() {
	row kernel "$(word "$R/proc/sys/kernel/osrelease")"
	status_iommu
	status_remapping
	status_modules
	status_huge
	status_user
	status_nodes
	status_ssds
	if [ -n "$notes" ]; then
		say "notes"
		printf '%s' "$notes"
	fi
	if [ "$lack_count" = 0 ]; then
		say "nothing lacks: an ordinary user in group $group can use SSDs that are bound (next: sudo $self bind PCI-ADDRESS)"
	else
		say "lacking"
		printf '%s' "$lacks"
	fi
}

# --- setup

need_root() {
	if [ "$dry" = 0 ] && [ "$(id_of -u)" != 0 ]; then
		die 3 "$1 needs root; run \"sudo $self $1\", or add --dry-run to see what it would do"
	fi
}
id_of() { "$(tool_or_own id)" "$@"; }

setup_modules() {
	rest="vfio_pci vfio_pci_core vfio_iommu_type1 vfio_virqfd vfio irqbypass iommufd"
	for m in $rest; do
		if ! loaded "$m"; then rec_add "module $m"; fi
	done
	list=
	for m in vfio-pci vfio_iommu_type1; do
		u=$(printf '%s' "$m" | tr - _)
		if loaded "$u"; then
			list="$list
$m"
			say "kept module $m"
			continue
		fi
		t=$(tool modprobe) || die 3 "there is no modprobe; install kmod, then run setup again"
		if change "loaded module $m" "$t" "$m"; then
			list="$list
$m"
		elif [ "$m" = vfio_iommu_type1 ] && [ -e "$R/dev/iommu" ]; then
			say "no module $m in this kernel; /dev/iommu is there instead"
		else
			die 3 "module $m does not load: the kernel $(word "$R/proc/sys/kernel/osrelease") lacks it, or its modules are not installed; take a kernel with CONFIG_VFIO_PCI (every distribution's has it); \"sudo $self reset\" takes back what was done"
		fi
	done
	put $modules_file "${list#?}"
}

# setup_huge: what was there before is kept in the record, and given back by reset.
setup_huge() {
	nr=$R/proc/sys/vm/nr_hugepages
	page=$(meminfo Hugepagesize)
	if [ -z "$page" ] || [ ! -e "$nr" ]; then
		if [ "$huge_given" = 1 ] && [ "$huge_kib" != 0 ]; then
			die 3 "this kernel has no huge pages; run setup with --hugepages 0"
		fi
		say "no huge pages in this kernel; heliosctl uses ordinary ones"
		return
	fi
	now=$(word "$nr")
	before=$(rec_get hugepages_before)
	before=${before:-$now}
	if [ "$want" = 0 ] || [ "$before" -ge "$want" ]; then
		if [ -n "$(rec_get hugepages_set)" ]; then
			give_back_huge
			drop $sysctl_file
			rec_drop hugepages_set
			rec_drop hugepages_before
		fi
		say "kept $before huge pages"
		return
	fi
	if [ "$now" != "$want" ]; then
		rec_set hugepages_before "$before"
		rec_set hugepages_set "$want"
		change "asked for $want huge pages of $(kib_text "$page")" write_number "$want" "$nr" ||
			die 1 "cannot write /proc/sys/vm/nr_hugepages"
		if [ "$dry" = 0 ]; then
			got=$(meminfo HugePages_Total)
			if [ "$got" -lt "$want" ] && [ -w "$R/proc/sys/vm/compact_memory" ]; then
				write_number 1 "$R/proc/sys/vm/compact_memory" && write_number "$want" "$nr"
				got=$(meminfo HugePages_Total)
			fi
			if [ "$got" -lt "$want" ]; then
				say "got $got of $want huge pages: the memory is in pieces; after a reboot it will be all"
			else
				say "got all $want ($(kib_text $((want * page))))"
			fi
		fi
	else
		say "kept $now huge pages"
	fi
	put $sysctl_file "vm.nr_hugepages = $want"
}
write_number() { printf '%s\n' "$1" >"$2"; }
# give_back_huge: as before setup, unless somebody raised the number since.
give_back_huge() {
	nr=$R/proc/sys/vm/nr_hugepages
	before=$(rec_get hugepages_before)
	set_to=$(rec_get hugepages_set)
	now=$(word "$nr")
	if [ -z "$before" ] || [ -z "$set_to" ] || [ -z "$now" ]; then return 0; fi
	if [ "$now" -gt "$set_to" ]; then
		say "left $now huge pages: somebody raised them above our $set_to"
	elif [ "$now" != "$before" ]; then
		change "huge pages back to $before" write_number "$before" "$nr" || die 1 "cannot write /proc/sys/vm/nr_hugepages"
	fi
}

# rule_program FOLDER: for udev, whether all devices of an IOMMU group are bridges or SSDs that
# heliosctl has bound (has_bound). Other groups stay root's; the nodes of an SSD that is being bound are
# given by heliosctl itself. $$ is udev's way to write $; it knows no double quotes in there, so dots stand
# for those of the record's lines.
rule_program() {
	printf '%s' "/bin/sh -c 'for d in $1/devices/*; do read v <\$\$d/class || exit 1; case \$\$v in $nvme_class) [ -e /sys/bus/pci/drivers/vfio-pci/\$\${d##*/} ] && f=\$\$(grep -lsx ...pci.:..\$\${d##*/}.. /run/heliosctl/vfio*.json) && grep -qsx ...phase.:..bound.. \$\$f || exit 1 ;; 0x0604*) ;; *) exit 1 ;; esac; done'"
}
rules_text() {
	cat <<END
# Nodes of IOMMU groups that hold SSDs which heliosctl bound, and nothing else but PCI bridges.
SUBSYSTEM=="vfio", KERNEL=="[0-9]*", PROGRAM=="$(rule_program /sys/kernel/iommu_groups/%k)", GROUP="$group", MODE="0660"
SUBSYSTEM=="vfio-dev", PROGRAM=="$(rule_program /sys/class/vfio-dev/%k/device/iommu_group)", GROUP="$group", MODE="0660"
# The container opens nothing by itself; the kernel's own mode for it is 0666.
SUBSYSTEM=="misc", KERNEL=="vfio", MODE="0666"
END
	if iommu_free; then
		printf 'SUBSYSTEM=="misc", KERNEL=="iommu", GROUP="%s", MODE="0660"\n' "$group"
	fi
}
reload_rules() {
	if t=$(tool udevadm); then
		change "udev reads its rules again" "$t" control --reload ||
			say "udev does not answer; it reads the rules when it starts"
	fi
}

# set_node PATH GID MODE: what it was goes to the record, once.
set_node() {
	# shellcheck disable=SC2046 # two words
	set -- "$1" "$2" "$3" $(stat_of '%g %a' "$R$1")
	if [ "$2" = "$4" ] && [ "$3" = "$5" ]; then return 0; fi
	if ! rec_all node | grep -q "^$1 "; then rec_add "node $1 $4 $5"; fi
	if [ "$2" != "$4" ]; then
		change "$1: group ${group}" "$(tool_or_own chgrp)" "$2" "$R$1" || die 1 "cannot change the group of $1"
	fi
	change "$1: mode $3" chmod "$3" "$R$1" || die 1 "cannot change the mode of $1"
}
setup_nodes() {
	gid=$(group_id "$group")
	if [ -z "$gid" ]; then
		if [ "$dry" = 1 ]; then
			for n in $(nodes); do printf 'would run: chgrp %s %s; chmod 660 %s\n' "$group" "$n" "$n"; done
			return
		fi
		die 1 "group $group was made, but is not found; look at /etc/group and /etc/nsswitch.conf"
	fi
	if [ -e "$R/dev/vfio/vfio" ] && ! open_to_all /dev/vfio/vfio; then
		set_node /dev/vfio/vfio "$(stat_of %g "$R/dev/vfio/vfio")" 666
	fi
	for n in $(nodes); do
		set_node "$n" "$gid" 660
	done
}

do_setup() {
	need_root setup
	for f in "$modules_file" "$sysctl_file" "$limits_file" "$rules_file" "$record"; do check_file "$f"; done
	page=$(meminfo Hugepagesize)
	page=${page:-2048}
	if [ "$huge_given" = 1 ]; then
		want=$(((huge_kib + page - 1) / page))
		now=$(word "$R/proc/sys/vm/nr_hugepages")
		more=$(((want - ${now:-0}) * page))
		avail=$(meminfo MemAvailable)
		if [ "$more" -gt $((${avail:-0} * 9 / 10)) ]; then
			bad "--hugepages $(kib_text "$huge_kib") would take $(kib_text "$more") more, and $(kib_text "${avail:-0}") are available"
		fi
	elif [ -n "$(rec_get hugepages_set)" ]; then
		want=$(rec_get hugepages_set)
	else
		total=$(meminfo MemTotal)
		want=$((${total:-0} / 8))
		if [ $want -gt $((most_default_huge_mib * 1024)) ]; then want=$((most_default_huge_mib * 1024)); fi
		want=$((want / page))
		avail=$(meminfo MemAvailable)
		if [ $((want * page)) -gt $((${avail:-0} / 2)) ]; then want=0; fi
	fi

	rec_start
	setup_modules
	setup_huge
	old=$(rec_get group)
	if [ -n "$old" ] && [ "$old" != "$group" ]; then say "the group changes from $old to $group"; fi
	rec_set group "$group"
	if [ -z "$(group_line "$group")" ]; then
		rec_add "made_group $group"
		group_make "$group" || die 1 "cannot make group $group"
	else
		say "kept group $group"
	fi
	if [ -n "$user" ]; then
		if [ -n "$(group_line "$group")" ] && in_group "$user" "$group"; then
			say "kept $user in group $group"
		else
			rec_add "member $group $user"
			group_join "$group" "$user" || die 1 "cannot add $user to group $group"
		fi
	fi
	put $limits_file "# Memory that SSDs reach is locked. KiB, or unlimited; takes effect at login.
@$group - memlock $memlock"
	say "locked memory: $(kib_text "$memlock") for group $group from the next login on$memlock_why"
	put $rules_file "$(rules_text)"
	reload_rules
	setup_nodes
	if [ "$dry" = 1 ]; then return 0; fi
	say ""
	look
	if [ $iommu_on = 0 ]; then
		say "setup did its part; the IOMMU it cannot turn on"
		return 3
	fi
}

# --- bind, unbind, reset

# find_heliosctl: the one that runs this script (heliosctl vfio-setup), else beside the script, in bin
# beside it, or in PATH.
find_heliosctl() {
	if [ -n "${HELIOSCTL:-}" ]; then
		printf '%s\n' "$HELIOSCTL"
		return 0
	fi
	case $0 in
	*/*) here=${0%/*} ;;
	*) here=. ;;
	esac
	for h in "$here/heliosctl" "$here/bin/heliosctl"; do
		if [ -f "$h" ] && [ -x "$h" ]; then
			printf '%s\n' "$h"
			return 0
		fi
	done
	command -v heliosctl || die 3 "there is no heliosctl beside this script, in bin/ beside it or in PATH; build it with \"make build\""
}

# pass VERB ARGUMENT…: heliosctl does it, with all its checks, and gives the exit code.
pass() {
	h=$(find_heliosctl) || exit
	if [ "$dry" = 1 ]; then
		printf 'would run: %s\n' "$(quoted "$h" "$@")"
		return 0
	fi
	exec "$h" "$@"
}

# run_dir: where heliosctl's records of bound SSDs are.
run_dir() { printf '%s\n' "${HELIOS_RUN:-$R/run/heliosctl}"; }
# record_of ADDRESS: the name of the SSD that heliosctl has bound there.
record_of() {
	f=$(grep -sl "\"pci\": *\"$1\"" "$(run_dir)"/vfio*.json | head -n 1)
	f=${f##*/}
	printf '%s\n' "${f%.json}"
}
# has_bound ADDRESS: whether heliosctl has finished its bind and vfio-pci has it still. A record is stale
# when somebody moved the SSD to another driver since.
has_bound() {
	rec=$(record_of "$1")
	[ -n "$rec" ] && [ -e "$R/sys/bus/pci/drivers/vfio-pci/$1" ] && grep -qs '^ *"phase": *"bound"' "$(run_dir)/$rec.json"
}
# bound: the names of the SSDs that heliosctl has bound, machine-wide.
bound() {
	for f in "$(run_dir)"/vfio*.json; do
		if [ -f "$f" ]; then
			f=${f##*/}
			printf '%s\n' "${f%.json}"
		fi
	done
}

reset_modules() {
	held=
	ssds=
	for d in "$R"/sys/bus/pci/drivers/vfio-pci/*:*:*.*; do
		d=${d##*/}
		# In a dry run heliosctl's own are still there.
		if [ ! -e "$R/sys/bus/pci/drivers/vfio-pci/$d" ] || [ -n "$(record_of "$d")" ]; then continue; fi
		held="$held $d"
		if [ "$(word "$R/sys/bus/pci/devices/$d/class")" = "$nvme_class" ]; then ssds="$ssds $d"; fi
	done
	if [ -n "$held" ]; then
		say "left the VFIO modules loaded, for vfio-pci still has:$held"
		if [ -n "$ssds" ]; then say "  what no other program uses goes back to the kernel with: sudo heliosctl unbind-ssds$ssds"; fi
		return
	fi
	if ! t=$(tool modprobe); then return; fi
	for m in vfio_pci vfio_pci_core vfio_iommu_type1 vfio_virqfd vfio irqbypass iommufd; do
		if rec_has "module $m" && [ -e "$R/sys/module/$m/initstate" ]; then
			change "unloaded module $m" "$t" -r $m 2>/dev/null || {
				case $m in
				vfio_pci | vfio_iommu_type1) say "left module $m loaded: it is in use" ;;
				esac
			}
		fi
	done
}
reset_nodes() {
	rec_all node | while read -r n g mode; do
		if [ -e "$R$n" ]; then
			change "$n: as before" "$(tool_or_own chgrp)" "$g" "$R$n" && change "$n: mode $mode" chmod "$mode" "$R$n"
		fi
	done
	# Nodes that came later, as the kernel makes them.
	gid=$(group_id "$(rec_get group)")
	for n in $(nodes_of ssds_only); do
		if [ -n "$gid" ] && ! rec_all node | grep -q "^$n " && owned "$n" "$gid"; then
			change "$n: root's" "$(tool_or_own chgrp)" 0 "$R$n" && change "$n: mode 600" chmod 600 "$R$n"
		fi
	done
}
reset_groups() {
	rec_all member | while read -r g u; do
		if [ -n "$(group_line "$g")" ] && in_group "$u" "$g"; then
			group_leave "$g" "$u" || say "left $u in group $g"
		fi
	done
	for g in $(rec_all made_group); do
		if [ -z "$(group_line "$g")" ]; then continue; fi
		left=
		for u in $(group_members "$g") $(primary_users "$(group_id "$g")"); do
			if ! { [ "$dry" = 1 ] && rec_has "member $g $u"; }; then left="$left $u"; fi
		done
		if [ -n "$left" ]; then
			say "left group $g: others are in it:$left"
		else
			group_remove "$g" || say "left group $g: it cannot be removed"
		fi
	done
}

do_reset() {
	need_root reset
	names=$(bound)
	if [ -n "$names" ]; then
		h=$(find_heliosctl) || exit
		# shellcheck disable=SC2086 # one word each
		change "unbound: $(printf '%s ' $names)" "$h" unbind-ssds $names || {
			rc=$?
			printf 'vfio-setup: SSDs are still bound, so nothing was reset; see the message above, then run reset again\n' >&2
			return $rc
		}
	fi
	had=0
	if [ -f "$R$record" ]; then
		had=1
		ours "$R$record" || die 4 "$record is there and is not ours; nothing was reset"
	fi
	for f in $rules_file $limits_file $modules_file $sysctl_file; do
		if ours "$R$f"; then had=1; fi
	done
	if [ $had = 0 ]; then
		say "nothing to reset: setup has not run here, or was reset"
		return 0
	fi
	if ours "$R$rules_file"; then
		drop $rules_file
		reload_rules
	else
		drop $rules_file
	fi
	drop $limits_file
	drop $modules_file
	drop $sysctl_file
	give_back_huge
	reset_nodes
	reset_groups
	reset_modules
	dirs=$(rec_all dir | awk '{ line[NR] = $0 } END { for (i = NR; i > 0; i--) print line[i] }')
	if [ -f "$R$record" ]; then
		change "removed $record" rm -f -- "$R$record" || die 1 "cannot remove $record"
	fi
	for f in $dirs; do
		if [ -d "$R$f" ]; then change "removed $f" rmdir -- "$R$f" 2>/dev/null || say "left $f: something else is in it"; fi
	done
}

# --- arguments

dry=0
verb=
while [ $# -gt 0 ]; do
	case $1 in
	--dry-run) dry=1 ;;
	-h | --help | help)
		usage
		exit 0
		;;
	-*) bad "unknown option $1" ;;
	*)
		verb=$1
		shift
		break
		;;
	esac
	shift
done
case $R in
'' | /*) ;;
*) bad "HELIOS_SYSROOT must be an absolute path, not \"$R\"" ;;
esac
if [ -n "$R" ] && [ ! -d "$R" ]; then bad "HELIOS_SYSROOT: there is no folder $R"; fi
case $verb in
'') bad "say what to do: status, setup, bind, unbind or reset" ;;
bind | unbind)
	# --dry-run is ours wherever it stands; the rest goes on as it is.
	left=$#
	while [ "$left" -gt 0 ]; do
		a=$1
		shift
		left=$((left - 1))
		if [ "$a" = --dry-run ]; then
			dry=1
		else
			set -- "$@" "$a"
		fi
	done
	pass "$verb-ssds" "$@"
	exit
	;;
status | setup | reset)
	missing=
	for c in awk cat chmod chgrp cp cut grep head id mkdir mv readlink rm rmdir sed stat tail tr; do
		command -v "$c" >/dev/null || [ -x "$R/bin/$c" ] || missing="$missing${missing:+, }$c"
	done
	# Without them what is there would not be found.
	if [ -n "$missing" ]; then die 3 "there is no $missing in PATH ($PATH), which $verb needs; install what has it (gawk or mawk, sed, grep, coreutils, or busybox) or mend PATH, then run $verb again"; fi
	;;
*) bad "there is no verb \"$verb\"; there are status, setup, bind, unbind and reset" ;;
esac

user=
group=
memlock=
huge_kib=0
huge_given=0
while [ $# -gt 0 ]; do
	case $1 in
	--*=*)
		a=$1
		shift
		set -- "${a%%=*}" "${a#*=}" "$@"
		;;
	esac
	case $1 in
	--dry-run)
		dry=1
		shift
		continue
		;;
	-h | --help)
		usage
		exit 0
		;;
	--user | --group | --hugepages | --memlock) ;;
	-*) bad "unknown option $1 for $verb" ;;
	*) bad "$verb takes no argument \"$1\"" ;;
	esac
	case $verb$1 in
	status--user | status--group | setup--*) ;;
	*) bad "$1 is no option of $verb" ;;
	esac
	if [ $# -lt 2 ] || [ -z "$2" ]; then bad "$1 needs a value"; fi
	case $1 in
	--user)
		check_name user "$2"
		user=$2
		;;
	--group)
		check_name group "$2"
		group=$2
		;;
	--hugepages)
		huge_kib=$(size_kib "$2") || bad "--hugepages \"$2\" is not a size; write it like 512MiB or 2GiB, or 0"
		huge_given=1
		;;
	--memlock)
		if [ "$2" = unlimited ]; then
			memlock=unlimited
		else
			memlock=$(size_kib "$2") || bad "--memlock \"$2\" is neither a size nor \"unlimited\""
			enough_memlock "$memlock" "$least_memlock_kib" || bad "--memlock $2 is too little; heliosctl needs $(kib_text $least_memlock_kib) at least"
		fi
		;;
	esac
	shift 2
done
me=$(id_of -un 2>/dev/null) || me=
if [ -z "$user" ]; then
	user=${SUDO_USER:-${DOAS_USER:-}}
	if [ -z "$user" ] && [ "$verb" = status ]; then user=$me; fi
fi
if [ "$user" = root ]; then user=; fi
if [ -n "$user" ]; then
	check_name user "$user"
	[ -n "$(user_line "$user")" ] || bad "there is no user $user"
fi
if [ -z "$group" ]; then
	group=$(rec_get group)
	group=${group:-$default_group}
	check_name group "$group"
fi
memlock_why=
if [ -z "$memlock" ]; then
	# What an earlier setup wrote stays, unless another value is given.
	if ours "$R$limits_file"; then
		memlock=$(awk '$3 == "memlock" { print $4; exit }' "$R$limits_file")
		memlock_why=", as an earlier setup set it (--memlock SIZE or unlimited changes it)"
	fi
	memlock=${memlock:-unlimited}
fi

case $verb in
status)
	look
	if [ "$lack_count" -gt 0 ]; then exit 3; fi
	;;
setup) do_setup ;;
reset) do_reset ;;
esac
