"""One layer of experts on the CPU, from converted weights, checked against plain torch.

    pip install 'kt-kernel[torch]'             # or ./install.sh in KT's tree; also safetensors, for the check
    kt quant demo -o demo-int8 --method int8
    python layer.py demo-int8 PATH/TO/demo/tiny-deepseekv3
"""
import json
import pathlib
import sys

import torch
from safetensors import safe_open

from kt_kernel import KTMoEWrapper

LAYER, TOKENS = 1, 5


def published(folder, name):
    """A tensor of the model as it was published."""
    file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(folder / file, "pt") as tensors:
        return tensors.get_tensor(name).float()


def expected(folder, x, ids, weights):
    """What the layer gives, as a loop over tokens and their experts."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token]):
            gate, up, down = (published(folder, f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj.weight")
                              for part in ("gate", "up", "down"))
            out[token] += weight * ((torch.nn.functional.silu(x[token] @ gate.T) * (x[token] @ up.T)) @ down.T)
    return out


def main(weights_folder, model_folder):
    config = json.loads((model_folder / "config.json").read_text())
    experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    layer = KTMoEWrapper(layer_idx=LAYER, num_experts=experts, num_experts_per_tok=top_k,
                         hidden_size=config["hidden_size"], moe_intermediate_size=config["moe_intermediate_size"],
                         num_gpu_experts=0, cpuinfer_threads=2, threadpool_count=1, weight_path=str(weights_folder),
                         chunked_prefill_size=512, method="AMXINT8")
    layer.load_weights()

    torch.manual_seed(1)
    x = torch.randn(TOKENS, config["hidden_size"])
    scores = torch.rand(TOKENS, experts).topk(top_k)
    ids, weights = scores.indices, scores.values.float()
    out = layer.forward(x, ids, weights, None)  # None: no CUDA stream
    wanted = expected(model_folder, x, ids, weights)
    likeness = torch.nn.functional.cosine_similarity(out.flatten(), wanted.flatten(), 0)
    print(f"{TOKENS} tokens, {experts} experts in int8: cosine {likeness:.5f} from plain torch in f32")
    return 0 if likeness > 0.999 else 1


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))
