#!/usr/bin/env bash
# Two releases, of this folder and of a clone, are equal to the byte. The image, unpacked and run by others'
# programs, runs the demo as its own user. The deb installs on a bare Debian, runs the demo and leaves
# nothing: tools/testrelease.sh. Needs root, debootstrap, umoci, runc and what "make release" needs.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")/.."
work=$(mktemp -d)
root=$work/root
trap 'umount "$root/proc" 2>/dev/null || true; rm -rf --one-file-system "$work"' EXIT
make -s release RELEASE_DIR="$work/1"
git clone -q --no-hardlinks . "$work/clone" # another path, and nothing compiled before
GOCACHE=$work/cache make -s -C "$work/clone" release RELEASE_DIR="$work/2"
diff -r "$work/1" "$work/2"
echo "testrelease: $(find "$work/1" -type f | wc -l) files, twice the same"
(cd "$work/1" && sha256sum -c --quiet SHA256SUMS)

tar -xf "$work/1"/heliosctl_*_"$(dpkg --print-architecture)".oci.tar --one-top-level="$work/oci"
name=$(umoci ls --layout "$work/oci")
umoci unpack --image "$work/oci:$name" "$work/image"
echo "testrelease: image $name, $(du -sm "$work/image/rootfs" | cut -f 1) MiB"
# in_image ARGUMENT…: what "docker run IMAGE ARGUMENT…" would do.
in_image() {
	python3 - "$work/image/config.json" "$@" <<-'END'
		import json, sys
		path, config = sys.argv[1], json.load(open(sys.argv[1]))
		process = config["process"]
		assert process["user"]["uid"] != 0
		process.update(terminal=False, args=process["args"][:1] + sys.argv[2:])
		json.dump(config, open(path, "w"))
	END
	runc --root "$work/runc" run --bundle "$work/image" "testrelease-$$"
}
in_image demo

# shellcheck disable=SC2016 # apt's own variable
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
debootstrap --variant=minbase "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root" "$mirror" >/dev/null
mount -t proc proc "$root/proc"
# bare COMMAND…: runs it on the bare system, with no more in its environment than a login has.
bare() { chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
# All files but those that dpkg writes on any change.
there() { (cd "$root" && find . -xdev -path ./proc -prune -o -print | grep -vE '^\./var/(lib/dpkg/[a-z]*-old|log/dpkg.log|cache/ldconfig)|^\./tmp/' | sort); }
there >"$work/before"
cp "$work/1"/heliosctl_*_"$(dpkg --print-architecture)".deb "$root/tmp/heliosctl.deb"
bare dpkg -i /tmp/heliosctl.deb
bare du -sk /usr/bin/heliosctl
bare heliosctl demo /tmp/demo-out
bare dpkg --purge heliosctl
there >"$work/after"
diff "$work/before" "$work/after"
echo "testrelease: nothing is left"
