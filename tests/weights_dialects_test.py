"""Expert weights of every dialect, dequantised by weights_probe, against the libraries that define them.

Needs weights_probe, named by KT_WEIGHTS_PROBE. What a library is missing for is skipped and says so.
"""
import json
import os
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")

PROBE = os.environ.get("KT_WEIGHTS_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_WEIGHTS_PROBE does not name the weights_probe program")
E, H, I = 2, 256, 128
SHAPES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def torch_or_skip():
    return pytest.importorskip("torch", reason="torch is not installed")


def save(folder, tensors, **config):
    """tensors: name -> torch tensor"""
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    config = {"num_hidden_layers": 3, "hidden_size": H, "moe_intermediate_size": I, "num_experts": E} | config
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def probe(*arguments):
    done = subprocess.run([PROBE, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def dequant(path, expert, projection, layer=1):
    return np.frombuffer(probe("dequant", path, layer, expert, projection), np.float32).reshape(SHAPES[projection])


def dialect(path):
    return probe("experts", path).decode().splitlines()[0].removeprefix("dialect ")


def modules(prefix="model.layers.1.mlp.experts"):
    for expert in range(E):
        for projection, shape in SHAPES.items():
            yield expert, projection, shape, f"{prefix}.{expert}.{projection}_proj"


def same(ours, theirs):
    """The same numbers, a zero's sign included."""
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours.view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats(tmp_path, dtype):
    torch = torch_or_skip()
    torch.manual_seed(1)
    tensors = {name + ".weight": (torch.randn(shape) * 0.02).to(getattr(torch, dtype))
               for _, _, shape, name in modules()}
    save(tmp_path, tensors)
    for expert, projection, _, name in modules():
        same(dequant(tmp_path, expert, projection), tensors[name + ".weight"].float().numpy())


@pytest.mark.parametrize("kind", ["block", "block_64", "channel", "bf16_scales"])
def test_fp8(tmp_path, kind):
    torch = torch_or_skip()
    torch.manual_seed(2)
    n, k = {"block_64": (64, 64), "channel": (1, 10**6)}.get(kind, (128, 128))
    suffix = "weight_scale" if kind == "channel" else "weight_scale_inv"
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        weight = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-rows // n), -(-columns // k)) * 0.01
        if kind == "bf16_scales":
            scale = scale.bfloat16()
        wide = scale.float().repeat_interleave(n, 0)[:rows].repeat_interleave(min(k, columns), 1)[:, :columns]
        tensors[name + ".weight"], tensors[f"{name}.{suffix}"] = weight, scale
        expected[expert, projection] = (weight.float() * wide).numpy()
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [n, k]}}
    save(tmp_path, tensors, **({} if kind == "channel" else config))
    assert dialect(tmp_path) == ("fp8-channel" if kind == "channel" else "fp8")
    for (expert, projection), values in expected.items():
        same(dequant(tmp_path, expert, projection), values)


def test_every_e4m3_code(tmp_path):
    torch = torch_or_skip()
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    tensors = {}
    for _, _, (rows, columns), name in modules():
        tensors[name + ".weight"] = codes.repeat(rows * columns // 256).reshape(rows, columns).view(torch.float8_e4m3fn)
        tensors[name + ".weight_scale"] = torch.ones(rows, 1)
    save(tmp_path, tensors)
    same(dequant(tmp_path, 0, "gate"), tensors["model.layers.1.mlp.experts.0.gate_proj.weight"].float().numpy())


@pytest.mark.parametrize("bits,strategy,symmetric", [(4, "group", True), (4, "channel", True), (8, "group", True),
                                                     (8, "channel", True), (4, "group", False)])
def test_compressed_tensors(tmp_path, bits, strategy, symmetric):
    torch = torch_or_skip()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    torch.manual_seed(3)
    group, low = 32, -(1 << (bits - 1))
    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy,
                                 group_size=group if strategy == "group" else None)
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        groups = columns // group if strategy == "group" else 1
        codes = torch.randint(low, -low, (rows, columns), dtype=torch.int8)
        scale = (torch.rand(rows, groups) * 0.01 + 0.001).bfloat16()
        zero = None if symmetric else torch.randint(low, -low, (rows, groups), dtype=torch.int8)
        tensors[name + ".weight_packed"] = pack_to_int32(codes, bits)
        tensors[name + ".weight_scale"] = scale
        tensors[name + ".weight_shape"] = torch.tensor([rows, columns])
        if zero is not None:
            tensors[name + ".weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0)
        expected[expert, projection] = dequantize(codes, scale, zero, arguments, dtype=torch.bfloat16)
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy,
               "group_size": group if strategy == "group" else None}
    save(tmp_path, tensors, quantization_config={
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    assert dialect(tmp_path) == "compressed-tensors"
    for (expert, projection), values in expected.items():
        # Theirs rounds the product to bf16; ours is the exact product. -0.0 where a zero scales a negative.
        ours = torch.from_numpy(dequant(tmp_path, expert, projection).copy()).bfloat16()
        assert torch.equal(ours, values)


def gptq_words(codes):
    """[k, n] -> int32 [k / 8, n]"""
    k, n = codes.shape
    shifts = 4 * np.arange(8, dtype=np.uint32)[None, :, None]
    return np.bitwise_or.reduce(codes.astype(np.uint32).reshape(k // 8, 8, n) << shifts, axis=1).view(np.int32)


def row_words(codes, order=range(8)):
    """[a, n] -> int32 [a, n / 8]; nibble i holds element order[i] of eight"""
    a, n = codes.shape
    eight = codes.astype(np.uint32).reshape(a, n // 8, 8)[:, :, list(order)]
    return np.bitwise_or.reduce(eight << (4 * np.arange(8, dtype=np.uint32)), axis=2).view(np.int32)


@pytest.mark.parametrize("kind", ["v1", "v2", "symmetric", "act_order", "awq"])
def test_gptq_and_awq(tmp_path, kind):
    torch = torch_or_skip()
    random = np.random.default_rng(4)
    tensors, expected, group = {}, {}, 64
    for expert, projection, (rows, columns), name in modules():
        codes = random.integers(0, 16, (columns, rows))
        scales = (random.random((columns // group, rows)) * 0.01).astype(np.float16)
        zeros = random.integers(1, 16, (columns // group, rows))  # as the arithmetic uses them
        if kind == "symmetric":
            zeros[:] = 8
        index = np.arange(columns, dtype=np.int32) // group
        if kind == "act_order":
            random.shuffle(index)
        if kind == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            packed = {"qweight": row_words(codes, order), "qzeros": row_words(zeros, order), "scales": scales}
        else:
            packed = {"qweight": gptq_words(codes), "qzeros": row_words(zeros - (kind != "v2")), "scales": scales,
                      "g_idx": index}
        tensors |= {f"{name}.{suffix}": torch.from_numpy(value) for suffix, value in packed.items()}
        exact = (codes - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)
        expected[expert, projection] = exact.T
    save(tmp_path, tensors, quantization_config={
        "quant_method": "awq" if kind == "awq" else "gptq", "bits": 4, "group_size": group,
        "sym": kind == "symmetric", "desc_act": kind == "act_order",
        **({"checkpoint_format": "gptq_v2"} if kind == "v2" else {})})
    assert dialect(tmp_path) == ("awq" if kind == "awq" else "gptq")
    for (expert, projection), values in expected.items():
        np.testing.assert_array_equal(dequant(tmp_path, expert, projection), values)


def test_mxfp4_per_expert(tmp_path):
    torch = torch_or_skip()
    random = np.random.default_rng(5)
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
        exponents = random.integers(110, 130, (rows, columns // 32)).astype(np.uint8)
        tensors[name + ".weight"] = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        tensors[name + ".scale"] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        expected[expert, projection] = E2M1[codes] * np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
    save(tmp_path, tensors)
    assert dialect(tmp_path) == "mxfp4"
    for (expert, projection), values in expected.items():
        same(dequant(tmp_path, expert, projection), values)


def check_gpt_oss(path, gate_up, down, gate_up_bias):
    """gate_up [E, H, 2I] and down [E, I, H] as the model multiplies: x @ gate_up[e]."""
    for expert in range(E):
        np.testing.assert_array_equal(dequant(path, expert, "gate"), gate_up[expert, :, ::2].T)
        np.testing.assert_array_equal(dequant(path, expert, "up"), gate_up[expert, :, 1::2].T)
        np.testing.assert_array_equal(dequant(path, expert, "down"), down[expert].T)
        for start, projection in enumerate(["gate", "up"]):
            bias = np.frombuffer(probe("bias", path, 1, expert, projection), np.float32)
            np.testing.assert_array_equal(bias, gate_up_bias[expert, start::2])


def test_gpt_oss_blocks(tmp_path):
    torch = torch_or_skip()
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    torch.manual_seed(6)
    stem = "model.layers.1.mlp.experts."
    shapes = {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}
    tensors, theirs = {stem + "gate_up_proj_bias": torch.randn(E, 2 * I).bfloat16(),
                       stem + "down_proj_bias": torch.randn(E, H).bfloat16()}, {}
    for name, (rows, columns) in shapes.items():
        blocks = torch.randint(0, 256, (E, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (E, rows, columns // 32), dtype=torch.uint8)
        tensors[f"{stem}{name}_blocks"], tensors[f"{stem}{name}_scales"] = blocks, scales
        theirs[name] = mxfp4.convert_moe_packed_tensors(blocks, scales).float().numpy()
    save(tmp_path, tensors, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    check_gpt_oss(tmp_path, theirs["gate_up_proj"], theirs["down_proj"],
                  tensors[stem + "gate_up_proj_bias"].float().numpy())


def test_gpt_oss_bf16(tmp_path):
    torch = torch_or_skip()
    torch.manual_seed(7)
    stem = "model.layers.1.mlp.experts."
    tensors = {stem + "gate_up_proj": torch.randn(E, H, 2 * I).bfloat16(),
               stem + "gate_up_proj_bias": torch.randn(E, 2 * I).bfloat16(),
               stem + "down_proj": torch.randn(E, I, H).bfloat16(),
               stem + "down_proj_bias": torch.randn(E, H).bfloat16()}
    save(tmp_path, tensors, model_type="gpt_oss")
    check_gpt_oss(tmp_path, *[tensors[stem + name].float().numpy()
                              for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias")])


# 2I = H: either way round fits gate_up alone, and down decides.
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_chunked(tmp_path, transposed):
    torch = torch_or_skip()
    torch.manual_seed(8)
    stem = "model.language_model.layers.1.mlp.experts."
    gate_up, down = torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16()
    turn = (lambda t: t.transpose(1, 2)) if transposed else (lambda t: t)
    save(tmp_path, {stem + "gate_up_proj": turn(gate_up), stem + "down_proj": turn(down)})
    for expert in range(E):
        gate, up = gate_up[expert].float().chunk(2)
        same(dequant(tmp_path, expert, "gate"), gate.numpy())
        same(dequant(tmp_path, expert, "up"), up.numpy())
        same(dequant(tmp_path, expert, "down"), down[expert].float().numpy())


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_gguf(tmp_path, kind, merged):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    kind = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(9)
    columns = {"gate": 512, "up": 512, "down": 256}
    rows = {"gate": 256, "up": 256, "down": 512}
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(3)
    theirs = {}

    def add(name, shape):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if kind.name in ("F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0"):
            raw = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), kind)
        else:  # what the library cannot write: random bytes, with every f16 of the block a small number
            raw = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
            if kind.name == "MXFP4":
                raw[..., 0] = random.integers(110, 130, raw[..., 0].shape)
            for start in {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}.get(kind.name, ()):
                raw[..., start + 1] = 0x2C
            raw = raw.reshape(*shape[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=kind)
        return gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(shape)

    if merged:
        both = add("blk.1.ffn_gate_up_exps.weight", (E, 512, 512))
        theirs = {"gate": both[:, :256], "up": both[:, 256:]}
    for projection in ("gate", "up", "down"):
        if projection not in theirs:
            theirs[projection] = add(f"blk.1.ffn_{projection}_exps.weight", (E, rows[projection], columns[projection]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert dialect(path) == "gguf"
    for projection, values in theirs.items():
        for expert in range(E):
            ours = np.frombuffer(probe("dequant", path, 1, expert, projection), np.float32)
            np.testing.assert_array_equal(ours.reshape(rows[projection], columns[projection]), values[expert])


def test_gguf_one_tensor_an_expert(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    random = np.random.default_rng(10)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    theirs = {}
    for expert in range(E):
        for projection, shape in SHAPES.items():
            raw = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"blk.1.ffn_{projection}.{expert}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            theirs[expert, projection] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for (expert, projection), values in theirs.items():
        np.testing.assert_array_equal(dequant(path, expert, projection), values)


def test_nan_is_named(tmp_path):
    torch = torch_or_skip()
    tensors = {name + ".weight": torch.zeros(shape).bfloat16() for _, _, shape, name in modules()}
    name = "model.layers.1.mlp.experts.1.up_proj"
    tensors[name + ".weight"][5, 9] = float("nan")
    save(tmp_path, tensors)
    done = subprocess.run([PROBE, "dequant", str(tmp_path), "1", "1", "up"], capture_output=True, check=False)
    assert done.returncode != 0
    assert f"{name}: the weight of row 5, column 9 is not a finite number" in done.stderr.decode()
