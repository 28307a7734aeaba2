"""LLaMA-Factory as it is installed, with experts on KT.

    python -m kt_kernel.llamafactory train|chat|api|export FILE.yaml

It reads the recipe, takes what is KT's out of it, puts KT's experts where LLaMA-Factory loads its models, and calls
LLaMA-Factory's own main(). Nothing of it is changed on disk.

    command   the command line, exit codes
    packages  LLaMA-Factory and what it needs: versions, and what is missing
    recipe    KT's keys of a recipe, and what cannot be with experts on KT
    swaps     the four names of LLaMA-Factory that are replaced in this process
"""
