#!/usr/bin/env python3
"""Compares two folders of weights tensor by tensor: `kt quant compare` under its established name and flags."""
import kt_program


def main():
    parser = kt_program.parser(__doc__)
    parser.add_argument("--path1", required=True, help="one folder or file")
    parser.add_argument("--path2", required=True, help="the other")
    parser.add_argument("--tolerance", type=float, help="largest difference that counts as equal")
    args = parser.parse_args()
    kt_program.run("quant", "compare", kt_program.path(args.path1), kt_program.path(args.path2),
                   *kt_program.given(("--tolerance", args.tolerance)))


if __name__ == "__main__":
    main()
