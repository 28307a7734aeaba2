#!/usr/bin/env python3
"""Writes an fp8 checkpoint as bf16: `kt quant dequant` under its established name and flags. Any fp8 model will do."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--input-fp8-hf-path", required=True, help="folder of the model")
    parser.add_argument("--output-bf16-hf-path", required=True, help="folder to write")
    parser.add_argument("--resume", action="store_true", help="go on with a conversion that was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    args = parser.parse_args()
    kt_program.run("quant", "dequant", kt_program.path(args.input_fp8_hf_path), "-o",
                   kt_program.path(args.output_bf16_hf_path),
                   *kt_program.given(("--resume", args.resume), ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
