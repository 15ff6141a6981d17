#!/bin/sh
# Everything a run needs, from nothing but Python, git and make; with `train`, what training needs too. Quick when it
# is all there already.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=.venv

say() { printf '%s\n' "$*" >&2; }
fail() { say "setup: $*"; exit 1; }

[ "$(uname -s)" = Linux ] || fail "Understudy's sandboxes need Linux; this is $(uname -s). Use a Linux machine, a virtual machine or WSL2."
command -v "$PYTHON" >/dev/null || fail "no $PYTHON here; install Python 3.11 or newer, or set PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$PYTHON" --version) is too old; install Python 3.11 or newer, or set PYTHON=/path/to/python3"
command -v git >/dev/null || fail "no git here; install it, as: apt-get install git"

if ! command -v bwrap >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "setup: installing bubblewrap with apt-get"
    said=$({ apt-get install -y -q bubblewrap || { apt-get update -q && apt-get install -y -q bubblewrap; }; } 2>&1) || {
      printf '%s\n' "$said" | tail -n 5 >&2
      fail "apt-get could not install bubblewrap (is the network there?); its last words are above"
    }
  else
    fail "no bubblewrap here, which the sandbox is made of; install it, as: sudo apt-get install bubblewrap
       (dnf install bubblewrap, pacman -S bubblewrap, apk add bubblewrap)"
  fi
fi

# A virtual environment knows its own path, and one that was interrupted has no pip: such a one is made anew.
stamp=$VENV/.installed
whole() {
  [ -x $VENV/bin/python ] && grep -qsF -- "$(pwd -P)/$VENV" $VENV/pyvenv.cfg &&
    { [ -f $stamp ] || $VENV/bin/python -c 'import pip' 2>/dev/null; }
}
if ! whole; then
  rm -rf $VENV
  "$PYTHON" -m venv $VENV || {
    rm -rf $VENV
    fail "$PYTHON cannot make a virtual environment; install its venv module, as: apt-get install python3-venv"
  }
fi
# What is there already stays: whoever trained once has it in `make demo-quick` too.
extras="hf,otel,redact,dev"
case "${1:-} $(cat $stamp 2>/dev/null || true)" in *train*) extras="$extras,train" ;; esac
command -v npm >/dev/null || extras="$extras,node"
want="$extras $(cksum pyproject.toml)"

# torch of the package index is a build with CUDA, of some 3 GB. Without a GPU the smaller one for CPUs comes first,
# where pip has a source of it.
torch_for_cpu() {
  version=$(sed -n 's/^ *"torch==\([0-9.]*\)",$/\1/p' pyproject.toml)
  $VENV/bin/python -m pip install -qq --disable-pip-version-check "torch==$version+cpu" 2>/dev/null ||
    say "setup: pip knows no torch $version for CPUs only, so the build with CUDA comes (some 3 GB);
       to have the small one, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds and start again"
}

if [ "$(cat $stamp 2>/dev/null || true)" != "$want" ]; then
  say "setup: installing into $VENV (a minute or two the first time)"
  case "$extras" in
    *train*) [ -e /dev/nvidiactl ] || [ -e /dev/kfd ] || $VENV/bin/python -c 'import torch' 2>/dev/null || torch_for_cpu ;;
  esac
  $VENV/bin/python -m pip install -qq --disable-pip-version-check -e ".[$extras]" ||
    fail "pip could not install the dependencies (is the network there?); its words are above"
  printf '%s' "$want" >$stamp
fi
$VENV/bin/understudy setup || exit 1
