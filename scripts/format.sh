#!/usr/bin/env bash
# clang-format over the C++ of the repository, as .clang-format says.
#
#   scripts/format.sh           rewrites what differs
#   scripts/format.sh --check   changes nothing; 1 when a file differs, 77 (CTest: skipped) without clang-format or git
#
# Every version breaks lines a little differently, so 19 is taken where there is one, and none older.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=19
version_of() { "$1" --version 2> /dev/null | sed -n 's/.*version \([0-9]*\)\..*/\1/p'; }
find_clang_format() {
  local name
  for name in ${CLANG_FORMAT:-} clang-format-{19..24} clang-format; do
    if [ "$(version_of "$name" || true)" -ge $oldest ] 2> /dev/null; then echo "$name"; return; fi
  done
  return 1
}

not_run_here() {
  echo "not run here: clang-format ($*)"
  exit 77
}
tool=$(find_clang_format) || not_run_here "no version from $oldest on; apt-get install clang-format-$oldest"
git rev-parse --is-inside-work-tree > /dev/null 2>&1 ||
  not_run_here "which files are ours is for git to say, and there is none"
how=(-i)
[ "${1:-}" = --check ] && how=(--dry-run -Werror --ferror-limit=3)
git ls-files -z '*.cc' '*.h' | xargs -0 -P "${JOBS:-$(nproc)}" -n 16 "$tool" "${how[@]}" || {
  [ "${1:-}" = --check ] && echo "make format writes what is asked for"
  exit 1
}
