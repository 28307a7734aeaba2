#!/usr/bin/env bash
# kt-kernel's MoE layers beside ours, in turns on one machine: int8 and int4, the shapes of Qwen3-30B and DeepSeek-V3,
# 1, 16 and 1024 tokens, several thread counts of each. After a mode that built kt.
#
#   tools/rival_layers.sh [seconds per row, default 0.5] [rounds, default 1]
#
# carry/rival holds kt_kernel/ and kt_kernel.libs/ of its wheel for this Python, or kt-kernel.tar.xz with them; only the
# AMX extension is used. About three minutes a round on 16 cores. rival.jsonl, ours-*.json and rival.txt go to $OUT,
# else ./out.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-0.5}
rounds=${2:-1}
out=${OUT:-$PWD/out}
build=$(realpath -m "${BUILD:-build-server}")
kt=$build/bin/kt
python=${PYTHON:-python3}
cores=$(nproc)
threads=${THREADS:-$((cores / 2)),$((cores - 2)),$cores}
mkdir -p "$out" "$build/ours"
[ -x "$kt" ] || { echo "layers: needs $kt (another mode builds it)"; exit 1; }

package=carry/rival
if [ ! -d $package/kt_kernel ]; then
  [ -f $package/kt-kernel.tar.xz ] || { echo "no kt-kernel in carry/rival: left out"; exit 1; }
  package=$build/rival
  mkdir -p "$package"
  tar -xJf carry/rival/kt-kernel.tar.xz -C "$package"
fi

rm -f "$build"/ours/*
: > "$out/rival.jsonl"
for round in $(seq "$rounds"); do
  for shape in ${SHAPES:-qwen3-30b deepseek-v3}; do
    for format in int8 int4; do
      for count in ${threads//,/ }; do
        timeout 60 "$kt" microbench moe --seconds "$seconds" --json --shape "$shape" --tokens 1,16,1024 \
          --format $format --threads "$count" \
          > "$build/ours/$round-$shape-$format-$count.json" || echo "failed: kt, $shape $format, $count threads"
      done
      timeout 200 "$python" tools/rival_kt_kernel.py --package "$package" --shape "$shape" \
        --method ${format^^} --threads "$threads" \
        --seconds "$seconds" >> "$out/rival.jsonl" || echo "failed: kt-kernel, $shape $format"
      printf '%s %s, round %d (%dm%02ds)\n' "$shape" $format "$round" $((SECONDS / 60)) $((SECONDS % 60))
    done
  done
done
cat "$build"/ours/*.json > "$out/ours.json.txt"
"$python" tools/rival_table.py "$out/rival.jsonl" "$build"/ours/*.json | tee "$out/rival.txt"
