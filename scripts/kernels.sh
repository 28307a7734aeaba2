#!/usr/bin/env bash
# GPU kernels: src/cuda/kernels/*.cu to the assembly that drivers compile, in src/cuda/kernels.tar.xz. Builds take that.
#
#   scripts/kernels.sh           makes the archive; needs nvcc
#   scripts/kernels.sh --check   makes the files again and compares them (another nvcc: says "not compared"), and
#                                assembles them for the oldest and the newest architecture below, with KT_TEST_FULL=1
#                                for all of them: a spill or a stack frame fails; 77 without nvcc
#   scripts/kernels.sh --digest  prints the digest of the sources that the archive has to carry; needs sha256sum only
set -euo pipefail
cd "$(dirname "$0")/.."

archive=src/cuda/kernels.tar.xz
version=7.8  # of the assembly's header: drivers from 525 (CUDA 12.0) on take it
architectures="sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"
[ "${KT_TEST_FULL:-}" = 1 ] || [ "${1:-}" != --check ] || architectures="sm_80 sm_120"  # the whole list takes minutes
codes="i8:kI8 u2:kU2 u3:kU3 u4:kU4 u5:kU5 u6:kU6 iq4:kIq4 e2m1:kE2m1 e4m3:kE4m3 bf16:kBf16 f16:kF16 f32:kF32"

# What a module depends on.
sources() {
  printf '%s\n' scripts/kernels.sh src/cuda/gpu.h src/formats/format.h src/formats/kv_type.h src/formats/layout.h \
    src/cuda/kernels/*.h src/cuda/kernels/*.cu | LC_ALL=C sort
}
digest() { sources | xargs sha256sum | sha256sum | cut -d ' ' -f 1; }
if [ "${1:-}" = --digest ]; then digest; exit; fi

nvcc=${NVCC:-$(command -v nvcc || true)}
if [ -z "$nvcc" ]; then
  echo "not run here: nvcc was not found (CUDA toolkit 13.0)"
  exit 77
fi
ptxas=$(dirname "$(readlink -f "$nvcc")")/ptxas
[ -x "$ptxas" ] || ptxas=$(command -v ptxas || echo "${CUDA_HOME:-/usr/local/cuda}/bin/ptxas")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# nvcc 13.0 leaves a dead load in a module or not, by where its own memory happens to lie: always in the same place,
# where the system allows it.
fixed=
! setarch -R true 2> /dev/null || fixed="setarch -R"

# once SOURCE OUT flags...: without comments, which name the compiler, and with the header that old drivers take.
once() {
  local source=$1 out=$folder/$2
  $fixed "$nvcc" -std=c++20 -arch=sm_80 -ptx --expt-relaxed-constexpr -fmad=false -Isrc "${@:3}" \
    "src/cuda/kernels/$source" -o "$out.all"
  sed -e '/^\/\//d' -e '/^$/d' -e '/^\s*\.pragma/d' -e "s/^\.version .*/.version $version/" "$out.all" > "$out"
  rm "$out.all"
}
# The same until it gives what is expected: the archive's file when it is checked, and, where memory moves, what the
# time before gave when it is made.
compile() {
  local try
  for try in 1 2 3 4; do
    once "$@"
    if [ -d "$folder/have" ]; then
      cmp -s "$folder/$2" "$folder/have/$2" && return
      cmp -s "$folder/compiler" "$folder/have/compiler" || return 0
    else
      [ -z "$fixed" ] || return 0
      [ $try -gt 1 ] && cmp -s "$folder/$2" "$folder/$2.before" && break
      cp "$folder/$2" "$folder/$2.before"
    fi
  done
  rm -f "$folder/$2.before"
}
jobs=()
for source in src/cuda/kernels/*.cu; do
  name=$(basename "$source" .cu)
  if ! grep -q 'KT_FOR_.*CODES(' "$source"; then jobs+=("$name.cu $name.ptx"); continue; fi
  for code in $codes; do
    if [ "$code" = f32:kF32 ] && grep -q KT_FOR_ROUNDED_CODES "$source"; then continue; fi
    for step in 4 8; do
      jobs+=("$name.cu ${name}_${code%%:*}_$step.ptx -DKT_CODE_NAME=${code%%:*} -DKT_CODE=${code##*:} -DKT_STEP=$step")
    done
  done
done
"$nvcc" --version | sed -n 's/.*\(V[0-9.]*\)$/\1/p' > "$folder/compiler"
if [ "${1:-}" = --check ]; then
  mkdir "$folder/have"
  tar -xJf "$archive" -C "$folder/have"
fi
export -f once compile
export nvcc folder version fixed
printf '%s\n' "${jobs[@]}" | xargs -P "$(nproc)" -I '{}' bash -c 'set -eu; compile {}'
digest > "$folder/sources.sha256"

if [ "${1:-}" = --check ]; then
  have=$folder/have
  if cmp -s "$have/compiler" "$folder/compiler"; then
    for file in "$folder"/*.ptx; do
      cmp -s "$file" "$have/$(basename "$file")" ||
        { echo "$(basename "$file") is not what the sources give: make kernels"; exit 1; }
    done
    echo "$(ls "$have" | grep -c 'ptx$') modules compared with the sources"
  else
    echo "modules not compared: made by $(cat "$have/compiler"), nvcc here is $(cat "$folder/compiler")"
  fi
  for architecture in $architectures; do
    for file in "$folder"/*.ptx; do echo "$architecture $file"; done
  done | xargs -P "$(nproc)" -L 1 bash -c '
    report=$("'"$ptxas"'" -v -arch=$0 "$1" -o /dev/null 2>&1) || { echo "$report"; exit 255; }
    if grep -E "[1-9][0-9]* bytes (stack frame|spill)" <<< "$report"; then echo "$(basename "$1") on $0"; exit 255; fi'
  echo "assembled for $architectures: no spill, no stack frame"
  exit
fi

(cd "$folder" &&
  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - -- *.ptx compiler sources.sha256) |
  xz --lzma2=preset=9e,lc=4,pb=0 > "$archive"
echo "$archive: $(stat -c %s "$archive") bytes, $(ls "$folder" | grep -c 'ptx$') modules"
