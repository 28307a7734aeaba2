"""One model in several places: layers on GPUs, each with a context of its own, and on the CPU, on the test driver with
several devices.

KT_TEST_CUDA names the folder with the driver's libcuda.so.1, KT_MODEL_PROBE the program model_probe, KT_PROGRAM kt."""

import functools
import json
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import logits as probes
from gpu_model_test import CUDA, DEMO, FULL, KT, kt, with_gpu
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
        import torch

        import tiny_models
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


TWO = {"KT_TEST_CUDA_DEVICES": "2"}
ASK = ("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "12", "--acts", "f32")


@pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name kt")
class TestProgram:
    @staticmethod
    def estimate(*words, **environment):
        done = kt("estimate", str(DEMO), "--bandwidth", "9", "--json", *words, **{**TWO, **environment})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_generate(self):
        plain = kt(*ASK, "--gpu", "off").stdout
        for gpus, where in (("0,1", "GPU 0 (test driver) layers 0-3, GPU 1 (test driver) layers 4-5"),
                            ("0,0", "GPU 0 (test driver) layers 0-3, GPU 0 #2 (test driver) layers 4-5")):
            done = kt(*ASK, "--gpu", gpus, "--gpu-experts", "4", **TWO)
            assert done.returncode == 0 and done.stdout == plain and len(plain) > 20, done.stderr
            assert done.stderr == (f"kt: note: {where}: attention, dense parts, the cache and 20 of 80 routed experts; "
                                   "the CPU: the others, and those of prompts\n")

    def test_layers_by_rules(self):
        plain = kt(*ASK, "--gpu", "off").stdout
        words = ("--place", r"layers\.(0|3)$=cpu", "--place", r"layers\.[12]$=cuda:0",
                 "--place", r"layers\.[45]$=cuda:1", "--place", "lm_head=cpu")
        done = kt(*ASK, *words, "--gpu-experts", "2", **TWO)
        assert done.returncode == 0 and done.stdout == plain, done.stderr
        assert ("GPU 0 (test driver) layers 1-2, GPU 1 (test driver) layers 4-5, the CPU layers 0, 3: " in done.stderr)
        one = kt(*ASK, "--gpu", "0", "--place", r"layers\.2$=cpu")
        assert one.returncode == 0 and one.stdout == plain and "layers 0-1, 3-5, the CPU layers 2" in one.stderr

    def test_the_plan_adds_up_by_device(self):
        plan = self.estimate("--gpu", "0,1", "--gpu-experts", "3")
        gpu = plan["gpu"]
        assert [device["name"] for device in gpu["devices"]] == ["GPU 0 (test driver)", "GPU 1 (test driver)"]
        for key in ("dense", "kv_cache", "workspace", "experts", "driver", "needed", "allowed", "free"):
            assert gpu[key] == sum(device[key] for device in gpu["devices"]) > 0 or key == "driver"
        for number, device in enumerate(gpu["devices"]):
            assert gpu["placement"]["bytes"][f"GPU {number}"] == device["needed"] <= device["allowed"]
        whole = self.estimate("--gpu", "0", "--gpu-experts", "3")
        for key in ("dense", "kv_cache", "experts"):
            assert gpu[key] == whole["gpu"][key]
        assert plan["bytes"]["experts"] == whole["bytes"]["experts"]
        devices = {part["part"]: set() for part in plan["placement"]["parts"]}
        for part in plan["placement"]["parts"]:
            devices[part["part"]].add(part["device"])
        assert devices["attention"] == {"cuda:0", "cuda:1"} and devices["head"] == {"cuda:1"}
        shown = kt("run", str(DEMO), "--dry-run", "--gpu", "0,1", **TWO).stdout
        assert "\nGPU 0 (test driver): " in shown and "\nGPU 1 (test driver): " in shown
        assert "; GPU 0 (test driver), GPU 1 (test driver)\n" in shown

    def test_a_layer_on_the_host_is_planned_there(self):
        plan = self.estimate("--gpu", "0", "--place", r"layers\.2$=cpu")
        whole = self.estimate("--gpu", "0")
        assert plan["gpu"]["kv_cache"] == whole["gpu"]["kv_cache"] * 5 // 6
        assert plan["bytes"]["kv_cache"] == whole["gpu"]["kv_cache"] // 6 and whole["bytes"]["kv_cache"] == 0
        assert plan["bytes"]["dense"] > whole["bytes"]["dense"]

    def test_memory_splits_them(self):
        def layers(memory):
            of = self.estimate("--gpu", "0,1", "--gpu-experts", "0", KT_TEST_CUDA_MEMORY=memory)["gpu"]["placement"]
            return [layer["dense"]["place"] for layer in of["layers"]].count("GPU 0")
        assert layers("4000000000,4000000000") == 4 and layers("4000000000,1000000000") > 4
        assert layers("1000000000,4000000000") < 4

    @pytest.mark.parametrize("words,environment,code,parts", [
        (("--gpu", "0,5"), {}, 4, ["kt: GPU 5: there are 2, numbered from 0"]),
        (("--gpu", "0,1", "--gpu-memory", "9GiB"), {}, 3, ["GPU 0 (test driver): --gpu-memory is 9.0 GiB"]),
        (("--gpu", "0,1"), {"KT_TEST_CUDA_MEMORY": "8000000000,1000000"}, 0, []),
        (("--gpu", "0,1", "--gpu-memory", "12MiB"), {}, 3, [" needed without any expert ", "too much; try "]),
        (("--gpu", "0", "--place", "layers=cuda:1"), {}, 2, ["on cuda:1, and --gpu names 1 device: "]),
        (("--place", "layers=cuda:2"), {}, 4, ["on cuda:2: GPU 2: there are 2, numbered from 0"]),
    ])
    def test_what_cannot_be_is_said(self, words, environment, code, parts):
        done = kt(*ASK, *words, **{**TWO, **environment})
        assert done.returncode == code, done.stderr
        if code:
            assert done.stdout == "" and all(part in done.stderr for part in parts), done.stderr

    def test_a_server_says_all_of_them(self):
        import urllib.request

        from server_process import Server
        with Server(DEMO, "--gpu", "0,1", "--gpu-experts", "2", env=with_gpu(**TWO)) as server:
            def read(path):
                with urllib.request.urlopen(server.url + path, timeout=60) as reply:
                    return reply.read().decode()
            said = json.loads(read("/kt/status"))
            assert said["gpu"]["name"] == "GPU 0 (test driver), GPU 1 (test driver)"
            assert said["gpu"]["memory"] == 2 << 33 and len(said["placement"]["devices"]) == 2
            metrics = read("/metrics")
            assert all(f'kt_gpu_memory_bytes{{gpu="{number}",kind="free"}}' in metrics for number in (0, 1))

    def test_one_of_two_that_is_lost_ends_it(self):
        import urllib.error
        import urllib.request

        from server_process import Server
        calls = 600
        while kt(*ASK, "--gpu", "0,1", KT_TEST_CUDA_LOST=f"{calls}@1", **TWO).returncode != 0:
            calls *= 2
        with Server(DEMO, "--gpu", "0,1", env=with_gpu(KT_TEST_CUDA_LOST=f"{2 * calls}@1", **TWO)) as server:
            def ask():
                body = json.dumps({"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}).encode()
                request = urllib.request.Request(server.url + "/v1/completions", data=body,
                                                 headers={"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=60) as reply:
                        return reply.status, reply.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()
            status, answer = 200, ""
            for _ in range(200):
                status, answer = ask()
                if status != 200:
                    break
            assert status in (500, 503) and "GPU 1 (test driver)" in answer and "CUDA_ERROR_LAUNCH_FAILED" in answer
            assert server.process.wait(timeout=30) == 5
            assert "GPU 1 (test driver)" in server.said().splitlines()[-1]
