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
E, H, I = 2, 256, 128  # noqa: E741 (experts, hidden, inter)
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


def refusal(*arguments):
    """The sentence of a command that has to fail."""
    done = subprocess.run([PROBE, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 1, done.stderr.decode()
    return done.stderr.decode()


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


# Block scales that are powers of two, in one byte each, under the names they are published with.
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
def test_fp8_blocks_with_e8m0_scales(tmp_path, suffix):
    torch = torch_or_skip()
    torch.manual_seed(11)
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        weight = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
        exponents = torch.randint(100, 140, (rows // 64, columns // 32), dtype=torch.uint8)
        exponents[0, 0] = 0  # 2^-127, below the normal numbers of float32
        scale = exponents.view(torch.float8_e8m0fnu)
        tensors[name + ".weight"], tensors[f"{name}.{suffix}"] = weight, scale
        wide = scale.float().repeat_interleave(64, 0).repeat_interleave(32, 1)
        expected[expert, projection] = (weight.float() * wide).numpy()
    config = {"quant_method": "fp8", "weight_block_size": [64, 32], "scale_fmt": "ue8m0"}
    save(tmp_path, tensors, quantization_config=config)
    assert dialect(tmp_path) == "fp8"
    for (expert, projection), values in expected.items():
        same(dequant(tmp_path, expert, projection), values)
    name = "model.layers.1.mlp.experts.1.up_proj"
    tensors[f"{name}.{suffix}"].view(torch.uint8)[1, 3] = 255
    save(tmp_path, tensors, quantization_config=config)
    assert f"{name}: the scale of row 64, column 96 is not a finite number" in refusal(
        "dequant", tmp_path, 1, 1, "up")


@pytest.mark.parametrize("library", [False, True])
def test_mxfp8(tmp_path, library):
    """The library calls the exponents weight_scale, models are published with weight_scale_inv."""
    torch = torch_or_skip()
    torch.manual_seed(12)
    suffix = "weight_scale" if library else "weight_scale_inv"
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0
        stored = {"weight": codes.view(torch.float8_e4m3fn),
                  "weight_scale": torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)}
        tensors[name + ".weight"], tensors[f"{name}.{suffix}"] = stored["weight"], stored["weight_scale"]
        if library:
            pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
            from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
            from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
                num_bits=8, type="float", symmetric=True, strategy="group", group_size=32))
            # In bf16 and exact: four bits of E4M3 times a power of two.
            values = MXFP8QuantizationCompressor.decompress(stored, scheme)["weight"].float()
        else:
            scale = torch.exp2(stored["weight_scale"].float() - 127)
            values = stored["weight"].float() * scale.repeat_interleave(32, 1)
        expected[expert, projection] = values.numpy()
    save(tmp_path, tensors)
    assert dialect(tmp_path) == "mxfp8"
    for (expert, projection), values in expected.items():
        same(dequant(tmp_path, expert, projection), values)


def compressed_config(**weights):
    return {"quantization_config": {
        "quant_method": "compressed-tensors", "format": weights.pop("format"),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}}}}


@pytest.mark.parametrize("scales,dtype", [("[n, 1]", "bfloat16"), ("[n]", "float32"), ("[1]", "float16")])
def test_int8_per_channel(tmp_path, scales, dtype):
    torch = torch_or_skip()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    torch.manual_seed(13)
    strategy = "tensor" if scales == "[1]" else "channel"
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy=strategy))
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        scale = (torch.rand(1 if strategy == "tensor" else rows, 1) * 0.01 + 0.001).to(getattr(torch, dtype))
        # In float32, where the product of eight bits and a half is exact.
        theirs = IntQuantizationCompressor.decompress({"weight": codes, "weight_scale": scale.float()}, scheme)
        expected[expert, projection] = theirs["weight"].float().numpy()
        tensors[name + ".weight"] = codes
        tensors[name + ".weight_scale"] = scale if scales == "[n, 1]" else scale[:, 0]
    config = compressed_config(format="int-quantized", num_bits=8, strategy=strategy)
    save(tmp_path, tensors, **config)
    assert dialect(tmp_path) == "int8-channel"
    for (expert, projection), values in expected.items():
        np.testing.assert_array_equal(dequant(tmp_path, expert, projection), values)  # 0 * -1 is either zero


def test_int8_refusals(tmp_path):
    torch = torch_or_skip()
    tensors = {}
    for _, _, (rows, columns), name in modules():
        tensors[name + ".weight"] = torch.zeros(rows, columns, dtype=torch.int8)
        tensors[name + ".weight_scale"] = torch.ones(rows, 1)
    first = "model.layers.1.mlp.experts.0.gate_proj"
    config = compressed_config(format="int-quantized", num_bits=8, strategy="channel")
    save(tmp_path, tensors | {first + ".weight_zero_point": torch.zeros(I, 1, dtype=torch.int8)}, **config)
    assert f"{first}.weight_zero_point: zero points of 8-bit weights are not read" in refusal("experts", tmp_path)
    save(tmp_path, tensors | {first + ".weight_scale": torch.ones(I, H // 32)}, **config)
    assert f"{first}.weight_scale: expected [{I}] for I8 [{I}, {H}], found [{I}, {H // 32}]" in refusal(
        "experts", tmp_path)
    del tensors[first + ".weight_scale"]
    save(tmp_path, tensors, **config)
    assert f"{first}.weight: I8 [{I}, {H}] without a weight_scale beside it" in refusal("experts", tmp_path)


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


def test_compressed_tensors_in_bytes(tmp_path):
    """The same bits as words of four bytes or as bytes."""
    torch = torch_or_skip()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    torch.manual_seed(14)
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8)
        scale = (torch.rand(rows, columns // 32) * 0.01).bfloat16()
        tensors[name + ".weight_packed"] = pack_to_int32(codes, 4).view(torch.uint8)
        tensors[name + ".weight_scale"] = scale
        tensors[name + ".weight_shape"] = torch.tensor([rows, columns], dtype=torch.int32)
        expected[expert, projection] = (codes.float() * scale.float().repeat_interleave(32, 1)).numpy()
    save(tmp_path, tensors, **compressed_config(format="pack-quantized", num_bits=4, strategy="group", group_size=32))
    for (expert, projection), values in expected.items():
        np.testing.assert_array_equal(dequant(tmp_path, expert, projection), values)


# weight_g_idx is the group of each column; -1 everywhere is how tools save that no order was made.
@pytest.mark.parametrize("order", ["shuffled", "stretches", "in_order", "none"])
@pytest.mark.parametrize("bits,symmetric", [(4, True), (4, False), (8, True)])
def test_compressed_tensors_activation_order(tmp_path, bits, symmetric, order):
    torch = torch_or_skip()
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    torch.manual_seed(15)
    group, low = 32, -(1 << (bits - 1))
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        codes = torch.randint(low, -low, (rows, columns), dtype=torch.int8)
        scale = (torch.rand(rows, columns // group) * 0.01 + 0.001).bfloat16()
        zero = torch.randint(low, -low, scale.shape, dtype=torch.int8) if not symmetric else torch.zeros_like(scale)
        index = torch.arange(columns) // group
        if order == "shuffled":
            index = index[torch.randperm(columns)]
        elif order == "stretches":
            index = index.reshape(-1, 8)[torch.randperm(columns // 8)].flatten()
        tensors[name + ".weight_packed"] = pack_to_int32(codes, bits)
        tensors[name + ".weight_scale"] = scale
        tensors[name + ".weight_shape"] = torch.tensor([rows, columns])
        tensors[name + ".weight_g_idx"] = (torch.full_like(index, -1) if order == "none" else index).int()
        if not symmetric:
            tensors[name + ".weight_zero_point"] = pack_to_int32(zero, bits, packed_dim=0)
        expected[expert, projection] = ((codes.float() - zero[:, index].float()) * scale[:, index].float()).numpy()
    save(tmp_path, tensors, **compressed_config(format="pack-quantized", num_bits=bits, strategy="group",
                                                group_size=group, symmetric=symmetric, actorder="group"))
    for (expert, projection), values in expected.items():
        np.testing.assert_array_equal(dequant(tmp_path, expert, projection), values)


def test_activation_order_refusals(tmp_path):
    torch = torch_or_skip()
    tensors = {}
    for _, _, (rows, columns), name in modules():
        tensors[name + ".weight_packed"] = torch.zeros(rows, columns // 8, dtype=torch.int32)
        tensors[name + ".weight_scale"] = torch.ones(rows, columns // 32)
    name = "model.layers.1.mlp.experts.1.up_proj"
    config = compressed_config(format="pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group")
    index = (torch.arange(H) // 32).int()
    index[7] = -1
    save(tmp_path, tensors | {name + ".weight_g_idx": index}, **config)
    assert f"{name}.weight_g_idx: column 7 is in group -1, expected 0 to 7" in refusal("dequant", tmp_path, 1, 1, "up")
    save(tmp_path, tensors | {name + ".weight_g_idx": index[1:]}, **config)
    assert f"{name}.weight_g_idx: expected [{H}], found [{H - 1}]" in refusal("dequant", tmp_path, 1, 1, "up")


# An order of columns belongs to packed integers; beside other weights it would be lost.
@pytest.mark.parametrize("kind", ["fp8", "int8", "mxfp4", "bf16"])
def test_activation_order_of_other_weights(tmp_path, kind):
    torch = torch_or_skip()
    tensors = {}
    for _, _, (rows, columns), name in modules():
        weight, scale = {
            "fp8": (torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.ones(rows)),
            "int8": (torch.zeros(rows, columns, dtype=torch.int8), torch.ones(rows)),
            "mxfp4": (torch.zeros(rows, columns // 2, dtype=torch.uint8),
                      torch.full((rows, columns // 32), 127, dtype=torch.uint8)),
            "bf16": (torch.zeros(rows, columns).bfloat16(), None),
        }[kind]
        tensors[name + ".weight"] = weight
        if scale is not None:
            tensors[name + (".weight_scale" if kind != "mxfp4" else ".scale")] = scale
        tensors[name + ".weight_g_idx"] = (torch.arange(columns) // 32).int()
    save(tmp_path, tensors)
    first = "model.layers.1.mlp.experts.0.gate_proj"
    assert f"{first}.weight_g_idx: an order of columns is read with packed integers only" in refusal(
        "experts", tmp_path)


def gptq_words(codes, bits=4):
    """[k, n] -> int32 [k * bits / 32, n]"""
    k, n = codes.shape
    per_word = 32 // bits
    shifts = bits * np.arange(per_word, dtype=np.uint32)[None, :, None]
    words = codes.astype(np.uint32).reshape(k // per_word, per_word, n) << shifts
    return np.bitwise_or.reduce(words, axis=1).view(np.int32)


def row_words(codes, order=range(8), bits=4):
    """[a, n] -> int32 [a, n * bits / 32]; place i of a word holds element order[i]"""
    a, n = codes.shape
    per_word = 32 // bits
    words = codes.astype(np.uint32).reshape(a, n // per_word, per_word)[:, :, list(order)[:per_word]]
    return np.bitwise_or.reduce(words << (bits * np.arange(per_word, dtype=np.uint32)), axis=2).view(np.int32)


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


# Symmetric checkpoints: the zero is 128, stored as 127, or as itself by version 2 and by some tools of version 1.
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("version,stored,group", [("gptq", 127, 64), ("gptq_v2", 128, 64), ("gptq", 128, 64),
                                                  ("gptq", 127, -1)])
def test_gptq_of_8_bits(tmp_path, version, stored, group, order):
    torch = torch_or_skip()
    random = np.random.default_rng(16)
    tensors, expected = {}, {}
    for expert, projection, (rows, columns), name in modules():
        length = columns if group < 0 else group
        codes = random.integers(0, 256, (columns, rows))
        scales = (random.random((columns // length, rows)) * 0.01).astype(np.float16)
        index = np.arange(columns, dtype=np.int32) // length
        if order:
            random.shuffle(index)
        packed = {"qweight": gptq_words(codes, 8), "qzeros": row_words(np.full(scales.shape, stored), bits=8),
                  "scales": scales, "g_idx": index}
        tensors |= {f"{name}.{suffix}": torch.from_numpy(value) for suffix, value in packed.items()}
        expected[expert, projection] = ((codes - 128).astype(np.float32) * scales[index].astype(np.float32)).T
    config = {"quant_method": "gptq", "bits": 8, "group_size": group, "sym": True, "desc_act": order,
              "checkpoint_format": version}
    save(tmp_path, tensors, quantization_config=config)
    assert dialect(tmp_path) == "gptq"
    for (expert, projection), values in expected.items():
        np.testing.assert_array_equal(dequant(tmp_path, expert, projection), values)
    name = "model.layers.1.mlp.experts.1.up_proj"
    tensors[name + ".qzeros"][0, 0] -= 1
    save(tmp_path, tensors, quantization_config=config)
    assert f"{name}.qzeros: zero points of 8-bit weights are not read" in refusal("dequant", tmp_path, 1, 1, "up")


def test_gptq_order_without_index(tmp_path):
    torch = torch_or_skip()
    tensors = {}
    for _, _, (rows, columns), name in modules():
        tensors[name + ".qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[name + ".qzeros"] = torch.full((columns // 64, rows // 8), 0x77777777, dtype=torch.int32)
        tensors[name + ".scales"] = torch.ones(columns // 64, rows).half()
    save(tmp_path, tensors, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True})
    name = "model.layers.1.mlp.experts.0.up_proj"
    assert f"{name}.qweight: config says desc_act, but there is no g_idx beside it" in refusal(
        "dequant", tmp_path, 1, 0, "up")


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


def fused_fp8(torch, scale_of):
    """Fused tensors [E, 2I, H] and [E, H, I], their scales, and the values. scale_of(experts, rows, columns) gives
    scales as stored and for every weight."""
    torch.manual_seed(17)
    stored, values = {}, {}
    for name, (rows, columns) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        weight = (torch.randn(E, rows, columns) * 100).to(torch.float8_e4m3fn)
        scale, wide = scale_of(E, rows, columns)
        stored[name] = weight, scale
        values[name] = (weight.float() * wide.float()).numpy()
    return stored, values


def check_fused(path, values):
    for expert in range(E):
        same(dequant(path, expert, "gate"), values["gate_up_proj"][expert, :I])
        same(dequant(path, expert, "up"), values["gate_up_proj"][expert, I:])
        same(dequant(path, expert, "down"), values["down_proj"][expert])


# 2I = H here too: the shape of down tells which way round both are.
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["blocks", "e8m0_blocks", "channels", "flat_channels", "tensors"])
def test_fused_fp8(tmp_path, kind, transposed):
    torch = torch_or_skip()
    blocks = kind.endswith("blocks")

    def scale_of(experts, rows, columns):
        n, k = {"tensors": (rows, columns)}.get(kind, (64, 64) if blocks else (1, columns))
        scale = torch.rand(experts, rows // n, columns // k) * 0.01 + 0.001
        if kind == "e8m0_blocks":
            scale = torch.randint(110, 130, scale.shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return scale, scale.float().repeat_interleave(n, 1).repeat_interleave(k, 2)

    stored, values = fused_fp8(torch, scale_of)
    turn = (lambda t: t.view(torch.uint8).transpose(1, 2).contiguous().view(t.dtype)
            if t.element_size() == 1 else t.transpose(1, 2)) if transposed else (lambda t: t)
    stem, tensors = "model.layers.1.mlp.experts.", {}
    for name, (weight, scale) in stored.items():
        tensors[stem + name] = turn(weight)
        tensors[f"{stem}{name}_scale{'_inv' if blocks else ''}"] = (
            scale[:, :, 0] if kind == "flat_channels" else scale[:, 0, 0] if kind == "tensors" else turn(scale))
    save(tmp_path, tensors, **({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
                               if blocks else {}))
    assert dialect(tmp_path) == ("fp8" if blocks else "fp8-channel")
    check_fused(tmp_path, values)


def test_fused_fp8_as_transformers_has_it(tmp_path):
    """Names, shapes and values of the module that transformers puts in the place of fused experts."""
    torch = torch_or_skip()
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is not installed")

    def scale_of(experts, rows, columns):
        scale = torch.rand(experts, rows // 128, columns // 128) * 0.01 + 0.001
        return scale, torch.ones(())

    stored, _ = fused_fp8(torch, scale_of)
    stem = "model.layers.1.mlp.experts."
    tensors = {stem + name: weight for name, (weight, _) in stored.items()}
    tensors |= {f"{stem}{name}_scale_inv": scale for name, (_, scale) in stored.items()}
    save(tmp_path, tensors, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    check_fused(tmp_path, {name: fp8._dequantize_fp8_weight(weight, scale, [128, 128], torch.float32).numpy()
                           for name, (weight, scale) in stored.items()})


def test_fused_fp8_as_fbgemm_has_it(tmp_path):
    """Llama 4: transposed weights; scales [E, 1, 2I] for gate and up, [E, H, 1] for down."""
    torch = torch_or_skip()

    def scale_of(experts, rows, columns):
        scale = torch.rand(experts, rows, 1) * 0.01 + 0.001
        return scale, scale

    stored, values = fused_fp8(torch, scale_of)
    stem, tensors = "language_model.model.layers.1.feed_forward.experts.", {}
    for name, (weight, scale) in stored.items():
        tensors[stem + name] = weight.view(torch.uint8).transpose(1, 2).contiguous().view(weight.dtype)
        tensors[f"{stem}{name}_scale"] = scale.transpose(1, 2) if name == "gate_up_proj" else scale
    save(tmp_path, tensors, model_type="llama4", quantization_config={"quant_method": "fbgemm_fp8"})
    check_fused(tmp_path, values)


def test_fused_fp8_refusals(tmp_path):
    torch = torch_or_skip()
    stem = "model.layers.1.mlp.experts."

    def write(turned, gate_up_scale, down_scale, block, **config):
        gate_up, down = torch.zeros(E, 2 * I, H), torch.zeros(E, H, I)
        if turned:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        save(tmp_path, {stem + "gate_up_proj": gate_up.contiguous().to(torch.float8_e4m3fn),
                        stem + "down_proj": down.contiguous().to(torch.float8_e4m3fn),
                        stem + "gate_up_proj_scale_inv": gate_up_scale, stem + "down_proj_scale_inv": down_scale},
             quantization_config={"quant_method": "fp8", "weight_block_size": block}, **config)
        return refusal("experts", tmp_path)

    # A block over the last rows of gate and the first of up.
    assert "gate_up_proj[0]: rows from 128 by 1 cut scale blocks of 96 rows" in write(
        False, torch.ones(E, 3, 4), torch.ones(E, 3, 2), [96, 64])
    # Gate and up by turns in the blocks of both.
    assert "gate_up_proj[0]: rows from 0 by 2 cut scale blocks of 64 rows" in write(
        True, torch.ones(E, 4, 4), torch.ones(E, 2, 4), [64, 64], model_type="gpt_oss")
    # Which side of a turned matrix the first number of [128, 64] is for, nothing says.
    assert "gate_up_proj_scale_inv: blocks of 128 x 64 of transposed fused experts are not read" in write(
        True, torch.ones(E, 2, 4), torch.ones(E, 1, 4), [128, 64])
    assert "gate_up_proj_scale_inv: exponents for 32 columns of transposed fused experts are not read" in write(
        True, torch.full((E, H, 2 * I // 32), 127, dtype=torch.uint8),
        torch.full((E, I, H // 32), 127, dtype=torch.uint8), [128, 128])


def test_fused_int8(tmp_path):
    torch = torch_or_skip()
    torch.manual_seed(18)
    stem, tensors, values = "model.layers.1.mlp.experts.", {}, {}
    for name, (rows, columns) in {"gate_up_proj": (2 * I, H), "down_proj": (H, I)}.items():
        codes = torch.randint(-128, 128, (E, rows, columns), dtype=torch.int8)
        scale = (torch.rand(E, rows, 1) * 0.01).bfloat16()
        tensors[stem + name], tensors[stem + name + "_scale"] = codes, scale
        values[name] = (codes.float() * scale.float()).numpy() + 0.0
    save(tmp_path, tensors)
    assert dialect(tmp_path) == "int8-channel"
    for expert in range(E):
        np.testing.assert_array_equal(dequant(tmp_path, expert, "gate"), values["gate_up_proj"][expert, :I])
        np.testing.assert_array_equal(dequant(tmp_path, expert, "up"), values["gate_up_proj"][expert, I:])
        np.testing.assert_array_equal(dequant(tmp_path, expert, "down"), values["down_proj"][expert])


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4",
                                  "NVFP4", "IQ2_XXS", "IQ3_S", "IQ1_S"])
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
            if kind.name == "NVFP4":
                raw[..., :4] %= 127
            for start in {"Q4_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ3_S": (0,),
                          "IQ1_S": (0,)}.get(kind.name, ()):
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


def write_gguf(path, tensors):
    """tensors: name -> (values, type); the values as the file holds them"""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(3)
    read = {}
    for name, (values, kind) in tensors.items():
        kind = gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        read[name] = gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def gguf_experts(merged, bias_kind, random):
    parts = {"gate_up": (2 * I, H), "down": (H, I)} if merged else SHAPES
    tensors = {}
    for part, shape in parts.items():
        tensors[f"blk.1.ffn_{part}_exps.weight"] = random.standard_normal((E, *shape), dtype=np.float32), "Q8_0"
        tensors[f"blk.1.ffn_{part}_exps.bias"] = random.standard_normal((E, shape[0]), dtype=np.float32), bias_kind
    return tensors


def bias_of(path, expert, projection):
    return np.frombuffer(probe("bias", path, 1, expert, projection), np.float32)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_gguf_biases(tmp_path, kind, merged):
    path = tmp_path / "model.gguf"
    read = write_gguf(path, gguf_experts(merged, kind, np.random.default_rng(19)))
    for part in ("weight", "bias"):
        get = dequant if part == "weight" else bias_of
        for expert in range(E):
            for projection in SHAPES:
                if merged and projection != "down":
                    half = slice(0, I) if projection == "gate" else slice(I, 2 * I)
                    values = read[f"blk.1.ffn_gate_up_exps.{part}"][expert, half]
                else:
                    values = read[f"blk.1.ffn_{projection}_exps.{part}"][expert]
                np.testing.assert_array_equal(get(path, expert, projection), values)


def test_gguf_without_biases(tmp_path):
    path = tmp_path / "model.gguf"
    tensors = gguf_experts(False, "F32", np.random.default_rng(20))
    write_gguf(path, {name: value for name, value in tensors.items() if name.endswith("weight")})
    assert bias_of(path, 1, "gate").size == 0


def test_gguf_refusals(tmp_path):
    path, random = tmp_path / "model.gguf", np.random.default_rng(21)
    tensors = gguf_experts(False, "F32", random)
    short, kinds, nan, scale = dict(tensors), dict(tensors), dict(tensors), dict(tensors)
    name = "blk.1.ffn_up_exps.bias"
    short[name] = tensors[name][0][:, 1:], "F32"
    write_gguf(path, short)
    assert f"{name}: expected {I} values for the up projection, found {I - 1}" in refusal("bias", path, 1, 0, "up")
    kinds[name] = tensors[name][0], "Q8_0"
    write_gguf(path, kinds)
    assert f"{name}: expected BF16, F16 or F32, found Q8_0 [{E}, {I}]" in refusal("bias", path, 1, 0, "up")
    nan[name] = tensors[name][0].copy(), "F32"
    nan[name][0][1, 9] = np.nan
    write_gguf(path, nan)
    assert f"{name}: the weight of row 9, column 0 is not a finite number" in refusal("bias", path, 1, 1, "up")
    scale["blk.1.ffn_up_exps.scale"] = np.ones(E, np.float32), "F32"
    write_gguf(path, scale)
    assert "blk.1.ffn_up_exps.weight: GGUF experts with a separate scale are not read" in refusal("experts", path)


def test_bias_of_another_length(tmp_path):
    torch = torch_or_skip()
    tensors = {name + ".weight": torch.zeros(shape).bfloat16() for _, _, shape, name in modules()}
    name = "model.layers.1.mlp.experts.1.down_proj"
    save(tmp_path, tensors | {name + ".bias": torch.zeros(H + 1)})
    assert f"{name}.bias: expected {H} values for the down projection, found {H + 1}" in refusal(
        "bias", tmp_path, 1, 1, "down")


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
