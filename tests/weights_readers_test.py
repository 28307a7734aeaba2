"""The readers and the writer of weights/ against the `safetensors` and `gguf` packages.

Needs numpy, safetensors, gguf and the program weights_probe, named by KT_WEIGHTS_PROBE. Checkpoints of trained models
are the demo's, and where KT_TEST_DATA names a folder that holds models/, those.
"""
import hashlib
import json
import os
import pathlib
import struct
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("safetensors", reason="the safetensors package is not installed")
from safetensors import safe_open
from safetensors.numpy import save_file

PROBE = os.environ.get("KT_WEIGHTS_PROBE")
DATA = os.environ.get("KT_TEST_DATA")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_WEIGHTS_PROBE does not name the weights_probe program")

NAMES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
         "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64"}
# numpy cannot hold these; the package refuses to open some of them as numpy arrays.
FOREIGN = {"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}


def probe(*arguments):
    return subprocess.run([PROBE, *map(str, arguments)], capture_output=True, text=True)


def listed(path):
    """{name: (type, shape, sha256)} as the probe sees them."""
    done = probe("list", path)
    assert done.returncode == 0, done.stderr
    out = {}
    for line in done.stdout.splitlines():
        name, kind, shape, digest = line.split("\t")
        out[name] = (kind, tuple(json.loads(shape)), digest)
    return out


def expected(array, kind=None, shape=None):
    return kind or NAMES[str(array.dtype)], tuple(shape or array.shape), hashlib.sha256(array.tobytes()).hexdigest()


def random_arrays(rng):
    arrays = {}
    for i, dtype in enumerate(NAMES):
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (i % 3 + 1, 8 * (i + 1)), dtype=np.uint8)
        arrays[f"model.layers.{i}.{dtype}"] = raw.view(dtype)
    arrays["scalar"] = np.array(3.5, np.float32)
    arrays["none"] = np.zeros((0, 7), np.int64)
    return arrays


def test_reads_what_safetensors_writes(tmp_path):
    arrays = random_arrays(np.random.default_rng(1))
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    assert listed(tmp_path) == {name: expected(array) for name, array in arrays.items()}


def test_reads_shards_with_an_index(tmp_path):
    arrays = random_arrays(np.random.default_rng(2))
    parts = [{}, {}, {}]
    for i, (name, array) in enumerate(arrays.items()):
        parts[i % 3][name] = array
    where = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(part, tmp_path / file)
        where.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert listed(tmp_path) == {name: expected(array) for name, array in arrays.items()}
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    done = probe("list", tmp_path)
    assert done.returncode == 1 and "1 of 3 files are missing: model-00002-of-00003.safetensors" in done.stderr


def test_safetensors_reads_what_we_write(tmp_path):
    path = tmp_path / "out.safetensors"
    done = probe("write", path)
    assert done.returncode == 0, done.stderr
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest() == done.stdout.strip()
    length = struct.unpack("<Q", content[:8])[0]
    assert (8 + length) % 64 == 0
    header = json.loads(content[8:8 + length])
    ours = listed(path)
    seen = 0
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt", "note": 'a "quoted"\nline'}
        assert set(file.keys()) == set(ours) == set(header) - {"__metadata__"}
        for name, (kind, shape, digest) in ours.items():
            view = file.get_slice(name)
            assert view.get_dtype() == kind and tuple(view.get_shape()) == shape
            if kind in FOREIGN:
                continue
            assert expected(file.get_tensor(name)) == (kind, shape, digest)
            seen += 1
    assert seen >= len(NAMES)


# Q8_1: its size is not agreed on, and no file has it. 41 was the last type when this was written.
QUANTISED = [t for t in gguf.GGMLQuantizationType if t.name != "Q8_1" and t.value <= 41]


def gguf_arrays(rng):
    """{name: (numpy array for the writer, type, shape)} of every type that the package knows."""
    out = {}
    for kind in QUANTISED:
        size, width = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = 3, 2 * size
        raw = rng.integers(0, 256, (2, rows, columns // size * width), dtype=np.uint8)
        out[f"blk.0.{kind.name.lower()}"] = (raw, kind, (2, rows, columns))
    return out


def write_gguf(path, tensors, **options):
    writer = gguf.GGUFWriter(path, "qwen3moe", **options)
    writer.add_block_count(4)
    writer.add_embedding_length(256)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(128)
    writer.add_token_list(["a", "b", ""])
    for name, (raw, kind, _) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_agrees_with_gguf_on_every_type(tmp_path):
    tensors = gguf_arrays(np.random.default_rng(3))
    path = tmp_path / "model.gguf"
    write_gguf(path, tensors)
    ours = listed(path)
    assert ours == {name: expected(raw, kind.name, shape) for name, (raw, kind, shape) in tensors.items()}
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        kind, shape, digest = ours[tensor.name]
        assert kind == tensor.tensor_type.name and list(shape) == [int(d) for d in tensor.shape][::-1]
        assert digest == hashlib.sha256(np.ascontiguousarray(tensor.data).tobytes()).hexdigest()
    config = dict(line.split(" ", 1) for line in probe("config", path).stdout.splitlines())
    assert config["model_type"] == "qwen3moe" and config["layers"] == "4" and config["experts"] == "8"
    assert config["hidden"] == "256" and config["inter"] == "128" and config["top_k"] == "2"


def test_split_sets(tmp_path):
    tensors = gguf_arrays(np.random.default_rng(4))
    write_gguf(tmp_path / "model.gguf", tensors, split_max_tensors=9)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(parts) > 2
    want = {name: expected(raw, kind.name, shape) for name, (raw, kind, shape) in tensors.items()}
    assert listed(tmp_path) == want
    assert all(listed(part) == want for part in parts)
    parts[1].unlink()
    done = probe("list", parts[0])
    assert done.returncode == 1 and f"parts are missing: {parts[1].name}" in done.stderr


def test_big_endian_is_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, endianess=gguf.GGUFEndian.BIG)
    done = probe("list", path)
    assert done.returncode == 1 and "a big-endian GGUF file" in done.stderr


MODELS = sorted((pathlib.Path(DATA) / "models" if DATA else pathlib.Path(__file__).resolve().parent.parent / "demo")
                .glob("*/config.json"))


@pytest.mark.parametrize("config", MODELS, ids=lambda path: path.parent.name)
def test_real_checkpoints(config):
    ours = listed(config.parent)
    names = set()
    for file in config.parent.glob("*.safetensors"):
        content = file.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            digest = hashlib.sha256(content[begin:end]).hexdigest()
            assert ours[name] == (entry["dtype"], tuple(entry["shape"]), digest)
        names |= set(header)
    assert names == set(ours)
