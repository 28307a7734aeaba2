#!/usr/bin/env bash
# Builds, tests and measures on an x86 server in one call: the ISAs that CI's machines cannot run are made green and
# measured here. Needs CMake, g++ >= 12, GoogleTest, CLI11 and nlohmann-json; installs nothing.
#
#   tools/x86_server.sh build-test-table [seconds per row, default 1]
#   tools/x86_server.sh rival [seconds per row, default 1]       after it: the same layers of kt-kernel beside ours
#
# Three minutes on 16 cores at half a second a row. The short table comes last; logs and JSON go to $OUT, else ./out. The rival
# is an unpacked kt-kernel wheel in carry/rival (tools/rival_kt_kernel.py); without one the second mode says so.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-}
seconds=${2:-1}
if [ "$mode" != build-test-table ] && [ "$mode" != rival ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi

out=${OUT:-$PWD/out}
build=${BUILD:-build-server}
mkdir -p "$out"
failures=0
say() { printf '\n== %s (%dm%02ds)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

if [ "$mode" = rival ]; then
  kt=$build/bin/kt
  if [ ! -d carry/rival/kt_kernel ] || [ ! -x "$kt" ]; then
    echo "rival: needs $kt (build-test-table first) and an unpacked kt-kernel wheel in carry/rival"
    exit 0
  fi
  : > "$out/rival.jsonl"
  for shape in qwen3-30b deepseek-v3; do
    "$kt" microbench moe --seconds "$seconds" --json --shape $shape --tokens 1,16,1024 --format int8,int4 > "$out/ours-$shape.json"
    for method in INT8 INT4; do
      python3 tools/rival_kt_kernel.py --package carry/rival --shape $shape --method $method --seconds "$seconds" \
        >> "$out/rival.jsonl" || echo "failed: $shape $method"
    done
  done
  python3 tools/rival_table.py "$out/rival.jsonl" "$out"/ours-*.json
  exit 0
fi

compiler=()
for candidate in g++-13 g++-14 g++-12; do
  command -v "$candidate" > /dev/null && { compiler=("-DCMAKE_CXX_COMPILER=$candidate"); break; }
done
generator=()
command -v ninja > /dev/null && generator=(-G Ninja)

say "build"
cmake -S . -B "$build" "${generator[@]}" "${compiler[@]}" > "$out/configure.log" 2>&1 || { cat "$out/configure.log"; exit 1; }
cmake --build "$build" -j "$(nproc)" > "$out/build.log" 2>&1 || { grep -E -A5 'error|FAILED' "$out/build.log" | head -80; exit 1; }
kt=$build/bin/kt
"$kt" version | tee "$out/version.txt"

say "tests"
for name in base formats kernels nn weights models engine; do
  program=$build/src/$name/${name}_test
  [ -x "$program" ] || continue
  if timeout 150 "$program" --gtest_brief=1 > "$out/${name}_test.log" 2>&1; then result=passed; else result=FAILED; failures=1; fi
  printf '%s_test: %s; %s (%dm%02ds)\n' "$name" "$result" "$(grep -E '^\[  PASSED' "$out/${name}_test.log" | tail -1)" \
    $((SECONDS / 60)) $((SECONDS % 60))
  [ "$result" = passed ] || tail -n 30 "$out/${name}_test.log"
done

say "limits"
"$kt" microbench roofline --json > "$out/roofline.json"
"$kt" microbench roofline
"$kt" doctor | tee "$out/doctor.txt" || failures=1

# row NAME ARGS...: one JSON file per call; a failing call does not stop the others.
row() {
  local name=$1
  shift
  "$kt" microbench moe --seconds "$seconds" --json "$@" > "$out/moe-$name.json" || { echo "failed: $name"; failures=1; }
}
best=$("$kt" version | awk '/in use$/ { print $1 }')
formats=int4,int8,fp8,bf16,q4_k,int4_g32
for shape in qwen3-30b deepseek-v3; do
  say "MoE layer, $shape"
  row "$shape-$best" --shape $shape --tokens 1,4,16,1024 --format $formats
  for isa in avx512_vnni avx2; do
    "$kt" version | grep -qE "^$isa +runs" && row "$shape-$isa" --shape $shape --tokens 1,1024 --format int4,int8 --isa $isa
  done
done

say "table"
python3 tools/moe_table.py "$out"/moe-*.json | tee "$out/table.txt"
say "done, failures: $failures"
exit $failures
