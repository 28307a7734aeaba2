"""Files that are none: a FIFO, a device or a socket where kt expects a file is refused with one line, and never waited
for. KT_PROGRAM names kt."""
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, kt_ok, refused

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = ROOT / "demo" / "tiny-deepseekv3"
SHARD = "model-00002-of-00002.safetensors"


def kt(*args):
    """Well before a FIFO's other end comes: nobody opens it."""
    return subprocess.run([KT, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path):
    return pathlib.Path(shutil.copytree(DEMO, tmp_path / "model"))


def fifo(path):
    pathlib.Path(path).unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", SHARD, "tokenizer.json",
                                  "tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_fifo_in_a_model(model, name):
    refused(kt("generate", fifo(model / name).parent, "-p", "a", "--max-tokens", "1"), 2, model / name, "a FIFO")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", SHARD])
@pytest.mark.parametrize("verb", ["quant", "quant dequant", "quant compare"])
def test_a_fifo_in_a_source(model, tmp_path, verb, name):
    more = [DEMO] if verb == "quant compare" else ["-o", tmp_path / "out"]
    refused(kt(*verb.split(), fifo(model / name).parent, *more), 2, model / name, "a FIFO")


def test_a_fifo_for_a_gguf_file(tmp_path):
    for name in ("m.gguf", "m-00001-of-00001.gguf"):
        path = fifo(tmp_path / name)
        refused(kt("estimate", path), 2, path, "a FIFO")


def test_a_fifo_in_weights(model, tmp_path):
    out = tmp_path / "kt"
    kt_ok("quant", DEMO, "-o", out, "--no-merge")
    fifo(out / "kt_weights.json")
    refused(kt("generate", model, "--weights", out, "-p", "a", "--max-tokens", "1"), 2,
            out / "kt_weights.json", "a FIFO")


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_fifo_for_a_text(model, tmp_path, ending):
    path = fifo(tmp_path / f"text.{ending}")
    refused(kt("quant", model, "-o", tmp_path / "out", "--group-size", "32", "--calibrate", path), 2, path, "a FIFO")
    if ending == "txt":
        refused(kt("perplexity", model, "--file", path), 2, path, "a FIFO")
        refused(kt("generate", model, "-f", path), 2, path, "a FIFO")


@pytest.mark.parametrize("name", ["config.yaml", "models.yaml"])
def test_a_fifo_for_settings(home, name):
    home.mkdir()
    path = fifo(home / name)
    for args in {"config.yaml": (["config", "show"], ["config", "set", "server.port", "8080"]),
                 "models.yaml": (["model", "list"], ["model", "add", "fox", DEMO])}[name]:
        refused(kt(*args), 2, path, "a FIFO")


def test_scanning_past_fifos(tmp_path):
    (tmp_path / "in" / "a").mkdir(parents=True)
    shutil.copytree(DEMO, tmp_path / "in" / "good")
    paths = [fifo(tmp_path / "in" / "a" / name) for name in ("x.safetensors", "config.json")]
    paths.append(fifo(tmp_path / "in" / "m.gguf"))
    result = kt("model", "scan", tmp_path / "in")
    assert str(tmp_path / "in" / "good") in result.stdout, result.stderr
    said = result.stdout + result.stderr
    assert "a FIFO" in said and str(paths[2]) in said, said


@pytest.mark.parametrize("path", ["/dev/zero", "fifo", "socket", "folder"])
def test_a_chat_template_that_is_no_file(model, tmp_path, path):
    if path == "fifo":
        path = fifo(tmp_path / "t.jinja")
    elif path == "folder":
        path = tmp_path
    elif path == "socket":
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    refused(kt("run", model, "--chat-template", path, "--dry-run"), 2, "--chat-template", path, "regular file")


def test_a_chat_template_without_end(model, tmp_path):
    path = tmp_path / "t.jinja"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    refused(kt("run", model, "--chat-template", path, "--dry-run"), 2, "--chat-template", path, "16777216")


def test_no_address_space_is_a_lack_of_memory(tmp_path):
    """Mapping is refused with the same words as memory, and so with its exit code."""
    import resource
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    result = subprocess.run([KT, "quant", "compare", path, path], capture_output=True, text=True, timeout=60,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)))
    assert result.returncode == 3, result.stderr
    assert str(path) in error_line(result.stderr)


def test_weights_one_level_down_are_named(model):
    """`kt generate /` took whatever lay there, and said nothing."""
    result = kt("generate", model.parent, "-p", "a", "--max-tokens", "1")
    assert result.returncode == 0, result.stderr
    line, = result.stderr.splitlines()
    assert line.startswith("kt warning: ") and str(model / "model.safetensors.index.json") in line
