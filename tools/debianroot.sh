#!/usr/bin/env bash
# The part of a Debian that the image stands on, unpacked without root and without running any of it:
# tools/debianroot.sh ARCH DIR. The packages come from this machine's mirror, and apt checks their
# signatures. Scanners find their versions in var/lib/dpkg/status.
set -euo pipefail
arch=${1:?usage: debianroot.sh ARCH DIR} dir=${2:?usage: debianroot.sh ARCH DIR}
suite=trixie
# The binary needs libc, as NVIDIA's libraries do; "demo" needs the rest.
packages=(base-files libc6 bash coreutils grep mawk)
command -v apt-get >/dev/null || {
	echo "debianroot.sh: the image is made of Debian's packages, and no apt-get is here; use a Debian" >&2
	exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/lists/partial "$work"/debs/partial "$dir"/{etc,proc,sys,dev,tmp,var/lib/dpkg}
# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
echo "deb $mirror $suite main" >"$work/sources"
: >"$work/status"
apt=(apt-get -qq -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o APT::Install-Recommends=false
	-o APT::Sandbox::User= -o Debug::NoLocking=1 -o Dir::Etc::SourceList="$work/sources"
	-o Dir::Etc::SourceParts=- -o Dir::State="$work" -o Dir::State::Lists="$work/lists"
	-o Dir::State::Status="$work/status" -o Dir::Cache="$work" -o Dir::Cache::Archives="$work/debs")
"${apt[@]}" update
"${apt[@]}" --yes --download-only install "${packages[@]}"
for deb in "$work"/debs/*.deb; do # base-files first: its links lead from /lib to /usr/lib
	dpkg-deb --extract "$deb" "$dir"
	{ dpkg-deb --field "$deb" | sed '/^Package:/a Status: install ok unpacked' && echo; } >>"$dir/var/lib/dpkg/status"
done
# Licences stay.
find "$dir/usr/share/doc" -type f ! -name copyright -delete
rm -rf "$dir"/usr/share/{man,info,locale,lintian,bug} "$dir"/usr/lib/*/gconv
find "$dir/usr/share" \( -xtype l -o -type d -empty \) -delete
ln -s mawk "$dir/usr/bin/awk"
ln -s bash "$dir/usr/bin/sh"
chmod 1777 "$dir/tmp"
printf '%s\n' 'root:x:0:0:root:/root:/bin/bash' 'heliosctl:x:65532:65532::/data:/bin/bash' >"$dir/etc/passwd"
printf '%s\n' 'root:x:0:' 'heliosctl:x:65532:' >"$dir/etc/group"
