"""`kt quant` on checkpoints and flags that are wrong: exit code 2 (3: memory, 4: unsupported), one line with names and
numbers, and nothing half-written under a final name. KT_PROGRAM names kt."""
import json
import os

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
from checkpoints import Model, digests, kt, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
MODES = {"merged": [], "folders": ["--no-merge"]}
UP = "model.layers.1.mlp.experts.1.up_proj"
DOWN = "model.layers.1.mlp.experts.2.down_proj"


# Each takes a Model that is not written yet, writes it in some bad way, and returns the words the line must have.

def missing_shard(model):
    model.save()
    (model.folder / model.shard_name(1)).unlink()
    return [model.shard_name(1)]


def truncated_shard(model):
    path = model.save().folder / model.shard_name(1)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    return [model.shard_name(1)]


def empty_shard(model):
    os.truncate(model.save().folder / model.shard_name(0), 0)
    return [model.shard_name(0)]


def tensor_in_two_shards(model):
    model.save(index=False)
    checkpoints.write_safetensors(model.folder / "more.safetensors", {f"{UP}.weight": model.tensors[f"{UP}.weight"]})
    return [f"{UP}.weight", "more.safetensors"]


def overlapping_offsets(model):
    model.save()
    path = model.folder / model.shard_name(1)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    first, last = header[f"{UP}.weight"]["data_offsets"]
    header[f"{UP}.weight"]["data_offsets"] = [first - 64, last - 64]
    checkpoints.write_raw_safetensors(path, header, raw[8 + length:])
    return [model.shard_name(1), "proj.weight"]


def index_of_other_files(model):
    model.save()
    path = model.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{UP}.weight"] = model.shard_name(0)
    path.write_text(json.dumps(index))
    return [f"{UP}.weight", model.shard_name(0)]


def index_out_of_the_folder(model):
    model.save()
    path = model.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][f"{UP}.weight"] = "../../etc/passwd"
    path.write_text(json.dumps(index))
    return ["passwd"]


def nan_weight(model):
    model.tensors[f"{DOWN}.weight"][1][3, 77] = 0x7FC0
    model.save()
    return [DOWN, "row 3", "column 77", "finite"]


def infinite_weight(model):
    model.tensors[f"{UP}.weight"][1][101, 5] = 0xFF80
    model.save()
    return [UP, "row 101", "column 5", "finite"]


def fewer_experts_than_said(model):
    model.config["num_experts"] = 8
    model.save()
    return ["expert", "8", "4"]


def more_experts_than_said(model):
    model.config["num_experts"] = 3
    model.save()
    return ["experts.3.", "config", "3 experts"]


def other_hidden_size(model):
    model.config["hidden_size"] = 192
    model.save()
    return ["192", "128", "hidden"]


def other_inter_size(model):
    model.config["moe_intermediate_size"] = 96
    model.save()
    return ["96", "128"]


def missing_projection(model):
    del model.tensors[f"{UP}.weight"]
    model.save()
    return ["layer 1", "expert 1", "up"]


def shape_of_another(model):
    model.tensors[f"{UP}.weight"] = ("BF16", np.zeros((64, 128), "<u2"))
    model.save()
    return [UP, "64", "128"]


def type_of_another(model):
    model.tensors[f"{UP}.weight"] = ("I64", np.zeros((128, 128), "<i8"))
    model.save()
    return [UP, "I64"]


def config_that_is_not_json(model):
    (model.save().folder / "config.json").write_text('{"hidden_size": ')
    return ["config.json"]


def config_with_words_for_numbers(model):
    model.config["num_experts"] = "many"
    model.save()
    return ["config.json", "num_experts"]


def nothing_there(model):
    return [model.folder]


def no_weights(model):
    model.folder.mkdir()
    (model.folder / "config.json").write_text(json.dumps(model.config))
    return [model.folder]


BAD = [missing_shard, truncated_shard, empty_shard, tensor_in_two_shards, overlapping_offsets, index_of_other_files,
       index_out_of_the_folder, nan_weight, infinite_weight, fewer_experts_than_said, more_experts_than_said,
       other_hidden_size, other_inter_size, missing_projection, shape_of_another, type_of_another,
       config_that_is_not_json, config_with_words_for_numbers, nothing_there, no_weights]
FOUND_WHILE_READING = (nan_weight, infinite_weight)  # weights are read once; layers before them are whole


@pytest.mark.parametrize("mode", ["merged", "folders"])
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_bad_checkpoints(tmp_path, bad, mode):
    words = bad(Model(tmp_path / "in"))
    out = tmp_path / "out"
    refused(kt("quant", tmp_path / "in", "-o", out, "--method", "int8", "--numa-nodes", 2, *MODES[mode]),
            4 if bad is type_of_another else 2, *words)
    if bad not in FOUND_WHILE_READING:
        assert not out.exists()
        return
    names = {name.split("/")[0] for name in digests(out) if not name.startswith(".kt_progress/")}
    assert names <= {"model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", "_layer_0"}
    for path in out.glob("*.safetensors"):
        checkpoints.read_safetensors(path)


def test_fp8_nan(tmp_path):
    model = Model(tmp_path / "in", kind="fp8", hidden=256)
    model.tensors[f"{UP}.weight"][1][9, 200] = 0x7F
    model.save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out"), 2, UP, "row 9", "column 200")


def test_fp8_scale_that_is_not_finite(tmp_path):
    model = Model(tmp_path / "in", kind="fp8", hidden=256)
    model.tensors[f"{UP}.weight_scale_inv"][1][0, 1] = np.inf
    model.save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out"), 2, UP)


def test_fp8_without_its_scales(tmp_path):
    model = Model(tmp_path / "in", kind="fp8", hidden=256)
    del model.tensors[f"{UP}.weight_scale_inv"]
    model.save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out"), 2, UP, "scale")


def test_source_of_another_type_than_said(tmp_path):
    model = Model(tmp_path / "in").save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out", "--input-type", "fp8"), 2, "fp8", "bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("experts", [0, None])
def test_model_without_experts(tmp_path, experts):
    model = Model(tmp_path / "in")
    model.tensors = {name: tensor for name, tensor in model.tensors.items() if ".experts." not in name}
    model.config.update(num_experts=0)
    if experts is None:
        del model.config["num_experts"], model.config["moe_intermediate_size"]
    model.save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out"), (2, 4), "expert")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("args, code, words", [
    (["--method", "int3"], 2, ["int3"]),
    (["--group-size", "33"], 2, ["33"]),
    (["--group-size", "32", "--method", "int8"], 2, ["32", "int8"]),
    (["--numa-nodes", "0"], 2, ["--numa-nodes"]),
    (["--max-memory", "much"], 2, ["--max-memory", "much"]),
    (["--max-memory", "1MiB"], 3, ["memory", "1.0 MiB"]),
    (["--resume-layer", "99"], 2, ["99"]),
    (["--calibrate", "text.txt"], 2, ["--calibrate", "--group-size"]),
    (["--no-such-flag"], 2, ["--no-such-flag"]),
])
def test_bad_flags(tmp_path, args, code, words):
    model = Model(tmp_path / "in").save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out", *args), code, *words)
    assert not (tmp_path / "out").exists()


def test_more_parts_than_rows(tmp_path):
    """128 rows cannot be cut into 500 parts; a sentence, or a file that says so, but no crash."""
    model = Model(tmp_path / "in").save()
    refused(kt("quant", model.folder, "-o", tmp_path / "out", "--numa-nodes", 500), 2, "500", "128")
