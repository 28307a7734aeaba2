#!/usr/bin/env python3
"""Writes an fp8 or int4 checkpoint as bf16: `kt quant dequant` under its established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--model-dir", required=True, help="folder of the model")
    parser.add_argument("--output-dir", required=True, help="folder to write")
    parser.add_argument("--files", nargs="+", help="only these files of the model (default: all)")
    parser.add_argument("--config-path", help="config.json to read (default: the model's)")
    parser.add_argument("--resume", action="store_true", help="go on with a conversion that was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    args = parser.parse_args()
    kt_program.run(
        "quant", "dequant", kt_program.path(args.model_dir), "-o", kt_program.path(args.output_dir),
        *kt_program.given(("--files", args.files and [kt_program.path(file) for file in args.files]),
                          ("--config-path", args.config_path and kt_program.path(args.config_path)),
                          ("--resume", args.resume),
                          ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
