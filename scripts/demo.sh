#!/usr/bin/env bash
# What this machine can do, and how close the kernels come to it. About a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
kt=${BUILD:-build}/bin/kt

step() { printf '\n$ kt %s\n\n' "$*"; "$kt" "$@"; }

step version
step doctor
step microbench moe --shape qwen3-30b --tokens 1,16 --format int4,int8,q4_k,bf16 --layers 4 --seconds 1

cat <<'TEXT'

Each row is one Mixture-of-Experts layer of a 30B-A3B model: 128 experts, 8 per token. `of limit` compares its time with
the best this machine allows, measured between the calls: reading the experts' bytes once, or multiplying at peak.
More: kt microbench moe --help
TEXT
