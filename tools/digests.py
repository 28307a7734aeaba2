#!/usr/bin/env python3
"""Whether a change of the code left every result as it was, bit for bit, and what it did to speed.

    digests.py write --build BUILD --models DIR [--trained FOLDER...] [-o digests.json]
    digests.py compare OLD.json NEW.json
    digests.py times OLD_BUILD NEW_BUILD --model FOLDER_OR_GGUF [--again OTHER_OLD_BUILD] [--rounds N] [--threads N]

`write` takes SHA-256 of what a build computes: logits of model_probe for every family of tests/tiny_models.py, over
prompts, precisions, formats, caches, threads, shards and instruction sets; tensors that kt quant and calibration write;
text of kt generate, figures of kt perplexity. Checkpoints are made once into DIR and stay there. --trained names more
models for logits and calibration (default: the demo). It ends with 1 when a case fails, and leaves that out. Needs the
targets kt and model_probe, and torch, transformers, compressed-tensors, gguf.

`compare` names every case that differs or is missing, and ends with 1 if there is one. Sums of floats follow the length
of vectors: digests are comparable on one machine and instruction set only; the file says which.

`times` runs the builds in turns and prints medians and new/old: a MoE layer of small experts, prefill and decode, and
loading. --again names a second build of the old commit; the widest ratio of the two in a kind of figures is its spread.
Ends with 1 when a ratio is over 1.02 and over the spread. Nothing else may run on the machine meanwhile.
"""
import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO, STORIES = ROOT / "demo" / "tiny-deepseekv3", ROOT / "demo" / "stories.txt"
SLOWER = 1.02
TINY_VOCAB, TRAINED_VOCAB = 300, 4096  # of tests/tiny_models.py and the demo
ACTS = ("f32", "bf16", "int8")
FORMATS = ("int8 int4 int4_g32 int4_g64 int4_g128 int4_g32_zero int4_g64_zero int4_g128_zero fp8 fp8_row bf16 fp16 f32 "
           "mxfp4 mxfp8 q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs").split()
TRAINED_FORMATS = [name for name in FORMATS if not name.endswith(("_k", "_xs"))]  # small models: rows of 128 columns
# Sizes that every format's blocks divide, in every matrix.
SIZES = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256)
WIDE_GQA, WIDE_MLA = dict(SIZES, head_dim=64), dict(SIZES, q_lora_rank=256, kv_lora_rank=256, v_head_dim=64)
WIDE = {"qwen3_moe": WIDE_GQA, "deepseek_v3": WIDE_MLA, "gpt_oss": WIDE_GQA}
CONVERSIONS = {"int4": "--method=int4 --numa-nodes=1", "int8": "--method=int8 --numa-nodes=1",
               "int4-two_parts": "--method=int4 --numa-nodes=2", "int4_g32": "--method=int4 --group-size=32"}


def checkpoints(root):
    """{name: path} under DIR; missing ones are made. The first part of a name says which cases it is for."""
    sys.path.insert(0, str(ROOT / "tests"))
    import gguf
    import torch

    import gguf_files
    import published
    import tiny_models

    kinds = gguf.GGMLQuantizationType

    def blocks(name, columns):
        """Of a GGUF matrix; more bits for down, v and the head."""
        more = int(any(word in name for word in ("ffn_down", "output.weight", "attn_v")))
        wide, narrow = (kinds.Q4_K, kinds.Q6_K), (kinds.Q4_0, kinds.Q8_0)
        return wide[more] if columns % 256 == 0 else narrow[more] if columns % 32 == 0 else kinds.F16

    def make(path, key, how=None, kind=None, tokenizer=False, **sizes):
        """As transformers saves it in bf16, in a format of tests/published.py, or a GGUF file; whole or not at all."""
        print(f"making {path}", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            model, draft = tiny_models.build(key, torch.bfloat16, **sizes), pathlib.Path(folder, "draft")
            draft = published.publish(model, how(), draft)[0] if how else tiny_models.save(model, draft, torch.bfloat16)
            for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
                shutil.copy(DEMO / name, draft)
            if kind:
                draft = gguf_files.Model(draft, kind).write(pathlib.Path(folder, path.name))
            draft.rename(path)

    families = [key for key in tiny_models.MODELS if "-" not in key]
    odd = dict(hidden_size=200, q_lora_rank=72, kv_lora_rank=136, qk_nope_head_dim=24, v_head_dim=40,
               intermediate_size=296, moe_intermediate_size=144)  # blocks of 128 do not divide them
    recipes = {
        **{f"tiny/{key}": dict(key=key) for key in tiny_models.MODELS},
        **{f"wide/{key}": dict(key=key, **sizes) for key, sizes in WIDE.items()},
        **{f"told/{key}": dict(key=key, tokenizer=True, vocab_size=TRAINED_VOCAB) for key in families},
        **{f"gguf/{key}.gguf": dict(key=key, kind=blocks) for key in families},
        "gguf/wide.gguf": dict(key="qwen3_moe", kind=blocks, **WIDE_GQA),
        "stored/fp16": dict(key="qwen2_moe", how=lambda: published.Plain(torch.float16)),
        "stored/f32": dict(key="glm4_moe", how=lambda: published.Plain(torch.float32)),
        "stored/fp8_blocks": dict(key="deepseek_v3", how=lambda: published.Fp8Blocks(), **odd),
        "stored/fp8_channels": dict(key="qwen3_moe", how=lambda: published.Fp8Channels(torch.bfloat16), **WIDE_GQA),
        "stored/int4_g32": dict(key="deepseek_v3", how=lambda: published.Packed(4, 32, False), **WIDE_MLA),
        "stored/int8": dict(key="qwen3_moe", how=lambda: published.Packed(8, None, False), **WIDE_GQA),
        "stored/mxfp4": dict(key="gpt_oss", how=lambda: published.GptOssMxfp4()),
    }
    for name, how in recipes.items():
        if not (root / name).exists():
            make(root / name, **how)
    return {name: root / name for name in recipes}


@dataclasses.dataclass
class Case:
    name: str
    command: list
    threads: int = 1
    stdin: bytes = b""
    isa: str = ""
    logits: int = 0  # numbers on standard output
    folder: pathlib.Path = None  # else: whose tensors count
    fields: tuple = ()  # else: of the JSON on standard output


def prompt(tokens, vocabulary, seed):
    """Ids that follow from the arguments on any version of Python."""
    words = (hashlib.sha256(f"{seed} {tokens} {i}".encode()).hexdigest() for i in range(tokens))
    return " ".join(str(int(word[:8], 16) % vocabulary) for word in words) + "\n"


# name: lengths of sequences, and where their steps begin
PROMPTS = {
    "whole": ((130,), ()),
    "chunks": ((130,), ("--chunk", "37")),
    "batch": ((40, 3, 97, 1), ("--cuts", "1,2,30,64,65")),
    "decode": ((70, 9), ("--cuts", "64,65,66,67,68,69")),
    "short": ((21, 2), ("--cuts", "20")),
    "long": ((600, 5, 300), ("--cuts", "5,511,512")),
}


def prober(program, label, model, vocab):
    """Makes cases of model_probe for one model."""
    def case(shape="batch", isa="", threads=1, **flags):
        lengths, cuts = PROMPTS[shape]
        lines = "".join(prompt(tokens, vocab, seed) for seed, tokens in enumerate(lengths))
        words = [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), value)]
        shown = [f"{name}={pathlib.Path(value).name}" for name, value in [*flags.items(), ("isa", isa)] if value]
        command = [program, model, "--threads", threads, *cuts, *words]
        name = " ".join([label, shape, *shown, f"threads={threads}"])
        return Case(name, command, threads, lines.encode(), isa, sum(lengths) * vocab)
    return case


def tiny_cases(case):
    for acts in ACTS:
        yield from (case(shape, acts=acts) for shape in ("whole", "chunks", "batch", "decode"))
        yield from (case(acts=acts, threads=2, shards=shards) for shards in ("1", "2"))
    yield from (case(acts=acts, kv=kv) for acts, kv in itertools.product(ACTS, ("f32", "bf16", "int8")))
    yield case("chunks", acts="bf16", kv="int8", threads=2)


def wide_cases(case, isas):
    for name in FORMATS:
        yield from (case(acts=acts, format=name) for acts in ACTS)
        yield case("decode", acts="default", format=name)
        yield from (case(acts=acts, linear_format=name) for acts in ("default", "f32"))
    yield case("long", acts="default", format="int4", linear_format="int8", kv="int8")
    for name in ("int4", "fp8", "q4_k"):
        yield from (case(acts="default", format=name, threads=2, shards=shards) for shards in ("1", "2"))
    for isa, name, acts in itertools.product(isas, ("bf16", "int4", "fp8", "q4_k"), ACTS):
        yield case("short", acts=acts, format=name, linear_format=name, isa=isa)


def stored_cases(case):
    for acts in ("default", *ACTS):
        yield from (case(shape, acts=acts) for shape in ("batch", "decode"))
    yield case("chunks", acts="default", threads=2)


def trained_cases(case):
    yield from stored_cases(case)
    for name in TRAINED_FORMATS:
        yield from (case(acts=acts, format=name) for acts in ("default", "f32"))
    for more in (dict(format="int4"), dict(kv="int8"), dict(linear_format="int8"), dict(shards="2", format="int8")):
        yield case("chunks", acts="default", threads=2, **more)
    yield case("long", acts="default", kv="int8", format="int4_g32")


def logit_cases(program, scratch, models, trained, isas):
    kinds = {"tiny": tiny_cases, "wide": lambda case: wide_cases(case, isas), "stored": stored_cases,
             "gguf": stored_cases, "told": lambda case: ()}
    for name, model in models.items():
        yield from kinds[name.split("/")[0]](prober(program, name, model, TINY_VOCAB))
    for model in trained:
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        yield from trained_cases(prober(program, f"trained/{model.name}", model, vocab))
    case = prober(program, "demo", DEMO, TRAINED_VOCAB)
    for name, acts in itertools.product(CONVERSIONS, ("default", "f32")):
        yield case(acts=acts, weights=scratch / "quant" / name)
    for name in ("RTN", "GPTQ all"):
        yield from stored_cases(prober(program, f"demo {name}", scratch / "quant gpu" / name, TRAINED_VOCAB))


def conversion_cases(kt, scratch, told, trained):
    """They leave folders, some of which are run afterwards."""
    def case(verb, name, model, *words):
        out = scratch / verb / name
        command = [kt, *verb.split(), model, "-o", out, "--threads", "1", "--json", *words]
        return Case(f"{verb} {name}", command, folder=out)

    for name, words in CONVERSIONS.items():
        yield case("quant", name, DEMO, *words.split())
    yield case("quant gpu", "RTN", DEMO, "--method=RTN", "--type=W8A16", "--targets=all", "--group-size=32")
    gptq = ["--type=W4A16", "--dataset", STORIES, "--max-sequence-length=192", "--num-calibration-samples"]
    yield from (case("quant gpu", f"GPTQ {model.name}", model, *gptq, "12", "--group-size", "128") for model in trained)
    yield case("quant gpu", "GPTQ all", DEMO, *gptq, "8", "--group-size", "32", "--targets", "all", "--actorder=none")
    for model in told:
        yield case("quant gpu", f"GPTQ told/{model.name}", model, *gptq, "6", "--group-size=-1", "--targets=all")


def engine_cases(kt, told):
    def generate(name, model, tokens, *words, threads=1):
        command = [kt, "generate", model, "-p", "Once upon a time there was a little", "--ignore-eos", "--json",
                   "--threads", threads, "--max-tokens", tokens, *words]
        return Case(f"generate {name} threads={threads}", command, threads, fields=("text", "tokens", "finish"))

    yield from (generate("greedy", DEMO, 96, threads=threads) for threads in (1, 2))
    yield generate("chat int4 kv=int8", DEMO, 64, "--chat", "--format", "int4", "--kv", "int8")
    yield generate("chunks f32", DEMO, 32, "--acts", "f32", "--chunked-prefill-size", "5")
    yield generate("sampled", DEMO, 96, "--temperature=0.9", "--top-k=40", "--repetition-penalty=1.1", "--seed=7")
    yield from (generate(f"told/{model.name}", model, 24) for model in told)
    for name in ("int4", "bf16"):
        command = [kt, "perplexity", DEMO, "--file", STORIES, "--max-tokens=600", "--threads=1", "--json",
                   "--kl-against=stored", "--format", name]
        yield Case(f"perplexity {name}", command, fields=("perplexity", "nll", "kl"))


def output(command, home, isa="", stdin=b""):
    """Of a program that gets no setting of the user's, nor one that steers the kernels."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    kept |= {"HOME": str(home), "KT_HOME": str(home)} | ({"KT_ISA": isa} if isa else {})
    done = subprocess.run([str(word) for word in command], input=stdin, capture_output=True, env=kept)
    if done.returncode != 0:
        raise RuntimeError(f"exit {done.returncode}: {done.stderr.decode(errors='replace').strip()[-600:]}")
    return done.stdout


def digest(case, home):
    out = output(case.command, home, case.isa, case.stdin)
    if case.logits:
        numbers = numpy.frombuffer(out, "<f4")
        if len(numbers) != case.logits or not numpy.isfinite(numbers).all() or (numbers == numbers[0]).all():
            raise RuntimeError(f"{len(numbers)} of {case.logits} logits, or some not finite, or all the same")
    elif case.folder:
        return digest_of_files(case.folder, "*.safetensors")
    else:
        found = json.loads(out)
        out = json.dumps([found[field] for field in case.fields]).encode()
    return hashlib.sha256(out).hexdigest()


def content(file):
    """Its bytes; of safetensors without the metadata, which name the version of the tool."""
    raw = file.read_bytes()
    if file.suffix != ".safetensors":
        return raw
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.dumps(json.loads(raw[8:end]) | {"__metadata__": None}, sort_keys=True).encode() + raw[end:]


def digest_of_files(path, names="*"):
    files = sorted(filter(pathlib.Path.is_file, path.rglob(names))) if path.is_dir() else [path]
    if not files:
        raise RuntimeError(f"{path} has no {names}")
    return hashlib.sha256(b"".join(hashlib.sha256(content(file)).digest() for file in files)).hexdigest()


def facts_of(kt):
    """Of the build and the machine; kt's version holds the commit it was built from."""
    rows = [line.split() for line in output([kt, "version"], pathlib.Path.home()).decode().splitlines()]
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"commit": next(row[1] for row in rows if row[:1] == ["kt-kernel:"]),
            "isa": next(row[0] for row in rows if row[-2:] == ["in", "use"]),
            "other_isas": [row[0] for row in rows if row[1:] == ["runs"]], "cpu": (cpu or [platform.machine()])[0]}


def write(args):
    start, kt = time.monotonic(), args.build / "bin" / "kt"
    facts = facts_of(kt)
    programs = [path for path in args.build.rglob("model_probe") if path.is_file() and os.access(path, os.X_OK)]
    if len(programs) != 1:
        sys.exit(f"{args.build}: {len(programs)} programs called model_probe; build kt and model_probe")
    models, trained = checkpoints(args.models), args.trained or [DEMO]
    found, failed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)

        def run(case):
            try:
                found[case.name] = digest(case, scratch)
            except RuntimeError as error:
                failed.append(case.name)
                print(f"FAILED {case.name}: {error}", file=sys.stderr)

        told = [path for name, path in models.items() if name.startswith("told/")]
        stages = {"conversions": conversion_cases(kt, scratch, told, trained), "engine": engine_cases(kt, told),
                  "logits": logit_cases(programs[0], scratch, models, trained, facts["other_isas"])}
        for stage, cases in stages.items():
            cases = list(cases)
            if len({case.name for case in cases}) != len(cases):
                sys.exit(f"{stage}: two cases have one name")
            with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as workers:
                list(workers.map(run, [case for case in cases if case.threads == 1]))
            list(map(run, [case for case in cases if case.threads > 1]))
            print(f"{stage}: {len(cases)} cases, {time.monotonic() - start:.0f} s", file=sys.stderr)
    named = models | {f"trained/{model.name}": model for model in trained} | {"demo": DEMO}
    result = facts | {"models": {name: digest_of_files(path) for name, path in named.items()},
                      "cases": dict(sorted(found.items()))}
    pathlib.Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(found)} digests, {len(failed)} failed, {facts['isa']}, {time.monotonic() - start:.0f} s: {args.out}")
    return 1 if failed else 0


def compare(args):
    old, new = (json.loads(pathlib.Path(path).read_text()) for path in (args.old, args.new))
    for fact in ("cpu", "isa", "other_isas"):
        if old[fact] != new[fact]:
            print(f"not comparable: {fact} {old[fact]} and {new[fact]}")
    different = {"models": 0, "cases": 0}
    for kind in different:
        for name in sorted(old[kind].keys() | new[kind].keys()):
            before, now = old[kind].get(name), new[kind].get(name)
            if before != now:
                different[kind] += 1
                word = "missing in the new" if not now else "missing in the old" if not before else "differs"
                print(f"{word}: {'the checkpoint ' if kind == 'models' else ''}{name}")
    total = len(old["cases"].keys() | new["cases"].keys())
    print(f"{total} cases, {total - different['cases']} the same")
    return 1 if not total or any(different.values()) else 0


def measured(build, model, threads, home):
    """{(kind, figure): seconds} of one run."""
    def kt(*words):
        return json.loads(output([build / "bin" / "kt", *words, "--json", "--threads", threads], home))

    out = {}
    for row in kt("microbench", "moe", "--experts", 32, "--hidden", 512, "--inter", 256, "--top-k", 4, "--layers", 4,
                  "--tokens", "1,64", "--format", "int4,bf16", "--seconds", 0.5):
        out["layer", f"{row['format']}, {row['tokens']} tokens"] = row["us_per_layer"] * 1e-6
    for point in kt("bench", model, "--prompt", 128, "--batch", "1,4", "--tokens", 32, "--repeat", 3)["points"]:
        for phase in ("prefill", "decode"):
            out["step", f"{phase}, {point['batch']} x 128"] = 1 / point[f"{phase}_tokens_per_s"]
    done = kt("generate", model, "-p", "Once", "--max-tokens", 1, "--stats")
    return out | {("load", "whole model"): done["stats"]["load"]["seconds"]}


def times(args):
    builds = {"old": args.old, "new": args.new, **({"again": args.again} if args.again else {})}
    runs, slower, spread = {name: [] for name in builds}, 0, {}
    with tempfile.TemporaryDirectory() as home:
        for turn in range(args.rounds + 1):
            for name in list(builds)[:: 1 if turn % 2 else -1]:
                runs[name].append(measured(builds[name], args.model, args.threads, home))
    # The first turn only brought files into memory.
    old, new, again = ({key: statistics.median(run[key] for run in runs[name][1:]) for key in runs[name][0]}
                       for name in ("old", "new", "again" if args.again else "old"))
    for kind, figure in old:
        ratio = again[kind, figure] / old[kind, figure]
        spread[kind] = max(spread.get(kind, 1), ratio, 1 / ratio)
    print(f"{'kind':6} {'figure':20} {'old us':>10} {'new us':>10} {'new/old':>8} {'again/old':>9} {'spread':>7}")
    for key in old:
        ratio = new[key] / old[key]
        bad = ratio > max(SLOWER, spread[key[0]])
        slower += bad
        same = [f"{again[key] / old[key]:.3f}", f"{spread[key[0]]:.3f}"] if args.again else ["-", "-"]
        print(f"{key[0]:6} {key[1]:20} {old[key] * 1e6:10.1f} {new[key] * 1e6:10.1f} {ratio:8.3f} {same[0]:>9} "
              f"{same[1]:>7}{'  slower' if bad else ''}")
    print(f"{len(old)} figures, {args.rounds} rounds, {slower} slower")
    return 1 if slower else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs, folder = parser.add_subparsers(required=True), lambda word: pathlib.Path(word).resolve()
    for run, options in (
        (write, {"--build": dict(type=folder, required=True), "--models": dict(type=folder, required=True),
                 "--trained": dict(type=folder, nargs="+", default=[]), "-o --out": dict(default="digests.json")}),
        (compare, {"old": {}, "new": {}}),
        (times, {"old": dict(type=folder), "new": dict(type=folder), "--again": dict(type=folder),
                 "--model": dict(type=folder, required=True), "--rounds": dict(type=int, default=7),
                 "--threads": dict(type=int, default=os.cpu_count())}),
    ):
        verb = verbs.add_parser(run.__name__)
        verb.set_defaults(run=run)
        for name, how in options.items():
            verb.add_argument(*name.split(), **how)
    args = parser.parse_args()
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
