#!/usr/bin/env python3
"""Writes an adapter with a pair of matrices for each expert, as SGLang and vLLM read it: `kt sft export
--layout per-expert` under its established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("input_dir",
                        help="the adapter's folder, with fused_expert_lora.safetensors or as PEFT saved it")
    parser.add_argument("output_dir", help="folder to write")
    parser.add_argument("--base-model-name-or-path", required=True,
                        help="what adapter_config.json calls the base model")
    parser.add_argument("--lora-alpha", type=float, help="where adapter_config.json is missing or says none")
    parser.add_argument("--expert-output-dir", help="also the routed experts alone, in this folder")
    parser.add_argument("--nonexpert-output-dir", help="also everything but the routed experts, in this folder")
    parser.add_argument("--overwrite", action="store_true", help="write into folders that hold something")
    args = parser.parse_args()
    kt_program.run(
        "sft", "export", kt_program.path(args.input_dir), "-o", kt_program.path(args.output_dir),
        "--layout", "per-expert",
        *kt_program.given(("--base-model-name", args.base_model_name_or_path),
                          ("--lora-alpha", args.lora_alpha),
                          ("--expert-output", args.expert_output_dir and kt_program.path(args.expert_output_dir)),
                          ("--nonexpert-output",
                           args.nonexpert_output_dir and kt_program.path(args.nonexpert_output_dir)),
                          ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
