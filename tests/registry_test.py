"""`kt model`, `kt config`, names of models in other verbs, and the questions a verb asks on a terminal, each in a kt
folder of its own. The demo model and what kt quant makes of it are the models here; KT_PROGRAM names kt."""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = ROOT / "demo" / "tiny-deepseekv3"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KT_DEMO_MODEL", str(DEMO))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """Three kinds of weights of the demo model, made once; tests copy what they spoil."""
    root = tmp_path_factory.mktemp("shelf")
    kt_ok("quant", DEMO, "-o", root / "int4")
    kt_ok("quant", DEMO, "-o", root / "kt", "--no-merge")
    kt_ok("quant", "gpu", DEMO, "-o", root / "w4", "--method", "RTN", "--type", "W4A16")
    return root


def link_folder(source, target):
    """A copy whose files are links to the same bytes."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def copied(source, target):
    shutil.copytree(source, target)
    return target


def write_gguf(path, part=1, parts=1):
    """A file of the right form with one tensor and too little in it to run."""
    def text(string):
        return struct.pack("<Q", len(string)) + string.encode()

    numbers = {"block_count": 2, "embedding_length": 64, "expert_count": 16, "expert_used_count": 4,
               "expert_feed_forward_length": 32}
    values = [text("general.architecture") + struct.pack("<I", 8) + text("qwen3moe")]
    values += [text("qwen3moe." + key) + struct.pack("<II", 4, value) for key, value in numbers.items()]
    if parts > 1:
        values += [text("split.no") + struct.pack("<IH", 2, part - 1),
                   text("split.count") + struct.pack("<IH", 2, parts),
                   text("split.tensors.count") + struct.pack("<Ii", 5, parts)]
    tensor = text(f"blk.{part - 1}.attn_norm.weight") + struct.pack("<IQIQ", 1, 64, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values) + tensor
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(256))


def listed():
    return {entry["name"]: entry for entry in json.loads(kt_ok("model", "list", "--json").stdout)}


def scanned(*words):
    return json.loads(kt_ok("model", "scan", "--json", *words).stdout)


# --- kt config -------------------------------------------------------------------------------------------------------


class TestConfig:
    def test_set_get_reset(self, home):
        assert kt_ok("config", "get", "server.port").stdout == "30000\n"
        kt_ok("config", "set", "server.port", "8080")
        kt_ok("config", "set", "chat.system", "You are: a 'fox' # not a comment")
        assert kt_ok("config", "get", "server.port").stdout == "8080\n"
        assert kt_ok("config", "get", "chat.system").stdout == "You are: a 'fox' # not a comment\n"
        kt_ok("config", "reset", "server.port")
        assert kt_ok("config", "get", "server.port").stdout == "30000\n"
        assert kt_ok("config", "path").stdout == f"{home}/config.yaml\n"

    def test_other_programs_read_the_file(self, home):
        yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
        kt_ok("config", "set", "server.port", "8080")
        kt_ok("config", "set", "chat.temperature", "1e-05")
        kt_ok("model", "path-add", home)
        text = (home / "config.yaml").read_text()
        assert text.startswith("# ")
        assert yaml.safe_load(text) == {"server": {"port": 8080}, "chat": {"temperature": 1e-05},
                                        "model": {"paths": [str(home)]}}

    def test_show_lists_every_key_and_hides_keys(self):
        kt_ok("config", "set", "server.api-key", "s3cret")
        plain, report = kt_ok("config", "show").stdout, kt_ok("config", "show", "--json").stdout
        assert "s3cret" not in plain + report
        values = json.loads(report)
        assert values["server.api-key"]["set"] and not values["server.port"]["set"]
        assert all(key in plain and value["help"] for key, value in values.items())
        assert kt_ok("config", "get", "server.api-key").stdout == "s3cret\n"

    @pytest.mark.parametrize("words, expected", [
        (["set", "server.prot", "1"], ["server.prot", "server.port"]),
        (["get", "sever.host"], ["server.host"]),
        (["set", "server.port", "eighty"], ["server.port", "expected an integer", "eighty"]),
        (["set", "server.port", "70000"], ["65535", "70000"]),
        (["set", "run.max-memory", "8 elephants"], ["run.max-memory", "8GiB"]),
        (["set", "run.kv", "int3"], ["bf16|int8|f32"]),
        (["set", "model.paths", "/a"], ["path-add"]),
        (["reset"], ["KEY", "--yes"]),
        (["reset", "--all"], ["--yes"]),
    ])
    def test_mistakes(self, words, expected):
        refused(kt("config", *words), 2, *expected)

    def test_mistakes_in_the_file_are_named_by_whoever_reads_it(self, home):
        home.mkdir()
        (home / "config.yaml").write_text("server:\n  prot: 1\n")
        refused(kt("config", "show"), 2, home / "config.yaml", "server.prot", "server.port")
        refused(kt("config", "set", "server.port", "1"), 2, "server.prot")
        assert (home / "config.yaml").read_text() == "server:\n  prot: 1\n"
        kt_ok("config", "reset", "--all", "--yes")
        kt_ok("config", "show")

    def test_init_writes_once(self, home):
        kt_ok("config", "init", "--port", "1234", "--model-path", ROOT)
        refused(kt("config", "init"), 2, "--yes", home / "config.yaml")
        assert kt_ok("config", "get", "server.port").stdout == "1234\n"
        assert kt_ok("model", "path-list").stdout == f"{ROOT}\n"
        refused(kt("config", "init", "--yes", "--cpu-threads", "70000"), 2, "70000")
        assert kt_ok("config", "get", "server.port").stdout == "1234\n"  # nothing is lost
        kt_ok("config", "init", "--yes")
        assert kt_ok("config", "get", "server.port").stdout == "30000\n"
        assert kt_ok("model", "path-list").stdout == ""

    def test_writers_at_once_lose_nothing(self, tmp_path):
        folders = [tmp_path / f"d{i}" for i in range(12)]
        for folder in folders:
            folder.mkdir()
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda folder: kt_ok("model", "path-add", folder), folders))
        assert set(kt_ok("model", "path-list").stdout.split()) == {str(folder) for folder in folders}

    def test_a_folder_that_cannot_be_made(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("KT_HOME", str(tmp_path / "file" / "home"))
        refused(kt("config", "set", "server.port", "1"), 2, "KT_HOME")


# --- names -----------------------------------------------------------------------------------------------------------


class TestNames:
    def test_demo_works_anywhere(self, tmp_path):
        (tmp_path / "demo").mkdir()  # a folder of that name without a model in it is no hindrance
        for name in ("demo", "dem"):
            out = kt_ok("generate", name, "-p", "Once upon", "--max-tokens", "4", cwd=tmp_path).stdout
            assert out.strip()
        kt_ok("estimate", "demo", "--bandwidth", "10")

    def test_demo_is_found_beside_the_program(self, monkeypatch, tmp_path):
        monkeypatch.delenv("KT_DEMO_MODEL")
        prefix = tmp_path / "prefix"
        (prefix / "bin").mkdir(parents=True)
        shutil.copy(KT, prefix / "bin" / "kt")

        def run():
            return subprocess.run([prefix / "bin" / "kt", "model", "info", "demo", "--json"], capture_output=True,
                                  text=True)

        refused(run(), 2, prefix / "share/kt/demo/tiny-deepseekv3", "KT_DEMO_MODEL")
        copied(DEMO, prefix / "share" / "kt" / "demo" / "tiny-deepseekv3")
        assert json.loads(run().stdout)["path"] == str(prefix / "share/kt/demo/tiny-deepseekv3")

    def test_names_prefixes_and_paths(self, tmp_path):
        model = link_folder(DEMO, tmp_path / "Some Model")
        kt_ok("model", "add", "fox-small", model)
        kt_ok("model", "add", "fox-large", model)
        words = ("-p", "Once", "--max-tokens", "2")
        expected = kt_ok("generate", model, *words).stdout
        assert kt_ok("generate", "fox-small", *words).stdout == expected
        assert kt_ok("generate", "FOX-L", *words).stdout == expected
        refused(kt("generate", "fox", *words), 2, "fox-large, fox-small")
        refused(kt("generate", "owl", *words), 2, "no model named 'owl'", "demo, fox-large, fox-small",
                "kt model add NAME PATH")
        refused(kt("generate", "./owl", *words), 2, "./owl: no such file or folder")

    def test_every_verb_takes_names(self, tmp_path):
        kt_ok("quant", "demo", "-o", tmp_path / "q")
        kt_ok("quant", "gpu", "demo", "-o", tmp_path / "g", "--method", "RTN")
        refused(kt("quant", "dequant", "demo", "-o", tmp_path / "d"), 2, DEMO, "nothing in it is quantised")
        kt_ok("bench", "demo", "--prompt", "8", "--batch", "1", "--tokens", "2", "--repeat", "1")
        (tmp_path / "t.txt").write_text("Once upon a time there was a little fox. " * 8)
        kt_ok("perplexity", "demo", "--file", tmp_path / "t.txt", "--context", "16", "--kl-against", "demo")

    def test_without_a_terminal_nothing_is_asked(self):
        assert error_line(kt("generate").stderr) == "kt: MODEL is required; see kt generate --help"
        assert error_line(kt("quant").stderr) == "kt: MODEL is required; see kt quant --help"
        assert kt("model").returncode == 2 and kt("config").returncode == 2


class TestRegistry:
    def test_add_list_info_remove(self, home, tmp_path, shelf):
        model = link_folder(DEMO, tmp_path / "m")
        kt_ok("model", "add", "fox", model, "--weights", shelf / "int4")
        entry = listed()["fox"]
        assert entry["path"] == str(model) and entry["weights"] == str(shelf / "int4") and entry["gpu"] is None
        assert (entry["architecture"], entry["experts"], entry["active"]) == ("DeepseekV3ForCausalLM", 16, 4)
        assert entry["size"] == sum(f.stat().st_size for f in model.glob("*.safetensors"))
        kt_ok("model", "add", "fox", model, "--gpu", shelf / "w4")  # again: completes it
        info = json.loads(kt_ok("model", "info", "fox", "--json").stdout)
        assert info["weights"] == str(shelf / "int4") and info["gpu"] == str(shelf / "w4")
        assert (info["layers"], info["hidden"], info["inter"], info["runs"]) == (6, 256, 128, True)
        assert "int4" in kt_ok("model", "list", "--verbose").stdout and "fox" in kt_ok("model", "info", "fox").stdout
        out = kt_ok("model", "remove", "fox").stdout
        assert "its files stay" in out and (model / "config.json").exists()
        assert "fox" not in listed()
        assert (home / "models.yaml").read_text().startswith("# ")

    def test_demo_is_listed_and_stays(self):
        assert listed()["demo"]["builtin"]
        refused(kt("model", "remove", "demo"), 2, "demo")
        refused(kt("model", "add", "demo", DEMO), 2, "demo")

    def test_missing_paths_are_marked(self, tmp_path):
        model = link_folder(DEMO, tmp_path / "m")
        kt_ok("model", "add", "fox", model)
        shutil.rmtree(model)
        assert not listed()["fox"]["exists"]
        assert "(missing)" in kt_ok("model", "list").stdout
        refused(kt("generate", "fox", "-p", "x"), 2, str(model))

    @pytest.mark.parametrize("name", ["a/b", "-x", "a b", ""])
    def test_bad_names(self, name):
        assert kt("model", "add", "--", name, DEMO).returncode == 2

    def test_what_is_no_model_is_refused(self, tmp_path, shelf):
        refused(kt("model", "add", "x", tmp_path), 2, str(tmp_path))
        refused(kt("model", "add", "x", tmp_path / "nowhere"), 2, "no such")
        old = copied(shelf / "kt", tmp_path / "old")  # experts that do not say whose they are
        (old / "kt_weights.json").unlink()
        refused(kt("model", "add", "x", old), 2, "does not name the model", f"--weights {old}")
        refused(kt("model", "remove", "x"), 2, "no model named 'x'")

    @pytest.mark.parametrize("name", ["int4", "kt"])
    def test_converted_models_have_names_too(self, shelf, name):
        assert kt_ok("model", "add", "small", shelf / name).stderr == ""
        assert "kt-int4 experts" in kt_ok("run", "small", "--dry-run").stdout
        kt_ok("model", "verify", "small", "--quick")

    def test_weights_of_another_model_are_refused(self, tmp_path, shelf):
        other = copied(DEMO, tmp_path / "other")
        config = json.loads((other / "config.json").read_text())
        config["moe_intermediate_size"] = 64
        (other / "config.json").write_text(json.dumps(config))
        refused(kt("model", "add", "x", other, "--weights", shelf / "int4"), 2, "--weights", "16 experts of 256 x 128")

    def test_another_path_under_a_taken_name(self, tmp_path):
        kt_ok("model", "add", "fox", link_folder(DEMO, tmp_path / "a"))
        refused(kt("model", "add", "fox", link_folder(DEMO, tmp_path / "b")), 2, str(tmp_path / "a"), "remove")

    def test_adding_at_once_loses_nothing(self):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda i: kt_ok("model", "add", f"m{i}", DEMO), range(12)))
        assert set(listed()) == {"demo", *(f"m{i}" for i in range(12))}

    def test_folders_to_scan(self, tmp_path):
        kt_ok("model", "path-add", tmp_path)
        kt_ok("model", "path-add", str(tmp_path) + "/")
        assert kt_ok("model", "path-list").stdout == f"{tmp_path}\n"
        kt_ok("model", "path-remove", tmp_path)
        refused(kt("model", "path-remove", tmp_path), 2, str(tmp_path))
        refused(kt("model", "path-add", tmp_path / "nowhere"), 2, "no such folder")
        refused(kt("model", "scan"), 2, "path-add")


# --- kt model scan ---------------------------------------------------------------------------------------------------


class TestScan:
    def test_models_with_their_weights(self, tmp_path, shelf):
        root = tmp_path / "root"
        link_folder(DEMO, root / "a" / "Tiny-Fox")
        link_folder(shelf / "int4", root / "w" / "anything")  # its manifest lists the model's files
        link_folder(shelf / "w4", root / "w" / "tiny-fox-w4a16")
        found = scanned(root)
        (model,) = found["models"]
        assert model["name"] == "tiny-fox" and model["status"] == "new" and model["runs"]
        assert model["weights"] == str(root / "w" / "anything") and model["gpu"] == str(root / "w" / "tiny-fox-w4a16")
        assert found["problems"] == [] and found["unlinked"] == []
        assert "tiny-fox" not in listed()
        kt_ok("model", "path-add", root)
        assert "tiny-fox" in kt_ok("model", "scan", "--add").stdout
        assert listed()["tiny-fox"]["weights"] == str(root / "w" / "anything")
        assert [m["status"] for m in scanned()["models"]] == ["known"]

    def test_same_sizes_are_not_enough(self, tmp_path, shelf):
        """A fine-tune has the sizes of its base: only names or the manifest tell them apart."""
        root = tmp_path / "root"
        link_folder(DEMO, root / "base")
        weights = copied(shelf / "int4", root / "something")
        (weights / "kt_manifest.json").unlink()
        found = scanned(root)
        assert found["models"][0]["weights"] == "" and found["unlinked"][0]["path"] == str(weights)
        weights.rename(root / "base-int4")
        assert scanned(root)["models"][0]["weights"] == str(root / "base-int4")

    def test_folders_of_kt_files(self, tmp_path, shelf):
        root = tmp_path / "root"
        link_folder(DEMO, root / "fox")
        link_folder(shelf / "kt", root / "fox-kt")
        found = scanned(root)
        assert found["models"][0]["weights"] == str(root / "fox-kt") and found["folders"] == 3

    def test_gpu_weights_alone_are_a_model(self, tmp_path, shelf):
        root = tmp_path / "root"
        link_folder(shelf / "w4", root / "fox-w4")
        (model,) = scanned(root)["models"]
        assert model["holds"] == "gpu-weights" and model["runs"]

    def test_gguf(self, tmp_path):
        write_gguf(tmp_path / "Fox-Q8.gguf")
        for part in (1, 2):
            write_gguf(tmp_path / f"Owl-{part:05}-of-00002.gguf", part, 2)
        models = scanned(tmp_path)["models"]
        assert [(m["name"], m["kind"], m["experts"], m["active"]) for m in models] == [("fox-q8", "gguf", 16, 4),
                                                                                       ("owl", "gguf", 16, 4)]
        assert models[1]["path"].endswith("Owl-00001-of-00002.gguf")
        assert models[1]["size"] == sum(file.stat().st_size for file in tmp_path.glob("Owl*"))
        kt_ok("model", "add", "fox", tmp_path / "Fox-Q8.gguf")
        assert listed()["fox"]["kind"] == "gguf"
        (tmp_path / "Owl-00002-of-00002.gguf").unlink()
        found = scanned(tmp_path)
        assert [m["status"] for m in found["models"]] == ["not run"]
        assert "Owl-00002-of-00002.gguf" in found["problems"][0]["reason"]

    def test_names_that_are_taken(self, tmp_path):
        root = tmp_path / "root"
        for place in "ab":
            link_folder(DEMO, root / place / "fox")
        assert {m["name"] for m in scanned(root)["models"]} == {"fox", "fox-2"}
        kt_ok("model", "scan", root, "--add")
        assert listed()["fox-2"]["path"] == str(root / "b" / "fox")

    def test_hub_cache(self, tmp_path):
        blobs, snapshot = (tmp_path / "models--Org--Tiny-Fox" / "blobs",
                           tmp_path / "models--Org--Tiny-Fox/snapshots/0a1b")
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for file in DEMO.iterdir():
            name = hashlib.sha256(file.read_bytes()).hexdigest()
            os.link(file, blobs / name)
            (snapshot / file.name).symlink_to(f"../../blobs/{name}")
        (model,) = scanned(tmp_path)["models"]
        assert (model["name"], model["path"]) == ("tiny-fox", str(snapshot))
        report = json.loads(kt_ok("model", "verify", snapshot, "--json").stdout)
        assert report["hashed_bytes"] > 20e6
        blob = blobs / os.readlink(snapshot / "model-00002-of-00002.safetensors").split("/")[-1]
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.unlink()
        blob.write_bytes(data)
        refused(kt("model", "verify", snapshot), 2, "1 fault")

    def test_links_that_go_round(self, tmp_path):
        link_folder(DEMO, tmp_path / "a" / "fox")
        (tmp_path / "a" / "up").symlink_to(tmp_path)
        (tmp_path / "again").symlink_to(tmp_path / "a")
        assert len(scanned(tmp_path)["models"]) == 1

    def test_links_to_folders_elsewhere_are_named(self, tmp_path):
        near, far = tmp_path / "near", tmp_path / "far"
        link_folder(DEMO, far / "fox")
        link_folder(DEMO, near / "own")
        (near / "away").symlink_to(far)
        (near / "nearby").symlink_to(near / "own")
        found = scanned(near)
        assert [m["path"] for m in found["models"]] == [str(near / "nearby")]  # one of its two names
        (problem,) = found["problems"]
        assert problem["path"] == str(near / "away") and str(far) in problem["reason"]
        both = json.loads(kt_ok("model", "scan", near, far, "--json").stdout)
        assert len(both["models"]) == 2 and not both["problems"]

    def test_what_is_broken_or_closed_is_reported(self, tmp_path):
        root = tmp_path / "root"
        link_folder(DEMO, root / "good")
        broken = link_folder(DEMO, root / "broken")
        (broken / "model-00002-of-00002.safetensors").unlink()
        (root / "adapter").mkdir()
        os.link(DEMO / "model-00001-of-00002.safetensors", root / "adapter" / "a.safetensors")  # no config: no model
        closed = root / "closed"
        closed.mkdir(mode=0)
        found = scanned(root)
        assert [m["name"] for m in found["models"]] == ["good"]
        problems = {pathlib.Path(p["path"]).name: p["reason"] for p in found["problems"]}
        assert "model-00002-of-00002.safetensors" in problems["broken"]
        assert "adapter" not in problems
        if os.geteuid() != 0:
            assert "closed" in problems
        closed.chmod(0o700)

    def test_two_streams_in_one_place_do_not_mix(self, tmp_path):
        """What is left out is said on stderr; lines of stdout, longer together than a block of it, stay whole."""
        for i in range(40):
            link_folder(DEMO, tmp_path / f"good-{i:02}-{'x' * 60}")
            (link_folder(DEMO, tmp_path / f"broken-{i:02}") / "model-00002-of-00002.safetensors").unlink()
        done = subprocess.run([KT, "model", "scan", str(tmp_path)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        left_out = [line for line in done.stdout.splitlines() if "left out" in line]
        assert done.returncode == 0 and len(left_out) == 40
        assert all(re.fullmatch(r"kt: left out: \S+/broken-\d\d: .*", line) for line in left_out)

    def test_an_architecture_that_does_not_run(self, tmp_path):
        model = copied(DEMO, tmp_path / "bert")
        config = json.loads((model / "config.json").read_text())
        config.update(architectures=["BertModel"], model_type="bert")
        (model / "config.json").write_text(json.dumps(config))
        (found,) = scanned(tmp_path)["models"]
        assert not found["runs"] and found["status"] == "not run"
        kt_ok("model", "scan", tmp_path, "--add")
        assert set(listed()) == {"demo"}

    def test_thousands_of_folders(self, tmp_path):
        for i in range(40):
            for j in range(50):
                (tmp_path / f"{i}" / f"{j}").mkdir(parents=True)
        link_folder(DEMO, tmp_path / "39" / "49" / "fox")
        found = scanned(tmp_path)
        assert found["folders"] == 1 + 40 + 2000 + 1 and len(found["models"]) == 1

    def test_depth_is_bounded(self, tmp_path):
        link_folder(DEMO, tmp_path / "1/2/3/4/5/6")
        link_folder(DEMO, tmp_path / "a/b/c/d/e/f/g")
        assert [m["name"] for m in scanned(tmp_path)["models"]] == ["6"]


# --- kt model verify -------------------------------------------------------------------------------------------------


class TestVerify:
    def faults(self, path, *words):
        result = kt("model", "verify", path, "--json", *words)
        report = json.loads(result.stdout)
        assert result.returncode == (0 if report["ok"] else 2) and report["ok"] == (not report["faults"])
        return [f"{fault['path']}: {fault['reason']}" for fault in report["faults"]]

    def test_whole_ones(self, shelf):
        assert "whole" in kt_ok("model", "verify", "demo").stdout
        for name in ("int4", "kt", "w4"):
            assert self.faults(shelf / name) == []

    def test_truncated_shard(self, tmp_path):
        model = copied(DEMO, tmp_path / "m")
        shard = model / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        (fault,) = self.faults(model)
        assert shard.name in fault

    def test_missing_and_damaged_shards_are_both_listed(self, tmp_path):
        model = copied(DEMO, tmp_path / "m")
        (model / "model-00001-of-00002.safetensors").unlink()
        shard = model / "model-00002-of-00002.safetensors"
        shard.write_bytes(b"\xff" * 100)
        faults = self.faults(model)
        assert len(faults) == 2 and "model-00001-of-00002" in faults[0] and shard.name in faults[1]

    def test_missing_tokenizer_and_tensor(self, tmp_path):
        model = copied(DEMO, tmp_path / "m")
        (model / "tokenizer.json").unlink()
        (fault,) = self.faults(model)
        assert "tokenizer.json" in fault
        other = copied(DEMO, tmp_path / "n")
        config = json.loads((other / "config.json").read_text())
        config["num_hidden_layers"] = 7
        (other / "config.json").write_text(json.dumps(config))
        (fault,) = self.faults(other)
        assert "layers.6" in fault or "layer 6" in fault

    @pytest.mark.parametrize("kind", ["int4", "kt", "w4"])
    def test_flipped_byte(self, tmp_path, shelf, kind):
        weights = copied(shelf / kind, tmp_path / "w")
        file = sorted(weights.rglob("*.kt" if kind == "kt" else "*.safetensors"))[0]
        data = bytearray(file.read_bytes())
        data[-1] ^= 0x10
        file.write_bytes(data)
        (fault,) = self.faults(weights)
        assert file.name in fault and "sha256" in fault
        assert self.faults(weights, "--quick") == []

    def test_missing_side_file_and_size(self, tmp_path, shelf):
        weights = copied(shelf / "int4", tmp_path / "w")
        (weights / "tokenizer.json").unlink()
        (weights / "config.json").write_text((weights / "config.json").read_text() + " ")
        faults = "\n".join(self.faults(weights))
        assert "tokenizer.json" in faults and "config.json: expected" in faults

    def test_missing_kt_file(self, tmp_path, shelf):
        weights = copied(shelf / "kt", tmp_path / "w")
        sorted(weights.rglob("*.kt"))[3].unlink()
        assert len(self.faults(weights)) == 2  # the layer, and the manifest's file

    def test_a_manifest_cannot_climb(self, tmp_path, shelf):
        weights = copied(shelf / "int4", tmp_path / "w")
        manifest = json.loads((weights / "kt_manifest.json").read_text())
        manifest["files"].append({"name": "../../etc/passwd", "bytes": 1, "sha256": "0" * 64})
        (weights / "kt_manifest.json").write_text(json.dumps(manifest))
        (fault,) = self.faults(weights)
        assert "not below its folder" in fault

    def test_linked_weights_are_checked(self, tmp_path, shelf):
        weights = copied(shelf / "int4", tmp_path / "w")
        kt_ok("model", "add", "fox", DEMO, "--weights", weights, "--gpu", shelf / "w4")
        assert self.faults("fox") == []
        (weights / "model-00001-of-00006.safetensors").unlink()
        result = kt("model", "verify", "fox")
        refused(result, 2, "fox", "faults")
        assert "model-00001-of-00006" in result.stdout


# --- on a terminal ---------------------------------------------------------------------------------------------------


def converse(words, answers, **env):
    """kt on a terminal of its own; each answer is typed when a question stands at the end of what was shown. What was
    shown, and the exit code."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(env)
        os.execv(KT, [KT, *map(str, words)])
    shown, answers, seen, end = "", list(answers), 0, time.monotonic() + 300
    while time.monotonic() < end:
        if not select.select([fd], [], [], 1)[0]:
            continue
        try:
            data = os.read(fd, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data.decode(errors="replace")
        if answers and shown[seen:].endswith(": "):
            seen = len(shown)
            os.write(fd, answers.pop(0).encode())
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail(f"still waiting after: {shown}")
    status = os.waitpid(pid, 0)[1]
    os.close(fd)
    return shown.replace("\r\n", "\n"), os.waitstatus_to_exitcode(status)


class TestQuestions:
    def test_quant(self, tmp_path):
        shown, code = converse(["quant"], ["demo\n", "int8\n", f"{tmp_path}/my weights\n"])
        assert code == 0 and f"$ kt quant demo --method int8 --output '{tmp_path}/my weights'" in shown
        assert (tmp_path / "my weights" / "kt_manifest.json").exists()

    def test_generate_asks_again_until_it_can_go_on(self):
        shown, code = converse(["generate"], ["owl\n", "1\n", "\n", "Once upon\n", "many\n", "4\n"])
        assert code == 0 and "$ kt generate demo --prompt 'Once upon' --max-tokens 4" in shown
        assert "no model named 'owl'" in shown and "an answer is needed" in shown and "got 'many'" in shown

    def test_other_verbs(self, tmp_path):
        (tmp_path / "t.txt").write_text("Once upon a time there was a little fox. " * 60)
        for words, answers in [(["estimate"], ["\n", "128\n", "int4\n"]),
                               (["bench"], ["\n", "8\n", "1\n"]),
                               (["perplexity"], ["\n", "/no/such\n", f"{tmp_path}/t.txt\n", "\n"]),
                               (["model"], ["info\n", "demo\n"]),
                               (["model", "add"], ["fox\n", f"{DEMO}\n", "\n", "\n"])]:
            shown, code = converse(words, answers)
            assert code == 0, (words, shown)
            assert "$ kt " + " ".join(words) in shown
        assert "fox" in listed()

    def test_config(self):
        shown, code = converse(["config", "init"], ["\n", "8080\n", "2\n"], HOME="/nonexistent")
        assert code == 0 and "$ kt config init --port 8080 --cpu-threads 2" in shown
        assert kt_ok("config", "get", "server.port").stdout == "8080\n"
        shown, code = converse(["config", "init"], ["no\n"])
        assert code == 2 and "nothing was changed" in shown
        shown, code = converse(["config"], ["3\n", "server.port\n", "9090\n"])
        assert code == 0 and kt_ok("config", "get", "server.port").stdout == "9090\n"

    @pytest.mark.parametrize("key", ["\x04", "\x03"])
    def test_ending_it(self, key):
        shown, code = converse(["quant"], [key])
        assert code == 130 and shown.endswith("kt: interrupted\n")

    def test_dumb_terminal(self):
        shown, code = converse(["model"], ["list\n"], TERM="dumb")
        assert code == 0 and "\033" not in shown

    def test_with_arguments_it_never_asks(self):
        shown, code = converse(["quant", "--method", "int8"], [])
        assert code == 2 and "MODEL is required" in shown
