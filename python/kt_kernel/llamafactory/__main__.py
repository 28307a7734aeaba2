"""python -m kt_kernel.llamafactory train|chat|api|export FILE.yaml [key=value ...]"""

import sys

from kt_kernel.llamafactory.command import main

sys.exit(main(sys.argv[1:]))
