"""Families whose layers choose the keys that they attend to, beyond their logits (model_logits_test.py): positions
where the choice is close, as they are published, cuts and company and threads. KT_MODEL_PROBE names model_probe; what
kt says of them, and serves, is in dsa_program_test.py."""

import functools
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gguf_files
import published
import tiny_models
from logits import PROBE, check, differences, probe, prompt

pytestmark = pytest.mark.skipif(not PROBE, reason="KT_MODEL_PROBE does not name model_probe")
BOUND, SUMS_BOUND = 1e-4, 1e-5  # as in model_logits_test.py
VOCAB = tiny_models.VOCAB
TOP = tiny_models.DSA["index_topk"]
LENGTHS = [700, 1, 130, 7]
PROMPTS = [prompt(tokens, VOCAB) for tokens in (1, 7, 130)]
models = pytest.mark.parametrize("key", tiny_models.DSA_MODELS)
families = pytest.mark.parametrize("key", ["glm_moe_dsa", "deepseek_v32"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dsa")


@functools.cache
def saved(root, key):
    """(tensors as transformers saves them, config, logits) of a model whose numbers are bf16."""
    return tiny_models.saved(root, key, PROMPTS)


# --- the choice -------------------------------------------------------------------------------------------------------


def gaps(model, ids, monkeypatch):
    """transformers' logits, and of each position how far the last key that is chosen and the first that is not are
    apart, by the size of the largest score: the least of all layers. Infinite where all keys are taken."""
    out, take = np.full(len(ids), np.inf), torch.Tensor.topk

    def watched(scores, k, dim=-1):
        if scores.dim() == 3 and scores.shape[-1] > TOP:
            best = take(scores, TOP + 1, dim=-1).values[0]
            apart = (best[:, TOP - 1] - best[:, TOP]) / scores[0].masked_fill(scores[0] < -1e30, 0).abs().amax(-1)
            out[TOP:] = np.minimum(out[TOP:], apart[TOP:].numpy())
        return take(scores, k, dim=dim)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    logits = tiny_models.logits(model, [ids])
    monkeypatch.undo()
    return logits, out


@models
def test_logits_where_the_choice_is_not_close(root, key, monkeypatch):
    """One sequence and four side by side. Scores differ by some 1e-6 of their size between the programs."""
    model = tiny_models.build(key)
    both = [gaps(model, prompt(tokens, VOCAB), monkeypatch) for tokens in LENGTHS]
    folder = tiny_models.save(model, root / "f32" / key)
    expected, apart = (np.concatenate(part) for part in zip(*both))
    clear = apart > 1e-5
    assert np.isfinite(apart).sum() == 700 + 130 - 2 * TOP and (~clear).sum() <= 8, (~clear).sum()
    prompts = [prompt(tokens, VOCAB) for tokens in LENGTHS]
    check(probe(folder, prompts, VOCAB)[clear], expected[clear], BOUND)
    for ids, (logits, of_one) in list(zip(prompts, both))[:3]:
        check(probe(folder, [ids], VOCAB)[of_one > 1e-5], logits[of_one > 1e-5], BOUND)


@families
def test_all_keys_would_give_other_logits(key):
    """The comparisons would notice attention to all keys, but only behind the first 16 positions."""
    ids = [prompt(130, VOCAB)]
    some, every = (tiny_models.logits(tiny_models.build(key, index_topk=top), ids) for top in (TOP, 1000))
    apart = differences(every, some)
    assert apart[:TOP].max() == 0 and (apart[TOP:] > 10 * BOUND).mean() > 0.9


def test_a_shared_choice_is_that_of_the_layer_before():
    """They would notice a layer that sees other keys, too."""
    ids = [prompt(130, VOCAB)]
    types = [["full", "shared", "shared", "full"], ["full", "shared", "full", "full"]]
    first, second = (tiny_models.build("glm_moe_dsa-shared-biases", indexer_types=each) for each in types)
    same = {name: tensor for name, tensor in first.state_dict().items()}
    second.load_state_dict(same, strict=False)
    assert differences(tiny_models.logits(second, ids), tiny_models.logits(first, ids)).max() > 10 * BOUND


# --- the same sums ----------------------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
def test_threads_change_no_bit(root, key, kv):
    saved(root, key)
    ids = [prompt(tokens, VOCAB) for tokens in (130, 20, 40)]
    flags = ("--kv", kv, "--chunk", "50")
    one = probe(root / key, ids, VOCAB, *flags, "--threads", "1")
    assert (probe(root / key, ids, VOCAB, *flags, "--threads", "3") == one).all()


@models
def test_cuts_and_company_change_sums_alone(root, key):
    saved(root, key)
    ids = prompt(130, VOCAB)
    whole = probe(root / key, [ids], VOCAB)
    for cuts in ("1", "15,16,17", "63", "64", "65,129", "1,2,3,64,65,127"):
        check(probe(root / key, [ids], VOCAB, "--cuts", cuts), whole, SUMS_BOUND)
    others = [prompt(tokens, VOCAB, 5) for tokens in (40, 3, 97)]
    ours = probe(root / key, [others[0], ids, *others[1:]], VOCAB, "--chunk", "50")
    check(ours[40:170], whole, SUMS_BOUND)


# --- as published -----------------------------------------------------------------------------------------------------


def further(tensors, layers):
    """A layer that predicts further tokens: the last one's tensors behind the others, and its own."""
    last = f"model.layers.{layers - 1}."
    out = {name.replace(last, f"model.layers.{layers}."): tensor for name, tensor in tensors.items()
           if name.startswith(last)}
    beside = {"eh_proj": torch.ones(64, 128), "enorm": torch.ones(64), "hnorm": torch.ones(64),
              "shared_head.norm": torch.ones(64)}
    return out | {f"model.layers.{layers}.{name}.weight": tensor for name, tensor in beside.items()}


GONE = ("layer_types", "mlp_layer_types", "indexer_types", "rope_parameters", "head_dim", "qk_head_dim", "mlp_bias")


@models
def test_as_published(root, tmp_path, key):
    """Words of the published configs, layers for further tokens, the weights of heads in f32."""
    tensors, config, expected = saved(root, key)
    tensors = {name: tensor.float() if "weights_proj" in name else tensor for name, tensor in tensors.items()}
    layers = config["num_hidden_layers"]
    said = {name: value for name, value in config.items() if name not in GONE}
    said |= dict(num_nextn_predict_layers=1, ep_size=1, moe_layer_freq=1, scoring_func="sigmoid",
                 topk_method="noaux_tc")
    if key == "deepseek_v32":
        yarn = {name: value for name, value in config["rope_parameters"].items()
                if name not in ("rope_theta", "rope_type")}
        said |= dict(rope_theta=10000, rope_scaling=dict(yarn, type="yarn"))
    else:
        said |= dict(indexer_rope_interleave=True, rope_interleave=True,
                     rope_parameters=dict(rope_theta=1000000, rope_type="default"))
    if "shared" in key:
        said |= dict(index_topk_freq=2, index_skip_topk_offset=1)
    folder = tiny_models.write(tmp_path / "model", tensors | further(tensors, layers), said)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)


@families
def test_fp8(tmp_path, key):
    how = published.Fp8Blocks()
    how.takes = lambda name, tensor: published.is_linear(name, tensor) and "weights_proj" not in name
    model = tiny_models.build(key, hidden_size=160, moe_intermediate_size=48)
    stored, plain = published.publish(model, how, tmp_path)
    check(probe(stored, PROMPTS, VOCAB), tiny_models.logits(published.load_plain(plain), PROMPTS), BOUND)


def test_indexers_of_layers_that_share_are_left_alone(root, tmp_path):
    """As converters once copied them."""
    tensors, config, expected = saved(root, "glm_moe_dsa-shared-biases")
    copied = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in tensors.items()
              if "layers.0.self_attn.indexer." in name}
    folder = tiny_models.write(tmp_path / "model", tensors | copied, config)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)


# --- GGUF files: gguf_models_test.py has those that say which layers choose -------------------------------------------


def gguf_of(root, key, path, change=lambda model: None):
    """A file of the model that does not say it."""
    model = gguf_files.Model(tiny_models.write(path.parent / "plain", saved(root, key)[0], saved(root, key)[1]))
    model.says_indexers = False
    change(model)
    return model.write(path)


def test_tensors_say_which_layers_choose(root, tmp_path):
    path = gguf_of(root, "glm_moe_dsa-shared-biases", tmp_path / "m.gguf")
    check(probe(path, PROMPTS, VOCAB), saved(root, "glm_moe_dsa-shared-biases")[2], BOUND)


def test_a_long_context_says_which_layers_choose(tmp_path):
    """Where converters copied indexers into every layer: two layers, and then one of four."""
    model = tiny_models.build("glm_moe_dsa-shared-biases", num_hidden_layers=5,
                              indexer_types=["full"] * 3 + ["shared"] * 2, max_position_embeddings=1 << 20)
    expected = tiny_models.logits(model, PROMPTS[-1:])
    source = gguf_files.Model(tiny_models.save(model, tmp_path / "plain"))
    source.says_indexers = False

    def copy(tensors):
        for name in [name for name in tensors if name.startswith("blk.0.indexer.")]:
            for layer in "34":
                tensors[name.replace("blk.0.", f"blk.{layer}.")] = tensors[name]

    path = source.write(tmp_path / "m.gguf", change=copy)
    check(probe(path, PROMPTS[-1:], VOCAB), expected, BOUND)
    source.config["max_position_embeddings"] = (1 << 20) - 1  # then all layers choose
    assert differences(probe(source.write(tmp_path / "all.gguf", change=copy), PROMPTS[-1:], VOCAB),
                       expected).max() > 10 * BOUND


