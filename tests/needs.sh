#!/bin/sh
# Installs what the tests use beyond Python: nftables, to drop packets between workers. Where it can't be installed
# (no root, another system) the tests that need it are skipped, and say so.
command -v nft >/dev/null && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
echo "installing nftables for the tests that drop packets"
{ timeout 120 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install --yes --no-install-recommends nftables; } \
  >/dev/null 2>&1 ||
  echo "nftables can't be installed: tests that drop packets will be skipped"
