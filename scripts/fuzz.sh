#!/usr/bin/env bash
# Builds every fuzz/x_fuzz.cc with clang, ASan and UBSan, and runs each for FUZZ_SECONDS (60). Seeds are
# fuzz/corpus/*; what is found on the way is kept in build-fuzz/corpus, inputs that fail in build-fuzz/found.
#
#   scripts/fuzz.sh [NAME...]     all of them, or only those named: safetensors gguf json_config ...
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${FUZZ_SECONDS:-60}
jobs=${JOBS:-$(nproc)}
clang=${CLANGXX:-$(command -v clang++-19 || command -v clang++ || true)}
if [ -z "$clang" ]; then
  echo "not run here: fuzzing needs clang++ with libFuzzer (apt-get install clang-19 libclang-rt-19-dev)"
  exit 1
fi
launcher=()
command -v ccache > /dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
generator=()
if [ ! -f build-fuzz/CMakeCache.txt ] && command -v ninja > /dev/null; then generator=(-G Ninja); fi
cmake -S . -B build-fuzz "${generator[@]}" "${launcher[@]}" -DCMAKE_CXX_COMPILER="$clang" -DKT_FUZZ=ON -DKT_TESTS=OFF \
  -DKT_CLI=OFF > /dev/null
cmake --build build-fuzz -j "$jobs" --target fuzz_targets

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for source in fuzz/*_fuzz.cc; do
    name=$(basename "$source" _fuzz.cc)
    names+=("$name")
  done
fi
mkdir -p build-fuzz/found
failed=0
for name in "${names[@]}"; do
  mkdir -p "build-fuzz/corpus/$name"
  seeds=()
  # json_config starts from corpus/json and corpus/config.
  for part in "$name" ${name//_/ }; do
    [ -d "fuzz/corpus/$part" ] && seeds+=("fuzz/corpus/$part")
  done
  [ "$name" = template ] && seeds+=(tests/chat_templates)
  echo "== $name: $seconds s"
  # ASan keeps 256 MB of freed memory by itself, which is half of what a target may have.
  ASAN_OPTIONS=quarantine_size_mb=64${ASAN_OPTIONS:+:$ASAN_OPTIONS} \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 "build-fuzz/fuzz/${name}_fuzz" -max_total_time="$seconds" \
    -rss_limit_mb=512 -timeout=10 -print_final_stats=1 -artifact_prefix="build-fuzz/found/$name-" \
    "build-fuzz/corpus/$name" "${seeds[@]}" > "build-fuzz/$name.log" 2>&1 || failed=1
  grep -E '^(==[0-9]+==ERROR|SUMMARY|stat::number_of_executed_units|stat::peak_rss_mb)|runtime error|artifact' \
    "build-fuzz/$name.log" || tail -n 20 "build-fuzz/$name.log"
done
[ $failed = 0 ] || echo "FAILED: see build-fuzz/found and build-fuzz/*.log"
exit $failed
