#!/usr/bin/env bash
# The speed tables of docs/benchmarks.md on this machine: its limits, one MoE layer of two shapes in six formats, and
# loading the demo model. A few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
kt=${BUILD:-build}/bin/kt
formats=int4,int8,fp8,bf16,q4_k,int4_g32
"$kt" microbench roofline
for shape in qwen3-30b deepseek-v3; do
  "$kt" microbench moe --shape $shape --tokens 1,4,16,1024 --format $formats
done
"$kt" quant demo/tiny-deepseekv3 -o "${BUILD:-build}/bench/int8" --method int8 --overwrite > /dev/null
"$kt" microbench load "${BUILD:-build}/bench/int8"
