"""One model in several places: layers on GPUs, each with a context of its own, and on the CPU, on the test driver with
several devices.

KT_TEST_CUDA names the folder with the driver's libcuda.so.1, KT_MODEL_PROBE the program model_probe, KT_PROGRAM kt."""

import functools
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import logits as probes
from gpu_model_test import CUDA, DEMO, FULL, with_gpu
from logits import check, prompt

pytestmark = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists() or not probes.PROBE,
                                reason="KT_TEST_CUDA or KT_MODEL_PROBE is not there")

BOUND = 1e-4
VOCABULARY = 4096  # of the demo, which has six layers, the first of them dense


def probe(folder, sequences, vocabulary, *options, **environment):
    before = dict(os.environ)
    os.environ.update(with_gpu(KT_TEST_CUDA_DEVICES="3", **environment))
    try:
        return probes.probe(folder, sequences, vocabulary, *options)
    finally:
        os.environ.clear()
        os.environ.update(before)


class TestBits:
    """The same arithmetic in another place gives the same bits."""

    # Prompts that go in pieces, and answers of several pages' end.
    LONG = ((tuple((i * 37 + 11) % 200 + 5 for i in range(70)), tuple((i * 13 + 7) % 150 + 9 for i in range(33))),
            ("--chunk", "24"))
    SHORT = ((LONG[0][0][:7], LONG[0][1][:4]), ("--chunk", "1"))  # steps that are replayed

    @staticmethod
    @functools.cache
    def logits(ids, *options, **environment):
        return probe(DEMO, ids, VOCABULARY, *options, **environment)

    @pytest.mark.parametrize("split,case,options", [
        ("0=3,1=3", SHORT, ("--hot", "2")),
        ("0=1,1=2,2=3", LONG, ()),
        ("0=1,1=2,2=3", SHORT, ()),
        ("0=3,0=3", SHORT, ("--kv", "int8")),
        ("0=6,1=0", SHORT, ()),
        *((("0=3,1=3", LONG, ("--acts", "default", "--hot", "1")), ("0=2,0=4", LONG, ("--hot", "3"))) if FULL else ())
    ])
    def test_layers_on_gpus(self, split, case, options):
        ids, cut = case
        assert (self.logits(ids, *cut, *options, "--split", split)
                == self.logits(ids, *cut, *options, "--gpu", "0")).all()

    @pytest.mark.parametrize("split", ["cpu=3,cpu=3", "cpu=1,cpu=1,cpu=4,cpu=0"])
    @pytest.mark.parametrize("options", [(), ("--acts", "default")])
    def test_layers_on_the_cpu(self, split, options):
        for ids, cut in (self.LONG, self.SHORT):
            assert (self.logits(ids, *cut, *options, "--split", split) == self.logits(ids, *cut, *options)).all()

    @pytest.mark.parametrize("split", ["cpu=2,0=4", "0=2,cpu=2,1=2", "cpu=1,0=4,cpu=1", "0=6,cpu=0"])
    def test_both(self, split):
        for ids, cut in (self.LONG, self.SHORT) if FULL or split.startswith("0=2") else (self.SHORT,):
            check(self.logits(ids, *cut, "--hot", "2", "--split", split), self.logits(ids, *cut), 2e-5)

    def test_replayed_steps_and_launched_ones_give_the_same(self):
        ids, cut = self.SHORT
        words = (*cut, "--split", "0=2,cpu=2,1=2", "--hot", "2")
        assert (self.logits(ids, *words)
                == self.logits(ids, *words, KT_CUDA_GRAPHS="0", KT_TEST_CUDA_SEED="9")).all()


class TestFamilies:
    """Against transformers: layers of a tiny model before, between and behind the GPU's."""

    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory):
        pytest.importorskip("torch", reason="torch is not installed")
        pytest.importorskip("transformers", reason="transformers is not installed")
        return tmp_path_factory.mktemp("models")

    def keys():
        try:
            import tiny_models
            return [key for key in tiny_models.MODELS if FULL or "-" not in key]
        except ImportError:
            return ["none"]

    @pytest.mark.parametrize("key", keys())
    def test_logits(self, root, key):
        import json

        import tiny_models
        import torch
        model = tiny_models.build(key, torch.float32)
        prompts = [prompt(tokens, tiny_models.VOCAB) for tokens in (1, 7, 130)]
        expected = np.concatenate([tiny_models.logits(model, [ids]) for ids in prompts])
        folder = tiny_models.save(model, root / key, torch.float32)
        config = json.loads((folder / "config.json").read_text())
        layers = config.get("text_config", config)["num_hidden_layers"]
        rest = layers - 2 if layers > 2 else 0
        host_only = key in tiny_models.HOST_ONLY
        split = f"cpu=1,cpu={layers - 1}" if host_only else f"0=1,cpu=1,1={rest}"
        check(probe(folder, prompts, tiny_models.VOCAB, "--split", split, "--chunk", "67"), expected, BOUND)
