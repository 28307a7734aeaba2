#!/usr/bin/env python3
"""Shows what this CPU can do and whether the kernels run on it: `kt doctor --cpu` under its established name."""
import kt_program


def main():
    kt_program.parser(__doc__).parse_args()
    kt_program.run("doctor", "--cpu")


if __name__ == "__main__":
    main()
