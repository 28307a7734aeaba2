"""Layers of random experts and what tokens are routed to them."""

import torch


def random_layer(experts=32, top_k=4, hidden=1024, inter=512, method="BF16", max_tokens=64, layer=0, deferred=0,
                 threads=0):
    from kt_kernel import KTMoEWrapper

    generator = torch.Generator().manual_seed(1 + layer)
    made = KTMoEWrapper(layer, experts, top_k, hidden, inter, None, threads, 0, None, max_tokens,
                        max_deferred_experts_per_token=deferred, method=method)

    def values(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    made.load_weights_from_tensors(values(experts, inter, hidden), values(experts, inter, hidden),
                                   values(experts, hidden, inter), torch.arange(experts))
    return made


def routed(gpu, tokens, experts, top_k, hidden, seed):
    """hidden states, ids and weights on the device; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    return [tensor.to(gpu.device) for tensor in (x, ids, weights)]
