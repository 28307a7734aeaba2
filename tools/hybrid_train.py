#!/usr/bin/env python3
"""Training with attention on a GPU and experts on the CPU gives the losses of training on the CPU alone, checkpointed
and not: two small random models, a few steps of AdamW on LoRA of attention and experts, in bf16.

    PYTHONPATH=build/python python3 tools/hybrid_train.py
"""
import argparse
import copy
import sys
import types

import torch

import train_speed

STEPS = 6
BOUND = 2e-2  # of a loss: bf16 rounds at 4e-3, in other orders on either side


def losses(model, device, batches, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    torch.manual_seed(3)
    model = train_speed.put_lora(model, model.sizes, rank=4).train()
    model.to(device)
    # the draws that A begins with are the same on both sides
    generator = torch.Generator().manual_seed(4)
    for p in model.parameters():
        if p.requires_grad:
            with torch.no_grad():
                p.copy_((0.05 * torch.randn(p.shape, generator=generator)).to(p.dtype))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, foreach=False)
    out = []
    for batch in batches:
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        out.append(float(loss.detach()))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    device = torch.device(parser.parse_args().device)
    wrong = 0
    for shape in train_speed.SHAPES:
        args = types.SimpleNamespace(dry=True, layers=0, tokens=256, threads=0)
        sizes = train_speed.sizes_of(args, shape)
        batches = [torch.randint(sizes["vocabulary"], (2, 128), generator=torch.Generator().manual_seed(9))] * STEPS
        for checkpointing in (False, True):
            found = []
            for where in (torch.device("cpu"), device):
                torch.manual_seed(1)
                model = train_speed.make_model(args, sizes, torch.device("cpu"))
                train_speed.put_experts(model, sizes, "bf16", args)
                model.sizes = copy.copy(sizes)
                found.append(losses(model, where, batches, checkpointing))
            apart = max(abs(a - b) / abs(a) for a, b in zip(*found))
            fine = apart <= BOUND and found[1][-1] < found[1][0]
            wrong += not fine
            print(f"{shape}, small, {'checkpointed' if checkpointing else 'eager'}: CPU "
                  f"{' '.join(f'{x:.4f}' for x in found[0])}; {device} {' '.join(f'{x:.4f}' for x in found[1])}; "
                  f"apart by {apart:.1e} at most (bound {BOUND:.0e}){'' if fine else ': WRONG'}", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
