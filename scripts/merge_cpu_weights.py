#!/usr/bin/env python3
"""Merges a folder of `_layer_*` (written with --no-merge-safetensor) into safetensors files: `kt quant merge` under its
established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--input-path", "-i", required=True, help="folder that holds _layer_*")
    parser.add_argument("--output", "-o", required=True, help="folder to write")
    parser.add_argument("--original-path", "-r", help="the original model: config, tokenizer and the other tensors")
    parser.add_argument("--max-tensors", type=int, help="tensors in one file (default: a layer's)")
    parser.add_argument("--resume", action="store_true", help="go on with one that was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    args = parser.parse_args()
    kt_program.run(
        "quant", "merge", "-i", kt_program.path(args.input_path), "-o", kt_program.path(args.output),
        *kt_program.given(("-r", args.original_path and kt_program.path(args.original_path)),
                          ("--max-tensors", args.max_tensors),
                          ("--resume", args.resume),
                          ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
