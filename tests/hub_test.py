"""Names of models, the hub's cache and downloads, against a hub of our own (hub_server.py): what is fetched is byte for
byte what the hub has, however often kt is killed, and PyPI's huggingface_hub reads what kt stored and the other way
round. No network; KT_PROGRAM names kt."""
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, halting, kt, kt_ok, refused
from hub_server import Hub, Repo, make_certificate
from server_process import Server

DEMO = ROOT / "demo" / "tiny-deepseekv3"
WORDS = ("-p", "Once upon", "--max-tokens", "3")


def has_curl():
    if not KT:
        return False
    done = subprocess.run([KT, "model", "download", "a/b"], capture_output=True, text=True,
                          env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "1"})
    return "libcurl" not in done.stderr


pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
downloads = pytest.mark.skipif(not has_curl(), reason="kt was built without libcurl")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
                 "XDG_CACHE_HOME", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "http_proxy", "https_proxy", "HTTP_PROXY",
                 "HTTPS_PROXY", "ALL_PROXY",
                 "all_proxy", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_DEMO_MODEL", str(DEMO))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    return tmp_path


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.endpoint)
    yield server
    server.close()


def demo_files():
    return {path.name: path.read_bytes() for path in DEMO.iterdir() if path.name != "weights.tar.xz"}


def made(size, seed):
    return random.Random(seed).randbytes(size)


def folder_of(name, kind="models"):
    return pathlib.Path(os.environ["HF_HOME"], "hub", f"{kind}--{name.replace('/', '--')}")


def store(name, files, commit="a" * 40):
    """A snapshot as huggingface_hub leaves one."""
    root = folder_of(name)
    for path, data in files.items():
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = root / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    return root / "snapshots" / commit


def same_files(folder, files):
    found = {str(p.relative_to(folder)): p.read_bytes() for p in pathlib.Path(folder).rglob("*")
             if p.is_file() and ".cache" not in p.relative_to(folder).parts}
    assert found.keys() == files.keys()
    assert all(found[path] == data for path, data in files.items())


def download(*words, code=None, env=None):
    done = subprocess.run([KT, "model", "download", *map(str, words), "--json"], capture_output=True, text=True,
                          env=env, timeout=120)
    if code is None:
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    assert done.returncode == code, (done.returncode, done.stderr)
    return error_line(done.stderr)


# --- names -----------------------------------------------------------------------------------------------------------


class TestNames:
    def test_a_repository_in_the_cache(self):
        store("fox/den", demo_files())
        assert kt_ok("generate", "fox/den", *WORDS).stdout == kt_ok("generate", "demo", *WORDS).stdout
        info = json.loads(kt_ok("model", "info", "fox/den", "--json").stdout)
        assert info["path"].endswith("snapshots/" + "a" * 40)

    def test_a_repository_of_modelscope(self, home):
        for folder in ("models/fox/den-1___5", "fox/den-2"):
            shutil.copytree(DEMO, home / "ms" / folder)
        for name in ("fox/den-1.5", "fox/den-2"):
            kt_ok("estimate", name, "--bandwidth", "10")

    def test_every_verb_takes_one(self, home):
        store("fox/den", demo_files())
        (home / "t.txt").write_text("Once upon a time there was a little fox. " * 8)
        kt_ok("estimate", "fox/den", "--bandwidth", "10")
        kt_ok("quant", "fox/den", "-o", home / "q")
        kt_ok("quant", "gpu", "fox/den", "-o", home / "g", "--method", "RTN")
        kt_ok("bench", "fox/den", "--prompt", "8", "--batch", "1", "--tokens", "2", "--repeat", "1")
        kt_ok("perplexity", "fox/den", "--file", home / "t.txt", "--context", "16", "--kl-against", "fox/den")
        assert json.loads(kt_ok("run", "fox/den", "--dry-run", "--json").stdout)["fits"]
        out = subprocess.run([KT, "chat", "fox/den", "--max-tokens", "2"], input="Once\n",
                             capture_output=True, text=True)
        assert out.returncode == 0, out.stderr

    def test_a_path_wins_over_a_repository(self, home):
        store("fox/den", demo_files())
        (home / "fox" / "den").mkdir(parents=True)
        refused(kt("generate", "fox/den", *WORDS, cwd=home), 2, "fox/den")

    def test_the_registry_comes_before_the_cache(self, home):
        shutil.copytree(DEMO, home / "own")
        kt_ok("model", "add", "mine", home / "own")
        kt_ok("model", "edit", "mine", "--repo", "fox/den")
        assert json.loads(kt_ok("model", "info", "FOX/den", "--json").stdout)["path"] == str(home / "own")
        kt_ok("model", "add", "other", home / "own")
        kt_ok("model", "edit", "other", "--repo", "fox/den")
        refused(kt("model", "info", "fox/den"), 2, "fox/den is 2 registered models: mine, other")

    def test_absent_ones_are_never_fetched_silently(self, hub):
        hub.repos["fox/den"] = Repo(demo_files())
        for verb in (("generate", "fox/den", *WORDS), ("run", "fox/den", "--dry-run"), ("estimate", "fox/den"),
                     ("quant", "fox/den", "-o", "x"), ("model", "info", "fox/den")):
            refused(kt(*verb), 2, "fox/den: no such file or folder", "hf/hub", "kt model download fox/den")
        assert hub.requests == []
        refused(kt("generate", "m2", *WORDS), 2, "MiniMaxAI/MiniMax-M2", "230 GB", "--download")
        assert hub.requests == []

    @pytest.mark.parametrize("alias, repository", [
        ("m2", "MiniMaxAI/MiniMax-M2"), ("M2.1", "MiniMaxAI/MiniMax-M2.1"), ("m2.7", "MiniMaxAI/MiniMax-M2.7"),
        ("k2", "moonshotai/Kimi-K2-Thinking"), ("k2-thinking", "moonshotai/Kimi-K2-Thinking"),
        ("r1", "deepseek-ai/DeepSeek-R1-0528"), ("v3-0324", "deepseek-ai/DeepSeek-V3-0324"),
        ("glm-4.5-air", "zai-org/GLM-4.5-Air"), ("qwen3-30b", "Qwen/Qwen3-30B-A3B"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("k2.5", "moonshotai/Kimi-K2.5"), ("v3.2", "deepseek-ai/DeepSeek-V3.2"),
        ("GLM-4.7-Flash", "zai-org/GLM-4.7-Flash"), ("dots1", "rednote-hilab/dots.llm1.inst"),
        ("hy3", "tencent/Hy3"), ("solar-open", "upstage/Solar-Open-100B"), ("ernie-4.5", "baidu/ERNIE-4.5-21B-A3B-PT"),
        ("mistral-small-4", "mistralai/Mistral-Small-4-119B-2603")])
    def test_aliases(self, alias, repository):
        refused(kt("generate", alias, *WORDS), 2, repository)
        store(repository, demo_files())
        kt_ok("estimate", alias, "--bandwidth", "10")

    @pytest.mark.parametrize("alias", ["m3", "v4"])
    def test_a_family_that_does_not_run_says_so_first(self, hub, alias):
        refused(kt("run", alias, "--download"), 4, "does not run", "nothing was downloaded")
        refused(kt("quant", "gpu", alias, "-o", "x", "--download"), 4, "does not run")  # GPTQ runs the model
        assert hub.requests == []

    def test_a_registered_name_wins_over_an_alias(self, home):
        kt_ok("model", "add", "m2", DEMO)
        kt_ok("model", "add", "k2-small", DEMO)
        kt_ok("estimate", "m2", "--bandwidth", "10")
        refused(kt("estimate", "k2"), 2, "moonshotai/Kimi-K2-Thinking")  # and an alias over a beginning

    def test_what_is_not_whole(self, hub):
        files = demo_files()
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        part = {**{n: d for n, d in files.items() if not n.endswith(".safetensors")},
                "model.safetensors.index.json": json.dumps(index).encode(),
                "model-00001-of-00002.safetensors": b"x" * 64}
        store("fox/part", part)
        refused(kt("generate", "fox/part", *WORDS), 2, "not whole", "model-00002-of-00002.safetensors",
                "kt model download fox/part")
        (folder_of("fox/part") / "blobs" / "abc.incomplete").write_bytes(b"")
        refused(kt("generate", "fox/part", *WORDS), 2, "another program")
        store("fox/words", {n: d for n, d in files.items() if not n.endswith(".safetensors")})
        refused(kt("generate", "fox/words", *WORDS), 2, "kt model download fox/words")  # a tokenizer is no model
        gone = next(store("fox/gone", files).glob("*.safetensors"))
        gone.resolve().unlink()
        refused(kt("generate", "fox/gone", *WORDS), 2, "not whole", gone.name)

    def test_several_models_in_one_repository(self):
        snapshot = store("fox/gguf", {"fox-Q4.gguf": b"GGUF1", "fox-Q8.gguf": b"GGUF2"})
        refused(kt("generate", "fox/gguf", *WORDS), 2, "fox/gguf:fox-Q4.gguf", "fox-Q8.gguf")
        refused(kt("generate", "fox/gguf:fox-Q4.gguf", *WORDS), 2, snapshot / "fox-Q4.gguf")  # found, and no GGUF file
        refused(kt("generate", "fox/gguf:fox-Q5.gguf", *WORDS), 2, "kt model download fox/gguf:fox-Q5.gguf")

    def test_several_snapshots(self):
        store("fox/two", demo_files(), "a" * 40)
        store("fox/two", demo_files(), "b" * 40)
        assert json.loads(kt_ok("model", "info", "fox/two", "--json").stdout)["path"].endswith("b" * 40)
        (folder_of("fox/two") / "refs" / "main").unlink()
        refused(kt("model", "info", "fox/two"), 2, "2 snapshots")

    @pytest.mark.parametrize("reference",
                             ["../x/y", "a/b/c", "a//b", "a/..", "-a/b", "a/b:c.txt", "a/b:../c.gguf", "a/b:/c.gguf"])
    def test_what_is_no_repository(self, hub, reference):
        assert kt("generate", "--download", reference, *WORDS).returncode == 2
        assert hub.requests == []


# --- downloads -------------------------------------------------------------------------------------------------------


@downloads
class TestDownload:
    def test_a_model_runs(self, hub):
        hub.repos["fox/den"] = repo = Repo({**demo_files(), "pytorch_model.bin": b"pickle",
                                            "original/x.safetensors": b"y"})
        out = kt_ok("generate", "fox/den", "--download", *WORDS)
        assert out.stdout == kt_ok("generate", "demo", *WORDS).stdout
        snapshot = folder_of("fox/den") / "snapshots" / repo.commit
        same_files(snapshot, demo_files())
        assert (folder_of("fox/den") / "refs" / "main").read_text() == repo.commit
        for path in snapshot.iterdir():
            assert os.readlink(path) == f"../../blobs/{repo.etag(path.name)}"
        before = len(hub.requests)
        kt_ok("generate", "fox/den", *WORDS)
        assert len(hub.requests) == before
        assert download("fox/den")["fetched"] == 0  # and nothing twice
        report = download("fox/den", "--include", "*.bin", "--include", "original/")
        assert report["fetched"] == 7 and (snapshot / "original" / "x.safetensors").read_bytes() == b"y"

    def test_pieces_connections_pages_and_names(self, hub):
        files = {"a/b/model one+%.safetensors": made(300_001, 1), "zero.json": b"", "twin-1.safetensors": made(5000, 2),
                 "twin-2.safetensors": made(5000, 2), "été.txt": "é".encode(),
                 **{f"f{i}.txt": b"%d" % i for i in range(40)}}
        hub.repos["fox/den"] = repo = Repo(files)
        hub.page = 7
        report = download("fox/den", "--piece-size", "4KiB", "--connections", "6")
        same_files(report["path"], files)
        assert report["commit"] == repo.commit and report["files"] == len(files)
        ranges = [r for r in hub.asked("elsewhere") if "%2B" in r["path"]]
        assert len(ranges) == 74 and len({r["range"] for r in ranges}) == 74
        assert len([r for r in hub.asked() if "/tree/" in r["path"]]) == -(-len(files) // 7)

    def test_faults_of_the_network_are_got_over(self, hub):
        data = made(400_000, 3)
        hub.repos["fox/den"] = Repo({"model.safetensors": data, "config.json": b"{}", "plain.txt": made(9000, 4)})
        hub.broken.update({"model.safetensors": 5, "plain.txt": 2})
        hub.failing.update({"model.safetensors": 2, "config.json": 1})
        report = download("fox/den", "--piece-size", "64KiB")
        assert pathlib.Path(report["path"], "model.safetensors").read_bytes() == data

    def test_a_mirror_that_passes_on_addresses(self, hub):
        files = {"model.safetensors": b"x", **{f"f{i}.txt": b"%d" % i for i in range(5)}}
        hub.repos["fox/den"] = Repo(files)
        hub.page, own = 2, hub.endpoint
        hub.endpoint = "http://hub.invalid"  # in its Link fields
        same_files(download("fox/den")["path"], files)
        hub.endpoint = own

    def test_a_server_that_asks_to_wait(self, hub):
        hub.repos["fox/den"] = Repo({"model.safetensors": b"x"})
        hub.failing["model.safetensors"], hub.failure = 5, 429  # six in a row are too many
        began = time.monotonic()
        download("fox/den")
        assert time.monotonic() - began < 6  # no longer than it asked for
        hub.failing["model.safetensors"] = 99
        shutil.rmtree(folder_of("fox/den"))
        line = download("fox/den", code=2)
        assert "answered 429" in line and "goes on" in line

    def test_a_file_that_may_not_grow(self, hub):
        hub.repos["fox/den"] = Repo({"model.safetensors": made(300_000, 13)})
        done = subprocess.run(["bash", "-c", f"ulimit -f 100; exec {KT} model download fox/den"],
                              capture_output=True, text=True)
        refused(done, 3, "parts/", "300000")
        refused(kt("model", "info", "fox/den"), 2, "did not end")
        download("fox/den")

    def test_a_server_without_ranges(self, hub):
        data = made(200_000, 5)
        hub.repos["fox/den"] = Repo({"model.safetensors": data})
        hub.no_ranges.add("model.safetensors")
        report = download("fox/den", "--piece-size", "16KiB")
        assert pathlib.Path(report["path"], "model.safetensors").read_bytes() == data

    @pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
    def test_wrong_bytes_never_pass(self, hub, path):
        hub.repos["fox/den"] = Repo({"model.safetensors": made(9000, 6), "config.json": b"{}"})
        hub.wrong.add(path)
        line = download("fox/den", code=2)
        assert path in line and "twice" in line and ("sha256" in line) == (path != "config.json")
        assert not list(folder_of("fox/den").rglob(path)) and not (folder_of("fox/den") / "refs" / "main").exists()
        refused(kt("generate", "fox/den", *WORDS), 2, "did not end", "kt model download fox/den")
        hub.wrong.clear()
        download("fox/den")

    def test_a_listing_that_lies_about_sizes(self, hub):
        hub.repos["fox/den"] = repo = Repo({"model.safetensors": made(9000, 7)})
        lie = repo.tree()
        lie[0]["lfs"]["size"] = lie[0]["size"] = 8000
        repo.listing = lie
        line = download("fox/den", "--piece-size", "4KiB", code=2)
        assert "model.safetensors" in line and "8000" in line

    @pytest.mark.parametrize("path",
                             ["../../evil.txt", "/etc/evil", "a/../../../evil", "a\nb", "a\\b", "", "./x", "x" * 300])
    def test_names_of_the_server_stay_inside(self, hub, home, path):
        hub.repos["fox/den"] = repo = Repo({"model.safetensors": b"x"})
        repo.listing = [{"type": "file", "path": path, "size": 1, "oid": "0" * 40}]
        assert "refused" in download("fox/den", "--include", "*", code=2)
        assert not list(home.rglob("*evil*")) and not folder_of("fox/den").exists()

    @pytest.mark.parametrize("entry", [
        {"size": -1}, {"size": "1"}, {"size": 1 << 60}, {"oid": "../../x"}, {"oid": ""},
        {"lfs": {"oid": "../x", "size": 1}},
        {"lfs": {"size": 1}}])
    def test_listings_that_make_no_sense(self, hub, entry):
        hub.repos["fox/den"] = repo = Repo({"model.safetensors": b"x"})
        repo.listing = [{**repo.tree()[0], "lfs": None, **entry}]
        assert "localhost" in download("fox/den", code=2)
        assert not folder_of("fox/den").exists()

    def test_the_token_stays_with_the_hub(self, hub, monkeypatch, home):
        hub.repos["fox/den"] = Repo({"model.safetensors": made(9000, 8), "config.json": b"{}"},
                                    token="s3cret", gated=True)
        assert ("gated" in (line := download("fox/den", code=2)) and "HF_TOKEN" in line
                and f"{hub.endpoint}/fox/den" in line)
        monkeypatch.setenv("HF_TOKEN", "other")
        assert "no access" in download("fox/den", code=2)
        monkeypatch.setenv("HF_TOKEN", "bad")
        assert "refused the token" in download("fox/den", code=2)
        monkeypatch.setenv("HF_TOKEN", "a\nX-Evil: b")
        assert "HF_TOKEN" in download("fox/den", code=2)
        monkeypatch.delenv("HF_TOKEN")
        (home / "hf").mkdir(exist_ok=True)
        (home / "hf" / "token").write_text("s3cret\n")
        hub.requests.clear()
        download("fox/den")
        assert all(r["token"] == "Bearer s3cret" for r in hub.asked())
        assert hub.asked("elsewhere") and all(r["token"] is None for r in hub.asked("elsewhere"))

    def test_what_is_not_there(self, hub, monkeypatch):
        hub.repos["fox/den"] = Repo({"readme.md": b"words"})
        hub.repos["fox/old"] = Repo({"pytorch_model.bin": b"x", "config.json": b"{}"})
        hub.repos["fox/many"] = Repo({"a-Q4.gguf": b"1", "a-Q8-00001-of-00002.gguf": b"2",
                                      "a-Q8-00002-of-00002.gguf": b"3"})
        assert "no such repository" in (line := download("fox/cave", code=2)) and "HF_TOKEN" in line
        assert "no revision 'v9'" in download("fox/den", "--revision", "v9", code=2)
        assert "without weights" in download("fox/den", code=2)
        assert "pytorch_model.bin" in download("fox/old", code=2)
        assert "fox/many:a-Q4.gguf" in download("fox/many", code=2)
        assert "no file matches" in download("fox/den", "--include", "*.xyz", code=2)
        assert "a-Q8-00001-of-00002.gguf" in download("fox/many:b.gguf", code=2)
        report = download("fox/many:a-Q8-00001-of-00002.gguf")
        assert report["files"] == 2 and report["path"].endswith("a-Q8-00001-of-00002.gguf")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert "HF_HUB_OFFLINE" in download("fox/den", code=2)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        assert "http://127.0.0.1:1 cannot be asked" in download("fox/den", code=2)
        monkeypatch.setenv("HF_ENDPOINT", "ftp://x")
        assert "HF_ENDPOINT" in download("fox/den", code=2)

    def test_a_family_that_does_not_run_is_not_fetched(self, hub):
        config = json.dumps({"architectures": ["OwlForCausalLM"], "model_type": "owl"}).encode()
        hub.repos["fox/owl"] = Repo({"model.safetensors": made(9000, 9), "config.json": config})
        refused(kt("generate", "fox/owl", "--download", *WORDS), 4, "OwlForCausalLM", "nothing was downloaded")
        assert not hub.asked("elsewhere") and not folder_of("fox/owl").exists()

    def test_a_redirect_out_of_https_or_http_is_refused(self, hub):
        hub.repos["fox/den"] = Repo({"model.safetensors": made(9000, 10)})
        hub.redirect_to = "file:///etc/passwd"
        assert "no http address" in download("fox/den", code=2)

    def test_revisions(self, hub):
        files = {"model.safetensors": made(9000, 11), "config.json": b"{}"}
        hub.repos["fox/den"] = old = Repo(files)
        first = download("fox/den", "--revision", "v1")
        hub.repos["fox/den"] = new = Repo({**files, "config.json": b"{ }"})
        hub.requests.clear()
        second = download("fox/den")
        assert not hub.asked("elsewhere")  # the same weights are not fetched again
        refs = folder_of("fox/den") / "refs"
        assert ((refs / "v1").read_text(), (refs / "main").read_text()) == (old.commit, new.commit)
        same_files(first["path"], files)
        same_files(second["path"], {**files, "config.json": b"{ }"})

    def test_a_folder_of_ones_own(self, hub, home):
        home = home / "snapshots"  # only a name here
        home.mkdir()
        files = {**demo_files(), ".cache/kt/download.json": b"evil", "sub/twin.txt": b"t" * 50,
                 "sub/twin2.txt": b"t" * 50}
        hub.repos["fox/den"] = Repo(files)
        (home / "own").mkdir()
        (home / "own" / "config.json").write_bytes(b" " * len(files["config.json"]))  # the right size and other bytes
        download("fox/den", "-d", home / "own", "--repo-type", "huggingface")
        del files[".cache/kt/download.json"]
        same_files(home / "own", files)
        assert not (home.parent / "hf" / "hub").exists()
        kt_ok("generate", "fox/den", *WORDS)  # by its repository, through the registry
        kt_ok("generate", "own", *WORDS)
        assert download("fox/den", "--local-dir", home / "own")["fetched"] == 0

    def test_modelscope(self, hub, home):
        hub.repos["fox/den-1.5"] = Repo(demo_files())
        download("fox/den-1.5", "-t", "modelscope", "-y")
        same_files(home / "ms" / "models" / "fox" / "den-1___5", demo_files())
        kt_ok("generate", "fox/den-1.5", *WORDS)
        assert "no such repository" in download("fox/cave", "--source", "modelscope", code=2)

    def test_disk_space_is_looked_at_first(self, hub):
        hub.repos["fox/den"] = repo = Repo({"model.safetensors": b"x"})
        lie = repo.tree()
        lie[0]["lfs"]["size"] = lie[0]["size"] = 1 << 42
        repo.listing = lie
        line = download("fox/den", code=3)
        assert "4096.0 GiB" in line or "4.0 TiB" in line
        assert "free" in line and not hub.asked("elsewhere")

    def test_https_and_certificates(self, home, monkeypatch):
        if not shutil.which("openssl"):
            pytest.skip("openssl is not installed")
        certificate = make_certificate(home)
        server = Hub(certificate)
        try:
            monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
            server.repos["fox/den"] = Repo(demo_files())
            assert "certificate" in download("fox/den", code=2)
            monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
            same_files(download("fox/den")["path"], demo_files())
            server.repos["fox/low"] = Repo({"model.safetensors": b"x" * 100})
            server.redirect_to = "http://127.0.0.1:1/x"
            assert "from https to http" in download("fox/low", code=2)
        finally:
            server.close()

    def test_two_at_once_share(self, hub):
        data = made(300_000, 12)
        hub.repos["fox/den"] = Repo({"model.safetensors": data})
        hub.slow = 1_000_000
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            reports = list(pool.map(lambda _: download("fox/den"), range(2)))
        assert sorted(r["fetched"] for r in reports) == [0, len(data)]

    def test_asked_on_a_terminal(self, hub):
        hub.repos["fox/den"] = Repo(demo_files())

        def talk(answer):
            ours, theirs = pty.openpty()
            process = subprocess.Popen([KT, "generate", "fox/den", *WORDS], stdin=theirs, stderr=theirs,
                                       stdout=subprocess.PIPE, close_fds=True)
            os.close(theirs)
            seen = b""
            while b"Download" not in seen and select.select([ours], [], [], 30)[0]:
                seen += os.read(ours, 4096)
            os.write(ours, answer)
            with contextlib.suppress(OSError):
                while chunk := os.read(ours, 4096):
                    seen += chunk
            out = process.communicate(timeout=60)[0]
            os.close(ours)
            return process.returncode, out, seen.decode()

        code, _, seen = talk(b"n\n")
        assert code == 2 and "was not downloaded" in seen and "is not on this disk" in seen
        assert not hub.asked("elsewhere")
        code, out, seen = talk(b"y\n")
        assert code == 0 and out.decode() == kt_ok("generate", "demo", *WORDS).stdout

    def test_a_proxy_of_the_environment(self, hub, monkeypatch):
        hub.repos["fox/den"] = Repo({"model.safetensors": b"x"})
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert "cannot be asked" in download("fox/den", code=2)
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        download("fox/den")


# --- crashes ---------------------------------------------------------------------------------------------------------


@downloads
@pytest.mark.parametrize("where", ["cache", "folder"])
def test_thirty_kills(hub, home, where):
    """Killed before the N-th write, for thirty N over the whole work: nothing half-written is ever taken for a model,
    no run loses what those before it had finished, and in the end every byte is right."""
    files = {"config.json": demo_files()["config.json"], "b/model-00002.safetensors": made(150_000, 21),
             "model-00001.safetensors": made(250_000, 20), "twin.txt": b"t" * 999,
             "b/twin.txt": b"t" * 999, "zero": b""}
    hub.repos["fox/den"] = Repo(files)
    words = ["--piece-size", "8KiB", "--connections", "3"] + (["--local-dir", home / "own"]
                                                              if where == "folder" else [])
    target = home / "own" if where == "folder" else folder_of("fox/den") / "snapshots" / hub.repos["fox/den"].commit
    kills = 0
    for number in range(30):
        done = subprocess.run([KT, "model", "download", "fox/den", *map(str, words)], capture_output=True, text=True,
                              env=halting(f"kill call {2 + (number * 7) % 23}"), timeout=60)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:  # all there: from the beginning
            same_files(target, files)
            shutil.rmtree(home / "own" if where == "folder" else folder_of("fox/den"))
            continue
        kills += 1
        for path, data in files.items():
            if (target / path).exists():
                assert (target / path).read_bytes() == data, path
        refused(kt("model", "info", target), 2)
        refused(kt("model", "info", "fox/den"), 2)
    assert kills >= 20
    report = download("fox/den", *words)
    same_files(target, files)
    parts = (target / ".cache" / "kt" if where == "folder" else folder_of("fox/den") / ".kt") / "parts"
    assert not list(parts.iterdir()) and pathlib.Path(report["path"]) == target


@downloads
@pytest.mark.parametrize("flag", [[], ["--resume"], ["--no-resume"]], ids=" ".join)
def test_what_came_is_not_fetched_again(hub, flag):
    """Held at the server after so many pieces, killed, and gone on with: each piece crosses the network once, unless
    the user wants it otherwise."""
    data = made(640_000, 22)
    hub.repos["fox/den"] = Repo({"model.safetensors": data})
    held, enough = threading.Event(), threading.Event()
    seen = []

    def gate(path, start):
        seen.append(start)
        if len(seen) > 20:
            enough.set()
            held.wait(20)

    hub.gate = gate
    process = subprocess.Popen([KT, "model", "download", "fox/den", "--piece-size", "16KiB", "--connections", "1"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert enough.wait(30)
    process.kill()
    process.wait()
    held.set()
    hub.gate = None
    report = download("fox/den", "--piece-size", "16KiB", "--connections", "1", *flag)
    assert report["fetched"] == len(data) - (0 if flag == ["--no-resume"] else 20 * 16384)
    assert pathlib.Path(report["path"], "model.safetensors").read_bytes() == data


# --- other tools -----------------------------------------------------------------------------------------------------


@downloads
class TestHuggingfaceHub:
    CODE = """
import sys, huggingface_hub
if sys.argv[1] == "one":
    print(huggingface_hub.hf_hub_download(sys.argv[2], sys.argv[3]))
else:
    print(huggingface_hub.snapshot_download(sys.argv[2], local_files_only=sys.argv[1] == "local"))
"""

    def ask(self, *words, offline=False):
        pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
        env = {**os.environ, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
               "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        if offline:
            env["HF_HUB_OFFLINE"] = "1"
        done = subprocess.run([sys.executable, "-c", self.CODE, *words], capture_output=True, text=True,
                              env=env, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip().splitlines()[-1]

    def test_it_reads_what_we_stored(self, hub):
        files = {**demo_files(), "sub/x.txt": b"x"}
        hub.repos["fox/den"] = repo = Repo(files)
        path = download("fox/den")["path"]
        assert self.ask("local", "fox/den", offline=True) == path
        assert self.ask("one", "fox/den", "sub/x.txt", offline=True) == f"{path}/sub/x.txt"
        hub.requests.clear()
        assert self.ask("all", "fox/den") == path  # online it agrees that all is there
        assert not hub.asked("elsewhere") and not [r for r in hub.asked() if "/resolve/" in r["path"]]
        assert repo.commit in path

    def test_we_read_what_it_stored(self, hub):
        files = {**demo_files(), "sub/x.txt": b"x"}
        hub.repos["fox/den"] = Repo(files)
        path = self.ask("all", "fox/den")
        hub.requests.clear()
        assert kt_ok("generate", "fox/den", *WORDS).stdout == kt_ok("generate", "demo", *WORDS).stdout
        assert json.loads(kt_ok("model", "info", "fox/den", "--json").stdout)["path"] == path
        assert hub.requests == []
        report = download("fox/den")
        assert report["fetched"] == 0 and report["path"] == path
        out = kt_ok("model", "verify", "fox/den").stdout
        assert "sums of the hub" in out

    def test_we_complete_what_it_began(self, hub):
        hub.repos["fox/den"] = Repo(demo_files())
        self.ask("one", "fox/den", "config.json")
        refused(kt("generate", "fox/den", *WORDS), 2, "kt model download fox/den")
        kt_ok("generate", "fox/den", "--download", *WORDS)


# --- the registry ----------------------------------------------------------------------------------------------------


class TestVerify:
    def test_sums_that_were_stored(self, hub):
        if not has_curl():
            pytest.skip("kt was built without libcurl")
        hub.repos["fox/den"] = Repo(demo_files())
        path = pathlib.Path(download("fox/den")["path"])
        hub.requests.clear()
        out = kt_ok("model", "verify", "fox/den").stdout
        assert f"sums of the hub for {len(demo_files())} files" in out and "whole" in out and hub.requests == []
        blob = (path / "tokenizer.json").resolve()
        blob.write_bytes(blob.read_bytes()[:-1] + b" ")
        done = kt("model", "verify", "fox/den")
        assert done.returncode == 2 and "tokenizer.json: expected git sha1" in done.stdout

    def test_sums_that_are_asked_for(self, hub, home):
        if not has_curl():
            pytest.skip("kt was built without libcurl")
        hub.repos["fox/den"] = repo = Repo(demo_files())
        shutil.copytree(DEMO, home / "own")
        kt_ok("model", "add", "mine", home / "own")
        refused(kt("model", "verify", "mine", "--hub"), 2, "1 fault")
        kt_ok("model", "edit", "mine", "--repo", "fox/den")
        assert "asked now" in kt_ok("model", "verify", "mine", "--hub").stdout
        repo.files["config.json"] = repo.files["config.json"] + b" "
        done = kt("model", "verify", "mine", "--hub")
        assert done.returncode == 2 and "config.json: expected" in done.stdout


class TestEdit:
    def test_edit(self, home):
        shutil.copytree(DEMO, home / "a")
        kt_ok("model", "add", "fox", home / "a")
        (home / "a").rename(home / "b")
        kt_ok("model", "edit", "fox", "--name", "owl", "--path", home / "b", "--repo", "x/y")
        entries = {e["name"]: e for e in json.loads(kt_ok("model", "list", "--json").stdout)}
        assert "fox" not in entries and entries["owl"]["path"] == str(home / "b") and entries["owl"]["repo"] == "x/y"
        kt_ok("model", "edit", "owl", "--repo", "none")
        kt_ok("model", "add", "cat", home / "b")
        refused(kt("model", "edit", "owl"), 2, "nothing to change")
        refused(kt("model", "edit", "owl", "--name", "cat"), 2, "another model")
        refused(kt("model", "edit", "owl", "--repo", "nonsense"), 2, "ORG/REPO")
        refused(kt("model", "edit", "owl", "--path", home / "a"), 2, "no such")
        refused(kt("model", "edit", "dog", "--repo", "x/y"), 2, "known are cat, owl")
        refused(kt("model", "edit", "demo", "--repo", "x/y"), 2, "demo")

    def test_link_and_unlink(self, home):
        kt_ok("quant", "demo", "-o", home / "int4")
        kt_ok("model", "add", "fox", DEMO)
        kt_ok("model", "link", "fox", home / "int4")
        assert json.loads(kt_ok("model", "info", "fox", "--json").stdout)["weights"] == str(home / "int4")
        assert "stays where it is" in kt_ok("model", "unlink", "fox").stdout
        refused(kt("model", "unlink", "fox"), 2, "no CPU weights")
        refused(kt("model", "unlink", "fox", "--gpu"), 2, "no GPU weights")
        (home / "empty").mkdir()
        refused(kt("model", "link", "fox", home / "empty"), 2, str(home / "empty"))

    def test_list_moe(self, home):
        dense = home / "dense"
        shutil.copytree(DEMO, dense)
        kt_ok("model", "add", "dense", dense)
        registry = home / "home" / "models.yaml"
        registry.write_text("".join(line for line in registry.read_text().splitlines(True)
                                    if "experts:" not in line and "active:" not in line))
        assert kt_ok("model", "list", "--names").stdout.split() == ["demo", "dense"]
        assert kt_ok("model", "list", "--names", "--moe").stdout.split() == ["demo"]


# --- datasets --------------------------------------------------------------------------------------------------------


@downloads
def test_a_dataset_for_calibration(hub, home):
    rows = [{"instruction": f"Tell a story about fox {i}.", "input": "" if i % 2 else "A short one.",
             "output": "Once upon a time there was a little fox."} for i in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    hub.repos["tales/alpaca"] = Repo({"train.jsonl": lines, "README.md": b"words"}, kind="datasets")
    words = ["quant", "gpu", "demo", "-o", home / "out", "--dataset", "tales/alpaca", "--num-calibration-samples", "32",
             "--max-sequence-length", "32"]
    refused(kt(*words), 2, "tales/alpaca", "--download")
    assert hub.requests == []
    kt_ok(*words, "--download")
    assert (folder_of("tales/alpaca", "datasets") / "snapshots" / hub.repos["tales/alpaca"].commit
            / "train.jsonl").exists()
    found = kt_ok("quant", "dataset", "tales/alpaca").stdout
    assert found.strip().endswith("train.jsonl")


def test_a_repository_is_served_by_its_name():
    store("fox/den", demo_files())
    with Server("fox/den") as server:
        with urllib.request.urlopen(server.url + "/v1/models", timeout=60) as reply:
            assert json.load(reply)["data"][0]["id"] == "fox/den"
