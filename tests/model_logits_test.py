"""Logits of every family against transformers, from checkpoints that transformers wrote.

KT_MODEL_PROBE names the program model_probe: `model_probe MODEL --acts f32 [--chunk N]` reads token ids from standard
input, one sequence a line, and writes float32 logits [tokens of all sequences in order, vocabulary]. KT_TEST_DATA,
where it is set, is the folder with the other trained model; KT_TEST_FULL=1 cuts prompts of 700 tokens too.

Weights are float32 or bf16; activations are float32 in both programs, so that only the order of sums differs. Two
experts whose scores are equal to the last digits may still change places; a jump at one position of one model that
another seed (tiny_models.build) does not show is that.
"""

import functools
import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import tiny_models
from logits import PROBE, check, differences, probe, prompt

FULL = os.environ.get("KT_TEST_FULL") == "1"
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_MODEL_PROBE does not name model_probe")

LENGTHS = [1, 7, 130, 700]
LONGEST_CUT = LENGTHS.index(700 if FULL else 130)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# max|a - b| / max|b| of a position. Sums of float32 in another order differ by about 1e-6; the first bound leaves room
# for other exponentials and sines, the second for nothing but other sums.
BOUND, CHUNK_BOUND = 1e-4, 1e-5


@functools.cache
def checkpoint(root, key, dtype):
    """The folder of a tiny model, its prompts, and transformers' logits of each prompt by itself."""
    model = tiny_models.build(key, DTYPES[dtype])
    prompts = [prompt(tokens, tiny_models.VOCAB) for tokens in LENGTHS]
    expected = [tiny_models.logits(model, [ids]) for ids in prompts]
    return tiny_models.save(model, root / key / dtype, DTYPES[dtype]), prompts, expected


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


models = pytest.mark.parametrize("key,dtype", [(key, dtype) for key in tiny_models.MODELS for dtype in DTYPES])


class TestTiny:
    @models
    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_one_prompt(self, root, key, dtype, tokens):
        folder, prompts, expected = checkpoint(root, key, dtype)
        which = LENGTHS.index(tokens)
        check(probe(folder, [prompts[which]], tiny_models.VOCAB), expected[which], BOUND)

    @models
    def test_several_at_once(self, root, key, dtype):
        folder, prompts, expected = checkpoint(root, key, dtype)
        order = [2, 0, 1, 0]
        ours = probe(folder, [prompts[i] for i in order], tiny_models.VOCAB)
        check(ours, np.concatenate([expected[i] for i in order]), BOUND)

    @models
    @pytest.mark.parametrize("chunk", [1, 7, 64] if FULL else [7, 64])
    def test_in_pieces(self, root, key, dtype, chunk):
        folder, prompts, expected = checkpoint(root, key, dtype)
        whole = probe(folder, [prompts[LONGEST_CUT]], tiny_models.VOCAB)
        pieces = probe(folder, [prompts[LONGEST_CUT]], tiny_models.VOCAB, "--chunk", str(chunk))
        check(pieces, whole, CHUNK_BOUND)
        check(pieces, expected[LONGEST_CUT], BOUND)


class TestTestItself:
    """A comparison that cannot fail compares nothing."""

    @pytest.mark.parametrize("key", [key for key in tiny_models.MODELS if FULL or "-" not in key])
    def test_every_weight_is_seen_in_the_logits(self, key):
        model = tiny_models.build(key)
        ids = [prompt(60, tiny_models.VOCAB)]
        before = tiny_models.logits(model, ids)
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or name.endswith("k_proj.bias"):
                continue  # most of what it adds is the same for all keys, which the softmax does not see
            if name == f"model.layers.{model.config.num_hidden_layers - 1}.layer_scalar":
                continue  # the last norm divides by it
            kept = tensor.clone()
            with torch.no_grad():
                tensor.mul_(1.05).add_(0.01 * torch.arange(tensor.numel()).reshape(tensor.shape).remainder(7))
                after = tiny_models.logits(model, ids)
                tensor.copy_(kept)
            assert differences(after, before).max() > 2 * BOUND, f"{name} changes nothing that the bound would see"


STORY = (
    "Once upon a time there was a little fox who lived at the edge of a dark wood. Every morning she went down to the "
    "river to drink, and every morning an old heron told her a story about the sea. One day the heron was not there. "
    "The fox waited until the sun stood high above the trees, then she crossed the water on the stones and followed "
    "the footprints along the bank. "
)


@pytest.fixture(scope="module", params=["tiny-qwen3moe", "tiny-deepseekv3"])
def trained(request):
    folder = checkpoints.trained_model(request.param)
    if folder is None:
        pytest.skip(f"{request.param} (42 MiB) is not in the tree, and KT_TEST_DATA names no folder with it")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(STORY)["input_ids"]
    assert 60 <= len(ids) <= 200
    return folder, ids, tiny_models.logits(model, [ids]), model.config.vocab_size


class TestTrained:
    def test_logits(self, trained):
        folder, ids, expected, vocabulary = trained
        check(probe(folder, [ids], vocabulary), expected, BOUND)

    def test_batch(self, trained):
        folder, ids, expected, vocabulary = trained
        ours = probe(folder, [ids[:1], ids, ids[:40]], vocabulary)
        check(ours, np.concatenate([expected[:1], expected, expected[:40]]), BOUND)

    def test_in_pieces(self, trained):
        folder, ids, expected, vocabulary = trained
        whole = probe(folder, [ids], vocabulary)
        for chunk in (1, 16):
            check(probe(folder, [ids], vocabulary, "--chunk", str(chunk)), whole, CHUNK_BOUND)
