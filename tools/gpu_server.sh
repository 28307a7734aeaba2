#!/usr/bin/env bash
# A GPU beside the CPU on an x86 server: kernels and models on the real driver, then how fast a whole model decodes.
# Steps in the order given, each with its own limit; logs go to $OUT, else ./out.
#
#   tools/gpu_server.sh build      kt, nn_test, model_probe for this CPU in build-gpu (two minutes on 16 cores)
#   tools/gpu_server.sh check      kernels and operations against double loops and the CPU's, then the four tools of
#                                  compute-sanitizer
#   tools/gpu_server.sh logits     the demo model, CPU beside GPU, formats and caches
#   tools/gpu_server.sh decode     48 layers of Qwen3-30B-A3B's shape (Q4_0, even routing): --gpu off and 0 in turns;
#                                  LAYERS=N
#   tools/gpu_server.sh prefill    the same file and, with ARCH=deepseek2 LAYERS=4, that of another shape: prompts of
#                                  several lengths whose experts stay on the CPU, pass through the GPU, and as measured
#
# KT_CUDA_PTX names a folder with modules made elsewhere (scripts/kernels.sh): tuning a kernel needs no build here.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-$PWD/out}
build=${BUILD:-build-gpu}
layers=${LAYERS:-48}
mkdir -p "$out"
failures=0
say() { printf '\n== %s (%dm%02ds)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
limited() { timeout "$@" || { echo "failed: ${*:2:2}"; failures=$((failures + 1)); }; }

step_build() {
  cmake -S . -B "$build" -G Ninja -DKT_ISAS=native > "$out/configure.log" 2>&1 ||
    { tail -n 20 "$out/configure.log"; exit 1; }
  timeout 300 cmake --build "$build" -j "$(nproc)" --target kt nn_test model_probe > "$out/build.log" 2>&1 ||
    { grep -E -A5 'error' "$out/build.log" | head -40; exit 1; }
}

step_check() {
  export KT_TEST_REAL_CUDA=1
  limited 120 "$build/src/nn/nn_test" --gtest_filter='*Gpu*' > "$out/check.log" 2>&1
  tail -n 3 "$out/check.log"
  for tool in memcheck racecheck synccheck initcheck; do
    limited 100 compute-sanitizer --tool $tool "$build/src/nn/nn_test" --gtest_filter='GpuOps.*:*GpuProducts*_4' \
      > "$out/$tool.log" 2>&1
    echo "$tool: $(grep -E 'SUMMARY' "$out/$tool.log" | tail -n 1)"
  done
}

step_logits() {
  timeout 120 python3 - "$build/src/models/model_probe" <<'P'
import subprocess, sys
import numpy as np
lines = "\n".join(" ".join(str((i * a + b) % 200 + 5) for i in range(n))
                  for a, b, n in [(37, 11, 70), (13, 7, 33)]) + "\n"
def logits(*options):
    done = subprocess.run([sys.argv[1], "demo/tiny-deepseekv3", *options], input=lines.encode(),
                          capture_output=True, check=True)
    return np.frombuffer(done.stdout, "<f4")
for options in ([], ["--linear-format", "int8"], ["--linear-format", "int4_g32"], ["--linear-format", "fp8_row"],
                ["--linear-format", "mxfp4"], ["--kv", "bf16"], ["--kv", "int8"]):
    cpu, gpu = logits(*options), logits("--gpu", "0", *options)
    same = (logits("--gpu", "0", "--chunk", "1", *options) == gpu).all()
    print(f"{' '.join(options) or 'as stored':28} CPU - GPU {np.abs(cpu - gpu).max():.2e} of {np.abs(cpu).max():.1f}, "
          f"one token at a time: {'the same bits' if same else 'OTHER BITS'}")
P
}

step_decode() {
  local model=$build/gpu-$layers.gguf
  [ -s "$model" ] || python3 tools/make_gguf.py "$model" --layers "$layers"
  for round in 1 2; do
    for gpu in off 0; do
      for tokens in 1024 8192; do
        [ "$tokens" = 1024 ] || [ "$round" = 1 ] || continue
        limited 120 "$build/bin/kt" bench "$model" --gpu $gpu --prompt $tokens --batch 1 --tokens 48 --repeat 1 --json \
          > "$out/bench-$gpu-$tokens-$round.json" 2> "$out/bench-$gpu-$tokens-$round.log"
        python3 - "$out/bench-$gpu-$tokens-$round.json" "$gpu" "$tokens" <<'P'
import json, sys
print(f"--gpu {sys.argv[2]:4} after {sys.argv[3]:>5} tokens:", json.dumps(json.load(open(sys.argv[1])))[:700])
P
      done
    done
  done
}

step_prefill() {
  local model=$build/gpu-${ARCH:-qwen3moe}-$layers.gguf threshold
  [ -s "$model" ] || python3 tools/make_gguf.py "$model" --layers "$layers" ${ARCH:+--arch "$ARCH"}
  for threshold in off 65 auto; do
    echo "--gpu-prefill-threshold $threshold"
    limited 150 "$build/bin/kt" bench "$model" --gpu 0 --gpu-memory 24GiB --gpu-experts 0 --batch 1 --tokens 4 \
      --prompt "${PROMPTS:-256,512,1024,2048,4096,8192,16384,32768}" --repeat "${REPEAT:-2}" \
      --gpu-prefill-threshold $threshold 2> "$out/prefill-$threshold.log" | tee "$out/prefill-$threshold.txt"
  done
}

[ $# -gt 0 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
for step in "$@"; do
  say "$step"
  "step_$step"
done
exit $((failures > 0))
