#!/usr/bin/env bash
# What this machine can do, how close the kernels come to it, and a small trained model: converted, telling a story, and
# judged in four formats. Two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
kt=${BUILD:-build}/bin/kt
model=demo/tiny-deepseekv3
stories=demo/stories.txt
out=${BUILD:-build}/demo

step() { printf '\n$ kt %s\n\n' "$*"; "$kt" "$@"; }

step version
step doctor
step microbench moe --shape qwen3-30b --tokens 1,16 --format int4,int8,q4_k,bf16 --layers 4 --seconds 1

cat <<'TEXT'

Each row is one Mixture-of-Experts layer of a 30B-A3B model: 128 experts, 8 per token. `of limit` compares its time with
the best this machine allows, measured between the calls: reading the experts' bytes once, or multiplying at peak.
More: kt microbench moe --help
TEXT

step quant $model -o "$out/int8" --method int8 --report --overwrite
step quant $model -o "$out/int4" --method int4 --report --overwrite
step quant $model -o "$out/int4-g32" --method int4 --group-size 32 --overwrite

printf '\nThe demo model, a 13 M parameter DeepSeek-V3 that writes stories, '
printf 'and what its three conversions take on disk:\n\n'
for folder in $model "$out/int8" "$out/int4" "$out/int4-g32"; do
  printf '  %-28s %6.1f MiB\n' "$folder" "$(du -sb --exclude=weights.tar.xz "$folder" | awk '{ print $1 / 1048576 }')"
done
cat <<'TEXT'

Experts are rounded; everything else is copied. Per-row int4 is the smallest and loses most; groups of 32 with their own
scale keep more; int8 is close to the original. More: kt quant --help
TEXT

printf '\nOnce upon a time'
"$kt" generate $model --weights "$out/int4" -p "Once upon a time" --max-tokens 160 --temperature 0.7 --seed 7 --stats

printf '\nWhat the formats cost, on the first 4096 tokens of %s ' $stories
printf '(lower is better; KL is the distance from bf16):\n\n'
for format in bf16 int8 int4_g32 int4; do
  printf '  %-9s ' $format
  "$kt" perplexity $model --file $stories --max-tokens 4096 --format $format --kl-against stored
done

# Fine-tuning needs a Python with torch, PEFT and TRL, and kt_kernel: that of the build where it has one. Nothing is
# installed here.
python=${KT_PYTHON:-python3}
PYTHONPATH=$(realpath -m "${BUILD:-build}")/python${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
if "$python" -c 'import accelerate, datasets, peft, torch, transformers, trl, kt_kernel' 2> /dev/null; then
  printf '\nTwenty steps of LoRA on stories that a pirate tells, attention and experts, '
  printf 'with the experts as they are stored:\n'
  KT_PYTHON=$(command -v "$python") step sft train demo/sft.yaml "output_dir=$out/pirate"
  asked="You are a pirate. Tell me a bedtime story."
  tell() { "$kt" generate $model --chat -p "$asked" --max-tokens 80 --temperature 0 "$@"; }
  printf '\n"%s" before:\n\n' "$asked"
  tell
  printf '\n\nand after:\n\n'
  tell --adapter "$out/pirate"
  printf '\n\n  %s chat demo --adapter %s          ask it yourself\n' "$kt" "$out/pirate"
else
  cat <<TEXT

Fine-tuning, which needs a Python with torch, transformers, PEFT and TRL (pip install ".[sft]"):

  $kt sft train demo/sft.yaml --dry-run     what it would train, and the memory that takes
  $kt sft train demo/sft.yaml               twenty steps on stories that a pirate tells
TEXT
fi

cat <<TEXT

Now talk to it:

  $kt run demo          a web page and OpenAI's API at http://127.0.0.1:30000
  $kt chat demo         the same in this terminal
TEXT
