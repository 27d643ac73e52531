#!/bin/bash
# Builds an image where no registry is at hand: its base is made of Debian's packages, and what pip downloads comes as
# this machine's pip gets it. As root, on Debian or Ubuntu. Prints its size and digest.
# Usage: images/build.sh hvd-elastic|hvd-elastic-ray [CACHE]
# CACHE keeps downloads. Settings: TAG=latest, PYTHON=python3, FRESH=1: nothing is taken from an earlier build.
set -euo pipefail
name=${1:-}
cache=${2:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd-elastic/images}
tag=${TAG:-latest}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
epoch=315532800 # 1980: the first year that zip files know
release=bookworm
image=localhost/$name:$tag
base=localhost/hvd-elastic-base:$release
export TMPDIR=${TMPDIR:-/var/tmp} SOURCE_DATE_EPOCH=$epoch

fail() { echo "$*" >&2; exit 1; }

case $name in
  hvd-elastic) extras=kubernetes,etcd ;;
  hvd-elastic-ray) extras=kubernetes,etcd,ray ;;
  *) fail "usage: images/build.sh hvd-elastic|hvd-elastic-ray [CACHE]; hvd-elastic-cuda needs a registry: README.md" ;;
esac
[ "$(id -u)" = 0 ] || fail "this makes a root file system, which takes root; with Docker: see images/README.md"
missing=
for program in buildah debootstrap; do command -v "$program" >/dev/null || missing+=" $program"; done
[ -z "$missing" ] || fail "missing:$missing; apt-get install$missing"

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
work=$(mktemp -d)
container=
trap '[ -z "$container" ] || buildah rm "$container" >/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

debian_sources() { # URI URI-OF-SECURITY
  local kind
  for kind in "$1 $release $release-updates" "$2 $release-security"; do
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\n' "${kind%% *}" "${kind#* }"
    printf 'Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n'
  done
}

# Packages come from where apt here takes its own, if this is the same Debian; the image names Debian's own servers.
official=(http://deb.debian.org/debian http://deb.debian.org/debian-security)
here=/etc/apt/sources.list.d/debian.sources
mkdir "$work/apt"
if grep -qw "$release" "$here" 2>/dev/null; then
  cp "$here" "$work/apt/debian.sources"
else
  debian_sources "${official[@]}" >"$work/apt/debian.sources"
fi

# Debian as its smallest, without a trace of this machine.
build_base() {
  local tree="$work/root" mirror
  mirror=$(awk '$1 == "URIs:" { print $2; exit }' "$work/apt/debian.sources")
  debootstrap --variant=minbase "$release" "$tree" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    { tail -n 20 "$work/debootstrap.log" >&2; fail "debootstrap failed"; }
  chroot "$tree" sh -c 'umask 022; cat >/etc/apt/sources.list.d/debian.sources; rm /etc/apt/sources.list' \
    <"$work/apt/debian.sources"
  chroot "$tree" sh -c 'apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get dist-upgrade -q -y' \
    >"$work/upgrade.log" 2>&1 || { tail -n 20 "$work/upgrade.log" >&2; fail "no updates"; }
  debian_sources "${official[@]}" >"$tree/etc/apt/sources.list.d/debian.sources"
  rm -rf "$tree"/etc/{hostname,resolv.conf,machine-id} "$tree"/var/{log,cache/apt,cache/ldconfig}/* \
    "$tree"/var/cache/debconf/*-old "$tree"/var/lib/apt/lists/* "$tree"/var/lib/dpkg/*-old "$tree"/dev/* \
    "$tree"/usr/share/{doc,man,locale}/*
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$tree" / >/dev/null
  buildah config --cmd /bin/bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit --quiet --timestamp "$epoch" --rm "$container" "$base" >/dev/null
  container=
  rm -rf "$tree"
}

# All that pip would fetch during the build; a folder for each set of wishes.
download() {
  local wanted
  wanted=$(cat "$root"/{pyproject.toml,constraints.txt} <(echo "$extras") | sha256sum | cut -c 1-12)
  wheels="$cache/wheels-$wanted"
  [ ! -d "$wheels" ] || return 0
  local platforms=() glibc
  for glibc in _2_28 _2_27 _2_17 2014; do platforms+=(--platform "manylinux${glibc}_$(uname -m)"); done
  (cd "$root" && "$python" images/requirements.py "$extras") >"$work/requirements.txt"
  "$python" -m pip download --quiet --dest "$work/wheels" --only-binary :all: --python-version 3.11 "${platforms[@]}" \
    --constraint "$root/constraints.txt" --requirement "$work/requirements.txt" cmake ninja scikit-build-core \
    2> >(grep -v ^WARNING >&2)
  rm -rf "$cache"/wheels-"$wanted".new
  mv "$work/wheels" "$wheels.new" && mv "$wheels.new" "$wheels"
}

begun=$SECONDS
download
if [ -n "${FRESH:-}" ] || ! buildah inspect --type image "$base" >/dev/null 2>&1; then build_base; fi

during_build=(--isolation chroot --network host --ulimit nofile=4096:4096)
# Mounted over folders that are there, so that no trace stays: downloads at /mnt, pip's settings in /root.
mkdir -p "$work/home/.config/pip"
printf '[global]\nno-index = true\nfind-links = /mnt\n' >"$work/home/.config/pip/pip.conf"
during_build+=(--volume "$work/apt:/etc/apt/sources.list.d:ro" --volume "$wheels:/mnt:ro")
during_build+=(--volume "$work/home:/root:ro")
again=()
[ -z "${FRESH:-}" ] || again=(--no-cache)
buildah build --quiet --layers "${again[@]}" "${during_build[@]}" --timestamp "$epoch" --pull-never \
  --file "$root/images/Containerfile" --ignorefile "$root/images/Containerfile.dockerignore" \
  --build-arg BASE="$base" --build-arg EXTRAS="$extras" --tag "$image" "$root" >"$work/build.log" 2>&1 ||
  { tail -n 40 "$work/build.log" >&2; fail "building $image failed"; }

# As a registry would hold it: compressed.
buildah push --quiet --digestfile "$work/digest" "$image" "oci:$work/oci"
packed=$(du -sb "$work/oci/blobs" | cut -f 1)
unpacked=$(gzip --decompress --stdout "$work"/oci/blobs/sha256/* 2>/dev/null | wc --bytes || true)
printf '%s\n' "image     $image" "digest    $(cat "$work/digest")" \
  "packed    $((packed / 1000000)) MB, as a registry holds it and a node fetches it" \
  "unpacked  $((unpacked / 1000000)) MB" "built in  $((SECONDS - begun)) s"
