#!/usr/bin/env python3
"""What calibration earns a model's experts, as the table of docs/benchmarks/calibration.md, and whether it holds to its
bars:

    gptq_quality.py --program build/bin/kt --book TEXT --chat CHATS.jsonl[.xz] MODEL...

The first --test-tokens of the book are the test; calibration sees what follows token --calibrate-from, or chats. Every
figure is also given without the first --seen test tokens. Expert-output errors are sums of (routing weight * |output -
bf16's output|)^2 against rounding to nearest: those that kt reports (held-out calibration tokens, on which it chooses),
and those on the test tokens, computed here from the files alone. --dampening adds rows with other dampings, --weights
NAME=FOLDER rows of another program's output, which takes part in no bar. Exit status 1 where a bar is missed.

Needs tokenizers; torch, transformers and safetensors for the errors on test tokens (--no-errors leaves them out).
"""
import argparse
import json
import lzma
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

SEPARATOR = "<|endoftext|>"
CONTEXT = 1024
LEAST_KL_GAIN, MOST_ERROR, MOST_LOSS = 0.25, 0.75, 0.001


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder; its experts as bf16")
    parser.add_argument("--program", default="build/bin/kt")
    parser.add_argument("--book", required=True, type=pathlib.Path)
    parser.add_argument("--chat", required=True, type=pathlib.Path, help=".jsonl with messages, .xz or not")
    parser.add_argument("--chats", type=int, default=400, help="of the file's first, to calibrate with")
    parser.add_argument("--test-tokens", type=int, default=24576)
    parser.add_argument("--calibrate-from", type=int, default=25600)
    parser.add_argument("--seen", type=int, default=4096, help="test tokens that the settings were chosen with")
    parser.add_argument("--dampening", action="append", default=[], help="measure this too")
    parser.add_argument("--weights", action="append", default=[], metavar="NAME=FOLDER",
                        help="measure these experts too; only with one MODEL")
    parser.add_argument("--no-errors", action="store_true", help="no expert-output errors on test tokens")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    args = parser.parse_args()
    if args.weights and len(args.models) > 1:
        parser.error("--weights belongs to one MODEL")
    if not 0 < args.seen < args.test_tokens <= args.calibrate_from:
        parser.error("expected 0 < --seen < --test-tokens <= --calibrate-from")
    return args


def document_tokens(tokenizer, text):
    """The tokens kt perplexity reads a text as, and where in the text each begins."""
    tokens, starts, begin = [], [], 0
    for document in text.split(SEPARATOR):
        stripped = document.strip("\n")
        if stripped:
            first = begin + document.index(stripped)
            encoded = tokenizer.encode(stripped, add_special_tokens=False)
            tokens += [*encoded.ids, tokenizer.token_to_id(SEPARATOR)]
            starts += [*(first + span[0] for span in encoded.offsets), first + len(stripped)]
        begin += len(document) + len(SEPARATOR)
    return tokens, starts


class Texts:
    """Test and calibration texts of a model, as files."""

    def __init__(self, args, model, folder):
        import tokenizers
        tokenizer = tokenizers.Tokenizer.from_file(str(pathlib.Path(model, "tokenizer.json")))
        text = args.book.read_text()
        tokens, starts = document_tokens(tokenizer, text)
        if len(tokens) <= args.calibrate_from + CONTEXT:
            sys.exit(f"{args.book}: {len(tokens)} tokens, of which none are left from {args.calibrate_from}")
        rest = text[starts[args.calibrate_from]:]
        if document_tokens(tokenizer, rest)[0] != tokens[args.calibrate_from:]:
            sys.exit(f"{args.book}: token {args.calibrate_from} stands within a word; take another --calibrate-from")
        self.test = tokens[:args.test_tokens]
        self.book, self.chat = folder / "book.txt", folder / "chat.jsonl"
        self.book.write_text(rest)
        with (lzma.open if args.chat.suffix == ".xz" else open)(args.chat, "rt") as file:
            lines = [line for line in file if line.strip()][:args.chats]
        self.chat.write_text("".join(lines))


def run(args, *words):
    done = subprocess.run([args.program, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kt {' '.join(map(str, words))}: {done.stderr.strip()[-500:]}")
    return done.stdout


def perplexity(args, model, weights, tokens):
    words = ["perplexity", model, "--file", args.book, "--max-tokens", tokens, "--context", CONTEXT, "--acts", "bf16",
             "--kl-against", "stored", "--json", *(["--weights", weights] if weights else [])]
    return json.loads(run(args, *words))


def predicted(args, model, weights):
    """Perplexity and KL of all test tokens, and of those past --seen."""
    whole, seen = (perplexity(args, model, weights, tokens) for tokens in (args.test_tokens, args.seen))
    if whole["tokens"] != args.test_tokens or seen["tokens"] != args.seen:
        sys.exit(f"{args.book}: {whole['tokens']} and {seen['tokens']} test tokens; expected {args.test_tokens} and "
                 f"{args.seen}, whole windows of {CONTEXT}")
    left = args.test_tokens - args.seen
    return {"perplexity": whole["perplexity"], "kl": whole["kl"],
            "unseen_perplexity": math.exp((whole["nll"] - seen["nll"]) / left),
            "unseen_kl": (whole["kl"] * args.test_tokens - seen["kl"] * args.seen) / left}


def conversions(args, texts):
    """name -> arguments of kt quant gpu, in the order of the table."""
    rows = {}
    for kind in ("W4A16", "W8A16"):
        rows[f"{kind}, nearest"] = ["--method", "RTN", "--type", kind]
        for name, file in (("the book", texts.book), ("chats", texts.chat)):
            calibrated = ["--method", "GPTQ", "--type", kind, "--max-sequence-length", CONTEXT, "--dataset", file]
            rows[f"{kind}, {name}"] = calibrated
            for value in args.dampening if kind == "W4A16" else []:
                rows[f"{kind}, {name}, dampening {value}"] = [*calibrated, "--dampening-frac", value]
    return rows


def measured(args, model, folder):
    """name -> figures of every row."""
    texts = Texts(args, model, folder)
    rows = {"bf16": predicted(args, model, None)}
    outputs = {}
    for name, words in conversions(args, texts).items():
        outputs[name] = folder / f"experts-{len(outputs)}"
        begin = time.monotonic()
        run(args, "quant", "gpu", model, "-o", outputs[name], "--group-size", "128", *words)
        seconds = time.monotonic() - begin
        rows[name] = {"seconds": seconds, **predicted(args, model, outputs[name])}
        report = outputs[name] / "kt_calibration.json"
        if report.exists():
            layers = json.loads(report.read_text())["layers"]
            rows[name]["held_out_ratios"] = [layer["error"] / layer["rtn_error"] for layer in layers]
    for name, path in (named.split("=", 1) for named in args.weights):
        outputs[name] = pathlib.Path(path)
        rows[name] = predicted(args, model, path)
    if not args.no_errors:
        errors = ExpertErrors(model, texts.test).of(outputs)
        for name in outputs:
            if not name.endswith("nearest"):
                nearest = errors["W8A16, nearest" if name.startswith("W8A16") else "W4A16, nearest"]
                rows[name]["test_ratios"] = [error / rtn for error, rtn in zip(errors[name], nearest)]
    return rows


class ExpertErrors:
    """Outputs of a model's experts for what they are sent on a text, from transformers and the files."""

    def __init__(self, model, tokens):
        import torch
        import transformers
        self.torch = torch
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.routed = {}  # layer -> [(inputs, experts, weights)] of the windows
        for name, module in network.named_modules():
            if name.endswith(".mlp.experts"):
                module.register_forward_pre_hook(self.keeper(int(name.split(".layers.")[1].split(".")[0])))
        with torch.no_grad():
            for first in range(0, len(tokens), CONTEXT):
                network(torch.tensor([tokens[first:first + CONTEXT]]))
        self.routed = {layer: [torch.cat(part) for part in zip(*parts)] for layer, parts in self.routed.items()}
        self.original = Experts(torch, model)

    def keeper(self, layer):
        def keep(_, inputs):
            x, experts, weights = inputs
            self.routed.setdefault(layer, []).append((x.reshape(-1, x.shape[-1]), experts, weights.float()))
        return keep

    def of(self, folders):
        """name -> of every layer with experts, the sum of squared weighted differences."""
        rounded = {name: Experts(self.torch, folder) for name, folder in folders.items()}
        sums = {name: [0.0] * len(self.routed) for name in folders}
        with self.torch.no_grad():
            for number, (layer, (x, experts, weights)) in enumerate(sorted(self.routed.items())):
                for expert in range(int(experts.max()) + 1):
                    row, slot = self.torch.where(experts == expert)
                    sent, share = x[row], weights[row, slot][:, None]
                    exact = self.original.output(layer, expert, sent)
                    for name, other in rounded.items():
                        moved = (other.output(layer, expert, sent) - exact) * share
                        sums[name][number] += float(moved.double().square().sum())
        return sums


class Experts:
    """The matrices of a folder's experts: bf16, or codes with scales (compressed-tensors, pack-quantized)."""

    def __init__(self, torch, folder):
        from safetensors import safe_open
        self.torch, self.tensors = torch, {}
        for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.tensors.update({name: file.get_tensor(name) for name in file.keys() if ".mlp.experts." in name})

    def matrix(self, name):
        if name + ".weight" in self.tensors:
            return self.tensors[name + ".weight"].float()
        codes, scales = self.tensors[name + ".weight_packed"], self.tensors[name + ".weight_scale"].float()
        rows, columns = (int(size) for size in self.tensors[name + ".weight_shape"])
        bits = 32 * codes.shape[1] // columns
        shifts = self.torch.arange(0, 32, bits, dtype=self.torch.int32)
        values = (codes[:, :, None] >> shifts & (1 << bits) - 1).reshape(rows, -1)[:, :columns] - (1 << bits - 1)
        return values.float() * scales.repeat_interleave(columns // scales.shape[1], 1)

    def output(self, layer, expert, x):
        gate, up, down = (self.matrix(f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj")
                          for name in ("gate", "up", "down"))
        return (self.torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def bars(rows):
    """(what, figure, limit) of every bar; a figure may be as high as its limit."""
    for past in ("", "unseen_"):
        suffix = " past the seen tokens" if past else ""
        nearest, book, chats = (rows[f"W4A16, {name}"] for name in ("nearest", "the book", "chats"))
        yield "perplexity, book against nearest" + suffix, book[past + "perplexity"], nearest[past + "perplexity"]
        yield "KL, book against nearest" + suffix, book[past + "kl"], (1 - LEAST_KL_GAIN) * nearest[past + "kl"]
        yield ("perplexity, chats against nearest" + suffix, chats[past + "perplexity"],
               (1 + MOST_LOSS) * nearest[past + "perplexity"])
        exact = rows["bf16"][past + "perplexity"]
        for name in ("nearest", "the book", "chats"):
            moved = abs(rows[f"W8A16, {name}"][past + "perplexity"] / exact - 1)
            yield f"W8A16, {name}: perplexity from bf16" + suffix, moved, MOST_LOSS
    for ratios, which in (("held_out_ratios", "held-out"), ("test_ratios", "test")):
        for number, ratio in enumerate(rows["W4A16, the book"].get(ratios, [])):
            yield f"error on {which} tokens, {number + 1}. layer with experts", ratio, MOST_ERROR


def table(rows):
    def span(row, key):
        return f"{min(row[key]):.2f} to {max(row[key]):.2f}" if key in row else ""

    yield "| experts | perplexity | KL | perplexity, unseen | KL, unseen | error, held-out | error, test | s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        cells = [name, f"{row['perplexity']:.3f}", f"{row['kl']:.5f}", f"{row['unseen_perplexity']:.3f}",
                 f"{row['unseen_kl']:.5f}", span(row, "held_out_ratios"), span(row, "test_ratios"),
                 f"{row['seconds']:.1f}" if "seconds" in row else ""]
        yield "| " + " | ".join(cells) + " |"


def main():
    args = parsed_arguments()
    all_rows, missed = {}, 0
    for model in args.models:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="gptq-quality-"))
        try:
            rows = all_rows[pathlib.Path(model).name] = measured(args, model, folder)
        finally:
            shutil.rmtree(folder)
        print(f"\n{pathlib.Path(model).name}\n\n" + "\n".join(table(rows)) + "\n", flush=True)
        for what, figure, limit in bars(rows):
            missed += figure > limit
            print(f"{'MISSED' if figure > limit else 'kept'}: {what}: {figure:.6g}, at most {limit:.6g}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(all_rows, indent=1) + "\n")
    print(f"{missed} bars missed" if missed else "all bars kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
