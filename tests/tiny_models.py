"""Tiny random checkpoints of every family the engine runs, made by transformers: its configs, its weights, its files.

Numbers are drawn so that every part of a layer can be seen in the logits: norms away from one, biases, correction
biases and sinks away from zero, embeddings of size one. Everything follows from the seed.
"""

import json
import pathlib

import safetensors.torch
import torch
import transformers

torch.set_num_threads(1)  # matrices this small only make threads wait for each other
VOCAB = 300
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=3,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    attn_implementation="eager",
)
GQA = dict(num_attention_heads=4, num_key_value_heads=2)
MLA = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
# Original contexts are short, so that prompts of 130 tokens reach past them.
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=16.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
)


def _yarn(**more):
    return dict(YARN, **more)


def _rope(**more):
    return dict(dict(rope_type="default", rope_theta=10000.0), **more)


# Where it has no attention factor, that follows from the contexts.
def _longrope(**more):
    factors = [1.0 + 0.25 * i for i in range(8)]
    return dict(_rope(rope_type="longrope", short_factor=factors, long_factor=factors), **more)


def _deepseek_v2(**more):
    config = dict(
        MLA,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=4.0,
        rope_parameters=_yarn(mscale=0.707, mscale_all_dim=0.707),
    )
    return "DeepseekV2", dict(config, **more)


def _deepseek_v3(**more):
    config = dict(
        MLA,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
        rope_parameters=_yarn(mscale=1.0, mscale_all_dim=1.0),
    )
    return "DeepseekV3", dict(config, **more)


def _qwen3_moe(**more):
    config = dict(
        GQA,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=_rope(rope_theta=1e6),
    )
    return "Qwen3Moe", dict(config, **more)


def _qwen2_moe(**more):
    config = dict(
        GQA,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=80,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        rope_parameters=_rope(),
    )
    return "Qwen2Moe", dict(config, **more)


def _glm4_moe(**more):
    config = dict(
        GQA,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
        rope_parameters=_rope(partial_rotary_factor=0.5),
    )
    return "Glm4Moe", dict(config, **more)


def _qwen3(**more):
    return "Qwen3", dict(dict(GQA, head_dim=32, intermediate_size=96, rope_parameters=_rope(rope_theta=1e6)), **more)


def _llama(**more):
    llama3 = dict(
        rope_type="llama3",
        rope_theta=10000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    return "Llama", dict(dict(GQA, intermediate_size=96, rope_parameters=llama3), **more)


def _mixtral(**more):
    config = dict(
        GQA, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2, rope_parameters=_rope(rope_theta=1e6)
    )
    return "Mixtral", dict(config, **more)


def _minimax_m2(**more):
    config = dict(
        GQA,
        head_dim=32,
        intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=_rope(rope_theta=5e6, partial_rotary_factor=0.5),
    )
    return "MiniMaxM2", dict(config, **more)


def _gpt_oss(**more):
    config = dict(
        GQA,
        head_dim=32,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=24,
        rope_parameters=_yarn(rope_theta=150000.0, truncate=False),
    )
    return "GptOss", dict(config, **more)


def _glm4_moe_lite(**more):
    config = dict(
        MLA,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        rope_parameters=_rope(rope_theta=1e6),
    )
    return "Glm4MoeLite", dict(config, **more)


def _dots1(**more):
    config = dict(
        GQA,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=None,
        rope_parameters=_rope(rope_theta=1e7),
    )
    return "Dots1", dict(config, **more)


def _hy_v3(**more):
    config = dict(
        GQA,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        router_scaling_factor=2.826,
        rope_parameters=_rope(rope_theta=11158840.0),
    )
    return "HYV3", dict(config, **more)


def _solar_open(**more):
    config = dict(
        GQA,
        head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        rope_parameters=_rope(rope_theta=1e6),
    )
    return "SolarOpen", dict(config, **more)


def _ernie4_5_moe(**more):
    config = dict(
        GQA,
        intermediate_size=96,
        moe_intermediate_size=32,
        moe_num_experts=8,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=2,
        moe_layer_interval=1,
        tie_word_embeddings=True,
        rope_parameters=_rope(rope_theta=500000.0),
    )
    return "Ernie4_5_Moe", dict(config, **more)


def _mistral4(**more):
    config = dict(
        MLA,
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=0,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        rope_parameters=_yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
    )
    return "Mistral4", dict(config, **more)


# More keys than the indexer chooses from the 17th token on; heads of sizes that no vector divides. With few index heads
# all weights of a query may be negative, and scores equal.
DSA_BUDGET = 16
DSA = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=40,
    index_topk=DSA_BUDGET,
    index_n_heads=24,
    index_head_dim=40,
    intermediate_size=96,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)


def _glm_moe_dsa(**more):
    return "GlmMoeDsa", dict(DSA, rms_norm_eps=1e-5, rope_parameters=_rope(rope_theta=1e6), **more)


def _deepseek_v32(**more):
    rope = _yarn(mscale=1.0, mscale_all_dim=1.0)
    return "DeepseekV32", dict(dict(DSA, n_group=4, topk_group=2, rope_parameters=rope), **more)


# Sizes of heads that no vector divides, and half as many heads of keys as of values. The last layer attends.
DELTA = dict(
    GQA,
    num_hidden_layers=4,
    head_dim=32,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=24,
    linear_value_head_dim=40,
    rope_parameters=_rope(rope_theta=1e7, partial_rotary_factor=0.25),
)
DELTA_MOE = dict(
    DELTA, moe_intermediate_size=32, shared_expert_intermediate_size=80, num_experts=8, num_experts_per_tok=3
)


def _qwen3_next(**more):
    return "Qwen3Next", dict(dict(DELTA_MOE, intermediate_size=96, norm_topk_prob=True), **more)


ONE_OF_EACH = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def _qwen3_5_moe(**more):
    return "Qwen3_5Moe", dict(DELTA_MOE | ONE_OF_EACH, **more)


def _qwen3_5(**more):
    return "Qwen3_5", dict(dict(DELTA | ONE_OF_EACH, intermediate_size=96), **more)


# Frequencies change at one wavelength, as published; prompts reach past many chunks. The last layer of four does not
# turn.
def _llama4(**more):
    config = dict(
        GQA,
        num_hidden_layers=4,
        head_dim=24,
        intermediate_size=40,
        intermediate_size_mlp=80,
        num_local_experts=8,
        num_experts_per_tok=1,
        attention_chunk_size=32,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=64,
        ),
    )
    return "Llama4", dict(config, **more)


# Two kinds of layers, the last sees all: heads of sizes that no vector divides, and keys that are values too.
def _gemma4(**more):
    config = dict(
        GQA,
        head_dim=24,
        global_head_dim=40,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        intermediate_size=80,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        moe_intermediate_size=32,
        num_experts=8,
        top_k_experts=3,
        sliding_window=24,
        final_logit_softcapping=30.0,
    )
    return "Gemma4", dict(config, **more)


# The family as it is published first, then the other ways its config can turn.
MODELS = {
    "qwen3_moe": _qwen3_moe(),
    "qwen3_moe-some_dense-tied-yarn-not_normalised": _qwen3_moe(
        mlp_only_layers=[0],
        tie_word_embeddings=True,
        norm_topk_prob=False,
        attention_bias=True,
        rope_parameters=_yarn(rope_theta=1e6),
    ),
    "qwen3_moe-window": _qwen3_moe(use_sliding_window=True, sliding_window=24),
    "qwen2_moe": _qwen2_moe(),
    "qwen2_moe-every_second-window": _qwen2_moe(
        decoder_sparse_step=2, norm_topk_prob=True, use_sliding_window=True, sliding_window=24, max_window_layers=2
    ),
    "mixtral": _mixtral(),
    "mixtral-window": _mixtral(sliding_window=24),
    "deepseek_v2": _deepseek_v2(),
    "deepseek_v2-greedy-no_q_rank": _deepseek_v2(
        q_lora_rank=None,
        topk_method="greedy",
        n_group=None,
        topk_group=None,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
    ),
    "deepseek_v3": _deepseek_v3(),
    "deepseek_v3-halves-no_yarn": _deepseek_v3(
        rope_interleave=False,
        norm_topk_prob=False,
        n_group=1,
        topk_group=1,
        attention_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters=_rope(),
    ),
    "deepseek_v3-mscale_apart": _deepseek_v3(rope_parameters=_yarn(mscale=1.0, mscale_all_dim=0.5, factor=4.0)),
    "glm4_moe": _glm4_moe(),
    "glm4_moe-no_qk_norm-groups": _glm4_moe(use_qk_norm=False, attention_bias=False, n_group=4, topk_group=2),
    "minimax_m2": _minimax_m2(),
    "gpt_oss": _gpt_oss(),
    "gpt_oss-full_first": _gpt_oss(
        intermediate_size=96, layer_types=["full_attention", "sliding_attention", "full_attention"]
    ),
    "qwen3": _qwen3(),
    "qwen3-tied-window": _qwen3(
        tie_word_embeddings=True, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
    "llama": _llama(),
    "llama-linear-biases": _llama(attention_bias=True, mlp_bias=True,
                                  rope_parameters=_rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": _llama(rope_parameters=_rope(rope_type="dynamic", factor=4.0)),
    "llama-longrope": _llama(rope_parameters=_longrope(original_max_position_embeddings=64, factor=16.0)),
    # No prompt is longer: past the original context positions are others, and no text gets there.
    "llama-longrope_apart": _llama(rope_parameters=_longrope(
        original_max_position_embeddings=800, long_factor=[4.0 + i for i in range(8)], attention_factor=1.5)),
    "glm4_moe_lite": _glm4_moe_lite(),
    "glm4_moe_lite-listed-halves-no_q_rank": _glm4_moe_lite(
        mlp_layer_types=["sparse", "dense", "sparse"], rope_interleave=False, q_lora_rank=None, n_group=4, topk_group=2
    ),
    "dots1": _dots1(),
    "dots1-window-biases": _dots1(
        attention_bias=True,
        norm_topk_prob=False,
        n_group=4,
        topk_group=2,
        sliding_window=24,
        max_window_layers=1,
        rope_parameters=_yarn(rope_theta=1e7),
    ),
    "hy_v3": _hy_v3(),
    "hy_v3-biases-tied": _hy_v3(
        attention_bias=True, tie_word_embeddings=True, num_shared_experts=2,
        mlp_layer_types=["dense", "sparse", "dense"]
    ),
    "solar_open": _solar_open(),
    "solar_open-biases-yarn": _solar_open(
        attention_bias=True, n_group=4, topk_group=2, routed_scaling_factor=2.5, rope_parameters=_yarn(rope_theta=1e6)
    ),
    "ernie4_5_moe": _ernie4_5_moe(),
    "ernie4_5_moe-every_second-untied": _ernie4_5_moe(
        moe_layer_start_index=0, moe_layer_interval=2, tie_word_embeddings=False, moe_num_shared_experts=0
    ),
    "mistral4": _mistral4(),
    "mistral4-groups-first_dense": _mistral4(
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        rope_parameters=_yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4),
    ),
    "glm_moe_dsa": _glm_moe_dsa(),
    "glm_moe_dsa-shared-biases": _glm_moe_dsa(
        num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"], attention_bias=True
    ),
    "deepseek_v32": _deepseek_v32(),
    "qwen3_next": _qwen3_next(),
    "qwen3_next-some_dense-listed-biases": _qwen3_next(
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_only_layers=[1],
        norm_topk_prob=False,
        attention_bias=True,
        linear_num_value_heads=3,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=2,
        rope_parameters=_rope(),
    ),
    "qwen3_5_moe": _qwen3_5_moe(),
    "qwen3_5_moe-tied-more_heads": _qwen3_5_moe(
        tie_word_embeddings=True,
        linear_num_value_heads=9,
        linear_key_head_dim=40,
        linear_value_head_dim=72,
        linear_conv_kernel_dim=5,
        rope_parameters=_yarn(rope_theta=1e6, partial_rotary_factor=0.5),
    ),
    "qwen3_5": _qwen3_5(),
    "llama4": _llama4(),
    "llama4-every_second-two_experts-grows-no_norm": _llama4(
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 1],
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        use_qk_norm=False,
        floor_scale=16,
        attn_scale=0.5,
        attention_bias=True,
        rope_parameters=_rope(),
    ),
    "gemma4": _gemma4(),
    "gemma4-dense-listed-untied-biases-no_cap": _gemma4(
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_k_eq_v=False,
        attention_bias=True,
        enable_moe_block=False,
        num_experts=None,
        tie_word_embeddings=False,
        final_logit_softcapping=None,
        rope_parameters=dict(
            full_attention=_rope(rope_type="proportional", rope_theta=1e5, partial_rotary_factor=0.7, factor=4.0),
            sliding_attention=_rope(rope_theta=5000.0),
        ),
    ),
}
# Those that keep states of sequences.
DELTA_MODELS = [key for key, (family, _) in MODELS.items() if family in ("Qwen3Next", "Qwen3_5Moe", "Qwen3_5")]
# Those whose layers choose the keys that they attend to.
DSA_MODELS = [key for key, (family, _) in MODELS.items() if family in ("GlmMoeDsa", "DeepseekV32")]
# Those with parts that do not run on a GPU.
HOST_ONLY = DELTA_MODELS + DSA_MODELS + [key for key, (family, _) in MODELS.items() if family in ("Llama4", "Gemma4")]
# Those of the second half of 2026: tests that cost more run some families only.
NEWER = ["glm4_moe_lite", "dots1", "hy_v3", "solar_open", "ernie4_5_moe", "mistral4"]


def _draw(name, tensor, generator, adds_one=False):
    """One parameter's or buffer's values; sizes keep activations near one through the layers."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name:
        return 0.2 * noise + (0 if adds_one and "linear_attn" not in name else 1)
    if name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return 1 + 0.2 * noise
    if name.endswith("router.proj.weight"):
        return 2 * noise  # of rows whose size is one together
    if "A_log" in name:
        return 1.5 * noise - 2  # memories of one token to a hundred
    if "correction_bias" in name:
        return 0.3 * noise
    if "sinks" in name or name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name:
        return noise
    if "router" in name or name.endswith(".gate.weight"):
        return noise * 2 / tensor.shape[-1] ** 0.5
    # gpt-oss alone stores experts as [experts, in, out]; there the two differ by three at most, so either will do.
    return noise / tensor.shape[-1] ** 0.5


def build(key, dtype=torch.float32, seed=1, **more):
    """The model in float32, its numbers rounded to `dtype` first. `more` of the config wins over what MODELS says."""
    family, overrides = MODELS[key]
    config_class = getattr(transformers, family + "TextConfig", None) or getattr(transformers, family + "Config")
    config = config_class(**{**SIZES, **overrides, **more})
    model = getattr(transformers, family + "ForCausalLM")(config).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                values = _draw(name, tensor, generator, key in DELTA_MODELS)
                if family == "Gemma4" and name.endswith("q_norm.weight"):
                    values /= tensor.shape[-1] ** 0.5  # its softmax has no scale of its own
                tensor.copy_(values.to(dtype).to(torch.float32))
        model.tie_weights()
    return model


def save(model, folder, dtype=torch.float32):
    """Writes the checkpoint in `dtype`; the model itself is spent."""
    folder = pathlib.Path(folder)
    model.to(dtype).save_pretrained(folder)
    return folder


def load(folder, **options):
    """transformers' model of a folder, in float32. By the class that the config names: the Auto classes do not list
    every text model that is published inside a larger one."""
    named = json.loads((pathlib.Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, named).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    )


def logits(model, sequences):
    """[tokens of all sequences in order, vocabulary], float32, as numpy."""
    with torch.no_grad():
        out = [model(torch.tensor([ids]), use_cache=False).logits[0].float() for ids in sequences]
    return torch.cat(out).numpy()


def saved(root, key, prompts):
    """(tensors under the names that transformers saves, config, logits) of a model whose numbers are bf16."""
    model = build(key, torch.bfloat16)
    expected = logits(model, prompts)
    folder = save(model, root / key, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    return safetensors.torch.load_file(folder / "model.safetensors"), config, expected


def write(folder, tensors, config):
    folder.mkdir(parents=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
