#!/bin/bash
# The first process of a pod: it makes the pod's file system and becomes its container. It runs in namespaces of its
# own, so all that it mounts goes with it. The machine's own root is what images have; what a pod writes there is lost.
# Usage: pod_root.sh FOLDER COMMAND...; in FOLDER are `settings`, shell variables, and `mounts`, a line for each.
set -euo pipefail
folder=$1
shift
# shellcheck source=/dev/null
. "$folder/settings" # hostname, user, group, read_only

mkdir -p "$folder/layer"
mount -t tmpfs -o mode=755 layer "$folder/layer"
mkdir "$folder"/layer/{upper,work,root}
root="$folder/layer/root"
mount -t overlay -o "lowerdir=/,upperdir=$folder/layer/upper,workdir=$folder/layer/work" root "$root"

mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts"
mount --rbind /dev/pts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for number in 0 1 2; do
  name=(stdin stdout stderr)
  ln -s "/proc/self/fd/$number" "$root/dev/${name[number]}"
done
mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm" # as much as containers get

mount_at() { # SOURCE TARGET OPTIONS; the path's links are the pod's
  local source=$1 target=$2 options=$3 at
  at=$root$(chroot "$root" realpath --canonicalize-missing -- "$target")
  if [ "$source" = tmpfs ]; then
    mkdir -p "$at"
    mount -t tmpfs -o "$options" tmpfs "$at"
    return
  fi
  if [ -d "$source" ]; then mkdir -p "$at"; else mkdir -p "${at%/*}"; [ -e "$at" ] || touch "$at"; fi
  mount --bind "$source" "$at"
  [ "$options" != ro ] || mount -o remount,bind,ro "$at"
}
while IFS=$'\t' read -r source target options; do
  mount_at "$source" "$target" "$options"
done <"$folder/mounts"

hostname "$hostname"
[ -z "$read_only" ] || mount -o remount,ro "$root"
as=()
[ -z "$user$group" ] || as=(setpriv --reuid "${user:-0}" --regid "${group:-0}" --clear-groups)
cd /
exec chroot "$root" "${as[@]}" "$@"
