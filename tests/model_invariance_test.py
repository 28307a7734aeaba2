"""What logits must not depend on: where a prompt is cut, how many threads there are, who else is in the batch; and what
configs may look like without meaning anything else. KT_MODEL_PROBE names model_probe."""

import functools
import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import published
import tiny_models
from logits import PROBE, check, differences, probe, probe_exactly, prompt

pytestmark = pytest.mark.skipif(not PROBE, reason="KT_MODEL_PROBE does not name model_probe")
VOCAB = tiny_models.VOCAB
BOUND, SUMS_BOUND = 1e-4, 1e-5  # as in model_logits_test.py: against transformers, and against ourselves

# One of each kind of attention, routing and window.
KEYS = ["deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral-window", "qwen2_moe-every_second-window", "qwen3_moe",
        "llama", "mistral4", "qwen3_next", "glm_moe_dsa-shared-biases"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("invariance")


@functools.cache
def plain(root, key):
    return tiny_models.save(tiny_models.build(key, torch.bfloat16), root / key, torch.bfloat16)


class TestCuts:
    """Pages hold 64 tokens."""

    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("cuts", ["1", "63", "64", "65", "128", "129", "1,2,3,64,65,127"])
    def test_anywhere(self, root, key, cuts):
        ids = [prompt(130, VOCAB)]
        check(probe(plain(root, key), ids, VOCAB, "--cuts", cuts), whole(root, key), SUMS_BOUND)

    @pytest.mark.parametrize("key", KEYS)
    def test_long_prompts_side_by_side(self, root, key):
        """700 tokens are eleven pages, and more than one step of the split that long contexts are attended in."""
        folder = plain(root, key)
        model = published.load_plain(folder)
        batch = [prompt(tokens, VOCAB) for tokens in (700, 1, 130, 7)]
        expected = tiny_models.logits(model, batch)
        check(probe(folder, batch, VOCAB), expected, BOUND)
        check(probe(folder, batch[:1], VOCAB), expected[:700], BOUND)
        check(probe(folder, batch, VOCAB, "--cuts", "5,511,512,640"), expected, BOUND)


@functools.cache
def whole(root, key):
    return probe(plain(root, key), [prompt(130, VOCAB)], VOCAB)


class TestThreads:
    @pytest.mark.parametrize("acts", ["f32", "bf16", "int8"])
    @pytest.mark.parametrize("key", KEYS)
    def test_same_bits(self, root, key, acts):
        batch = [prompt(tokens, VOCAB) for tokens in (130, 1, 7)]
        one, two, three = (
            probe(plain(root, key), batch, VOCAB, "--acts", acts, "--cuts", "120,129", "--threads", str(threads))
            for threads in (1, 2, 3)
        )
        assert (one == two).all() and (one == three).all()

    @pytest.mark.parametrize("bits,group", [(4, 32), (8, None)])
    def test_same_bits_of_integers(self, root, bits, group):
        folder = integers(root, bits, group)
        batch = [prompt(tokens, VOCAB) for tokens in (130, 1, 7)]
        one, two, three = (probe(folder, batch, VOCAB, "--acts", "int8", "--threads", str(n)) for n in (1, 2, 3))
        assert (one == two).all() and (one == three).all()


@functools.cache
def integers(root, bits, group):
    """qwen3_moe with every matrix in integers, the head too; what is left is norms, the router, and the embedding."""
    folder = root / f"int{bits}-{group}"
    packed = published.Packed(bits, group, False)
    model = tiny_models.build("qwen3_moe", hidden_size=128, head_dim=32, moe_intermediate_size=64)
    stored, _ = published.publish(model, packed, folder)
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    parts, _ = packed.linear(tensors.pop("lm_head.weight").float(), None)
    tensors.update({f"lm_head.{part}": tensor for part, tensor in parts.items()})
    safetensors.torch.save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    return stored


class TestCompany:
    """A sequence alone, and with three others in any place."""

    batch = [prompt(tokens, VOCAB, seed) for seed, tokens in enumerate((40, 3, 97, 1))]

    def together(self, folder, order, *options, run=probe):
        """Logits of each sequence by its number, run in this order."""
        rows = run(folder, [self.batch[i] for i in order], VOCAB, *options)
        ends = np.cumsum([len(self.batch[i]) for i in order])[:-1]
        return dict(zip(order, np.split(rows, ends)))

    @pytest.mark.parametrize("cuts", ["1000", "1,2", "30,60"])
    @pytest.mark.parametrize("bits", [4, 8])
    def test_int8_gives_the_same_bits(self, root, bits, cuts):
        """One scale a row: products are exact integers, whatever route the number of rows takes."""
        folder = integers(root, bits, None)
        run = functools.partial(self.together, folder, run=probe_exactly)
        first = run((0, 1, 2, 3), "--cuts", cuts)
        other = run((3, 2, 0, 1), "--cuts", cuts)
        for i in range(4):
            alone = run((i,), "--cuts", cuts)[i]
            assert (first[i] == alone).all() and (other[i] == alone).all(), f"sequence {i}"

    @pytest.mark.parametrize("key", KEYS)
    def test_f32_gives_the_same_sums(self, root, key):
        first = self.together(plain(root, key), (0, 1, 2, 3))
        other = self.together(plain(root, key), (3, 2, 0, 1))
        for i in range(4):
            alone = self.together(plain(root, key), (i,))[i]
            check(first[i], alone, SUMS_BOUND)
            check(other[i], alone, SUMS_BOUND)


# --- other spellings -------------------------------------------------------------------------------------------------



def respelled(folder, change, rename=lambda name: name):
    """Changes config.json, and the names of tensors."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config)))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def saved(folder, key, **more):
    """The folder, and what transformers computes for two prompts."""
    model = tiny_models.build(key, torch.bfloat16, **more)
    expected = tiny_models.logits(model, PROMPTS)
    return tiny_models.save(model, folder, torch.bfloat16), expected


PROMPTS = [prompt(130, VOCAB), prompt(7, VOCAB)]


def kimi_k2(folder):
    """As Kimi-K2 is published: its own model_type, one group, and a YaRN whose ramp has no width."""
    rope = dict(tiny_models.YARN, rope_theta=50000.0, factor=32.0, original_max_position_embeddings=32, beta_fast=1.0,
                beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    folder, expected = saved(folder, "deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=2.827,
                             rope_parameters=rope)
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}

    def change(config):
        return dict(without(config, "rope_parameters", "rope_interleave", "head_dim"), model_type="kimi_k2",
                    rope_theta=50000.0, rope_scaling=dict(old, type="yarn"), scoring_func="sigmoid",
                    topk_method="noaux_tc", seq_aux=True, moe_layer_freq=1, ep_size=1, aux_loss_alpha=0.001)

    return folder, expected, change


def nested(prefix, outer_type):
    """A text model inside a larger one: its config in text_config, its tensors behind a prefix; others beside it."""

    def make(folder):
        folder, expected, change = kimi_k2(folder)

        def outer(config):
            return {"architectures": ["SomethingForConditionalGeneration"], "model_type": outer_type,
                    "tie_word_embeddings": False, "vision_config": {"hidden_size": 7, "num_hidden_layers": 1},
                    "text_config": without(change(config), "architectures")}

        def rename(name):
            if prefix == "language_model.":
                return prefix + name
            return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name

        return folder, expected, outer, rename

    return make


def deepseek_v2_as_published(folder):
    rope = dict(tiny_models.YARN, mscale=0.707, mscale_all_dim=0.707)
    folder, expected = saved(folder, "deepseek_v2", rope_parameters=rope)
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}

    def change(config):
        return dict(without(config, "rope_parameters", "head_dim"), rope_theta=10000, scoring_func="softmax",
                    rope_scaling=dict(old, type="yarn"), norm_topk_prob=False, moe_layer_freq=1, seq_aux=True)

    return folder, expected, change


def gpt_oss_as_published(folder):
    folder, expected = saved(folder, "gpt_oss")

    def change(config):
        old = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
        return dict(without(config, "rope_parameters", "swiglu_alpha"), rope_theta=150000, rope_scaling=old,
                    experts_per_token=config["num_experts_per_tok"], initial_context_length=64)

    return folder, expected, change


def llama3_as_published(folder):
    folder, expected = saved(folder, "llama")

    def change(config):
        old = {key: value for key, value in config["rope_parameters"].items() if key != "rope_theta"}
        return dict(without(config, "rope_parameters", "head_dim"), rope_theta=10000.0, rope_scaling=old)

    return folder, expected, change


def partial_rotary_beside(folder):
    folder, expected = saved(folder, "glm4_moe")
    return folder, expected, lambda config: dict(without(config, "rope_parameters"), partial_rotary_factor=0.5,
                                                 rope_theta=10000, rope_scaling=None)


def window_longer_than_prompts(folder):
    folder, expected = saved(folder, "mixtral", sliding_window=1000)
    full = tiny_models.build("mixtral", torch.bfloat16)
    assert (tiny_models.logits(full, PROMPTS) == expected).all()
    return folder, expected, dict


def window_as_long_as_a_prompt(folder):
    folder, expected = saved(folder, "mixtral", sliding_window=130)
    return folder, expected, dict


def window_of_a_page(folder):
    folder, expected = saved(folder, "gpt_oss", sliding_window=64)
    return folder, expected, dict


def window_of_one(folder):
    folder, expected = saved(folder, "gpt_oss", sliding_window=1)
    return folder, expected, dict


SPELLINGS = {
    "kimi_k2": kimi_k2,
    "kimi_k2-inside": nested("language_model.", "kimi_k25"),
    "text_config-model.language_model": nested("model.language_model.", "some_vl_moe"),
    "deepseek_v2-rope_scaling": deepseek_v2_as_published,
    "gpt_oss-rope_scaling": gpt_oss_as_published,
    "llama3-rope_scaling": llama3_as_published,
    "glm4_moe-partial_rotary_factor": partial_rotary_beside,
    "window-longer": window_longer_than_prompts,
    "window-equal": window_as_long_as_a_prompt,
    "window-page": window_of_a_page,
    "window-one": window_of_one,
}


@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_spelling(tmp_path, spelling):
    folder, expected, change, *rename = SPELLINGS[spelling](tmp_path / "model")
    check(probe(respelled(folder, change, *rename), PROMPTS, VOCAB), expected, BOUND)


def test_groups_limit_the_choice():
    """Group-limited routing of V2 and V3 is not what plain routing would choose: their tests see the difference."""
    for key in ("deepseek_v2", "deepseek_v3"):
        limited = tiny_models.logits(tiny_models.build(key), PROMPTS)
        free = tiny_models.logits(tiny_models.build(key, n_group=1, topk_group=1), PROMPTS)
        assert differences(free, limited).max() > 10 * BOUND, key
