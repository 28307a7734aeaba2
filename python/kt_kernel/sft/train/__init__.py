"""The Python side of `kt sft train`: a plan that the program has made of a recipe, carried out with stock transformers,
PEFT and TRL. The experts are kt_kernel.sft's; there is no arithmetic here but that of trainers.

    command      the command line, signals, exit codes
    plan         what the program hands over
    events       what it is told meanwhile
    rows         files of examples, as messages
    encode       messages as tokens and targets; packing; batches
    targets      which modules get LoRA
    driver       model, rows and trainer brought together
    trainer      transformers' trainer, with checkpoints that are whole and steps that are finite
    preferences  TRL's trainers, the same way
    watch        how long experts compute, tokens, memory
    files        files that appear whole; logs, results, pictures
"""
