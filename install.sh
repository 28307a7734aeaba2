#!/usr/bin/env bash
# The established way to build, as a thin alias of make:
#
#   ./install.sh                    deps, then build
#   ./install.sh deps               install missing Debian packages (as root) or print the command:  make setup
#   ./install.sh build [--manual]   build build/bin/kt:                                              make program
#
# Variables: CPUINFER_PARALLEL (jobs), CPUINFER_BUILD_TYPE (Release, Debug ...), CPUINFER_VERBOSE=1,
# CPUINFER_FORCE_REBUILD=1. Those that choose an instruction set or a part are ignored with a note: one program holds
# all instruction sets and picks the best that the CPU runs. --manual is accepted; there is nothing to choose by hand.
set -euo pipefail
cd "$(dirname "$0")"

usage() { sed -n '2,11s/^# \{0,1\}//p' install.sh; }
note() { echo "install.sh: note: $*" >&2; }
bad() {
  echo "install.sh: $*; see ./install.sh --help" >&2
  exit 2
}

is_on() {
  case ${1:-} in
    1 | on | ON | true | TRUE | yes | YES) return 0 ;;
    *) return 1 ;;
  esac
}

# Every CPUINFER_ variable is used or named in a note: none is dropped silently.
explain_variables() {
  local name
  while IFS= read -r name; do
    case $name in
      CPUINFER_PARALLEL | CPUINFER_BUILD_TYPE | CPUINFER_VERBOSE | CPUINFER_FORCE_REBUILD) ;;
      CPUINFER_CPU_INSTRUCT | CPUINFER_NATIVE | CPUINFER_ENABLE_AMX | CPUINFER_ENABLE_AVX* | CPUINFER_BUILD_ALL_VARIANTS)
        note "$name=${!name} is ignored: all instruction sets are in one library (KT_ISA=name forces one at run time)"
        ;;
      *) note "$name=${!name} is ignored: this build has no such choice" ;;
    esac
  done < <(compgen -e | grep '^CPUINFER_' | sort)
}

build() {
  local flags=() jobs=${CPUINFER_PARALLEL:-$(nproc)}
  [[ $jobs =~ ^[1-9][0-9]*$ ]] || bad "CPUINFER_PARALLEL: expected a number of jobs, '$jobs' came"
  explain_variables
  [ -z "${CPUINFER_BUILD_TYPE:-}" ] || flags+=("CMAKE_FLAGS=-DCMAKE_BUILD_TYPE=$CPUINFER_BUILD_TYPE")
  if is_on "${CPUINFER_VERBOSE:-}"; then export VERBOSE=1; fi
  local folder=${BUILD:-build}
  if is_on "${CPUINFER_FORCE_REBUILD:-}" && [ -f "$folder/CMakeCache.txt" ]; then
    cmake --build "$folder" --target clean
  fi
  make --no-print-directory program "BUILD=$folder" "JOBS=$jobs" "${flags[@]}"
  echo "install.sh: built $folder/bin/kt; make install PREFIX=DIR puts it in place"
}

what=all
for word in "$@"; do
  case $word in
    deps | build | all) what=$word ;;
    --manual) [ "$what" = build ] || bad "--manual belongs to build" ;;
    -h | --help | help)
      usage
      exit 0
      ;;
    *) bad "expected deps or build [--manual], '$word' came" ;;
  esac
done
[ "$what" = build ] || scripts/setup.sh
[ "$what" = deps ] || build
