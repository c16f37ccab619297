#!/usr/bin/env bash
# All set-up, for every make target: Debian packages, a Python with torch.
# What is there already is left alone, so a second run takes well under a second.
#
#   VIOLIN_PYTHON=/path/python   use this interpreter's torch (>= 2.11)
#   VIOLIN_OFFLINE=1             install nothing; say what is missing
#
# Result: .violin/python, the interpreter to use.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly kTorch=2.13.0
readonly kTorchAtLeast=2.11
readonly kTimm=1.0.29
readonly state=.violin

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

have_command() { command -v "$1" >/dev/null 2>&1; }
have_header() { local dir; for dir in /usr/include /usr/include/x86_64-linux-gnu /usr/include/aarch64-linux-gnu /usr/local/include; do
  [ -e "$dir/$1" ] && return 0; done; return 1; }

# package | how to tell that it is there | needed or wanted
packages() {
  cat <<'LIST'
g++|have_command g++|needed
make|have_command make|needed
cmake|have_command cmake|needed
ninja-build|have_command ninja|needed
git|have_command git|needed
python3|have_command python3|needed
python3-venv|have_venv|needed
python3-dev|have_python_header|wanted
libjpeg-dev|have_header jpeglib.h|needed
libpng-dev|have_header png.h|needed
libcli11-dev|have_header CLI/CLI.hpp|needed
nlohmann-json3-dev|have_header nlohmann/json.hpp|needed
libgtest-dev|have_header gtest/gtest.h|needed
libwebp-dev|have_header webp/decode.h|wanted
libopenmpi-dev|have_mpi|wanted
openmpi-bin|have_command mpirun|wanted
ccache|have_command ccache|wanted
clang-format-19|have_command clang-format-19|wanted
clang-tidy-19|have_command clang-tidy-19|lint
clang-19|have_command clang-19|wanted
libclang-rt-19-dev|have_fuzzer|wanted
LIST
}
have_mpi() { have_command mpicxx || have_header mpi.h; }
have_fuzzer() { compgen -G '/usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.fuzzer-*.a' >/dev/null; }
# A usable environment already, or the module that makes one.
have_venv() { [ -x .venv/bin/python ] || [ -x "${VIOLIN_PYTHON:-}" ] || python3 -c 'import ensurepip, venv' 2>/dev/null; }

# torch.compile builds against it. Other interpreters than Debian's bring their own.
have_python_header() {
  local python=python3
  [ -s $state/python ] && python=$(cat $state/python)
  "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' 2>/dev/null
}

missing_packages() {  # of the kinds given
  local name test kind
  while IFS='|' read -r name test kind; do
    [[ " $* " == *" $kind "* ]] && ! eval "$test" && printf '%s ' "$name"
  done < <(packages)
  return 0
}

install_packages() {
  local kinds="needed wanted" missing
  [ "${1:-}" = lint ] && kinds+=" lint"
  # shellcheck disable=SC2086
  missing=$(missing_packages $kinds)
  [ -z "$missing" ] && return 0

  local apt="" must
  must=$(missing_packages needed)
  if [ -n "${VIOLIN_OFFLINE:-}" ] || ! have_command apt-get; then
    [ -z "$must" ] || fail "these packages are missing: ${must% }; install them and run make again"
    return 0
  fi
  if [ "$(id -u)" = 0 ]; then apt="apt-get"
  elif have_command sudo && sudo -n true 2>/dev/null; then apt="sudo -n apt-get"
  elif have_command sudo && [ -t 0 ]; then apt="sudo apt-get"
  elif [ -n "$must" ]; then fail "neither root nor sudo here; ask for these packages, then run make again: apt-get install ${must% }"
  else return 0; fi

  say "installing Debian packages: ${missing% }"
  local log=$state/apt.log
  export DEBIAN_FRONTEND=noninteractive
  $apt update >"$log" 2>&1 || say "apt-get update failed (see $log); going on with the lists that are there"
  # One by one only when all together fails, so that an optional package which this release lacks stops nothing.
  # shellcheck disable=SC2086
  if ! $apt install -y --no-install-recommends $missing >>"$log" 2>&1; then
    local name
    for name in $missing; do $apt install -y --no-install-recommends "$name" >>"$log" 2>&1 || true; done
  fi
  must=$(missing_packages needed)
  [ -z "$must" ] || fail "could not install ${must% }; see $log"
  # shellcheck disable=SC2086
  missing=$(missing_packages $kinds)
  [ -z "$missing" ] || say "going on without the optional ${missing% }"
}

torch_version() {  # of interpreter $1, empty when it is missing or too old
  "$1" - "$kTorchAtLeast" 2>/dev/null <<'PY' || true
import sys
if sys.version_info < (3, 10):
    raise SystemExit
from importlib import metadata
version = metadata.version("torch")
number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
if number >= tuple(int(part) for part in sys.argv[1].split(".")):
    import torch
    print(torch.__version__)
PY
}

choose_python() {
  # The answer of last time holds while the interpreter and its torch are still in place.
  if [ -s $state/python ] && [ -s $state/torch ] && [ -z "${VIOLIN_PYTHON:-}" ] && [ -e "$(cat $state/torch)" ]; then return 0; fi

  local candidate found=""
  for candidate in "${VIOLIN_PYTHON:-}" .venv/bin/python python3; do
    [ -n "$candidate" ] && have_command "$candidate" && [ -n "$(torch_version "$candidate")" ] && { found=$candidate; break; }
  done
  [ -n "${VIOLIN_PYTHON:-}" ] && [ "$found" != "$VIOLIN_PYTHON" ] &&
    fail "VIOLIN_PYTHON=$VIOLIN_PYTHON has no torch >= $kTorchAtLeast; install one there, or unset it"

  if [ -z "$found" ]; then
    [ -n "${VIOLIN_OFFLINE:-}" ] && fail "no torch >= $kTorchAtLeast can be imported, and VIOLIN_OFFLINE is set"
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "Python 3.10 or later is needed, python3 is $(python3 --version)"
    say "making .venv with torch $kTorch (once; a few minutes)"
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==$kTorch" >$state/pip.log 2>&1 ||
      fail "pip could not install torch==$kTorch; see $state/pip.log"
    found=.venv/bin/python
  fi
  "$found" -c 'import sys; print(sys.executable)' >$state/python
  "$found" -c 'import torch, os; print(os.path.dirname(torch.__file__))' 2>/dev/null >$state/torch
}

# The Python tests want pytest and numpy beside torch, timm to compare with and matplotlib for pictures. An interpreter that
# is not ours is never changed: it gets an environment of ours on top, which sees its torch. timm comes without what it
# depends on (torchvision wants a torch of its own; its models do not need it).
python_test_packages() {
  local python
  python=$(cat $state/python)
  "$python" -c 'import importlib.util as u, sys
sys.exit(any(u.find_spec(m) is None for m in ("pytest", "numpy", "matplotlib", "timm")))' && return 0
  [ -e $state/no-python-packages ] && return 0  # could not be had last time; distclean tries again
  [ -n "${VIOLIN_OFFLINE:-}" ] && { say "pytest, numpy, matplotlib or timm is missing: some Python tests will be skipped"; return 0; }
  if [ "$python" != "$PWD/.venv/bin/python" ]; then
    "$python" -m venv --system-site-packages .venv || { say "no venv module: the Python tests will be skipped"; return 0; }
    python=$PWD/.venv/bin/python
  fi
  say "installing pytest, numpy, matplotlib and timm into .venv"
  "$python" -m pip install --quiet --disable-pip-version-check pytest numpy >$state/pip.log 2>&1 ||
    { say "pip could not install them (see $state/pip.log): the Python tests will be skipped"; return 0; }
  echo "$python" >$state/python
  { "$python" -m pip install --quiet --disable-pip-version-check matplotlib &&
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps "timm==$kTimm" safetensors; } >>$state/pip.log 2>&1 ||
    { say "pip could not install matplotlib and timm (see $state/pip.log): some Python tests will be skipped"
      touch $state/no-python-packages; }
}

mkdir -p $state
install_packages "${1:-}"
choose_python
python_test_packages
