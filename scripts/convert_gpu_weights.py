#!/usr/bin/env python3
"""Quantises the experts of a checkpoint for the GPU: `kt quant gpu` under its established name and flags."""
import kt_program


def arguments():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--model_id", required=True, help="folder of the model")
    parser.add_argument("--output_dir", required=True, help="folder to write")
    parser.add_argument("--quant_method", choices=["GPTQ", "RTN"], default="GPTQ", help="default: GPTQ")
    parser.add_argument("--quant_type", choices=["W4A16", "W8A16"], default="W8A16", help="default: W8A16")
    parser.add_argument("--num_calibration_samples", type=int, help="GPTQ (default: 512)")
    parser.add_argument("--max_sequence_length", type=int, help="GPTQ (default: 2048)")
    parser.add_argument("--dampening_frac", type=float, help="GPTQ (default: 0.1)")
    parser.add_argument("--dataset", help="GPTQ: calibration text")
    parser.add_argument("--dataset_split", help="GPTQ")
    parser.add_argument("--force_cpu", action="store_true", help="use no GPU")
    parser.add_argument("--ignore_patterns", nargs="*", help="modules to leave alone (default: kt's list)")
    parser.add_argument("--torch_dtype", help="ignored: the model's own type is kept")
    parser.add_argument("--trust_remote_code", action="store_true", help="accepted; nothing is executed")
    parser.add_argument("--random_seed", type=int, help="GPTQ (default: 42)")
    parser.add_argument("--max_gpu_memory", help="such as 40GiB")
    parser.add_argument("--max_cpu_memory", help="such as 100GiB")
    return parser.parse_args()


def main():
    args = arguments()
    if args.torch_dtype not in (None, "auto"):
        kt_program.note(f"--torch_dtype {args.torch_dtype} is ignored: what is not quantised keeps the model's own type")
    kt_program.run(
        "quant", "gpu", kt_program.path(args.model_id), "-o", kt_program.path(args.output_dir),
        *kt_program.given(
            ("--method", args.quant_method),
            ("--type", args.quant_type),
            ("--num-calibration-samples", args.num_calibration_samples),
            ("--max-sequence-length", args.max_sequence_length),
            ("--dampening-frac", args.dampening_frac),
            ("--dataset", args.dataset),
            ("--dataset-split", args.dataset_split),
            ("--force-cpu", args.force_cpu),
            ("--ignore", args.ignore_patterns),
            ("--trust-remote-code", args.trust_remote_code),
            ("--seed", args.random_seed),
            ("--max-gpu-memory", args.max_gpu_memory),
            ("--max-cpu-memory", args.max_cpu_memory)))


if __name__ == "__main__":
    main()
