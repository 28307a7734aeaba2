"""Whole models with a GPU beside the CPU, on the test driver: every family's logits against transformers, the program's
answers, and what it says where there is no GPU that could be used.

KT_TEST_CUDA names the folder with the driver's libcuda.so.1, KT_MODEL_PROBE the program model_probe.
"""

import functools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import logits as probes
from logits import check, prompt

CUDA = os.environ.get("KT_TEST_CUDA", "")
KT = os.environ.get("KT_PROGRAM", "")
DEMO = pathlib.Path(__file__).parent.parent / "demo" / "tiny-deepseekv3"
FULL = os.environ.get("KT_TEST_FULL") == "1"
pytestmark = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists() or not probes.PROBE,
                                reason="KT_TEST_CUDA or KT_MODEL_PROBE is not there")

# As model_logits_test.py: activations are float32 on both sides.
BOUND = 1e-4
LENGTHS = [1, 7, 130]


def with_gpu(**more):
    return dict(os.environ, LD_LIBRARY_PATH=CUDA + ":" + os.environ.get("LD_LIBRARY_PATH", ""), **more)


def probe(folder, sequences, vocabulary, *options, seed="1"):
    before = dict(os.environ)
    os.environ.update(with_gpu(KT_TEST_CUDA_SEED=seed))
    try:
        return probes.probe(folder, sequences, vocabulary, "--gpu", "0", *options)
    finally:
        os.environ.clear()
        os.environ.update(before)


class TestFamilies:
    """f32 on both sides; weights as transformers wrote them."""

    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory):
        pytest.importorskip("torch", reason="torch is not installed")
        pytest.importorskip("transformers", reason="transformers is not installed")
        return tmp_path_factory.mktemp("models")

    @staticmethod
    @functools.cache
    def model(root, key):
        import torch

        import tiny_models
        model = tiny_models.build(key, torch.float32)
        prompts = [prompt(tokens, tiny_models.VOCAB) for tokens in LENGTHS]
        expected = [tiny_models.logits(model, [ids]) for ids in prompts]
        return tiny_models.save(model, root / key, torch.float32), prompts, expected, tiny_models.VOCAB

    def keys():
        try:
            import tiny_models
            return [key for key in tiny_models.MODELS if key not in tiny_models.HOST_ONLY]
        except ImportError:
            return ["none"]

    @pytest.mark.parametrize("key", keys())
    def test_logits(self, root, key):
        folder, prompts, expected, vocabulary = self.model(root, key)
        order = [2, 0, 1, 1]
        ours = probe(folder, [prompts[i] for i in order], vocabulary, "--chunk", "67")
        check(ours, np.concatenate([expected[i] for i in order]), BOUND)

    @pytest.mark.parametrize("key", [key for key in keys() if FULL or "-" not in key])
    def test_one_token_at_a_time_and_any_order_of_threads_give_the_same_bits(self, root, key):
        folder, prompts, expected, vocabulary = self.model(root, key)
        whole = probe(folder, [prompts[1]], vocabulary)
        check(whole, expected[1], BOUND)
        assert (probe(folder, [prompts[1]], vocabulary, "--chunk", "1", seed="5") == whole).all()

    # Dense models have no experts that could be copied.
    @pytest.mark.parametrize("hot", ["2", "1"] if FULL else ["2"])
    @pytest.mark.parametrize("key",
                             [key for key in keys() if FULL or ("-" not in key and key not in ("llama", "qwen3"))])
    def test_some_and_all_experts_on_the_gpu(self, root, key, hot):
        folder, prompts, expected, vocabulary = self.model(root, key)
        order = [1, 0, 1, 1]
        ours = probe(folder, [prompts[i] for i in order], vocabulary, "--hot", hot)  # one step of 22 tokens
        check(ours, np.concatenate([expected[i] for i in order]), BOUND)


    # A prompt's products run on matrix units, whose operands are bf16. Medians, because a token whose experts are
    # chosen by a hair takes others.
    @pytest.mark.parametrize("key",
                             [key for key in keys() if FULL or key in ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama")])
    def test_bf16_is_as_near_as_transformers_own(self, root, key):
        import torch

        import tiny_models
        model = tiny_models.build(key, torch.bfloat16)
        ids = prompt(130, tiny_models.VOCAB)
        exact = tiny_models.logits(model, [ids])
        folder = tiny_models.save(model, root / (key + "-bf16"), torch.bfloat16)
        theirs = tiny_models.logits(model.to(torch.bfloat16), [ids])
        ours = probe(folder, [ids], tiny_models.VOCAB, "--acts", "bf16")
        alone = probe(folder, [ids], tiny_models.VOCAB)
        assert not (ours == alone).all()
        # Experts that pass through the GPU, an expert at a time, beside one that is there.
        passed = [probe(folder, [ids], tiny_models.VOCAB, "--acts", "bf16", "--stream", "65", *more)
                  for more in ((), ("--hot", "1"))]
        if key != "llama":
            assert not (passed[0] == ours).all()
        for got in (ours, *passed):
            assert np.median(probes.differences(got, exact)) <= 2 * np.median(probes.differences(theirs, exact))


class TestDemo:
    IDS = [[(i * 37 + 11) % 200 + 5 for i in range(70)], [(i * 13 + 7) % 150 + 9 for i in range(33)]]

    @pytest.mark.parametrize("options,bound", [
        ([], 2e-5),
        (["--kv", "bf16"], 0.01),
        (["--kv", "int8"], 0.01),
        (["--linear-format", "int8"], 2e-5),
        (["--linear-format", "int4_g32"], 2e-5),
        (["--linear-format", "q8_0"], 2e-5),
        (["--linear-format", "mxfp4"], 2e-5),
        (["--format", "int4", "--shards", "2"], 2e-5),
        (["--hot", "1"], 2e-5),
        (["--hot", "3", "--shards", "2"], 2e-5),
        (["--hot", "1", "--format", "int4"], 2e-5),
        (["--hot", "2", "--format", "q4_0"], 2e-5),
    ])
    def test_the_cpu_alone_says_the_same(self, options, bound):
        ours = probe(DEMO, self.IDS, 4096, "--chunk", "16", *options)
        alone = options[2:] if "--hot" in options else options
        theirs = probes.probe(DEMO, self.IDS, 4096, *alone)
        if "--kv" in options:  # the CPU rounds queries and weights of values too
            probes.check_but_for_ties(ours, theirs, bound)
        else:
            check(ours, theirs, bound)

    def test_experts_on_both_sides_give_the_same_bits_in_any_company(self):
        ids = [self.IDS[0][:9], self.IDS[1][:4]]
        together = probe(DEMO, ids, 4096, "--hot", "2")
        assert (probe(DEMO, ids, 4096, "--hot", "2", "--chunk", "1", seed="7") == together).all()


def kt(*words, **environment):
    return subprocess.run([KT, *words], capture_output=True, text=True,
                          env=with_gpu(KT_LANG="en", **environment), timeout=300)


@pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name kt")
class TestProgram:
    ASK = ("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "24", "--acts", "f32")
    GPU = ("--gpu", "--gpu-experts", "0")  # gpu_placement_test.py has experts there

    def test_generate(self):
        plain, gpu = kt(*self.ASK, "--gpu", "off"), kt(*self.ASK, *self.GPU)
        assert gpu.returncode == 0, gpu.stderr
        assert gpu.stdout == plain.stdout and len(plain.stdout) > 40
        assert (gpu.stderr == "kt: note: GPU 0 (test driver): attention, dense parts and the cache; the CPU: "
                              "routed experts\n")
        assert plain.stderr == ""

    def test_perplexity(self, tmp_path):
        text = tmp_path / "text"
        text.write_text("Once upon a time there was a little fox who lived at the edge of a dark wood. " * 3)
        words = ("perplexity", str(DEMO), "--file", str(text), "--acts", "f32", "--json")
        plain, gpu = kt(*words), kt(*words, *self.GPU)
        assert gpu.returncode == 0, gpu.stderr
        import json
        assert abs(json.loads(gpu.stdout)["perplexity"] / json.loads(plain.stdout)["perplexity"] - 1) < 1e-4

    def test_the_plan_names_both_places(self):
        for words in (("estimate", str(DEMO)), ("run", str(DEMO), "--dry-run")):
            done = kt(*words, "--gpu")
            assert done.returncode == 0, done.stderr
            assert "\nGPU 0 (test driver): " in done.stdout and " available: fits\n" in done.stdout
            assert "no GPU is used" not in done.stdout
            parts = [line.split("  ", 1)[0].strip() for line in done.stdout.splitlines()]
            assert parts.count("dense weights") == 0 and parts.count("dense parts") == parts.count("in all") == 1
        import json
        plan = json.loads(kt("estimate", str(DEMO), "--gpu", "--json").stdout)
        alone = json.loads(kt("estimate", str(DEMO), "--gpu", "off", "--json").stdout)
        assert "gpu" not in alone and plan["fits"]
        assert plan["gpu"]["kv_cache"] == alone["bytes"]["kv_cache"] and plan["bytes"]["kv_cache"] == 0
        assert plan["bytes"]["experts"] == alone["bytes"]["experts"]

    def test_a_server_cuts_its_cache_to_what_the_card_has(self):
        import json
        words = ("run", str(DEMO), "--dry-run", "--json", "--gpu")
        roomy, tight = json.loads(kt(*words).stdout), json.loads(kt(*words, KT_TEST_CUDA_MEMORY="40000000").stdout)
        assert tight["gpu"]["kv_cache"] < roomy["gpu"]["kv_cache"] and tight["gpu"]["fits"]

    @pytest.mark.parametrize("words,environment,code,line", [
        (("--gpu", "3"), {}, 4, "kt: GPU 3: there is 1, numbered from 0"),
        (("--gpu",), {"KT_TEST_CUDA_CAPABILITY": "75"}, 4,
         "kt: GPU 0 (test driver): compute capability 7.5, needed is 8.0 or newer (Ampere, 2020)"),
        (("--gpu",), {"KT_TEST_CUDA_FAIL": "cuInit=100"}, 4, "kt: no GPU: no CUDA device"),
        (("--gpu",), {"KT_TEST_CUDA_FAIL": "cuDevicePrimaryCtxRetain=2"}, 3,
         "kt: GPU 0 (test driver): CUDA cannot open a device: CUDA_ERROR_OUT_OF_MEMORY"),
        (("--gpu",), {"KT_TEST_CUDA_MEMORY": "1000000"}, 3, "kt: GPU 0 (test driver): 2"),
        (("--gpu",), {"KT_TEST_CUDA_FAIL": "cuMemAlloc_v2=2"}, 3, "kt: GPU 0 (test driver): "),
        (GPU, {"KT_TEST_CUDA_FAIL": "cuModuleLoadData=218"}, 5, "kt: GPU 0 (test driver): CUDA cannot compile "),
        (GPU, {"KT_CUDA_PTX": "/nowhere"}, 2, "kt: /nowhere/"),
        (("--gpu", "fast"), {}, 2,
         "kt: --gpu: expected the number of a device, or several as 0,1, auto or off, got fast"),
    ])
    def test_what_cannot_be_is_said(self, words, environment, code, line):
        done = kt(*self.ASK, *words, **environment)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.startswith(line) or line in done.stderr.splitlines()[-1], done.stderr

    def test_auto_goes_on_without_one_and_says_why(self):
        plain = kt(*self.ASK, "--gpu", "off")
        for environment, why in [({"KT_TEST_CUDA_CAPABILITY": "75"}, "compute capability 7.5"),
                                 ({"KT_TEST_CUDA_MEMORY": "1000000"}, "needed without any expert")]:
            done = kt(*self.ASK, "--gpu", "auto", **environment)
            assert done.returncode == 0 and done.stdout == plain.stdout
            assert done.stderr.startswith("kt: note: everything runs on the CPU: ") and why in done.stderr

    def test_routing_in_place_of_the_routers_is_the_same_on_both_sides(self):
        import json
        words = ("bench", str(DEMO), "--prompt", "40", "--batch", "2", "--tokens", "6", "--repeat", "1",
                 "--routing", "zipf:1", "--json")
        plain, gpu = (json.loads(kt(*words, *more).stdout)["points"][0]
                      for more in (("--gpu", "off"), ("--gpu", "--gpu-experts", "30%")))
        for name in ("distinct_experts", "busiest_share"):
            for phase in ("prefill", "decode"):
                assert plain[f"{phase}_{name}"] == gpu[f"{phase}_{name}"]

    def test_what_a_server_says_of_it(self):
        import json
        import urllib.request

        from server_process import Server
        with Server(DEMO, "--gpu", "0", "--gpu-experts", "50%", env=with_gpu()) as server:
            def read(path, body=None):
                request = urllib.request.Request(server.url + path, data=body and json.dumps(body).encode(),
                                                 headers={"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return reply.read().decode()

            read("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0})
            said = json.loads(read("/kt/status"))["gpu"]
            assert said["name"] == "GPU 0 (test driver)" and 0 < said["free"] < said["memory"]
            assert 0 < said["held"] <= said["memory"] - said["free"]  # nobody else has some, and it comes in pages
            assert said["held"] > 0.99 * (said["memory"] - said["free"]) - (1 << 20)
            assert (0.2 < said["experts_share"] < 0.8 and 0 < said["waited_s"] < said["steps_s"]
                    and 0 < said["waited_for_s"] < said["steps_s"])
            metrics = dict(line.rsplit(" ", 1) for line in read("/metrics").splitlines() if not line.startswith("#"))
            assert float(metrics['kt_gpu_memory_bytes{kind="total"}']) == said["memory"]
            assert float(metrics['kt_gpu_memory_bytes{kind="held"}']) == said["held"]
            assert 0 < float(metrics['kt_gpu_memory_bytes{kind="free"}']) < said["memory"]
            assert float(metrics["kt_gpu_waited_for_seconds_total"]) == pytest.approx(said["waited_for_s"], rel=1e-6)
            assert float(metrics["kt_gpu_wait_seconds_total"]) == pytest.approx(said["waited_s"], rel=1e-6)
            rows = {device: float(metrics[f'kt_expert_calls_total{{device="{device}"}}']) for device in ("cpu", "gpu")}
            assert rows["gpu"] / sum(rows.values()) == pytest.approx(said["experts_share"], rel=1e-6)
            assert float(metrics["kt_expert_hit_rate"]) == pytest.approx(said["experts_share"], rel=1e-3)
        with Server(DEMO, "--gpu", "off", env=with_gpu()) as server:
            assert json.loads(read("/kt/status"))["gpu"] is None and "kt_gpu_memory_bytes" not in read("/metrics")
            assert "kt_gpu_waited_for" not in read("/metrics")

    def test_prompts_of_experts_on_the_gpu(self):
        """Rounded to bf16 there, by another kernel than an answer's."""
        import json
        words = ("perplexity", str(DEMO), "--file", str(DEMO.parent / "stories.txt"), "--context", "96",
                 "--max-tokens", "380", "--json")
        plain = json.loads(kt(*words, "--acts", "f32", "--gpu", "off").stdout)
        for more in (("--gpu", "--gpu-experts", "0"), ("--gpu", "--gpu-experts", "50%"), ("--gpu",),
                     ("--gpu", "--gpu-experts", "0", "--gpu-prefill-threshold", "65"),
                     ("--gpu", "--gpu-experts", "3", "--kt-gpu-prefill-token-threshold", "65")):
            done = kt(*words, *more)
            assert json.loads(done.stdout)["perplexity"] == pytest.approx(plain["perplexity"], rel=4e-3), done.stderr

    def test_microbench(self):
        import json
        done = kt("microbench", "gpu", "--memory", "2MiB", "--outputs", "256", "--inputs", "256", "--tokens", "1,20",
                  "--context", "130", "--format", "bf16,q4_k", "--seconds", "0.01", "--json")
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert min(figures[name]
                   for name in ("copy_gb_per_s", "to_gpu_gb_per_s", "to_host_gb_per_s", "bf16_tflops")) > 0
        assert [(row["what"], row["of"]) for row in figures["rows"]] == [
            ("product", "bf16"), ("product", "bf16"), ("product", "q4_k"), ("product", "q4_k"),
            ("attention", "grouped"), ("attention", "latent")]
        assert all(row["us"] > 0 and row["fraction_of_limit"] > 0 for row in figures["rows"])

    def test_a_gpu_that_is_lost_ends_the_run_with_its_name(self):
        for entry in ("cuLaunchKernel", "cuMemcpyAsync", "cuStreamSynchronize"):
            done = kt(*self.ASK, *self.GPU, KT_TEST_CUDA_FAIL=entry + "=700")
            assert done.returncode == 5 and done.stdout == ""
            assert "GPU 0 (test driver): CUDA cannot" in done.stderr and "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stderr


@pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name kt")
class TestLostGpu:
    """Every call of the driver from the n-th on finds the device lost."""

    ASK = ("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "6", "--gpu", "0")
    LOST = "CUDA_ERROR_LAUNCH_FAILED (unspecified launch failure)"

    @pytest.fixture(scope="class")
    @classmethod
    def enough(cls):
        """So many calls that an answer ends before, and half of them do not suffice."""
        calls = 500
        while kt(*cls.ASK, KT_TEST_CUDA_LOST=str(calls)).returncode != 0:
            calls *= 2
        return calls

    def test_one_line_names_it_whenever_it_happens(self, enough):
        lost = 0
        for calls in sorted({0, 1, 7, 40, 200, enough // 8, enough // 4, enough // 2 - 1}):
            done = kt(*self.ASK, KT_TEST_CUDA_LOST=str(calls))
            if calls > 200 and done.returncode == 0:
                continue  # who waits asks the driver again and again: a run that waited less makes fewer calls
            assert done.returncode == 5, (calls, done.stderr)
            last = done.stderr.splitlines()[-1]
            assert "GPU 0" in last and self.LOST in last, done.stderr
            assert len(done.stderr.splitlines()) <= 3, done.stderr
            lost += 1
        assert lost >= 5

    @pytest.mark.parametrize("entry,every", [("cuMemAlloc_v2", 1 if FULL else 23), ("cuMemHostAlloc", 1)])
    def test_memory_that_runs_out_at_any_allocation(self, entry, every):
        """Of loading and of the steps: one line that names what needed it."""
        refused, calls = 0, 0
        while (done := kt(*self.ASK, KT_TEST_CUDA_FAIL=f"{entry}=2@{calls}")).returncode != 0:
            last = done.stderr.splitlines()[-1]
            assert done.returncode == 3 and "GPU 0 (test driver): " in last and "memory" in last, (calls, done.stderr)
            assert len(done.stderr.splitlines()) <= 2, done.stderr
            refused, calls = refused + 1, calls + every
        assert refused >= (4 if entry == "cuMemHostAlloc" else 8)

    def test_a_server_says_why_and_stops(self, enough):
        import json
        import urllib.error
        import urllib.request

        from server_process import Server
        with Server(DEMO, "--gpu", "0", env=with_gpu(KT_TEST_CUDA_LOST=str(2 * enough))) as server:
            def ask(path, body=None):
                request = urllib.request.Request(server.url + path, data=json.dumps(body).encode() if body else None,
                                                 headers={"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=60) as reply:
                        return reply.status, reply.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            assert ask("/health")[0] == 200
            status, answer = 200, ""
            for _ in range(200):
                status, answer = ask("/v1/completions",
                                     {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0})
                if status != 200:
                    break
            assert status in (500, 503) and "GPU 0 (test driver)" in answer and self.LOST in answer
            try:
                assert ask("/health")[0] == 503
            except OSError:
                pass  # it has stopped already
            assert server.process.wait(timeout=30) == 5
            assert self.LOST in server.said().splitlines()[-1]
