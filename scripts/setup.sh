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
    output=$({ apt-get install -y -q bubblewrap || { apt-get update -q && apt-get install -y -q bubblewrap; }; } 2>&1) || {
      printf '%s\n' "$output" | tail -n 5 >&2
      fail "apt-get could not install bubblewrap (see the end of its output above): check the network and retry"
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
# What is installed stays: whoever trained once has torch in `make demo-quick` too.
lock=base
case "${1:-} $(cat $stamp 2>/dev/null || true)" in *train*) lock=train ;; esac
locks="-r requirements/$lock.txt"
command -v npm >/dev/null || locks="$locks -r requirements/node.txt"
want="$locks $(cat pyproject.toml requirements/*.txt | cksum)"

# torch is the one package that no lock file holds, since its build depends on the machine: its version is pinned in
# pyproject.toml. The index's own build is for CUDA and takes 3 GB; without a GPU the small build for CPUs is tried first.
install_torch() {
  version=$(sed -n 's/^ *"torch==\([0-9.]*\)",$/\1/p' pyproject.toml)
  if $VENV/bin/python -c "import sys, torch; sys.exit(torch.__version__.split('+')[0] != '$version')" 2>/dev/null; then return; fi
  if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/kfd ]; then
    if $VENV/bin/python -m pip install -qq --disable-pip-version-check "torch==$version+cpu" 2>/dev/null; then return; fi
    say "setup: pip has no CPU-only build of torch $version, so it installs the CUDA build (3 GB);
       for the small build set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds and run this again"
  fi
  $VENV/bin/python -m pip install -qq --disable-pip-version-check "torch==$version" ||
    fail "pip could not install torch $version (see its message above): check the network and retry"
}

if [ "$(cat $stamp 2>/dev/null || true)" != "$want" ]; then
  say "setup: installing into $VENV (a minute or two the first time)"
  [ $lock = base ] || install_torch
  # The lock files name every package with its hashes, so nothing is resolved here and nothing else is accepted.
  # shellcheck disable=SC2086  # options are words
  $VENV/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps $locks ||
    fail "pip could not install the dependencies (see its message above): check the network and retry"
  $VENV/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e . ||
    fail "pip could not install Understudy itself (see its message above)"
  printf '%s' "$want" >$stamp
fi
$VENV/bin/understudy setup || exit 1
