#!/usr/bin/env bash
# kt_kernel on an x86 server with a GPU: builds kt and the extension, runs the tests of the CUDA hand-off on the real
# driver, the Python tests and tools/hybrid_gpu.py. Installs nothing.
#
#   tools/x86_python.sh [steps, with commas; default all]
#
# Steps: build, doctor, cuda, hybrid, pytest, graph, logits, overlap, speed, decode-int4, decode-int8, decode-bf16. Each
# has a time limit of its own, so that one that hangs leaves the others their time; one that failed can be repeated
# alone. A short table comes last; table.txt, python.jsonl, timeline.svg and logs.tar.gz go to $OUT, else ./out. About
# ten minutes in all on 16 cores, two of them for the build.
#
# carry/python may hold wheels of nanobind and pytest, used where the machine has none; carry/models a
# tiny-qwen3moe.tar.xz. HYBRID=--dry goes through it on a machine without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

all=build,doctor,cuda,hybrid,pytest,graph,logits,overlap,speed,decode-int4,decode-int8,decode-bf16
steps=${1:-$all}
out=${OUT:-$PWD/out}
build=$(realpath -m "${BUILD:-build-server}")
logs=$build/logs
python=${PYTHON:-python3}
mkdir -p "$out" "$logs"
failures=0
summary=()

for step in ${steps//,/ }; do
  [[ ,$all, == *",$step,"* ]] || { echo "no step '$step'; there are: $all"; exit 2; }
done

clock() { printf '%dm%02ds' $((SECONDS / 60)) $((SECONDS % 60)); }

# step NAME SECONDS COMMAND...: if it is among those asked for. Its output goes to a log; the end of it is shown when it
# fails.
step() {
  local name=$1 limit=$2 began=$SECONDS result=passed code=0
  shift 2
  [[ ,$steps, == *",$name,"* ]] || return 0
  timeout -k 10 "$limit" "$@" > "$logs/$name.log" 2>&1 || code=$?
  case $code in
    0) ;;
    124 | 137) result="FAILED: over $limit s" ;;
    *) result="FAILED: exit status $code" ;;
  esac
  [ $code -eq 0 ] || { failures=1; echo "-- $name"; grep -v '^{' "$logs/$name.log" | tail -n 25 | cut -c1-300 || true; }
  summary+=("$(printf '%-12s %-26s %4d s' "$name" "$result" $((SECONDS - began)))")
  echo "${summary[-1]} ($(clock))"
  grep -h '^{' "$logs"/*.log > "$out/python.jsonl" || true
  cp "$logs"/*.svg "$out" 2> /dev/null || true
  tar -C "$logs" -czf "$out/logs.tar.gz" . || true
  [ "$name" != build ] || [ $code -eq 0 ] || exit 1
}

# A module that this Python lacks, from a wheel in carry/python.
borrow() {
  "$python" -c "import $1" 2> /dev/null && return
  compgen -G "carry/python/$1-*.whl" > /dev/null ||
    { echo "no $1 in $python, and no wheel of it in carry/python"; return 0; }
  for wheel in carry/python/*.whl; do "$python" -m zipfile -e "$wheel" "$build/borrowed"; done
}

build() {
  local compiler=() generator=() candidate
  if [ ! -f "$build/CMakeCache.txt" ]; then
    for candidate in g++-13 g++-14 g++-12; do
      command -v "$candidate" > /dev/null && { compiler=("-DCMAKE_CXX_COMPILER=$candidate"); break; }
    done
    command -v ninja > /dev/null && generator=(-G Ninja)
  fi
  borrow nanobind
  borrow pytest
  export PYTHONPATH=$build/borrowed${PYTHONPATH:+:$PYTHONPATH}
  "$python" -VV
  "$python" -m nanobind --version || true
  cmake -S . -B "$build" "${generator[@]}" "${compiler[@]}" -DKT_PYTHON=ON "-DPython_EXECUTABLE=$(command -v "$python")"
  cmake --build "$build" -j "$(nproc)" --target kt kt_kernel_ext cuda_test hybrid_test isas_probe
  PYTHONPATH=$build/python:$PYTHONPATH "$python" -c '
import kt_kernel
print(kt_kernel.__version__, kt_kernel.__cpu_variant__,
      kt_kernel.kt_kernel_ext.cuda_status())'
}

doctor() {
  "$build/bin/kt" version
  "$build/bin/kt" doctor || true
  nvidia-smi || true
  local names='torch|transformers|safetensors|accelerate|peft|compressed|gguf|nanobind|pytest|numpy|triton'
  "$python" -m pip list 2> /dev/null | grep -iE "^($names) " || true
}

# real_tests PROGRAM: its tests on the machine's driver, those of streams each in a process of its own with a limit, so
# that one that hangs is named and costs the others nothing.
real_tests() {
  local program=$1 apart='CudaDriverTest.*:PostTest.*:Stream*.*:ExpertLayerStream.*' code=0
  export program KT_TEST_REAL_CUDA=1
  timeout 90 "$program" --gtest_filter="-$apart" --gtest_brief=1 || code=1
  "$program" --gtest_list_tests --gtest_filter="$apart" | awk '/^[^ ]/ { suite = $1 } /^  / { print suite $1 }' |
    xargs -P 4 -I{} bash -c '
      if timeout 40 "$program" --gtest_filter={} > "$logs/{}.txt" 2>&1; then
        grep -q SKIPPED "$logs/{}.txt" && echo "skipped {}" || echo "passed {}"
        grep "of the host" "$logs/{}.txt" || true
      else
        echo "FAILED {}: status $?"
        tail -n 12 "$logs/{}.txt"
        exit 1
      fi' || code=1
  return $code
}

python_tests() {
  local files=(tests/python_api_test.py tests/python_placement_test.py tests/python_process_test.py
    tests/python_transformers_test.py tests/python_fused_test.py)
  "$python" -m pytest -q -p no:cacheprovider -o faulthandler_timeout=60 -rfEs --durations=5 "${files[@]}"
}

speed() {
  local method tokens
  for method in AMXINT8 AMXINT4; do
    "$python" tools/python_speed.py --program "$build/bin/kt" --shape qwen3-30b --method $method --tokens 1,16 \
      --seconds 0.7 --rounds 3
  done
}

gpu() {
  local folder
  folder=$(mktemp -d)
  local code=0
  # shellcheck disable=SC2086
  "$python" tools/hybrid_gpu.py ${HYBRID:-} --program "$build/bin/kt" --out "$folder" "$@" || code=$?
  cp "$folder"/*.svg "$logs" 2> /dev/null || true
  return $code
}

export -f build borrow doctor real_tests python_tests speed gpu
export build python logs

step build 330 bash -euo pipefail -c build
export PYTHONPATH=$build/python:$build/borrowed PYTHONUNBUFFERED=1 KT_PROGRAM=$build/bin/kt
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -f carry/models/tiny-qwen3moe.tar.xz ] && [ ! -d "$build/data/models/tiny-qwen3moe" ]; then
  mkdir -p "$build/data/models"
  tar -xJf carry/models/tiny-qwen3moe.tar.xz -C "$build/data/models"
  ln -sfn "$PWD/demo/tiny-deepseekv3" "$build/data/models/tiny-deepseekv3"
fi
[ -d "$build/data" ] && export KT_TEST_DATA=$build/data

step doctor 60 bash -c doctor
step cuda 100 bash -c 'real_tests "$build/src/cuda/cuda_test"'
step hybrid 150 bash -c 'real_tests "$build/src/hybrid/hybrid_test"'
step graph 90 bash -c 'gpu --parts graph'
step overlap 90 bash -c 'gpu --parts overlap'
step logits 200 bash -c 'gpu --parts logits'
step decode-int4 150 bash -c 'gpu --parts decode --formats int4'
step speed 120 bash -c speed
step pytest 240 bash -c python_tests
step decode-int8 150 bash -c 'gpu --parts decode --formats int8'
step decode-bf16 180 bash -c 'gpu --parts decode --formats bf16'

{
  for name in doctor cuda hybrid pytest; do
    [[ ,$steps, == *",$name,"* ]] && [ -f "$logs/$name.log" ] || continue
    echo "== $name"
    grep -E '^ *(CUDA|cuda|gpu|\[  (PASSED|FAILED)|[0-9]+ (passed|failed)|FAILED|SKIPPED|submit and sync)' \
      "$logs/$name.log" | tail -n 12 | cut -c1-200
    grep -c '^passed' "$logs/$name.log" | sed 's/^0$//;s/^[1-9].*/& passed/' || true
  done
  for name in graph logits overlap speed decode-int4 decode-int8 decode-bf16; do
    [[ ,$steps, == *",$name,"* ]] && [ -f "$logs/$name.log" ] && grep -v '^{' "$logs/$name.log" |
      grep -vE '^ *$|Warning|warn' | tail -n 30 | cut -c1-230
  done
  printf '\n'
  printf '%s\n' "${summary[@]}"
} > "$out/table.txt" || true
cat "$out/table.txt"
echo "done, failures: $failures ($(clock))"
exit $failures
