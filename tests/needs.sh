#!/bin/sh
# Installs what the tests use beyond Python: etcd, sshd, nftables to drop packets, ip for networks of their own, and
# redis, where Ray's control service keeps what it knows, and Java, in which Spark runs.
# More are named on the command line, as program:package.
# Where it can't be installed (no root, another system) the tests that need it are skipped, and say so.
missing=
for need in nft:nftables etcd:etcd-server sshd:openssh-server ip:iproute2 openssl:openssl \
  redis-server:redis-server java:default-jre-headless "$@"; do
  PATH="$PATH:/usr/sbin:/sbin" command -v "${need%%:*}" >/dev/null || missing="$missing ${need#*:}"
done
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
echo "installing for the tests:$missing"

# Debian starts what it installs. The tests start their own, on loopback; no other is to run because of them.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086
{ timeout 120 apt-get update && timeout 240 apt-get install --yes --no-install-recommends $missing; } >/dev/null 2>&1 ||
  echo "not all of$missing can be installed: tests that need it will be skipped"
