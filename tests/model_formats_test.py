"""Whole models in the formats they are published in, against transformers on the same numbers dequantised to float32.

KT_MODEL_PROBE names model_probe, KT_PROGRAM kt (for converted weights). tests/published.py says what each format is."""

import dataclasses
import functools
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import published
import tiny_models
from logits import PROBE, check, differences, probe, prompt

pytestmark = pytest.mark.skipif(not PROBE, reason="KT_MODEL_PROBE does not name model_probe")

# Sums of float32 in another order, and other exponentials; every value of these formats is a float32 or, where it is a
# code times a scale, one rounding (6e-8) away from the reference's.
BOUND = 1e-4
VOCAB = tiny_models.VOCAB
LENGTHS = [1, 7, 130]

# Sizes that blocks of 128 do not divide, in every matrix; and sizes that groups of 128 divide, in every matrix.
ODD_MLA = dict(hidden_size=200, q_lora_rank=72, kv_lora_rank=136, qk_nope_head_dim=24, v_head_dim=40,
               intermediate_size=296, moe_intermediate_size=144)
EVEN_MLA = dict(hidden_size=256, q_lora_rank=128, kv_lora_rank=128, v_head_dim=32, intermediate_size=256,
                moe_intermediate_size=128)
ODD_GQA = dict(hidden_size=200, head_dim=24, intermediate_size=296, moe_intermediate_size=144)
EVEN_GQA = dict(hidden_size=256, head_dim=64, intermediate_size=256, moe_intermediate_size=128)
HALF, FULL_PRECISION = torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Case:
    key: str
    sizes: dict
    make: object  # of the format

    def build(self, folder, **more):
        model = tiny_models.build(self.key, **{**self.sizes, **more})
        return published.publish(model, self.make(), folder)


CASES = {
    "fp16-deepseek_v3": Case("deepseek_v3", {}, lambda: published.Plain(HALF)),
    "fp16-gpt_oss": Case("gpt_oss", {}, lambda: published.Plain(HALF)),
    "fp16-qwen2_moe": Case("qwen2_moe", {}, lambda: published.Plain(HALF)),
    "fp8_blocks-deepseek_v3": Case("deepseek_v3", EVEN_MLA, published.Fp8Blocks),
    "fp8_blocks-deepseek_v3-odd": Case("deepseek_v3", ODD_MLA, published.Fp8Blocks),
    "fp8_blocks-qwen3_moe": Case("qwen3_moe", EVEN_GQA, published.Fp8Blocks),
    "fp8_blocks-qwen3_moe-odd": Case("qwen3_moe", ODD_GQA, published.Fp8Blocks),
    "fp8_blocks-minimax_m2": Case("minimax_m2", dict(hidden_size=192, intermediate_size=160), published.Fp8Blocks),
    "fp8_channels-glm4_moe": Case("glm4_moe", ODD_GQA, lambda: published.Fp8Channels(torch.bfloat16)),
    "fp8_channels-qwen3_moe": Case("qwen3_moe", EVEN_GQA, lambda: published.Fp8Channels(FULL_PRECISION)),
    "fp8_static-deepseek_v3": Case("deepseek_v3", ODD_MLA, published.Fp8Static),
    "fp8_static-qwen3_moe": Case("qwen3_moe", {}, published.Fp8Static),
    "int4_g32-experts-deepseek_v3": Case("deepseek_v3", {}, lambda: published.Packed(4, 32, True)),
    "int4_g32-all-deepseek_v3": Case("deepseek_v3", {**EVEN_MLA, "v_head_dim": 16},
                                     lambda: published.Packed(4, 32, False)),
    "int4_g128-experts-qwen3_moe": Case("qwen3_moe", EVEN_GQA, lambda: published.Packed(4, 128, True)),
    "int4_g128-all-qwen3_moe": Case("qwen3_moe", EVEN_GQA, lambda: published.Packed(4, 128, False)),
    "int4_g128-all-deepseek_v2": Case("deepseek_v2", EVEN_MLA, lambda: published.Packed(4, 128, False)),
    "int4_g32-all-mixtral": Case("mixtral", dict(intermediate_size=96), lambda: published.Packed(4, 32, False)),
    "int8_rows-all-qwen3_moe": Case("qwen3_moe", EVEN_GQA, lambda: published.Packed(8, None, False)),
    "fp8_blocks-glm4_moe_lite-odd": Case("glm4_moe_lite", ODD_MLA, published.Fp8Blocks),
    "int4_g32-glm4_moe_lite-even": Case("glm4_moe_lite", EVEN_MLA, lambda: published.Packed(4, 32, False)),
    "fp8_channels-dots1-odd": Case("dots1", dict(hidden_size=200, intermediate_size=296, moe_intermediate_size=144,
                                                 num_attention_heads=2, num_key_value_heads=1),
                                   lambda: published.Fp8Channels(torch.bfloat16)),
    "int4_g128-dots1-even": Case("dots1", dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=128),
                                 lambda: published.Packed(4, 128, False)),
    "fp8_blocks-hy_v3-odd": Case("hy_v3", ODD_GQA, published.Fp8Blocks),
    "int4_g32-hy_v3-even": Case("hy_v3", EVEN_GQA, lambda: published.Packed(4, 32, True)),
    "fp8_blocks-solar_open-odd": Case("solar_open", dict(hidden_size=200, head_dim=24, moe_intermediate_size=144),
                                      published.Fp8Blocks),
    "int4_g128-solar_open-even": Case("solar_open", dict(hidden_size=256, head_dim=64, moe_intermediate_size=128),
                                      lambda: published.Packed(4, 128, False)),
    "fp8_static-ernie4_5_moe-odd": Case("ernie4_5_moe", dict(hidden_size=200, intermediate_size=296,
                                                             moe_intermediate_size=144, num_attention_heads=2,
                                                             num_key_value_heads=1), published.Fp8Static),
    "int4_g32-ernie4_5_moe-even": Case("ernie4_5_moe", dict(hidden_size=256, intermediate_size=256,
                                                            moe_intermediate_size=128),
                                       lambda: published.Packed(4, 32, False)),
    "int4_g32-qwen3_next-even": Case("qwen3_next", dict(hidden_size=96, moe_intermediate_size=64,
                                                        shared_expert_intermediate_size=96, linear_value_head_dim=64),
                                     lambda: published.Packed(4, 32, False)),
    "int4_g32-glm_moe_dsa-even": Case("glm_moe_dsa", dict(hidden_size=128, moe_intermediate_size=64),
                                      lambda: published.Packed(4, 32, True)),
    "mxfp4-gpt_oss": Case("gpt_oss", {}, published.GptOssMxfp4),
    "mxfp4-gpt_oss-wider": Case("gpt_oss", dict(hidden_size=160, intermediate_size=96), published.GptOssMxfp4),
}
cases = pytest.mark.parametrize("name", list(CASES))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("formats")


@functools.cache
def opened(root, name):
    """The stored folder, prompts, and transformers' logits of each."""
    stored, plain = CASES[name].build(root / name)
    model = published.load_plain(plain)
    prompts = [prompt(tokens, VOCAB) for tokens in LENGTHS]
    return stored, prompts, [tiny_models.logits(model, [ids]) for ids in prompts]


class TestStored:
    @cases
    def test_logits(self, root, name):
        stored, prompts, expected = opened(root, name)
        check(probe(stored, prompts, VOCAB), np.concatenate(expected), BOUND)

    @cases
    def test_in_pieces(self, root, name):
        stored, prompts, expected = opened(root, name)
        check(probe(stored, prompts[-1:], VOCAB, "--chunk", "33"), expected[-1], BOUND)


def test_quantising_is_seen_in_the_logits(tmp_path):
    """The bound would notice the difference between the numbers before and after rounding, for the finest format."""
    model = tiny_models.build("qwen3_moe", **EVEN_GQA)
    ids = [prompt(60, VOCAB)]
    before = tiny_models.logits(model, ids)
    stored, _ = published.publish(model, published.Packed(8, None, True), tmp_path)
    assert differences(probe(stored, ids, VOCAB), before).max() > 10 * BOUND


def test_mxfp4_folder_is_the_published_one(root):
    """transformers itself reads the blocks and scales under these names, and gets the values the reference has."""
    stored, prompts, expected = opened(root, "mxfp4-gpt_oss")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        stored, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16,
        attn_implementation="eager",
    ).float().eval()
    check(tiny_models.logits(model, prompts[-1:]), expected[-1], 1e-5)


# --- converted experts -----------------------------------------------------------------------------------------------

# (model, sizes, parts): what the packed layout takes as it is, and what it has to pad.
CONVERTED = {
    "deepseek_v3": ("deepseek_v3", dict(hidden_size=128, moe_intermediate_size=256), 2),
    "qwen3_moe-padded": ("qwen3_moe", dict(hidden_size=200, moe_intermediate_size=80), 1),
    "mixtral-padded-parts": ("mixtral", dict(hidden_size=72, intermediate_size=128), 2),
    # A scale for 176, 16, 192 and 25 columns: DeepSeek-V2-Lite's experts for eight nodes, and sizes that nobody has.
    "deepseek_v2-parts-of-176": ("deepseek_v2", dict(hidden_size=72, moe_intermediate_size=1408), 8),
    "qwen3_moe-parts-of-16": ("qwen3_moe", dict(hidden_size=72, moe_intermediate_size=176), 11),
    "glm4_moe-parts-of-192": ("glm4_moe", dict(hidden_size=72, moe_intermediate_size=768), 4),
    "mixtral-parts-of-25": ("mixtral", dict(hidden_size=72, intermediate_size=100), 4),
}
if checkpoints.FULL:
    for size, counts in ((1408, (2, 4, 11)), (768, (2, 8)), (2048, (2, 4, 8)), (99, (3, 11)), (110, (2, 11))):
        for count in counts:
            CONVERTED[f"qwen3_moe-{size}-in-{count}"] = ("qwen3_moe", dict(hidden_size=72, moe_intermediate_size=size),
                                                         count)


def convert(folder, out, bits, parts, *more):
    if not checkpoints.KT:
        pytest.skip("KT_PROGRAM does not name the kt program")
    checkpoints.kt_ok("quant", folder, "-o", out, "--method", f"int{bits}", "--numa-nodes", parts, "--yes", *more)
    return out


def rounded(name, tensor, bits, parts):
    """An expert's matrix as converted weights hold it: down has scales of its own in each part of its columns."""
    if not published.EXPERT.search(name):
        return tensor
    down = name.endswith(("down_proj.weight", "w2.weight"))
    pieces = []
    for piece in torch.chunk(tensor, parts, 1 if down else 0):
        codes, scales = checkpoints.quantise(piece.to(torch.bfloat16).float().numpy(), bits)
        pieces.append(torch.from_numpy(codes.astype(np.float32) * (scales * (16 if bits == 4 else 1))[:, None]))
    return torch.cat(pieces, 1 if down else 0).contiguous()


@functools.cache
def converted(root, name, bits, **more):
    """The original folder, converted experts, and transformers' model of the rounded numbers."""
    key, sizes, parts = CONVERTED[name]
    model = tiny_models.build(key, torch.bfloat16, **{**sizes, **more})
    here = root / f"{name}-{bits}{'-all' if more else ''}"
    original, plain = here / "original", here / "plain"
    tiny_models.save(model, plain)
    tensors = safetensors.torch.load_file(plain / "model.safetensors")
    original.mkdir()
    safetensors.torch.save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, original / "model.safetensors",
                                metadata={"format": "pt"})
    (original / "config.json").write_text((plain / "config.json").read_text())
    safetensors.torch.save_file({n: rounded(n, t, bits, parts) for n, t in tensors.items()},
                                plain / "model.safetensors", metadata={"format": "pt"})
    return original, convert(original, here / "converted", bits, parts), published.load_plain(plain)


converted_cases = pytest.mark.parametrize("name,bits", [(name, bits) for name in CONVERTED for bits in (4, 8)])


class TestConverted:
    @converted_cases
    def test_logits(self, root, name, bits):
        original, weights, model = converted(root, name, bits)
        ids = [prompt(tokens, VOCAB) for tokens in LENGTHS]
        expected = tiny_models.logits(model, ids)
        check(probe(original, ids, VOCAB, "--weights", str(weights)), expected, BOUND)
        # The output by itself is the same model, its other tensors too.
        assert (probe(weights, ids, VOCAB) == probe(original, ids, VOCAB, "--weights", str(weights))).all()
        # And it is these weights that are used: the original's own give other logits.
        assert differences(probe(original, ids, VOCAB), expected).max() > 10 * BOUND

    def test_folder_of_layers(self, root):
        """The output that is not merged into safetensors holds the same experts."""
        original, weights, _ = converted(root, "deepseek_v3", 4)
        apart = convert(original, root / "apart", 4, 2, "--no-merge")
        ids = [prompt(7, VOCAB)]
        merged = probe(original, ids, VOCAB, "--weights", str(weights))
        assert (merged == probe(original, ids, VOCAB, "--weights", str(apart))).all()
        assert (merged == probe(apart, ids, VOCAB)).all()  # which opens the original for the rest

    @pytest.mark.parametrize("name", ["fp8_blocks-deepseek_v3", "int4_g32-all-mixtral"])
    def test_formats_of_the_rest(self, root, name):
        """Scales of matrices outside the experts come along under their new names."""
        original = CASES[name].build(root / f"rest-{name}")[0]
        out = convert(original, root / f"rest-{name}-int8", 8, 1)
        ids = [prompt(7, VOCAB)]
        expected = probe(original, ids, VOCAB, "--weights", str(out))
        original.rename(f"{original}-moved")
        assert (probe(out, ids, VOCAB) == expected).all()

    @pytest.mark.parametrize("root_name", ["language_model.model.", "model.language_model.", ""])
    def test_prefixes(self, root, root_name):
        """Models inside larger ones keep their names behind another prefix, of which converting takes a part."""
        original, _, _ = converted(root, "qwen3_moe-padded", 8)
        tensors = safetensors.torch.load_file(original / "model.safetensors")
        folder = root / f"prefix-{root_name}"
        folder.mkdir()
        head = "language_model." if root_name.startswith("language_model.") else ""
        safetensors.torch.save_file(
            {root_name + n[6:] if n.startswith("model.") else head + n: t for n, t in tensors.items()},
            folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text((original / "config.json").read_text())
        out = convert(folder, root / f"prefix-{root_name}-int8", 8, 1)
        ids = [prompt(7, VOCAB)]
        assert (probe(out, ids, VOCAB) == probe(folder, ids, VOCAB, "--weights", str(out))).all()


# --- rounded activations ---------------------------------------------------------------------------------------------

# Every expert is chosen for every token: which of them are is no matter of rounding then. Factors that make errors of
# experts larger than all else are left out.
ALL_CHOSEN = {
    "deepseek_v2": dict(n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=1.0),
    "deepseek_v3": dict(n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=1.0),
    "glm4_moe": dict(n_routed_experts=4, num_experts_per_tok=4),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=4),
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=4),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=4),
    "qwen2_moe": dict(num_experts=4, num_experts_per_tok=4),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=4),
}

# How far logits may be from the float32 ones: the reference itself is run with the same roundings, made in torch at
# every product, and moves by some distance e (of a position: max|error| / max|logit|; the largest of all positions).
# Ours are another draw of the same errors. One draw's largest error is near 4.3 standard deviations for 138 * 300
# numbers, another's hardly ever below 3.5 or beyond 5.5: quotients up to 1.6. What ours round beside the activations:
#   bf16  weights with more digits than a bf16 has (fp16, codes times scales): the same 8 bits once more, sqrt(2) e.
#   int8  grouped weights that meet many rows, to int8 in panels of 512 columns: at most as much as activations are
#         (their largest number is as far from their mean size), sqrt(2) e.
# 1.6 sqrt(2) = 2.3, and 2.5 e is allowed.
DRAWS = 2.5
PRODUCTS = {torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm,
            torch.Tensor.bmm, torch.mm}


def rounded_row(x, acts):
    """bf16: 8 significant bits. int8: one scale for a row, steps of its largest number / 127."""
    if acts == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, torch.round(x / step) * step, 0)


class Rounding(torch.overrides.TorchFunctionMode):
    """Rounds what is multiplied by weights, and keys and values too (they are bf16 in the cache). Where only experts
    are integers, the other matrices are met by bf16 numbers."""

    def __init__(self, acts, experts_only):
        super().__init__()
        self.acts, self.others = acts, "bf16" if experts_only else acts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function not in PRODUCTS:
            return function(*args, **(kwargs or {}))
        x, weight, *rest = args
        if isinstance(weight, torch.nn.Parameter):
            x = rounded_row(x, self.others)
        elif weight.ndim == 2:  # an expert's, cut from the tensor of all of them
            x = rounded_row(x, self.acts)
        else:
            x, weight = rounded_row(x, "bf16"), rounded_row(weight, "bf16")
        return function(x, weight, *rest, **(kwargs or {}))


# Roundings are no affair of families: those without a row in ALL_CHOSEN are left out.
ROUNDED = [(name, "bf16") for name in CASES if name.count("-") == 1 or "all" in name or "experts" in name] + [
    (name, "int8") for name, case in CASES.items() if name.startswith("int") and case.key in ALL_CHOSEN]


def check_rounded(ours, model, ids, acts, experts_only):
    theirs = tiny_models.logits(model, ids)
    with Rounding(acts, experts_only):
        alike = tiny_models.logits(model, ids)
    moved = differences(alike, theirs).max()
    assert moved > 10 * BOUND
    check(ours, theirs, DRAWS * moved)
    # No more exact than it claims: else the flag did nothing.
    assert differences(ours, theirs).max() > moved / 10
    order = np.sort(theirs, axis=1)
    clear = order[:, -1] - order[:, -2] > 2 * DRAWS * moved * np.abs(theirs).max(axis=1)
    assert clear.sum() >= 5, f"{clear.sum()} of {len(clear)} positions have a clear best token"
    assert (ours.argmax(1) == theirs.argmax(1))[clear].all()


class TestRoundedActivations:
    @pytest.mark.parametrize("name,acts", ROUNDED)
    def test_stored(self, tmp_path, name, acts):
        case = CASES[name]
        stored, plain = case.build(tmp_path, **ALL_CHOSEN[case.key])
        ids = [prompt(tokens, VOCAB) for tokens in LENGTHS]
        model = published.load_plain(plain)
        check_rounded(probe(stored, ids, VOCAB, "--acts", acts), model, ids, acts, "experts" in name)

    @pytest.mark.parametrize("acts", ["bf16", "int8"])
    @converted_cases
    def test_converted(self, root, name, bits, acts):
        original, weights, model = converted(root, name, bits, **ALL_CHOSEN[CONVERTED[name][0]])
        ids = [prompt(tokens, VOCAB) for tokens in LENGTHS]
        check_rounded(probe(original, ids, VOCAB, "--weights", str(weights), "--acts", acts), model, ids, acts, True)
