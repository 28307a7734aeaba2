"""The 46 published rule files for placement, written again from one table: what their patterns, classes, operators and
borders are, not their text. FILES: name -> (family of tests/tiny_models.py, or None where none is stock, layers, number
of rules, rules)."""

LAYERS = r"^model\.layers\."
MARLIN, TORCH, SERVED = "KLinearMarlin", "KLinearTorch", "VLinearMarlin"
LINEAR = "torch.nn.Linear"


def rule(name=None, cls=None, op="default", device=None, recursive=True, **kwargs):
    match = {key: value for key, value in (("name", name), ("class", cls)) if value is not None}
    if device:
        kwargs = dict(generate_device=device, prefill_device="cuda" if device == "cpu" else device, **kwargs)
    out = {"match": match, "replace": dict({"class": op}, **({"kwargs": kwargs} if kwargs else {}))}
    return out if recursive else dict(out, recursive=False)


# What the modules of a family are called, and what replaces them.
V2 = dict(rope=("DeepseekV2YarnRotaryEmbedding", "YarnRotaryEmbedding"),
          moe=("DeepseekV2MoE", "KDeepseekV2MoE"), gate=None,
          attention="KDeepseekV2Attention", model="KDeepseekV2Model", module="ktransformers.models.modeling_deepseek.")
V3 = dict(rope=("DeepseekV3RotaryEmbedding", "YarnRotaryEmbeddingV3"), moe=("DeepseekV3MoE", "KDeepseekV3MoE"),
          gate=("MoEGate", "KMoEGate"), attention="KDeepseekV2Attention", model="KDeepseekV2Model",
          norm=("DeepseekV3RMSNorm", "RMSNorm"),
          mlp=("DeepseekV3MLP", "kDeepseekV3MLP"), module="ktransformers.models.modeling_deepseek_v3.")
SERVE = dict(V3, moe=("DeepseekV3MoE", "KDeepseekV3MoEV2"), attention="flashinfer_attn")
QWEN2 = dict(rope=("Qwen2MoeRotaryEmbedding", "RotaryEmbedding"),
             moe=("Qwen2MoeSparseMoeBlock", "KQwen2MoeSparseMoeBlockV2"), gate=None,
             attention="KQwen2MoeAttention", model="KQwen2MoeModel", norm=("Qwen2MoeRMSNorm", "KQwen2MoeRMSNorm"),
             mlp=("Qwen2MoeMLP", "KQwen2MoeMLP"), module="ktransformers.models.modeling_qwen2_moe.")
QWEN3 = dict(QWEN2, moe=("Qwen3MoeSparseMoeBlock", "KQwen3MoeSparseMoeBlockV2"), attention="KQwen3MoeAttention",
             norm=("Qwen3MoeRMSNorm", "KQwen3MoeRMSNorm"), mlp=("Qwen3MoeMLP", "KQwen2MoeMLP"),
             module="transformers.models.qwen3_moe.")
NEXT = dict(QWEN3, rope=("Qwen3NextRotaryEmbedding", "KQwen3MoeRotaryEmbedding"),
            moe=("Qwen3NextSparseMoeBlock", "KQwen3NextSparseMoeBlockV2"),
            attention=None, model=None, norm=("Qwen3NextRMSNorm", "KQwen3NextRMSNorm"),
            mlp=("Qwen3NextMLP", "KQwen2MoeMLP"))
GLM = dict(rope=("Glm4MoeRotaryEmbedding", "KGlm4MoeRotaryEmbedding"), moe=("Glm4MoeMoE", "KGlm4MoeMoE"), gate=None,
           attention="KGlm4MoeAttention",
           model=None, norm=("Glm4MoeRMSNorm", "KGlm4MoeRMSNorm"), mlp=("Glm4MoeMLP", "KGlm4MoeMLP"),
           module="ktransformers.models.modeling_glm4_moe.")
SMALL = dict(rope=("SmallthinkerRotaryEmbedding", "KSmallthinkerRotaryEmbedding"),
             moe=("SmallthinkerMoeBlock", "KSmallthinkerMoeBlock"), gate=None,
             attention="KSmallthinkerAttention", model=None, norm=("SmallthinkerRMSNorm", "KSmallthinkerRMSNorm"),
             mlp=("SmallthinkerDenseMlpBlock", "KSmallthinkerDenseMlpBlock"),
             module="ktransformers.models.modeling_smallthinker.")
NOT_KV_B, NOT_GATE = r"(?!.*self_attn\.kv_b_proj).*$", r"(?!.*mlp\.shared_expert_gate).*$"


def one(family, linear=MARLIN, head=MARLIN, linears=NOT_KV_B, lm="^lm_head$", experts="KTransformersExperts",
        expert_op="KExpertsCPU",
        block="mlp", device="cuda",
        parts=("rope", "head", "linears", "moe", "gate", "experts", "attention", "model", "embedding"), **expert):
    """All but experts and embedding on one device."""
    def of(what, **kwargs):
        return rule(None, family["module"] + family[what][0], "ktransformers.operators." + family[what][1],
                    device, **kwargs)
    wrapper = "ktransformers.operators.linear.KTransformersLinear" + ("W8A8A2" if "W8A8" in linear else "")
    attention, model = family["attention"], family["model"]
    made = {
        "rope": lambda: of("rope"), "norm": lambda: of("norm"), "mlp": lambda: of("mlp"), "gate": lambda: of("gate"),
        "head": lambda: rule(lm, LINEAR, wrapper, "cpu" if head == "KLinearCPUInfer" else device, generate_op=head,
                             prefill_op=TORCH),
        "linears": lambda: rule(LAYERS + linears, LINEAR, wrapper, device, generate_op=linear, prefill_op=TORCH),
        "moe": lambda: dict(of("moe"),
                            match={"name": LAYERS + rf".*\.{block}$", "class": family["module"] + family["moe"][0]}),
        "experts": lambda: rule(LAYERS + rf".*\.{block}\.experts$", None, "ktransformers.operators.experts." + experts,
                                "cpu",
                                recursive=False, generate_op=expert_op, prefill_op="KExpertsTorch",
                                out_device=device, **expert),
        "attention": lambda: rule(LAYERS + r".*\.self_attn$", None, "ktransformers.operators.attention." + attention,
                                  device),
        "model": lambda: rule("^model$", None, "ktransformers.operators.models." + model,
                              per_layer_prefill_intput_threshold=0),
        "embedding": lambda: rule("^model.embed_tokens", None, "default", "cpu"),
        "rest": lambda: rule(LAYERS + r".*\.", None, "default", device),
    }
    return [made[part]() for part in parts if not (part == "gate" and not family["gate"])]


def split(family, borders, devices, linear=MARLIN, linears=r"(?!self_attn\.kv_b_proj).*$", head_on=-1, head=MARLIN,
          first=(), expert_op="KExpertsCPU", gates=True, **expert):
    """Ranges of layers on several devices; borders: the ranges as patterns."""
    out = [rule("^model.embed_tokens", None, "default", "cpu")]
    ranges = [(LAYERS + "(" + border + ")", device) for border, device in zip(borders, devices)]
    def each(make):
        out.extend(make(at, device) for at, device in ranges)
    each(lambda at, device: rule(at + r"\.", family["module"] + family["rope"][0], "a." + family["rope"][1], device))
    each(lambda at, device: rule(at + r"\." + linears, LINEAR, "a.KTransformersLinear", device, prefill_op=TORCH,
                                 generate_op="KLinearCPUInfer" if device == "cpu" else linear))
    each(lambda at, device: rule(at + r"\.mlp$", family["module"] + family["moe"][0], "a." + family["moe"][1], device))
    if family["gate"] and gates:
        each(lambda at, device: rule(at + r"\.mlp\.gate$", family["module"] + "MoEGate", "a.KMoEGate", device))
    for border, device in first:
        out.append(rule(LAYERS + f"({border})" + r"\.mlp\.experts$", None, "a.KTransformersExperts", device,
                        recursive=False, generate_op="KExpertsMarlin", prefill_op="KExpertsTorch"))
    each(lambda at, device: rule(at + r"\.mlp\.experts$", None, "a.KTransformersExperts", "cpu", recursive=False,
                                 generate_op=expert_op, prefill_op="KExpertsTorch", out_device=device, **expert))
    each(lambda at, device: rule(at + r"\.self_attn$", None, "a." + family["attention"], device))
    moves = {30 if len(ranges) == 2 else 15 * i: device for i, (_, device) in enumerate(ranges) if i}
    out.append(rule("^model$", None, "a." + family["model"], per_layer_prefill_intput_threshold=0, transfer_map=moves))
    out.extend(rule(at + r"\.", None, "default", device)
               for at, device in (ranges if len(ranges) == 8 else ranges[:-1]))
    wrapper = dict(op="a.KTransformersLinear", generate_op=head, prefill_op=TORCH) if head else {}
    out.append(rule("^lm_head", LINEAR, device=devices[head_on], **wrapper))
    out.append(rule(f"({ranges[-1][0]}\\.)|(model.norm)", None, "default", devices[-1]))
    return out


def qwen2_split():
    out = []
    for at, device in ((r"([012])", "cuda:0"), (r"([12][0-9]|[3-9])", "cuda:1")):
        out += [rule(LAYERS + at + r"\.", QWEN2["module"] + "Qwen2MoeRotaryEmbedding", "a.RotaryEmbedding", device),
                rule(LAYERS + at + "$", LINEAR, "a.KTransformersLinear", device, generate_op=MARLIN),
                rule(LAYERS + at + r"\.mlp$", QWEN2["module"] + "Qwen2MoeSparseMoeBlock", "a.KQwen2MoeSparseMoeBlock"),
                rule(LAYERS + at + r"\.mlp\.experts$", None, "a.KTransformersExperts", "cpu", recursive=False,
                     generate_op="KExpertsCPU")]
    return out + [rule("^model.embed_tokens", None, "default", "cpu"),
                  rule("^lm_head", LINEAR, "a.KTransformersLinear", "cuda:1", generate_op=MARLIN),
                  rule("(^model.norm)", None, "default", "cuda:1"),
                  rule("^model$", None, "a.KQwen2MoeModel", per_layer_prefill_intput_threshold=0,
                       transfer_map={3: "cuda:1"}),
                  rule(LAYERS + r"([012])\.", None, "default", "cuda:0"),
                  rule(LAYERS + r"([12][0-9]|[3-9])\.", None, "default", "cuda:1")]


V2_PARTS = ("rope", "linears", "head", "moe", "experts", "attention", "model", "embedding")
FP8_PARTS = ("rope", "linears", "moe", "gate", "experts", "attention", "model", "embedding")
SERVE_PARTS = FP8_PARTS + ("norm", "mlp", "head")
PLAIN = ("rope", "head", "linears", "moe", "experts", "attention", "model", "embedding")
QWEN_SERVE = PLAIN + ("norm", "mlp")
LITE, HALF, HALF3 = ["0|[1-9]", "[12][0-9]"], ["0|[1-9]|[12][0-9]", "[345][0-9]"], ["0|[1-9]|[12][0-9]", "[3456][0-9]"]
FOUR, FOUR3 = (["0|[1-9]|1[0-4]", "1[5-9]|2[0-9]", "3[0-9]|4[0-4]", last]
               for last in ("4[5-9]|5[0-9]", "4[5-9]|5[0-9]|60"))
EIGHT = ["[0-7]", "8|9|1[0-5]", "1[6-9]|2[0-3]", "2[4-9]|3[0-1]", "3[2-9]", "4[0-7]", "4[8-9]|5[0-5]", "5[6-9]|60"]
TWO, GPUS = ["cuda:0", "cuda:1"], [f"cuda:{i}" for i in range(8)]
AMX = dict(expert_op="KSFTExpertsCPU", backend="AMXInt8")
ASCEND = dict(linear="KLinearTorchW8A8A2", head="KLinearTorchW8A8A2", device="npu")
XPU = dict(linear="KLinearIPEXLLM", head="KLinearIPEXLLM", device="xpu", linears=".*")


def v2(**more):
    return one(V2, lm="^lm_head", parts=V2_PARTS, **more)


def ascend(attention):
    out = one(dict(V3, attention=attention), experts="KTransformersExpertsW8A8", expert_op="KExpertsCPUW8A8", **ASCEND)
    mlp = V3["module"] + "DeepseekV3MLP"
    out[4:4] = [rule(LAYERS + r"([0-2])\.mlp$", mlp, "a.KDeepseekV3MLPW8A8A2V1", "npu"),
                rule(LAYERS + r".*\.mlp\.shared_experts$", mlp, "a.KDeepseekV3MLPW8A8A2V2", "npu")]
    out.insert(8,
               rule(LAYERS + r".*\.mlp\.experts$", "ktransformers.operators.experts.KExpertsCPU", "a.KExpertsCPUW8A8"))
    return out + [rule("^model..*norm", None, "a.KDeepseekV3RMSNormW8A8", "npu")]


def mixtral():
    family = dict(QWEN2, rope=("MixtralRotaryEmbedding", "RotaryEmbedding"),
                  moe=("MixtralSparseMoeBlock", "KMistralSparseMoEBlock"))
    return one(family, lm="^lm_head", linears=".*$", block="block_sparse_moe",
               parts=("rope", "linears", "head", "moe", "experts", "embedding", "rest"))


def small():
    out = one(SMALL, head=SERVED, linears=r"(?!.*feed_forward\.shared_expert_gate).*$", block="block_sparse_moe",
              experts="KSmallthinkerExperts",
              parts=("rope", "head", "linears", "moe", "experts", "attention", "embedding", "norm", "mlp"))
    return out


def qwen3_next():
    out = one(NEXT, head=SERVED, linears=NOT_GATE, experts="KTransformersExpertsV2",
              parts=("rope", "head", "linears", "moe", "experts", "embedding", "norm", "mlp"))
    return out[:5] + [rule(None, "m.Qwen3NextGatedDeltaNet", "a.KQwen3NextGatedDeltaNet", "cuda"),
                      rule(None, "m.Qwen3NextAttention", "a.KQwen3NextAttention", "cuda")] + out[5:]


def qwen3_ascend():
    linears = [rule(LAYERS + at, LINEAR, "a.KTransformersLinearW8A8A2", "npu", generate_op="KLinearTorchW8A8A2")
               for at in
               (r"(?!.*mlp\.shared_expert_gate)(?!.*mlp\.gate)(?!.*mlp\.experts).*$",
                r"(?!.*mlp\.gate)(?!.*self_attn\.kv_b_proj)(?!.*mlp\.experts).*$")]
    out = one(dict(QWEN3, attention="KQwen3MoeAttentionW8A8A2Serve"), **ASCEND,
              parts=("rope", "head", "moe", "attention", "model", "embedding", "norm"))
    return out[:2] + linears + out[2:]


def qwen3_xpu():
    out = one(dict(QWEN3, attention="KQwen3MoeAttentionIPEXLLM"), experts="KTransformersExpertsV2", parts=QWEN_SERVE,
              **dict(XPU, linears=r"(?!.*mlp\.gate).*$"))
    return [rule("rotary_emb$", None, "a.KQwen3MoeRotaryEmbedding", "xpu")] + out[1:]


V2S, V3S, Q2, Q3 = ("deepseek_v2", 60), ("deepseek_v3", 61), ("qwen2_moe", 28), ("qwen3_moe", 48)
LITES, MOON = ("deepseek_v2", 27), ("deepseek_v3", 27)
LITE_LINEARS = dict(linears=r"(?!self_attn).*$")
llama = dict(module="ktransformers.models.modeling_llama.")
FILES = {name: (*model, count, rules) for name, model, count, rules in [
    ("V2-Chat", V2S, 8, v2()), ("V2-Lite-Chat", LITES, 8, v2()),
    ("V2-Chat-sft-amx", V2S, 8, v2(linear=TORCH, head=TORCH, **AMX)),
    ("V2-Lite-Chat-sft-amx", LITES, 8, v2(linear=TORCH, head=TORCH, **AMX)),
    ("V2-Lite-Chat-sft", LITES, 8, v2(linear=TORCH, head=TORCH, expert_op="KSFTExpertsCPU")),
    ("V2-Lite-Chat-use-adapter", LITES, 8, v2(linear=TORCH, head=TORCH)),
    ("V2-Chat-multi-gpu", V2S, 15, split(V2, HALF, TWO)), ("V2-Chat-multi-gpu-4", V2S, 27, split(V2, FOUR, GPUS[:4])),
    ("V2-Lite-Chat-multi-gpu", LITES, 15, split(V2, LITE, TWO, **LITE_LINEARS)),
    ("V2-Lite-Chat-sft-amx-multi-gpu", LITES, 15,
     split(V2, LITE, TWO, linear=TORCH, head=TORCH, linears=NOT_KV_B, **AMX)),
    ("V2-Lite-Chat-gpu-cpu", LITES, 17,
     split(dict(V2, gate=V3["gate"]), LITE, ["cuda:0", "cpu"], head_on=0, **LITE_LINEARS)),
    ("V3-Chat", V3S, 9, one(V3)), ("V3-Chat-amx", V3S, 9, one(V3, backend="AMXInt8")),
    ("V3-Chat-sft-amx", V3S, 9, one(V3, linear=TORCH, head=TORCH, **AMX)),
    ("V3-Chat-serve", V3S, 11,
     one(SERVE, linear=MARLIN, head=SERVED, experts="KTransformersExpertsV2", parts=SERVE_PARTS)),
    ("V3-Chat-fp8", V3S, 8, one(V3, linear="KLinearFP8", parts=FP8_PARTS)),
    ("V3-Chat-fp8-serve", V3S, 11,
     one(SERVE, linear="KLinearFP8", head=SERVED, experts="KTransformersExpertsV2", parts=SERVE_PARTS)),
    ("V3-Chat-fp8-serve-amx", V3S, 11, one(SERVE, linear="KLinearFP8", head=SERVED, experts="KTransformersExpertsV2",
                                           parts=SERVE_PARTS, backend="llamafile")),
    ("V3-Chat-multi-gpu", V3S, 17, split(V3, HALF3, TWO)),
    ("V3-Chat-multi-gpu-4", V3S, 31, split(V3, FOUR3, GPUS[:4], head_on=3)),
    ("V3-Chat-multi-gpu-8", V3S, 60, split(V3, EIGHT, GPUS)),
    ("V3-Chat-multi-gpu-fp8", V3S, 17, split(V3, HALF3, TWO, linear="KLinearFP8", head=None)),
    ("V3-Chat-multi-gpu-marlin", V3S, 19,
     split(V3, HALF3, TWO, head_on=0, first=[("0|[1-4]", "cuda:0"), ("[3][0]", "cuda:1")])),
    ("V3-Chat-sft-amx-multi-gpu", V3S, 17, split(V3, HALF3, TWO, linear=TORCH, head=TORCH, **AMX)),
    ("V3-Chat-sft-amx-multi-gpu-4", V3S, 31, split(V3, FOUR3, GPUS[:4], linear=TORCH, head=TORCH, **AMX)),
    ("Moonlight", MOON, 9, one(dict(V3, rope=("DeepseekV3RotaryEmbedding", "RotaryEmbeddingV3")))),
    ("Moonlight-serve", MOON, 11, one(dict(SERVE, rope=("DeepseekV3RotaryEmbedding", "RotaryEmbeddingV4")),
                                      linear=SERVED, head=SERVED, experts="KTransformersExpertsV2", parts=SERVE_PARTS)),
    ("Mixtral", ("mixtral", 32), 7, mixtral()), ("Qwen2-multi-gpu", Q2, 14, qwen2_split()),
    ("Qwen2", Q2, 8, one(QWEN2, lm="^lm_head", linears=".*$",
                         parts=("rope", "linears", "head", "moe", "experts", "model", "embedding", "rest"))),
    ("Qwen2-serve", Q2, 10,
     one(QWEN2, linear=SERVED, linears=NOT_GATE, experts="KTransformersExpertsV2", parts=QWEN_SERVE)),
    ("Qwen2-serve-amx", Q2, 10, one(QWEN2, linear=SERVED, linears=NOT_GATE, experts="KTransformersExpertsV2",
                                    parts=QWEN_SERVE, backend="AMXInt8")),
    ("Qwen3Moe-serve", Q3, 10,
     one(QWEN3, head=SERVED, linears=NOT_GATE, experts="KTransformersExpertsV2", parts=QWEN_SERVE)),
    ("Qwen3Moe-serve-amx", Q3, 10,
     one(QWEN3, head=SERVED, linears=NOT_GATE, experts="KTransformersExpertsV2", parts=QWEN_SERVE, backend="AMXBF16")),
    ("Qwen3Moe-sft-amx", Q3, 8,
     one(dict(QWEN3, model="KQwen3MoeModel"), linear=TORCH, head=TORCH, linears=NOT_GATE, parts=PLAIN, **AMX)),
    ("Glm4Moe-serve", ("glm4_moe", 46), 9, one(GLM, head=SERVED, linears=NOT_GATE, experts="KGlm4Experts",
                                               parts=("rope", "head", "linears", "moe", "experts", "attention",
                                                      "embedding", "norm", "mlp"))),
    ("Qwen3Next-serve", (None, 0), 10, qwen3_next()), ("Smallthinker-serve", (None, 0), 9, small()),
    ("Internlm2_5-7b-Chat-1m", ("llama", 32), 4,
     [rule(None, llama["module"] + "LlamaRotaryEmbedding", "a.RotaryEmbeddingV2"),
      rule("^model.embed_tokens", None, "default", "cpu"),
      rule(None, llama["module"] + "LlamaModel", "a.KLlamaModel", "cuda", per_layer_prefill_intput_threshold=0),
      rule(LAYERS + r".*\.self_attn$", None, "a.KLlamaAttention", "cuda")]),
    ("rocm-V3", V3S, 9, one(V3, linear="KLinearQ8", head="KLinearCPUInfer")),
    ("xpu-V2", V2S, 8, one(dict(V2, norm=("DeepseekV2RMSNorm", "KDeepseekRMSNormIPEXLLM")), **XPU,
                           parts=("rope", "linears", "moe", "experts", "norm", "attention", "model", "embedding"))),
    ("xpu-V3", V3S, 10,
     one(dict(V3, norm=("DeepseekV3RMSNorm", "KDeepseekRMSNormIPEXLLM"), gate=("MoEGate", "KMoEGateIPEXLLM")), **XPU,
         parts=("rope", "head", "linears", "moe", "norm", "gate", "experts", "attention", "model", "embedding"))),
    ("xpu-Qwen3Moe", Q3, 10, qwen3_xpu()), ("npu-V3", V3S, 9, one(dict(V3), **dict(ASCEND, linear=TORCH, head=TORCH))),
    ("npu-V3-300IA2", V3S, 13, ascend("KDeepseekV2AttentionW8A8A2")),
    ("npu-V3-300IA2-serve", V3S, 13, ascend("KDeepseekV2AttentionW8A8A2Serve")),
    ("npu-Qwen3-300IA2-serve", Q3, 9, qwen3_ascend())]}
