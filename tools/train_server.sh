#!/usr/bin/env bash
# The speed table of training on an x86 server, each step in under ten minutes; builds what it needs, installs nothing.
#
#   tools/train_server.sh [steps, with commas; default build,layers,rivals,model]
#
# build     kt and the Python extension (two minutes on 16 cores); the other steps make it when it is not there
# layers    kt microbench moe --train: the shapes of Qwen3-30B and of DeepSeek-V3 with 32 experts, bf16, int8 and int4
# rivals    the same layer in stock torch, and in kt-kernel's extension where carry/rival has it
#           (tools/rival_layers.sh), in turns with ours at several thread counts
# model     tools/hybrid_train.py: losses with attention on the GPU beside those of the CPU alone; tools/train_speed.py:
#           48 layers of Qwen3-30B's shape, then four of DeepSeek-V3's, attention on the GPU
#
# The table comes last, of all steps that $OUT, else ./out, has figures of. SECONDS_PER_ROW (default 2) is the time of
# each row.
# DRY=1 goes through it with small sizes on a machine that is none of these.
set -euo pipefail
cd "$(dirname "$0")/.."

all=build,layers,rivals,model
steps=${1:-$all}
out=${OUT:-$PWD/out}
build=$(realpath -m "${BUILD:-build-server}")
kt=$build/bin/kt
python=${PYTHON:-python3}
seconds=${SECONDS_PER_ROW:-2}
cores=$(nproc)
threads=${THREADS:-$((cores > 2 ? cores - 2 : cores)),$cores}
failures=0
mkdir -p "$out" "$build"
for step in ${steps//,/ }; do
  [[ ,$all, == *",$step,"* ]] || { echo "no step '$step'; there are: $all"; exit 2; }
done

clock() { printf '%dm%02ds' $((SECONDS / 60)) $((SECONDS % 60)); }
say() { printf '\n== %s (%s)\n' "$*" "$(clock)"; }
failed() { echo "failed: $*"; failures=1; }

qwen=(--shape qwen3-30b) deepseek=(--shape deepseek-v3) tokens=1024,4096 formats=bf16,int8,int4
rival_shape=qwen3-30b model=()
if [ -n "${DRY:-}" ]; then
  small=(--experts 8 --hidden 64 --inter 32 --top-k 2 --layers 3)
  qwen=("${small[@]}") deepseek=("${small[@]}") tokens=16 rival_shape=small model=(--dry)
fi

build() {
  local compiler=() generator=() candidate
  if [ ! -f "$build/CMakeCache.txt" ]; then
    for candidate in g++-13 g++-14 g++-12; do
      command -v "$candidate" > /dev/null && { compiler=("-DCMAKE_CXX_COMPILER=$candidate"); break; }
    done
    command -v ninja > /dev/null && generator=(-G Ninja)
  fi
  cmake -S . -B "$build" "${generator[@]}" "${compiler[@]}" -DKT_PYTHON=ON \
    "-DPython_EXECUTABLE=$(command -v "$python")" \
    > "$out/configure.log" 2>&1 || { tail -n 20 "$out/configure.log"; return 1; }
  cmake --build "$build" -j "$cores" --target kt kt_kernel_ext > "$out/build.log" 2>&1 ||
    { grep -E -A5 'error|FAILED' "$out/build.log" | head -40; return 1; }
}

# ours NAME ARGS...: rows of kt microbench moe --train.
ours() {
  local name=$1
  shift
  timeout 280 "$kt" microbench moe --train --seconds "$seconds" --json "$@" > "$out/train-$name.json" || failed "$name"
}

layers() {
  "$kt" microbench roofline
  ours qwen3-30b "${qwen[@]}" --tokens $tokens --rank 8,64 --format $formats --recompute
  ours deepseek-v3 "${deepseek[@]}" --tokens $tokens --format $formats
}

rivals() {
  local count package=carry/rival
  : > "$out/train-rivals.jsonl"
  for count in ${threads//,/ }; do
    ours "beside-$count" "${qwen[@]}" --tokens $tokens --format bf16,int8 --threads "$count"
  done
  timeout 330 "$python" tools/train_rival.py --kinds grouped_mm,loop --dtypes bf16 --shape $rival_shape \
    --tokens $tokens \
    --threads "$cores" --seconds "$seconds" --limit 100 >> "$out/train-rivals.jsonl" || failed "torch, bf16"
  timeout 150 "$python" tools/train_rival.py --kinds grouped_mm --dtypes f32 --shape $rival_shape \
    --tokens "${tokens%%,*}" \
    --threads "$cores" --seconds "$seconds" --limit 100 >> "$out/train-rivals.jsonl" || failed "torch, f32"
  if [ ! -d $package/kt_kernel ] && [ -f $package/kt-kernel.tar.xz ]; then
    mkdir -p "$build/rival"
    tar -xJf $package/kt-kernel.tar.xz -C "$build/rival"
    package=$build/rival
  fi
  if [ -d "$package/kt_kernel" ]; then
    timeout 300 "$python" tools/train_rival.py --kinds kt-kernel --package "$package" --dtypes bf16,int8 \
      --shape $rival_shape \
      --tokens $tokens --threads "$threads" --seconds "$seconds" --limit 45 \
      >> "$out/train-rivals.jsonl" || failed "kt-kernel"
  else
    echo "no kt-kernel in carry/rival: left out"
  fi
}

# The same threads as torch's own sleep while experts run.
model() {
  export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
  export TOKENIZERS_PARALLELISM=false
  : > "$out/train-models.jsonl"
  timeout 120 "$python" tools/hybrid_train.py | tee "$out/train-hybrid.txt" || failed "losses beside the CPU's"
  timeout 390 "$python" tools/train_speed.py "${model[@]}" --shape qwen3-30b --format int8 --tokens 4096 \
    --json "$out/train-models.jsonl" || failed "48 layers"
  timeout 190 "$python" tools/train_speed.py "${model[@]}" --shape deepseek-v3 --format int4,bf16 --tokens 8192 \
    --steps 3 --warmup 1 \
    --json "$out/train-models.jsonl" || failed "four layers"
}

[[ ,$steps, == *,build,* || ! -x $kt ]] && { say build; build || exit 1; }
"$kt" version | tee "$out/version.txt"
for step in layers rivals model; do
  [[ ,$steps, == *",$step,"* ]] || continue
  say "$step"
  "$step"
done
say table
files=()
for file in "$out"/train-*.json "$out"/train-*.jsonl; do [ -s "$file" ] && files+=("$file"); done
[ ${#files[@]} -eq 0 ] || "$python" tools/train_table.py "${files[@]}" | tee "$out/train-table.txt"
say "done, failures: $failures"
exit $failures
