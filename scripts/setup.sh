#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, when root; otherwise prints the command. Says nothing
# when nothing is missing.
#
#   scripts/setup.sh [--tests]   --tests: also the browser that the tests of the web page drive
set -euo pipefail

if ! command -v dpkg-query > /dev/null; then
  echo "setup: not a Debian system; needed are CMake >= 3.25, g++ >= 12, GoogleTest, CLI11, nlohmann-json, Python 3, qemu-user"
  exit 0
fi

packages=(cmake ninja-build g++ libgtest-dev libgmock-dev googletest libcli11-dev nlohmann-json3-dev
  python3 python3-venv qemu-user tmux)
case "$(dpkg --print-architecture)" in
  arm64) packages+=(g++-x86-64-linux-gnu) ;;
  amd64) packages+=(g++-aarch64-linux-gnu) ;;
esac

# Ubuntu has Chromium as a snap only; the tests of the page skip there.
if [ "${1:-}" = --tests ] && grep -qx 'ID=debian' /etc/os-release; then packages+=(chromium chromium-driver); fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2> /dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "setup: ${#missing[@]} packages are missing; install them with"
  echo
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  echo
  exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
