#!/usr/bin/env python3
"""Quantises the experts of a checkpoint for the GPU: `kt quant gpu` under its established name and flags."""
import hashlib
import json
import os
import pathlib
import sys

import kt_program

COLUMNS = ("messages", "conversations", "text")  # of datasets that kt reads, one of them
ASKED = ("instruction", "input", "output")  # or these together, the second where there is one
UNSUPPORTED = 4  # exit code, as kt's
DEFAULT = "HuggingFaceH4/ultrachat_200k", "train_sft"


def arguments():
    parser = kt_program.parser(__doc__)

    def add(name, **facts):
        parser.add_argument(*dict.fromkeys((name, name.replace("_", "-"))), **facts)

    add("--model_id", required=True, help="folder of the model")
    add("--output_dir", required=True, help="folder to write")
    add("--quant_method", choices=["GPTQ", "RTN"], default="GPTQ", help="default: GPTQ")
    add("--quant_type", choices=["W4A16", "W8A16"], default="W8A16", help="default: W8A16")
    add("--group_size", type=int, help="weights that share a scale; -1: one for each output (default: 128)")
    add("--targets", choices=["experts", "all"], help="experts (default), or all Linears")
    add("--num_calibration_samples", type=int, help="GPTQ (default: 512)")
    add("--max_sequence_length", type=int, help="GPTQ (default: 2048)")
    add("--dampening_frac", type=float, help="GPTQ (default: 0.5)")
    add("--dataset", help="GPTQ: .jsonl, .txt or .parquet, or a name in the hub cache")
    add("--dataset_split", help="GPTQ")
    add("--perplexity", help="GPTQ: a text to measure afterwards: original, RTN and GPTQ")
    add("--perplexity_tokens", type=int, help="of that text, to predict at most (default: 24576)")
    add("--force_cpu", action="store_true", help="use no GPU")
    add("--ignore_patterns", nargs="*", help="modules to leave alone (default: kt's list)")
    add("--torch_dtype", help="ignored: the model's own type is kept")
    add("--trust_remote_code", action="store_true", help="accepted; nothing is executed")
    add("--random_seed", type=int, help="GPTQ (default: 42)")
    add("--max_gpu_memory", help="such as 40GiB")
    add("--max_cpu_memory", help="such as 100GiB")
    add("--download", action="store_true", help="download a model or dataset of the hub that is not on this disk")
    add("--resume", action="store_true", help="go on with a conversion that was interrupted")
    add("--overwrite", action="store_true", help="replace an output that is there")
    return parser.parse_args()


def parquet_files(dataset, split, download):
    """The .parquet files a dataset consists of, [] where kt can read it or says itself what is wrong."""
    said = kt_program.ask("quant", "dataset", kt_program.path(dataset),
                          *kt_program.given(("--split", split), ("--download", download)))
    return [pathlib.Path(line) for line in said or [] if line.endswith(".parquet")]


def as_jsonl(files, dataset, split):
    """The path of the same rows as .jsonl, kept in the user's cache; ends with one line where pyarrow is
    not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        kt_program.fail(f"{dataset}: .parquet needs pyarrow, which is not installed: pip install pyarrow, or pass a "
                        ".jsonl or .txt file")
        sys.exit(UNSUPPORTED)
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kt" / "datasets"
    cache.mkdir(parents=True, exist_ok=True)
    said = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    name = "-".join(part for part in (pathlib.Path(dataset).name, split) if part).replace("/", "-")
    out = cache / f"{name}-{digest}.jsonl"
    if out.exists():
        return out
    part = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as lines:
            for file in files:
                write_rows(pyarrow.parquet, file, lines)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def write_rows(parquet, file, lines):
    """The rows of the first column that kt reads; ends with one line where the file has none or is damaged."""
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        known = [column for column in COLUMNS if column in names][:1]
        if not known and "instruction" in names and "output" in names:
            known = [column for column in ASKED if column in names]
        if not known:
            sys.exit(kt_program.fail(f"{file}: columns {', '.join(table.schema_arrow.names)}; "
                                     f"expected one of {', '.join(COLUMNS)}, or {' and '.join(ASKED[::2])}"))
        for batch in table.iter_batches(batch_size=1024, columns=known):
            for row in batch.to_pylist():
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    except Exception as error:  # pyarrow has many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        sys.exit(kt_program.fail(f"{file}: cannot be converted: {reason}"))


def calibration_text(args):
    """What kt is told of the dataset: (path or name, split), None for its own defaults."""
    if args.quant_method != "GPTQ":
        return args.dataset, args.dataset_split
    dataset = args.dataset or DEFAULT[0]
    split = args.dataset_split or (DEFAULT[1] if dataset == DEFAULT[0] else None)
    files = parquet_files(dataset, split, args.download)
    return (str(as_jsonl(files, dataset, split)), None) if files else (args.dataset, args.dataset_split)


def main():
    args = arguments()
    dataset, split = calibration_text(args)
    if args.torch_dtype not in (None, "auto"):
        kt_program.note(f"--torch_dtype {args.torch_dtype} is ignored: what is not quantised keeps the model's own "
                        "type")
    kt_program.run(
        "quant", "gpu", kt_program.path(args.model_id), "-o", kt_program.path(args.output_dir),
        *kt_program.given(
            ("--method", args.quant_method),
            ("--type", args.quant_type),
            ("--group-size", args.group_size),
            ("--targets", args.targets),
            ("--num-calibration-samples", args.num_calibration_samples),
            ("--max-sequence-length", args.max_sequence_length),
            ("--dampening-frac", args.dampening_frac),
            ("--dataset", dataset),
            ("--dataset-split", split),
            ("--perplexity", kt_program.path(args.perplexity) if args.perplexity else None),
            ("--perplexity-tokens", args.perplexity_tokens),
            ("--force-cpu", args.force_cpu),
            ("--ignore", args.ignore_patterns),
            ("--trust-remote-code", args.trust_remote_code),
            ("--seed", args.random_seed),
            ("--max-gpu-memory", args.max_gpu_memory),
            ("--max-cpu-memory", args.max_cpu_memory),
            ("--download", args.download),
            ("--resume", args.resume),
            ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
