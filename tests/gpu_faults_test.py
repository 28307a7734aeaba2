"""GPUs that are not what most are, and what goes wrong beside one, on the test driver: a slice, a screen, an old
driver, calls that fail, weights that make no numbers.

KT_TEST_CUDA names the folder with the driver's libcuda.so.1, KT_PROGRAM the program."""
import json
import pathlib
import sys
import urllib.error
import urllib.request

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gpu_model_test import CUDA, DEMO, FULL, KT, kt, with_gpu

pytestmark = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists() or not KT,
                                reason="KT_TEST_CUDA or KT_PROGRAM is not there")

ASK = ("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "6", "--acts", "f32", "--gpu")


@pytest.fixture(scope="module")
def answer():
    done = kt(*ASK)
    assert done.returncode == 0 and done.stdout, done.stderr
    return done.stdout


def test_a_screen_is_said_once(answer):
    done = kt(*ASK, KT_TEST_CUDA_SCREEN="1")
    assert done.returncode == 0 and done.stdout == answer
    assert done.stderr.count("GPU 0 shows a screen") == 1 and done.stderr.count("kt: note: ") == 2, done.stderr
    assert "screen" not in kt(*ASK).stderr


def test_a_slice_has_its_own_memory(answer):
    done = kt(*ASK, KT_TEST_CUDA_MIG="1")
    assert done.returncode == 0 and done.stdout == answer
    assert "GPU 0 (test driver MIG 1g.1gb): attention, dense parts" in done.stderr
    plan = json.loads(kt("estimate", str(DEMO), "--bandwidth", "9", "--gpu", "--json", KT_TEST_CUDA_MIG="1").stdout)
    assert plan["gpu"]["fits"] and plan["gpu"]["free"] <= 1 << 30
    for words, code, line in ((("--gpu-memory", "2GiB"), 3, "--gpu-memory is 2.0 GiB, 1.0 GiB are free"),
                              (("1",), 4, "kt: GPU 1: there is 1, numbered from 0")):
        done = kt(*ASK[:-1], "--gpu", *words, KT_TEST_CUDA_MIG="1")
        assert (done.returncode, done.stdout) == (code, "") and line in done.stderr, done.stderr


def test_an_old_driver_is_told_what_is_needed():
    line = "GPU 0: the driver speaks CUDA 11.8, needed is 12.0 (driver 525 or newer)"
    done = kt(*ASK, KT_TEST_CUDA_VERSION="11080")
    assert (done.returncode, done.stdout, done.stderr) == (4, "", f"kt: {line}\n")
    done = kt(*ASK, "auto", KT_TEST_CUDA_VERSION="11080")
    assert done.returncode == 0 and done.stderr == f"kt: note: everything runs on the CPU: {line}\n"


# Whose failure ends a run; of what is given back or asked again a failure may do no harm.
ENTRIES = ["cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceTotalMem_v2",
           "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemGetInfo_v2", "cuMemAlloc_v2", "cuMemHostAlloc",
           "cuStreamCreate", "cuStreamSynchronize", "cuMemcpyAsync", "cuModuleLoadData", "cuModuleGetFunction",
           "cuLaunchKernel", "cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags",
           "cuGraphLaunch"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_any_call_that_fails_is_one_line(entry):
    """The first of them, and one later: an answer, or a line with CUDA's own words and no part of an answer."""
    for call in (0, 3, 17) if FULL else (0,):
        done = kt(*ASK, KT_TEST_CUDA_FAIL=f"{entry}=1@{call}")
        if call > 0 and done.returncode == 0:
            continue
        assert done.returncode in (4, 5), (call, done.stderr)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("kt: ") and "CUDA_ERROR_INVALID_VALUE" in last, done.stderr


def ask(server, prompt, tokens):
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, json.loads(reply.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_row_that_cannot_be_read_ends_its_step_alone(tmp_path):
    """An error of the CPU inside a step of the GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    import shutil

    from generate_test import load_shards, save_shards
    from server_process import Server
    copy = pathlib.Path(shutil.copytree(DEMO, tmp_path / "copy"))
    ids = {name: tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids
           for name, text in (("good", "Once upon a time"), ("bad", "The little dog ran"))}
    with Server(DEMO, "--gpu", "0", "--acts", "f32", env=with_gpu()) as server:
        status, expected = ask(server, "Once upon a time", 4)
        assert status == 200
    tensors = load_shards(copy)
    only = next(token for token in reversed(ids["bad"]) if token not in ids["good"])
    tensors["model.embed_tokens.weight"][only] = torch.nan
    save_shards(copy, tensors)
    with Server(copy, "--gpu", "0", "--acts", "f32", env=with_gpu()) as server:
        for _ in range(2):
            status, line = ask(server, "The little dog ran", 4)
            assert status >= 400 and "not a finite number" in line
            assert ask(server, "Once upon a time", 4) == (200, expected)
        with urllib.request.urlopen(server.url + "/health", timeout=60) as reply:
            assert reply.status == 200


class TestDoctor:
    def gpu(self, *words, **environment):
        done = kt("doctor", "--json", *words, **environment)
        found = json.loads(done.stdout)
        finding, = (one for one in found["findings"] if one["topic"] == "gpu")
        assert bool(finding["cost"]) == bool(finding["fix"]) == (finding["level"] != "ok"), finding
        return finding, found["cuda"]["gpus"][0]

    def test_it_is_tried(self):
        finding, facts = self.gpu()
        assert finding["level"] == "ok" and "; tried: page-locked memory is copied at " in finding["found"]
        assert facts["kt_gpu"] and facts["tried"]["to_gpu_bytes_per_s"] > 0 and facts["tried"]["difference"] < 1e-6
        assert 0 < facts["free_bytes"] <= facts["total_bytes"] == 8 << 30

    def test_what_fails_is_said_with_what_helps(self):
        finding, facts = self.gpu(KT_TEST_CUDA_FAIL="cuMemHostAlloc=2")
        assert finding["level"] == "warning" and "CUDA cannot lock" in finding["cost"] and not facts["kt_gpu"]
        assert "docker run --memory" in finding["fix"]

    def test_what_is_seen_without_trying(self):
        finding, facts = self.gpu("--quick")
        assert finding["level"] == "ok" and facts["tried"] is None and "tried" not in finding["found"]
        finding, facts = self.gpu("--quick", KT_TEST_CUDA_SCREEN="1")
        assert finding["level"] == "warning" and "shows a screen" in finding["cost"] and facts["screen"]
        finding, facts = self.gpu("--quick", KT_TEST_CUDA_MIG="1")
        assert finding["level"] == "ok" and "a slice (MIG) of 1 multiprocessors" in finding["found"] and facts["slice"]
        for environment in ({"KT_TEST_CUDA_CAPABILITY": "75"}, {"KT_TEST_CUDA_VERSION": "11080"}):
            finding, facts = self.gpu("--quick", **environment)
            assert finding["level"] == "warning" and not facts["kt_gpu"]
