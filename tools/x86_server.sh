#!/usr/bin/env bash
# Builds, tests and measures on an x86 server in one call: the ISAs that CI's machines cannot run are made green and
# measured here. Needs CMake, g++ >= 12, GoogleTest, CLI11 and nlohmann-json; installs nothing.
#
#   tools/x86_server.sh build-test-table [seconds per row, default 1]
#   tools/x86_server.sh rival [models, default 4,48; deepseek2]   after it: llama.cpp's models beside ours
#   tools/x86_server.sh server                                   kt run beside the engine alone and llama.cpp's server
#   tools/x86_server.sh python [steps, with commas]              kt_kernel beside a GPU: tools/x86_python.sh
#   tools/x86_server.sh layers [seconds per row, default 0.5]    kt-kernel's MoE layers beside ours; after another mode
#   tools/x86_server.sh train [steps, with commas]               training, layers to models: tools/train_server.sh
#
# Three minutes on 16 cores at half a second a row. The short table comes last; logs and JSON go to $OUT, else ./out.
# The rivals are the extension of kt-kernel in carry/rival (tools/rival_layers.sh) and the source of llama.cpp in
# carry/llama.tar.xz; a mode says which is not there.
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-}
seconds=${2:-1}
case $mode in
  build-test-table | rival | server) ;;
  python) exec tools/x86_python.sh "${@:2}" ;;
  layers) exec tools/rival_layers.sh "${@:2}" ;;
  train) exec tools/train_server.sh "${@:2}" ;;
  *)
    sed -n '2,14s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac

out=${OUT:-$PWD/out}
build=${BUILD:-build-server}
mkdir -p "$out"
failures=0
say() { printf '\n== %s (%dm%02ds)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

# build_llama TARGETS...: from its source, for this CPU.
build_llama() {
  local server=OFF
  [[ " $* " = *" llama-server "* ]] && server=ON
  llama=$build/llama
  if [ ! -d "$llama/src" ]; then
    mkdir -p "$llama/src"
    tar -xJf carry/llama.tar.xz -C "$llama/src"
  fi
  cmake -S "$llama/src" -B "$llama" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_SERVER=$server -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    > "$out/llama-configure.log" 2>&1 || { tail -n 20 "$out/llama-configure.log"; return 1; }
  cmake --build "$llama" -j "$(nproc)" --target "$@" > "$out/llama-build.log" 2>&1 ||
    { grep -E -A5 'error|No rule' "$out/llama-build.log" | head -40; return 1; }
}

# llama.cpp's whole models beside ours: one Q4_0 file whose routers choose evenly, the same prompts and batches, each at
# its best thread count. rival_model NAME: layers of Qwen3-30B-A3B, or deepseek2; after 8192 tokens too with 4 layers.
rival_model() {
  local name=$1 all half model=$build/rival-$1.gguf llama=$build/llama to=$out/$1 shape=(--layers "$1")
  [ "$name" != deepseek2 ] || shape=(--arch deepseek2)
  all=$(nproc) half=$(($(nproc) / 2))
  mkdir -p "$to"
  say "$name: model and llama.cpp"
  [ -s "$model" ] || python3 tools/make_gguf.py "$model" "${shape[@]}"
  [ -x "$llama/bin/llama-bench" ] || build_llama llama-bench llama-batched-bench || return 1
  say "$name: llama.cpp"
  for threads in $half $all; do
    "$llama/bin/llama-bench" -m "$model" -t "$threads" -p 1024 -n 64 -r 2 -o json \
      > "$to/llama-$threads.json" 2> "$to/llama-$threads.log"
    [ "$name" != 4 ] || "$llama/bin/llama-bench" -m "$model" -t "$threads" -p 0 -n 32 -d 8192 -r 2 -o json \
      > "$to/llama-deep-$threads.json" 2>> "$to/llama-$threads.log"
    "$llama/bin/llama-batched-bench" -m "$model" -t "$threads" -c 4096 -npp 128 -ntg 32 -npl 8 --output-format jsonl \
      > "$to/llama-batch-$threads.jsonl" 2>> "$to/llama-$threads.log"
  done
  say "$name: kt"
  for threads in $((all - 2)) $all; do
    "$kt" bench "$model" --gpu off --threads "$threads" --prompt 1024 --batch 1 --tokens 64 --parts --json \
      > "$to/kt-$threads.json"
    [ "$name" != 4 ] || "$kt" bench "$model" --gpu off --threads "$threads" --prompt 8192 --batch 1 --tokens 32 \
      --repeat 2 --json > "$to/kt-deep-$threads.json"
    "$kt" bench "$model" --gpu off --threads "$threads" --prompt 128 --batch 8 --tokens 32 --json \
      > "$to/kt-batch-$threads.json"
  done
  say "$name: table"
  python3 tools/rival_model_table.py "$to"
}

if [ "$mode" = rival ]; then
  kt=$build/bin/kt
  if [ ! -x "$kt" ]; then echo "rival: needs $kt (build-test-table first)"; exit 0; fi
  if [ ! -f carry/llama.tar.xz ]; then echo "no source of llama.cpp in carry/llama.tar.xz: left out"; exit 0; fi
  models=${2:-4,48}
  for name in ${models//,/ }; do rival_model "$name"; done
  exit 0
fi

# The server beside the engine alone, on the demo and on a 30B-shaped model; llama.cpp's server on the second.
serve() {
  local model=$build/rival.gguf rival=()
  say "http and server tests"
  for name in http server; do
    timeout 150 "$build/src/$name/${name}_test" --gtest_brief=1 > "$out/${name}_test.log" 2>&1 ||
      { failures=1; tail -n 30 "$out/${name}_test.log"; }
    tail -n 1 "$out/${name}_test.log"
  done
  [ -s "$model" ] || python3 tools/make_gguf.py "$model"
  if [ -f carry/llama.tar.xz ]; then
    say "llama.cpp's server"
    build_llama llama-server && rival=(--llama-server "$build/llama/bin/llama-server")
  else
    echo "no source of llama.cpp in carry/llama.tar.xz: left out"
  fi
  say "demo"
  for threads in 2 $(($(nproc) / 2)); do
    python3 tools/server_speed.py demo/tiny-deepseekv3 --kt "$kt" --threads "$threads" \
      --json "$out/demo-$threads.json" || failures=1
  done
  say "30B-shaped model"
  for threads in $(($(nproc) - 2)); do
    python3 tools/server_speed.py "$model" --kt "$kt" --threads "$threads" --tokens 128 --rounds 2 \
      "${rival[@]}" --json "$out/model-$threads.json" || failures=1
  done
}

compiler=()
for candidate in g++-13 g++-14 g++-12; do
  command -v "$candidate" > /dev/null && { compiler=("-DCMAKE_CXX_COMPILER=$candidate"); break; }
done
generator=()
command -v ninja > /dev/null && generator=(-G Ninja)

say "build"
cmake -S . -B "$build" "${generator[@]}" "${compiler[@]}" > "$out/configure.log" 2>&1 ||
  { cat "$out/configure.log"; exit 1; }
targets=(all)
[ "$mode" = server ] && targets=(kt http_test server_test)
cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" > "$out/build.log" 2>&1 ||
  { grep -E -A5 'error|FAILED' "$out/build.log" | head -80; exit 1; }
kt=$build/bin/kt
"$kt" version | tee "$out/version.txt"
if [ "$mode" = server ]; then
  serve
  say "done, failures: $failures"
  exit $failures
fi

say "tests"
for name in base http formats kernels nn weights models engine server; do
  program=$build/src/$name/${name}_test
  [ -x "$program" ] || continue
  if timeout 150 "$program" --gtest_brief=1 > "$out/${name}_test.log" 2>&1; then
    result=passed
  else
    result=FAILED
    failures=1
  fi
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
    "$kt" version | grep -qE "^$isa +runs" &&
      row "$shape-$isa" --shape $shape --tokens 1,1024 --format int4,int8 --isa $isa
  done
done

say "table"
python3 tools/moe_table.py "$out"/moe-*.json | tee "$out/table.txt"
say "done, failures: $failures"
exit $failures
