"""examples/ run as their first lines say; examples/embed has a test of its own. KT_PROGRAM names kt. The layer runs in
the Python that install.sh put the package into (KT_INSTALLED), else in this one where it finds kt_kernel."""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, kt_ok
from server_process import Server

EXAMPLES = ROOT / "examples"
DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_a_session_in_curl():
    with Server(DEMO) as server:
        done = subprocess.run([EXAMPLES / "curl" / "session.sh", server.url], capture_output=True, text=True,
                              timeout=600)
        assert done.returncode == 0, done.stderr
    parts = re.split(r"^== .*\n", done.stdout, flags=re.M)[1:]
    assert len(parts) == 7 == (EXAMPLES / "curl" / "session.sh").read_text().count('echo "==')
    models, message, stream, shaped, plain, ids, counted = parts
    assert len(json.loads(models)["data"]) == 1
    said = json.loads(message)["choices"][0]["message"]["content"]
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert said.startswith("".join(pieces)) and len(pieces) > 2
    assert json.loads(json.loads(shaped)["choices"][0]["message"]["content"])["legs"] in (2, 4)
    assert json.loads(plain)["usage"]["completion_tokens"] == 8
    assert json.loads(ids)["tokens"]
    assert len(counted.splitlines()) == 5 and "kt" in counted


def python_with_the_package():
    if installed := os.environ.get("KT_INSTALLED"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return pathlib.Path(installed, "python/bin/python"), env
    if not importlib.util.find_spec("kt_kernel"):
        pytest.skip("KT_INSTALLED names no folder, and PYTHONPATH none with kt_kernel")
    return sys.executable, os.environ


def test_a_layer_from_the_wheel(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    python, env = python_with_the_package()
    kt_ok("quant", DEMO, "-o", tmp_path / "demo-int8", "--method", "int8")
    done = subprocess.run([python, EXAMPLES / "python" / "layer.py", tmp_path / "demo-int8", DEMO],
                          capture_output=True, text=True, cwd=tmp_path, env=env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"5 tokens, 16 experts in int8: cosine (1\.0000|0\.999\d)\d from plain torch in f32\n",
                        done.stdout), done.stdout


def test_a_recipe(tmp_path):
    """Its plan; sft_story_test.py trains with demo/sft.yaml, which has the same keys."""
    recipe = EXAMPLES / "training" / "recipe.yaml"
    env = {**os.environ, "KT_HOME": str(tmp_path / "home"), "KT_DEMO_MODEL": str(DEMO)}
    plan = json.loads(kt_ok("sft", "train", recipe, "--dry-run", "--json", cwd=tmp_path, env=env).stdout)
    assert "int4" in json.dumps(plan).lower() and not (tmp_path / "saves").exists()
    done = kt_ok("sft", "eval", recipe, "--dry-run", cwd=tmp_path, env=env)
    assert re.search(r"^rows +40 of .*style_pirate.jsonl, held back by val_size$", done.stdout, re.M), done.stdout
    assert "longer than cutoff_len" not in done.stderr
