#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, when root; otherwise prints the command. Says nothing
# when nothing is missing.
#
#   scripts/setup.sh [--tests] [--list] [PACKAGE...]
#
#   --tests   also what tests drive: an emulator, the other compiler, tmux, shells, a browser, clang-format
#   --list    print the names of what is missing, and install nothing
#   PACKAGE   needed too
set -euo pipefail

tests=no list=no also=()
for word in "$@"; do
  case $word in
    --tests) tests=yes ;;
    --list) list=yes ;;
    -*)
      echo "setup: unknown word '$word'" >&2
      exit 2
      ;;
    *) also+=("$word") ;;
  esac
done

if ! command -v dpkg-query > /dev/null; then
  [ $list = no ] || exit 0
  echo "setup: not a Debian system; needed are CMake >= 3.25, g++ >= 12, GoogleTest, CLI11, nlohmann-json, libcurl," \
    "OpenSSL, Python 3, qemu-user"
  exit 0
fi

packages=(cmake ninja-build g++ libgtest-dev libgmock-dev googletest libcli11-dev nlohmann-json3-dev python3
  "${also[@]}")
optional=(libcurl4-openssl-dev libssl-dev)  # downloads, https; without them kt says so
if [ $tests = yes ]; then
  optional+=(python3-venv python3-dev qemu-user tmux curl procps openssl)
  case "$(dpkg --print-architecture)" in
    arm64) optional+=(g++-x86-64-linux-gnu) ;;
    amd64) optional+=(g++-aarch64-linux-gnu) ;;
  esac
  # Not every distribution that builds the rest has these: what needs them says so where it did not run. A fresh
  # container knows of no packages at all.
  offered() { apt-cache show "$1" > /dev/null 2>&1; }
  if [ "$(id -u)" -eq 0 ] && ! offered g++; then apt-get update -qq || true; fi
  for package in zsh fish groff-base clang-format-19; do
    if offered "$package"; then optional+=("$package"); fi
  done
  # Ubuntu has Chromium as a snap only; the tests of the page skip there.
  if grep -qx 'ID=debian' /etc/os-release; then optional+=(chromium chromium-driver); fi
fi

# lacking PACKAGE...: those that are not installed. A tool may have come another way.
lacking() {
  local package status
  for package in "$@"; do
    case $package in
      cmake | g++ | python3) if command -v "$package" > /dev/null; then continue; fi ;;
      ninja-build) if command -v ninja > /dev/null; then continue; fi ;;
    esac
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
    [ "$status" = installed ] || echo "$package"
  done
}
mapfile -t needed < <(lacking "${packages[@]}")
mapfile -t missing < <(lacking "${packages[@]}" "${optional[@]}")
[ ${#missing[@]} -eq 0 ] && exit 0
if [ $list = yes ]; then
  printf '%s\n' "${missing[@]}"
  exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
  echo "setup: ${#missing[@]} packages are missing; install them with"
  echo
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  echo
  if [ ${#needed[@]} -eq 0 ]; then
    echo "setup: going on without; tests that need them skip and say so"
    exit 0
  fi
  exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
