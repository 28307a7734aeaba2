#!/usr/bin/env bash
# Installs the program kt and the Python package kt_kernel from this folder, and says first what it will do.
#
#   ./install.sh                    deps, then build
#   ./install.sh deps               install missing Debian packages (as root) or print the command
#   ./install.sh build [--manual]   compile in build/, put the program under the prefix and the package into a Python
#
#   --prefix DIR      for the program: /usr/local where that can be written to, else ~/.local
#   --python PROGRAM  whose package: python3 of PATH. Where pip may not write to it (the system owns it), a Python
#                     environment is made in PREFIX/share/kt/python
#   --no-python       the program alone
#   --dry-run         say what would be done, and stop
#   -y, --yes         go on without asking; where there is no terminal nothing is asked anyway
#
# Variables: CPUINFER_PARALLEL (jobs), CPUINFER_BUILD_TYPE (Release, Debug ...), CPUINFER_VERBOSE=1,
# CPUINFER_FORCE_REBUILD=1. Those that choose an instruction set or a part are ignored with a note: one program holds
# all instruction sets and picks the best that the CPU runs. --manual is accepted; there is nothing to choose by hand.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")"

usage() { sed -n '2,18s/^# \{0,1\}//p' install.sh; }
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
      CPUINFER_CPU_INSTRUCT | CPUINFER_NATIVE | CPUINFER_ENABLE_AMX | CPUINFER_ENABLE_AVX* | \
        CPUINFER_BUILD_ALL_VARIANTS)
        note "$name=${!name} is ignored: all instruction sets are in one library (KT_ISA=name forces one at run time)"
        ;;
      *) note "$name=${!name} is ignored: this build has no such choice" ;;
    esac
  done < <(compgen -e | grep '^CPUINFER_' | sort)
}

# Whether a folder, or the nearest one above it that exists, can be written to.
can_write() {
  local at=$1
  while [ ! -e "$at" ]; do at=$(dirname "$at"); done
  [ -d "$at" ] && [ -w "$at" ]
}

# Sets python_version, python_owner (pip: it may install there; system: it may not), python_lacks (headers, pip, venv).
look_at_python() {
  python_version='' python_owner='' python_lacks=''
  [ -n "$(command -v "$python")" ] || return 0
  read -r python_version python_owner python_lacks < <("$python" - << 'EOF'
import importlib.util, os, sys, sysconfig
at = sysconfig.get_path("purelib")
of_its_own = sys.prefix != sys.base_prefix or os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
managed = os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
pip_may = os.access(at, os.W_OK) and (of_its_own or not managed)
lacks = [] if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) else ["headers"]
wanted = {"pip": "pip"} if pip_may else {"venv": "venv", "ensurepip": "venv"}
lacks += [word for name, word in wanted.items() if importlib.util.find_spec(name) is None]
print("%d.%d.%d" % sys.version_info[:3], "pip" if pip_may else "system", ",".join(dict.fromkeys(lacks)))
EOF
  ) || true
}

# Debian packages of what that Python lacks; one from elsewhere has to bring it itself.
python_packages() {
  [ $with_python = yes ] || return 0
  [ -n "$python_version" ] || { echo python3-dev python3-venv; return 0; }
  case $(readlink -f "$(command -v "$python")") in /usr/bin/*) ;; *) return 0 ;; esac
  case ,$python_lacks, in *,headers,*) echo python3-dev ;; esac
  case ,$python_lacks, in *,venv,* | *,pip,*) echo python3-venv ;; esac
}

# What will be done, a line for each part; nothing is changed by it.
plan() {
  echo "install.sh: this will be done:"
  if [ "$what" != build ]; then
    local missing
    # shellcheck disable=SC2046
    missing=$(scripts/setup.sh --list $(python_packages))
    if [ -z "$missing" ]; then
      echo "  packages  nothing is missing"
    elif [ "$(id -u)" -eq 0 ]; then
      echo "  packages  apt-get installs $(tr '\n' ' ' <<< "$missing")"
    else
      echo "  packages  missing, and you are not root, so the command is printed: $(tr '\n' ' ' <<< "$missing")"
    fi
  fi
  [ "$what" != deps ] || return 0
  echo "  program   compiled in $folder with $jobs jobs, then $prefix/bin/kt with its man page, completions and demo"
  if [ $with_python = no ]; then
    echo "  package   none (--no-python)"
  elif [ -z "$python_version" ]; then
    echo "  package   kt_kernel for the python3 that the packages above bring"
  elif [ "$python_owner" = pip ]; then
    echo "  package   kt_kernel into Python $python_version, $(command -v "$python")"
  else
    echo "  package   kt_kernel into $environment, an environment of Python $python_version" \
      "($(command -v "$python")), which pip may not change"
  fi
}

# Ends here what could only fail after the compiler has run for minutes.
check() {
  [ "$what" != deps ] || return 0
  [[ $jobs =~ ^[1-9][0-9]*$ ]] || bad "CPUINFER_PARALLEL: expected a number of jobs, '$jobs' came"
  can_write "$prefix" || bad "$prefix cannot be written to: give --prefix DIR, or run it as root"
  [ $with_python = yes ] || return 0
  if [ -z "$python_version" ]; then
    [ "$what" = all ] && [ "$python" = python3 ] || bad "$python does not run: give --python PROGRAM or --no-python"
  elif [ "$(printf '%s\n' 3.10 "$python_version" | sort -V | head -n 1)" != 3.10 ]; then
    bad "$python is Python $python_version, kt_kernel wants 3.10 or newer: give --python PROGRAM or --no-python"
  elif [ -n "$python_lacks" ] && { [ "$what" = build ] || [ -z "$(python_packages)" ]; }; then
    bad "Python $python_version ($(command -v "$python")) lacks its ${python_lacks//,/ and }:" \
      "./install.sh deps, or --python PROGRAM, or --no-python"
  fi
}

agree() {
  [ $yes = no ] && [ -t 0 ] && [ -t 1 ] || return 0
  local answer
  read -r -p "install.sh: go on? [Y/n] " answer
  case $answer in '' | y | Y | yes) ;; *) exit 0 ;; esac
}

build() {
  local flags=()
  explain_variables
  [ -z "${CPUINFER_BUILD_TYPE:-}" ] || flags+=("CMAKE_FLAGS=-DCMAKE_BUILD_TYPE=$CPUINFER_BUILD_TYPE")
  if is_on "${CPUINFER_VERBOSE:-}"; then export VERBOSE=1; fi
  if is_on "${CPUINFER_FORCE_REBUILD:-}" && [ -f "$folder/CMakeCache.txt" ]; then
    cmake --build "$folder" --target clean
  fi
  make --no-print-directory program "BUILD=$folder" "JOBS=$jobs" "${flags[@]}"
  cmake --install "$folder" --prefix "$prefix" > /dev/null
}

# The package from what the program was compiled of: a wheel for this machine.
install_package() {
  look_at_python
  [ -n "$python_version" ] || bad "$python does not run"
  if [ "$python_owner" = system ]; then
    "$python" -m venv "$environment"
    python=$environment/bin/python
  fi
  rm -rf "$folder/package"
  JOBS=$jobs scripts/wheel.sh --plain --build "$folder" --python "$python" --out "$folder/package"
  "$python" -m pip install -q --no-deps --force-reinstall "$folder"/package/kt_kernel-*.whl
}

finish() {
  echo "install.sh: installed $prefix/bin/kt"
  if [ $with_python = yes ]; then
    (cd / &&
      "$python" -c 'import kt_kernel as k
print("install.sh: installed kt_kernel", k.__version__, f"({k.__cpu_variant__})")')
    [ "$python_owner" = pip ] || echo "install.sh: to use it: source $environment/bin/activate"
  fi
  case :$PATH: in
    *":$prefix/bin:"*) echo "install.sh: next: kt doctor" ;;
    *) echo "install.sh: next: export PATH=$prefix/bin:\$PATH; kt doctor" ;;
  esac
}

words=() with_python=yes yes=no dry=no python=python3 prefix=${PREFIX:-} manual=no
while [ $# -gt 0 ]; do
  case $1 in
    deps | build | all) words+=("$1") ;;
    --manual) manual=yes ;;
    --prefix | --python)
      [ $# -gt 1 ] || bad "$1 wants a value"
      declare "${1#--}=$2"
      shift
      ;;
    --no-python) with_python=no ;;
    --dry-run) dry=yes ;;
    -y | --yes) yes=yes ;;
    -h | --help | help)
      usage
      exit 0
      ;;
    *) bad "expected deps or build [--manual], '$1' came" ;;
  esac
  shift
done
case " ${words[*]:-all} " in
  *" all "* | *" deps build "* | *" build deps "*) what=all ;;
  *) what=${words[-1]} ;;
esac
[ $manual = no ] || [ "$what" = build ] || bad "--manual belongs to build"
folder=${BUILD:-build} jobs=${CPUINFER_PARALLEL:-$(nproc)}
if [ -z "$prefix" ]; then
  if can_write /usr/local; then prefix=/usr/local; else prefix=${HOME:?}/.local; fi
fi
case $prefix in /*) ;; *) prefix=$from/$prefix ;; esac
case $python in /*) ;; */*) python=$from/$python ;; esac
environment=$prefix/share/kt/python
if [ $with_python = yes ]; then look_at_python; fi
check
plan
[ $dry = no ] || exit 0
agree
# shellcheck disable=SC2046
[ "$what" = build ] || scripts/setup.sh $(python_packages)
[ "$what" != deps ] || exit 0
build
if [ $with_python = yes ]; then install_package; fi
finish
