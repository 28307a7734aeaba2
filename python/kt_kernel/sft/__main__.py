"""python -m kt_kernel.sft --plan FILE: trains what `kt sft train` has checked and planned."""

import sys

from kt_kernel.sft.train.command import main

sys.exit(main(sys.argv[1:]))
