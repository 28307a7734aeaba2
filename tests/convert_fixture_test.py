"""`kt quant` against what the established converter wrote, against the file format in numpy, and against the
safetensors package. KT_PROGRAM names kt."""
import hashlib
import json

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
from checkpoints import PROJECTIONS, kt, kt_ok, read_folder, read_safetensors

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
MODEL = checkpoints.trained_model()


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """converted(bits, parts, merge) -> output folder for the trained model, made once."""
    made = {}

    def get(bits, parts=1, merge=True):
        if (bits, parts, merge) not in made:
            out = tmp_path_factory.mktemp("converted") / f"int{bits}-{parts}-{merge}"
            kt_ok("quant", MODEL, "-o", out, "--method", f"int{bits}", "--numa-nodes", parts,
                  *([] if merge else ["--no-merge"]))
            made[bits, parts, merge] = out
        return made[bits, parts, merge]
    return get


def source():
    return read_folder(MODEL)[0]


def source_values(tensors, layer, expert, projection):
    _, shape, data = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"]
    return checkpoints.from_bf16(np.frombuffer(data, "<u2")).reshape(shape)


# --- the established converter's bytes -------------------------------------------------------------------------------

@pytest.mark.parametrize("bits", [4, 8])
def test_merged_file_is_the_established_one(converted, bits):
    fixture, _ = read_safetensors(checkpoints.FIXTURES / "kt-weights" / f"int{bits}-layer1-experts01.safetensors")
    ours, _ = read_folder(converted(bits))
    assert len(fixture) == 2 * 3 * 2
    for name, wanted in fixture.items():
        assert ours[name] == wanted, name


def test_folder_is_the_established_one(converted):
    fixture = checkpoints.FIXTURES / "kt-weights" / "folder"
    files = sorted(path.relative_to(fixture) for path in fixture.rglob("*.kt"))
    assert len(files) == 12
    for name in files:
        assert (converted(4, merge=False) / name).read_bytes() == (fixture / name).read_bytes(), name


# --- what lies around the experts ------------------------------------------------------------------------------------

@pytest.mark.parametrize("bits", [4, 8])
def test_other_tensors_are_copied_under_their_new_names(converted, bits):
    ours, _ = read_folder(converted(bits))
    last = sorted(converted(bits).glob("*.safetensors"))[-1]
    others = {name: tensor for name, tensor in source().items() if ".mlp.experts." not in name}
    renamed = {("blk." + name.removeprefix("model.layers.") if name.startswith("model.layers.")
                else name.removeprefix("model.")): tensor for name, tensor in others.items()}
    assert "embed_tokens.weight" in renamed and "blk.1.mlp.gate.weight" in renamed and "lm_head.weight" in renamed
    assert read_safetensors(last)[0] == renamed
    assert {name for name in ours if "_exps." not in name} == renamed.keys()


def test_index_manifest_and_side_files(converted):
    out = converted(4)
    tensors, metadata = read_folder(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    for name, file in index["weight_map"].items():
        assert name in read_safetensors(out / file)[0]
    assert index["weight_map"].keys() == tensors.keys()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (MODEL / name).read_bytes()
    assert metadata, "no __metadata__"
    check_manifest(out)


def check_manifest(out):
    manifest = json.loads((out / "kt_manifest.json").read_text())
    files = manifest["files"] + [file for shard in manifest["shards"].values() for file in shard["files"]]
    on_disk = checkpoints.digests(out)
    on_disk.pop("kt_manifest.json")
    assert {file["name"]: file["sha256"] for file in files} == on_disk
    for file in files:
        assert file["bytes"] == (out / file["name"]).stat().st_size
    assert [layer["layer"] for layer in manifest["layers"]] == [1, 2, 3, 4, 5]
    for layer in manifest["layers"]:
        assert layer["state"] == "done"
        assert all(0 < layer["relative_error"][projection] < 0.3 for projection in PROJECTIONS)


def test_manifest_of_a_folder(converted):
    check_manifest(converted(4, merge=False))


@pytest.mark.parametrize("bits", [4, 8])
def test_safetensors_package_reads_every_file(converted, bits):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    for path in sorted(converted(bits).glob("*.safetensors")):
        ours, _ = read_safetensors(path)
        with safetensors.safe_open(path, "np") as file:
            assert set(file.keys()) == ours.keys()
            for name in file.keys():
                dtype, shape, data = ours[name]
                assert file.get_slice(name).get_shape() == shape
                if dtype in ("I8", "F32"):  # numpy has no bf16
                    assert file.get_tensor(name).tobytes() == data


# --- numbers ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bits, limit", [(8, 0.01), (4, 0.25)])
def test_dequantised_error_is_the_formats(converted, bits, limit):
    """int8: a row's step is amax/127, so the error is at most half of that; about 0.7 % of the weights' size for normal
    weights. int4 rounds to sevenths: 16 times as much."""
    ours, _ = read_folder(converted(bits))
    tensors = source()
    manifest = json.loads((converted(bits) / "kt_manifest.json").read_text())
    for layer in (1, 5):
        for projection in PROJECTIONS:
            signal = noise = 0.0
            for expert in range(16):
                w = source_values(tensors, layer, expert, projection)
                at = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.0"
                codes = checkpoints.unpack(ours[f"{at}.weight"][2], *w.shape, bits).astype(np.float64)
                d = np.frombuffer(ours[f"{at}.scale"][2], "<f4")[:w.shape[0], None].astype(np.float64)
                back = codes * d * (16 if bits == 4 else 1)
                signal, noise = signal + (w.astype(np.float64)**2).sum(), noise + ((back - w)**2).sum()
            assert (noise / signal)**0.5 < limit
            said, = [row for row in manifest["layers"] if row["layer"] == layer]
            assert said["relative_error"][projection] == pytest.approx((noise / signal)**0.5, rel=1e-4)


def check_against_the_book(out, model, bits, parts):
    ours, metadata = read_folder(out)
    for (layer, expert, projection), values in model.values.items():
        for n in range(parts):
            name = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{n}"
            weight, scale = checkpoints.expected(values, projection, bits, parts, n)
            assert ours[f"{name}.weight"] == ("I8", [len(weight)], weight), name
            assert ours[f"{name}.scale"] == ("F32", [len(scale) // 4], scale), name
            shape = checkpoints.part(values, projection, parts, n).shape
            said = [value for key, value in metadata.items() if key.startswith(f"kt.shape.{name}")]
            if checkpoints.padded(*shape, bits) != shape:
                assert said and set(said) == {"{},{}".format(*shape)}, (name, said)
            else:
                assert not said


# hidden 3712 is past the block of 3584 columns; 160 rows leave a block of 128 ragged; 7424 has two blocks.
SHAPES = [(3712, 320, 2), (256, 7424, 2), (7424, 128, 1), (512, 768, 4), (128, 128, 1), (256, 256, 2)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("hidden, inter, parts", SHAPES)
def test_shapes_and_parts_by_the_book(tmp_path, hidden, inter, parts, bits):
    model = checkpoints.Model(tmp_path / "in", hidden=hidden, inter=inter, layers=1, experts=2).save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", f"int{bits}", "--numa-nodes", parts)
    check_against_the_book(tmp_path / "out", model, bits, parts)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("hidden, inter, parts", [(200, 72, 1), (200, 72, 2), (3600, 40, 1), (1, 1, 1)])
def test_ragged_shapes_are_padded_and_said(tmp_path, hidden, inter, parts, bits):
    model = checkpoints.Model(tmp_path / "in", hidden=hidden, inter=inter, layers=1, experts=2).save()
    result = kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", f"int{bits}", "--numa-nodes", parts)
    check_against_the_book(tmp_path / "out", model, bits, parts)
    assert any("pad" in line and "read" in line for line in result.stderr.splitlines()), "old readers: " + result.stderr


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["fp16", "f32", "fp8"])
def test_other_types_are_rounded_to_bf16_first(tmp_path, kind, bits):
    model = checkpoints.Model(tmp_path / "in", kind=kind, hidden=256, layers=1).save()
    result = kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", f"int{bits}", "--numa-nodes", 1)
    check_against_the_book(tmp_path / "out", model, bits, 1)
    warned = [line for line in result.stderr.splitlines() if line.startswith("kt warning: ") and "fp8" in line]
    assert bool(warned) == (kind == "fp8"), result.stderr


def test_rows_of_zeros_and_of_extremes(tmp_path):
    model = checkpoints.Model(tmp_path / "in", layers=1, experts=2)
    values = model.values[0, 1, "up"].copy()
    values[0], values[1], values[2, 1:], values[3] = 0, 1.6e38, 0, -1e-30
    values[4, ::2] *= -1
    stored = checkpoints.bf16(values)
    model.tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = ("BF16", stored)
    model.values[0, 1, "up"] = checkpoints.from_bf16(stored)
    model.save()
    for bits in (4, 8):
        kt_ok("quant", model.folder, "-o", tmp_path / f"out{bits}", "--method", f"int{bits}", "--numa-nodes", 1)
        check_against_the_book(tmp_path / f"out{bits}", model, bits, 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_too_small_for_a_reciprocal(tmp_path, bits):
    """1/d is past f32 below amax = 4e-37. Whatever the codes are, zeros stay near zero and nothing is off by more than
    a step."""
    model = checkpoints.Model(tmp_path / "in", layers=1, experts=1)
    values = np.zeros_like(model.values[0, 0, "up"])
    values[:, 0] = np.float32(2)**-np.linspace(118, 132, len(values))
    model.tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = ("BF16", checkpoints.bf16(values))
    model.save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", f"int{bits}", "--numa-nodes", 1)
    ours, _ = read_folder(tmp_path / "out")
    d = np.frombuffer(ours["blk.0.ffn_up_exps.0.numa.0.scale"][2], "<f4")[:, None].astype(np.float64)
    codes = checkpoints.unpack(ours["blk.0.ffn_up_exps.0.numa.0.weight"][2], *values.shape, bits).astype(np.float64)
    step = d * (16 if bits == 4 else 1)
    assert np.all(np.abs(codes * step - values) <= np.maximum(step, 2.0**-120))


def test_layers_past_the_last_are_not_converted(tmp_path):
    """MTP layers are stored after num_hidden_layers."""
    model = checkpoints.Model(tmp_path / "in", layers=3)
    model.config.update(num_hidden_layers=2, num_nextn_predict_layers=1)
    model.save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", "int8", "--numa-nodes", 1)
    names = read_folder(tmp_path / "out")[0]
    assert any(name.startswith("blk.1.ffn_") for name in names)
    assert not any(name.startswith("blk.2.ffn_") for name in names)


# --- the same weights by other roads ---------------------------------------------------------------------------------

@pytest.mark.parametrize("bits, parts", [(4, 1), (8, 2)])
def test_merging_the_folder_is_the_direct_output(converted, tmp_path, bits, parts):
    direct, loose = converted(bits, parts), converted(bits, parts, merge=False)
    kt_ok("quant", "merge", "-i", loose, "-o", tmp_path / "merged", "-r", MODEL)
    wanted, ours = checkpoints.digests(direct), checkpoints.digests(tmp_path / "merged")
    for side in (wanted, ours):
        side.pop("kt_manifest.json")  # its settings say how each was made
    assert ours.keys() == wanted.keys()
    for name in wanted:
        if not name.endswith(".safetensors"):
            assert ours[name] == wanted[name], name
            continue
        assert read_safetensors(tmp_path / "merged" / name)[0] == read_safetensors(direct / name)[0], name
    assert ours == wanted
    kt_ok("quant", "compare", direct, tmp_path / "merged", "--tolerance", 0)


def test_compare_sees_one_changed_byte(converted, tmp_path):
    for path in converted(8).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = kt("quant", "compare", converted(8), tmp_path, "--tolerance", 0)
    assert result.returncode == 2
    assert "blk.1." in result.stdout + result.stderr


def test_what_compare_says_is_true(tmp_path):
    """It said "largest 0" of bytes that differ, and "within 0.0000" of a tolerance of 1e-6."""
    for side, move in (("a", 0), ("b", 1)):
        (tmp_path / side).mkdir()
        checkpoints.write_safetensors(tmp_path / side / "model.safetensors", {
            "codes": ("U8", np.full(64, 7 + move, "u1")), "plain": ("F32", np.full(8, 1e-5 * move, "<f4"))})
    result = kt("quant", "compare", tmp_path / "a", tmp_path / "b", "--tolerance", "1e-6")
    assert result.returncode == 2
    codes, plain = (next(line for line in result.stdout.splitlines() if line.startswith(name))
                    for name in ("codes", "plain"))
    assert "64 of 64 bytes" in codes and codes.split()[-1] == "-"
    assert "8 of 8" in plain and plain.split()[-1] == "1e-05"
    last = result.stdout.splitlines()[-1]
    assert "equal within 1e-06" in last and "largest difference 1e-05" in last and "64 bytes" in last
    said = json.loads(kt("quant", "compare", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert [row["largest"] is None for row in said["differences"]] == [True, False]
    same = kt("quant", "compare", tmp_path / "a", tmp_path / "a")
    assert same.returncode == 0 and same.stdout.splitlines()[-1].endswith("largest difference 0")


@pytest.mark.parametrize("bits", [4, 8])
def test_merged_weights_are_known_as_such(tmp_path, bits):
    """They are quantised, and converted experts are in them; both were denied."""
    model, out = checkpoints.Model(tmp_path / "in").save(), tmp_path / "out"
    kt_ok("quant", model.folder, "-o", out, "--method", f"int{bits}")
    line = checkpoints.refused(kt("quant", "dequant", out, "-o", tmp_path / "d"), 2, out)
    assert "converted for the CPU already" in line and "nothing in it is quantised" not in line
    line = checkpoints.refused(kt("quant", "merge", out, "-o", tmp_path / "m"), 2, out)
    assert "merged already" in line and "no converted experts" not in line


@pytest.mark.parametrize("parts", [1, 2])
def test_any_number_of_threads_gives_the_same_folder(converted, tmp_path, parts):
    for threads in (1, 3):
        kt_ok("quant", MODEL, "-o", tmp_path / str(threads), "--method", "int4", "--numa-nodes", parts, "--cpu-threads",
              threads)
        assert checkpoints.digests(tmp_path / str(threads)) == checkpoints.digests(converted(4, parts))


def test_established_spellings_of_kt_quant(converted, tmp_path):
    kt_ok("quant", "--input-path", MODEL, "--output", tmp_path / "a", "--input-type", "bf16", "--quant-method", "int4",
          "--cpuinfer-threads", 60, "--threadpool-count", 2, "--no-merge-safetensor", "--gpu")
    assert checkpoints.digests(tmp_path / "a") == checkpoints.digests(converted(4, 2, merge=False))


def test_moe_int8_is_int8(converted, tmp_path):
    kt_ok("quant", MODEL, "-o", tmp_path / "out", "--method", "moe_int8", "--numa-nodes", 1)
    assert read_folder(tmp_path / "out")[0] == read_folder(converted(8))[0]


@pytest.mark.parametrize("merge", [True, False])
def test_backward_copies_are_the_transposed_matrices(tmp_path, merge):
    """gate and up: [H, I/tp]; down: [I/tp, H]; the forward bytes stay as they are."""
    model = checkpoints.Model(tmp_path / "in", hidden=256, inter=256, layers=1, experts=2).save()
    out = tmp_path / "out"
    kt_ok("quant", model.folder, "-o", out, "--method", "int8", "--numa-nodes", 2, "--backward",
          *([] if merge else ["--no-merge"]))
    ours = read_folder(out)[0] if merge else None
    for (layer, expert, projection), values in model.values.items():
        for n in range(2):
            mine = checkpoints.part(values, projection, 2, n)
            codes, d = checkpoints.quantise(np.ascontiguousarray(mine.T), 8)
            weight, scale = checkpoints.pack(codes, 8), d.astype("<f4").tobytes()
            if merge:
                at = f"blk.{layer}.ffn_{projection}_bwd_exps.{expert}.numa.{n}"
                assert ours[f"{at}.weight"][2] == weight and ours[f"{at}.scale"][2] == scale
            else:
                at = out / f"_layer_{layer}" / f"_numa_{n}"
                stem = f"INT8_{projection}_bwd_{expert}"
                assert (at / f"{stem}_{len(weight)}Byte_quant_.kt").read_bytes() == weight
                assert (at / f"{stem}_{len(scale)}Byte_scale_.kt").read_bytes() == scale
    if merge:
        forward = {name: tensor for name, tensor in ours.items() if "_bwd_" not in name}
        kt_ok("quant", model.folder, "-o", tmp_path / "plain", "--method", "int8", "--numa-nodes", 2)
        assert forward == read_folder(tmp_path / "plain")[0]


def test_direct_rounding_is_better_and_in_the_same_layout(tmp_path):
    """nibble = rhe(w * 7 / amax), d = amax / 112."""
    model = checkpoints.Model(tmp_path / "in", layers=1, experts=2).save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", "int4", "--numa-nodes", 1, "--rounding", "direct")
    ours, _ = read_folder(tmp_path / "out")
    for (layer, expert, projection), w in model.values.items():
        at = f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.0"
        d = np.frombuffer(ours[f"{at}.scale"][2], "<f4")
        assert np.array_equal(d, np.abs(w).max(1) / np.float32(112))
        codes = checkpoints.unpack(ours[f"{at}.weight"][2], *w.shape, 4).astype(np.float64)
        once = ((codes * 16 * d[:, None] - w)**2).sum()
        twice = ((checkpoints.quantise(w, 4)[0] * 16.0 * d[:, None] - w)**2).sum()
        assert once < twice


def test_json_report(tmp_path):
    model = checkpoints.Model(tmp_path / "in").save()
    result = kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", "int8", "--report", "--json")
    assert json.loads(result.stdout)


def test_digests_in_the_manifest_are_sha256(tmp_path):
    model = checkpoints.Model(tmp_path / "in").save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--method", "int8")
    manifest = json.loads((tmp_path / "out" / "kt_manifest.json").read_text())
    config, = [file for file in manifest["files"] if file["name"] == "config.json"]
    assert config["sha256"] == hashlib.sha256((model.folder / "config.json").read_bytes()).hexdigest()
