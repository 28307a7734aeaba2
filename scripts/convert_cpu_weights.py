#!/usr/bin/env python3
"""Quantises the experts of a checkpoint for the CPU: `kt quant` under its established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--input-path", "-i", required=True, help="folder of the model")
    parser.add_argument("--input-type", choices=["fp8", "fp16", "bf16"],
                        help="type of its experts (default: as stored)")
    parser.add_argument("--output", "-o", required=True, help="folder to write")
    parser.add_argument("--quant-method", choices=["int4", "int8", "moe_int8"], default="int4", help="default: int4")
    parser.add_argument("--cpuinfer-threads", type=int, help="default: all cores")
    parser.add_argument("--threadpool-count", type=int, default=2, help="NUMA parts of every expert (default: 2)")
    parser.add_argument("--no-merge-safetensor", action="store_true", help="write _layer_*/_numa_*/*.kt")
    parser.add_argument("--resume", action="store_true", help="go on with a conversion that was interrupted")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    parser.add_argument("--resume-layer", type=int, default=0, help="leave the layers below it alone (default: 0)")
    parser.add_argument("--save-backward-weights", action="store_true", help="also the transposed copies for training")
    parser.add_argument("--gpu", action="store_true", help="ignored: nothing here needs a GPU")
    args = parser.parse_args()
    if args.gpu:
        kt_program.note("--gpu is ignored: the conversion runs on the CPU alone")
    kt_program.run(
        "quant", kt_program.path(args.input_path), "-o", kt_program.path(args.output),
        *kt_program.given(
            ("--method", args.quant_method),
            ("--input-type", args.input_type),
            ("--cpu-threads", args.cpuinfer_threads),
            ("--numa-nodes", args.threadpool_count),
            ("--no-merge", args.no_merge_safetensor),
            ("--resume-layer", args.resume_layer or None),
            ("--backward", args.save_backward_weights),
            ("--resume", args.resume),
            ("--overwrite", args.overwrite)))


if __name__ == "__main__":
    main()
