#!/usr/bin/env python3
"""Writes an adapter of this base model with a pair of matrices for each expert: `kt sft export
--layout per-expert` under its established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)

    def add(name, **facts):
        parser.add_argument(name, name.replace("_", "-"), **facts)

    add("--base_path", required=True, help="the base model: its folder or name")
    add("--lora_path", required=True, help="the adapter's folder")
    add("--output_path", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that holds something")
    args = parser.parse_args()
    kt_program.run(
        "sft", "export", kt_program.path(args.lora_path), "-o", kt_program.path(args.output_path),
        "--layout", "per-expert",
        *kt_program.given(("--base-model-name", args.base_path), ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
