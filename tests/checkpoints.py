"""Small checkpoints written by hand, converted weights by the book, and the kt program run on them: what the tests of
conversion share. The quantiser and the packing here are written from the file format alone, in numpy."""
import contextlib
import hashlib
import json
import lzma
import os
import pathlib
import signal
import struct
import subprocess

import numpy as np
import pytest

KT = os.environ.get("KT_PROGRAM")
DATA = os.environ.get("KT_TEST_DATA")
ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
HALTS = os.environ.get("KT_TEST_HALTS") or (
    pathlib.Path(KT).resolve().parent.parent / "tests" / "libhalts.so" if KT else "")
FULL = bool(os.environ.get("KT_TEST_FULL"))
PROJECTIONS = ("gate", "up", "down")
DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F8_E4M3": "u1", "I8": "i1", "U8": "u1",
          "I32": "<i4", "I64": "<i8"}


def trained_model(name="tiny-deepseekv3"):
    """The folder of a small trained model, or None."""
    for folder in ([pathlib.Path(DATA, "models", name)] if DATA else []) + [ROOT / "demo" / name]:
        if (folder / "config.json").exists():
            return folder
    return None


def fixture_text(name):
    """The words of a compressed text of tests/fixtures."""
    return lzma.decompress((FIXTURES / f"{name}.xz").read_bytes()).decode()


def long_texts(folder):
    """(a text to calibrate with, a text to test with): the end and the beginning of one book where KT_TEST_DATA has it,
    else stories. `folder` takes the first."""
    book = pathlib.Path(DATA or "", "data", "valid_books.txt")
    calibrate = pathlib.Path(folder, "calibrate.txt")
    if book.exists():
        # 25,600 tokens of the trained models' vocabulary are less than 120,000 characters.
        calibrate.write_text(book.read_text()[120000:])
        return calibrate, book
    calibrate.write_text(fixture_text("stories.txt"))
    return calibrate, ROOT / "demo" / "stories.txt"


# --- numbers ---------------------------------------------------------------------------------------------------------

def bf16(values):
    """Round to nearest, ties to even. NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def from_bf16(bits):
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def e4m3_values():
    """[256] f32; 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


# --- safetensors -----------------------------------------------------------------------------------------------------

def write_safetensors(path, tensors, metadata=None):
    """tensors: name -> (dtype, array of its storage type)."""
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, (dtype, array) in tensors.items():
        assert array.dtype == np.dtype(DTYPES[dtype]), (name, dtype, array.dtype)
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    write_raw_safetensors(path, header, b"".join(np.ascontiguousarray(a).tobytes() for _, a in tensors.values()))


def write_raw_safetensors(path, header, data):
    """Any header, right or wrong."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    """({name: (dtype, shape, bytes)}, metadata)"""
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8:8 + length]), memoryview(raw)[8 + length:]
    metadata = header.pop("__metadata__", {})
    return {name: (entry["dtype"], entry["shape"], bytes(data[slice(*entry["data_offsets"])]))
            for name, entry in header.items()}, metadata


def read_folder(folder):
    """All tensors of all safetensors files of a folder, and all their metadata."""
    tensors, metadata = {}, {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        more, said = read_safetensors(path)
        assert not tensors.keys() & more.keys()
        tensors.update(more)
        metadata.update(said)
    return tensors, metadata


# --- models ----------------------------------------------------------------------------------------------------------

class Model:
    """A made MoE model: `values` holds each expert's weights as f32, as a reader must see them."""

    def __init__(self, folder, *, kind="bf16", layers=2, experts=4, hidden=128, inter=128, model_type="qwen3_moe",
                 seed=1, files=2):
        self.folder, self.kind = pathlib.Path(folder), kind
        self.layers, self.experts, self.hidden, self.inter, self.files = layers, experts, hidden, inter, files
        self.random = np.random.default_rng(seed)
        self.values, self.tensors = {}, {}
        self.config = {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": model_type, "hidden_size": hidden,
            "intermediate_size": 4 * inter, "moe_intermediate_size": inter, "num_hidden_layers": layers,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32,
            "num_experts": experts, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "torch_dtype": "float16" if kind == "fp16" else "bfloat16"}
        if kind == "fp8":
            self.config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                                  "weight_block_size": [128, 128]}
        self._fill()

    def name(self, layer, expert, projection):
        return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj"

    def _plain(self, name, *shape):
        self.tensors[name] = ("BF16", bf16(self.random.standard_normal(shape) * 0.05))

    def _fill(self):
        h = self.hidden
        self._plain("model.embed_tokens.weight", 32, h)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            self._plain(f"{at}.input_layernorm.weight", h)
            self._plain(f"{at}.post_attention_layernorm.weight", h)
            for name, rows, cols in (("q", 64, h), ("k", 32, h), ("v", 32, h), ("o", h, 64)):
                self._plain(f"{at}.self_attn.{name}_proj.weight", rows, cols)
            self._plain(f"{at}.mlp.gate.weight", self.experts, h)
            for expert in range(self.experts):
                for projection in PROJECTIONS:
                    self._expert(layer, expert, projection)
        self._plain("model.norm.weight", h)
        self._plain("lm_head.weight", 32, h)

    def _expert(self, layer, expert, projection):
        shape = (self.hidden, self.inter) if projection == "down" else (self.inter, self.hidden)
        name = self.name(layer, expert, projection)
        if self.kind == "fp8":
            codes = self.random.integers(0, 256, shape).astype("u1")
            codes[(codes & 127) == 127] = 0x30
            blocks = tuple(-(-size // 128) for size in shape)
            scales = (self.random.random(blocks) * 1e-3 + 1e-4).astype("<f4")
            spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:shape[0], :shape[1]]
            self.tensors[f"{name}.weight"] = ("F8_E4M3", codes)
            self.tensors[f"{name}.weight_scale_inv"] = ("F32", scales)
            self.values[layer, expert, projection] = e4m3_values()[codes] * spread
            return
        values = (self.random.standard_normal(shape) * 0.05).astype(np.float32)
        if self.kind == "fp16":
            stored = ("F16", values.astype("<f2"))
            self.values[layer, expert, projection] = stored[1].astype(np.float32)
        elif self.kind == "f32":
            stored = ("F32", values.astype("<f4"))
            self.values[layer, expert, projection] = values
        else:
            stored = ("BF16", bf16(values))
            self.values[layer, expert, projection] = from_bf16(stored[1])
        self.tensors[f"{name}.weight"] = stored

    def shard_name(self, i):
        return f"model-{i + 1:05d}-of-{self.files:05d}.safetensors"

    def save(self, index=True):
        """Writes the folder; what a test changed in `tensors` or `config` before is in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names, weight_map, total = list(self.tensors), {}, 0
        for i in range(self.files):
            mine = {n: self.tensors[n] for n in names[i * len(names) // self.files:(i + 1) * len(names) // self.files]}
            write_safetensors(self.folder / self.shard_name(i), mine)
            weight_map.update(dict.fromkeys(mine, self.shard_name(i)))
            total += sum(array.nbytes for _, array in mine.values())
        if index:
            said = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(said))
        (self.folder / "config.json").write_text(json.dumps(self.config))
        (self.folder / "generation_config.json").write_text('{"eos_token_id": 1}')
        (self.folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (self.folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
        return self


# --- converted weights by the book -----------------------------------------------------------------------------------

def quantise(values, bits):
    """(codes int8 [n, k], d f32 [n]) of rows already rounded to bf16. Every step in f32, halves to even."""
    w = np.asarray(values, np.float32)
    amax = np.abs(w).max(1)
    d = amax * (np.float32(1) / np.float32(127)) if bits == 8 else amax / np.float32(112)
    with np.errstate(divide="ignore"):
        r = np.where(d > 0, np.float32(1) / d, np.float32(0)).astype(np.float32)
    q = np.clip(np.rint(w * r[:, None]), -128, 127).astype(np.int32)
    if bits == 4:
        q = np.sign(q) * (((np.abs(q) + 8) & 0xF0) >> 4)
    return q.astype(np.int8), d


def places(n, k, bits):
    """Per element its byte, and whether it is the high nibble."""
    row, col = np.arange(n)[:, None], np.arange(k)[None, :]
    n_block, granule = (128, 128) if bits == 4 else (64, 64)
    nb, kb = row // n_block * n_block, col // 3584 * 3584
    nbs, kbs = np.minimum(n_block, n - nb), np.minimum(3584, k - kb)
    i, n0 = (row - nb) % 32, (row - nb) // 32 * 32
    j, k0 = (col - kb) % granule, (col - kb) // granule * granule
    start = nb * k + kb * nbs + n0 * kbs + k0 * 32
    inner = i // 16 * 1024 + j % 64 // 4 * 64 + i % 16 * 4 + j % 4
    high = np.broadcast_to(j >= 64, (n, k))
    return (start // 2 + inner if bits == 4 else start + inner), high


def padded(n, k, bits):
    granule = 128 if bits == 4 else 64
    return -(-n // 32) * 32, -(-k // granule) * granule


def pack(codes, bits):
    n, k = codes.shape
    whole = np.zeros(padded(n, k, bits), np.int8)
    whole[:n, :k] = codes
    at, high = places(*whole.shape, bits)
    out = np.zeros(whole.size * bits // 8, np.uint8)
    if bits == 8:
        out[at] = whole.view(np.uint8)
    else:
        nibbles = whole.view(np.uint8) & 15
        out[at[~high]] = nibbles[~high]
        out[at[high]] |= nibbles[high] << 4
    return out.tobytes()


def unpack(data, n, k, bits):
    at, high = places(*padded(n, k, bits), bits)
    codes = np.frombuffer(data, np.uint8)[at]
    if bits == 4:
        codes = np.where(high, codes >> 4, codes & 15).astype(np.int16)
        codes = np.where(codes > 7, codes - 16, codes)
    return codes.astype(np.uint8).view(np.int8)[:n, :k]


def part(values, projection, tp, index):
    inter = values.shape[1 if projection == "down" else 0]
    cut = slice(index * inter // tp, (index + 1) * inter // tp)
    return np.ascontiguousarray(values[:, cut] if projection == "down" else values[cut])


def expected(values, projection, bits, tp, index):
    """(weight bytes, scale bytes) of one part; sources of other types are rounded to bf16 first."""
    mine = from_bf16(bf16(part(values, projection, tp, index)))
    codes, d = quantise(mine, bits)
    scales = np.zeros(padded(*codes.shape, bits)[0], "<f4")
    scales[:len(d)] = d
    return pack(codes, bits), scales.tobytes()


# --- kt --------------------------------------------------------------------------------------------------------------

def kt(*args, **options):
    return subprocess.run([KT, *map(str, args)], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600,
                          **options)


def kt_ok(*args, **options):
    result = kt(*args, **options)
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result


def halting(where):
    """The environment of a kt that halts at a stated point of its work, as tests/halts.cc says."""
    if not os.path.exists(HALTS):
        pytest.skip(f"KT_TEST_HALTS does not name libhalts.so (tests/halts.cc): {HALTS}")
    return {**os.environ, "LD_PRELOAD": str(HALTS), "KT_TEST_HALT": where}


def kt_killed(where, *args):
    """kt that dies at `where`, "call N" or "rename N NAME"."""
    result = kt(*args, env=halting(f"kill {where}"))
    assert result.returncode == -signal.SIGKILL, (where, result.returncode, result.stderr)


@contextlib.contextmanager
def kt_held(where, *args):
    """kt that stands still at `where` while the block runs; then it goes on, unless the block ended it. Afterwards the
    process has its output as `stdout` and `stderr`."""
    process = subprocess.Popen([KT, *map(str, args)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=halting(f"stop {where}"))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        process.returncode = os.waitstatus_to_exitcode(status)
        raise AssertionError((where, process.returncode, process.communicate()[1]))
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdout, process.stderr = process.communicate(timeout=600)


def calls_of(folder, *args):
    """How many points "call N" a run of kt has that ends well."""
    count = pathlib.Path(folder, "calls")
    count.write_bytes(bytes(8))
    kt_ok(*args, env={**halting("kill call 0"), "KT_TEST_CALLS": str(count)})
    return struct.unpack("=Q", count.read_bytes())[0]


def error_line(stderr):
    """The one line of an error; warnings and progress may stand beside it."""
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if line.startswith("kt: ")]
    assert len(lines) == 1, stderr
    return lines[0]


def refused(result, codes, *words):
    """The line of a run that has to fail with one of these codes and name all the words."""
    assert result.returncode in ([codes] if isinstance(codes, int) else codes), (result.returncode, result.stderr)
    line = error_line(result.stderr)
    missing = [word for word in words if str(word) not in line]
    assert not missing, (missing, line)
    return line


def digests(folder):
    """{path in the folder: sha256} of every file, hidden ones too."""
    folder = pathlib.Path(folder)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}
