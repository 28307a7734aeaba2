"""The established conversion scripts: their flags as kt gets them (with a stand-in for kt), and what they do with small
models. The guides' own commands are in documents_test.py. KT_PROGRAM names kt; without it only the translation is
tested."""
import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints

SCRIPTS = checkpoints.ROOT / "scripts"
needs_kt = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")


def run_script(name, args, cwd=None, **env):
    return subprocess.run([sys.executable, str(SCRIPTS / name), *args], capture_output=True, text=True, cwd=cwd,
                          stdin=subprocess.DEVNULL, timeout=600, env={**os.environ, **env})


# --- translation -----------------------------------------------------------------------------------------------------

@pytest.fixture
def stand_in(tmp_path):
    """A program that writes its arguments down, one a line, and ends with the code in STAND_IN_CODE. What files a
    dataset has is for kt to say."""
    program = tmp_path / "stand-in"
    program.write_text(f'#!/bin/sh\n[ "$1 $2" != "quant dataset" ] || exec "{checkpoints.KT}" "$@"\n'
                       'printf "%s\\n" "$@" > "$STAND_IN_ARGS"\nexit ${STAND_IN_CODE:-0}\n')
    program.chmod(0o755)

    def call(script, line, code=0):
        args = tmp_path / "args"
        args.unlink(missing_ok=True)
        result = run_script(script, shlex.split(line), KT_PROGRAM=str(program), STAND_IN_ARGS=str(args),
                            STAND_IN_CODE=str(code))
        return result, args.read_text().splitlines() if args.exists() else None
    return call


TRANSLATIONS = [
    ("convert_cpu_weights.py", "--input-path m --input-type bf16 --output o --quant-method int4",
     "quant m -o o --method int4 --input-type bf16 --numa-nodes 2"),
    ("convert_cpu_weights.py", "--input-path m --output o", "quant m -o o --method int4 --numa-nodes 2"),
    ("convert_cpu_weights.py", "-i m -o o --quant-method moe_int8 --cpuinfer-threads 60 --threadpool-count 4"
     " --no-merge-safetensor --resume-layer 12 --save-backward-weights",
     "quant m -o o --method moe_int8 --cpu-threads 60 --numa-nodes 4 --no-merge --resume-layer 12 --backward"),
    ("convert_cpu_weights.py", "--input-path=-m --output='a b' --resume-layer 0",
     "quant ./-m -o 'a b' --method int4 --numa-nodes 2"),
    ("merge_cpu_weights.py", "--input-path i --output o", "quant merge -i i -o o"),
    ("merge_cpu_weights.py", "-i i -o o -r m --max-tensors 3000", "quant merge -i i -o o -r m --max-tensors 3000"),
    ("merge_cpu_weights.py", "--input-path i --output o --original-path m", "quant merge -i i -o o -r m"),
    # What kt answers where an output is there: "--resume finishes it, --overwrite replaces it".
    ("convert_cpu_weights.py", "-i m -o o --resume", "quant m -o o --method int4 --numa-nodes 2 --resume"),
    ("convert_cpu_weights.py", "-i m -o o --overwrite", "quant m -o o --method int4 --numa-nodes 2 --overwrite"),
    ("merge_cpu_weights.py", "-i i -o o --resume", "quant merge -i i -o o --resume"),
    ("merge_cpu_weights.py", "-i i -o o --overwrite", "quant merge -i i -o o --overwrite"),
    ("convert_moe_to_bf16.py", "--model-dir m --output-dir o --resume", "quant dequant m -o o --resume"),
    ("convert_kimi_k2_fp8_to_bf16_cpu.py", "--input-fp8-hf-path m --output-bf16-hf-path o --resume",
     "quant dequant m -o o --resume"),
    ("convert_kimi_k2_fp8_to_bf16_cpu.py", "--input-fp8-hf-path m --output-bf16-hf-path o --overwrite",
     "quant dequant m -o o --overwrite"),
    ("compare_weights.py", "--path1 a --path2 b", "quant compare a b"),
    ("compare_weights.py", "--path1 a --path2 b --tolerance 1e-3", "quant compare a b --tolerance 0.001"),
    ("convert_moe_to_bf16.py", "--model-dir m --output-dir o", "quant dequant m -o o"),
    ("convert_moe_to_bf16.py", "--model-dir m --output-dir o --files a.safetensors b.safetensors --config-path c"
     " --overwrite",
     "quant dequant m -o o --files a.safetensors --files b.safetensors --config-path c --overwrite"),
    ("convert_kimi_k2_fp8_to_bf16_cpu.py", "--input-fp8-hf-path m --output-bf16-hf-path o", "quant dequant m -o o"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o", "quant gpu m -o o --method GPTQ --type W8A16"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --quant_method RTN --quant_type W4A16 --force_cpu"
     " --ignore_patterns 're:.*gate$' lm_head --torch_dtype auto --trust_remote_code --max_gpu_memory 70GiB"
     " --max_cpu_memory 100GiB",
     "quant gpu m -o o --method RTN --type W4A16 --force-cpu --ignore 're:.*gate$' --ignore lm_head --trust-remote-code"
     " --max-gpu-memory 70GiB --max-cpu-memory 100GiB"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --num_calibration_samples 256 --max_sequence_length 1024"
     " --dampening_frac 0.05 --dataset d --dataset_split train --random_seed 7",
     "quant gpu m -o o --method GPTQ --type W8A16 --num-calibration-samples 256 --max-sequence-length 1024"
     " --dampening-frac 0.05 --dataset d --dataset-split train --seed 7"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --perplexity=-t.txt --perplexity_tokens 4096",
     "quant gpu m -o o --method GPTQ --type W8A16 --perplexity ./-t.txt --perplexity-tokens 4096"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --group_size -1 --targets all --resume",
     "quant gpu m -o o --method GPTQ --type W8A16 --group-size -1 --targets all --resume"),
    ("convert_gpu_weights.py", "--model-id m --output-dir o --quant-method RTN --group-size 64 --overwrite"
     " --trust-remote-code --max-cpu-memory 9GiB",
     "quant gpu m -o o --method RTN --type W8A16 --group-size 64 --trust-remote-code --max-cpu-memory 9GiB "
     "--overwrite"),
    ("check_cpu_features.py", "", "doctor --cpu"),
    ("convert_kt_to_sglang_adapter.py", "i o --base-model-name-or-path org/m",
     "sft export i -o o --layout per-expert --base-model-name org/m"),
    ("convert_kt_to_sglang_adapter.py", "i o --base-model-name-or-path m --lora-alpha 16 --expert-output-dir e"
     " --nonexpert-output-dir n --overwrite",
     "sft export i -o o --layout per-expert --base-model-name m --lora-alpha 16.0 --expert-output e "
     "--nonexpert-output n --overwrite"),
    ("convert_lora.py", "--base_path m --lora_path a --output_path o",
     "sft export a -o o --layout per-expert --base-model-name m"),
    ("convert_lora.py", "--base-path m --lora-path a --output-path o --overwrite",
     "sft export a -o o --layout per-expert --base-model-name m --overwrite"),
]


@pytest.mark.parametrize("script, line, wanted", TRANSLATIONS)
def test_flags_reach_kt(stand_in, script, line, wanted):
    result, args = stand_in(script, line)
    assert (result.returncode, result.stderr) == (0, "")
    assert args == shlex.split(wanted)


@pytest.mark.parametrize("code", [2, 3, 4, 5, 130])
def test_exit_codes_pass_through(stand_in, code):
    assert stand_in("convert_cpu_weights.py", "-i m -o o", code)[0].returncode == code


@pytest.mark.parametrize("script, line, word", [
    ("convert_cpu_weights.py", "--input-path m --output o --gpu", "--gpu"),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --torch_dtype float16", "--torch_dtype"),
])
def test_what_is_ignored_is_said(stand_in, script, line, word):
    result, args = stand_in(script, line)
    note, = result.stderr.splitlines()
    assert result.returncode == 0 and word in note and "ignored" in note
    assert not any(word.strip("-") in arg for arg in args[4:])


@pytest.mark.parametrize("script, line", [
    ("convert_cpu_weights.py", ""),
    ("convert_cpu_weights.py", "--input-path m"),
    ("convert_cpu_weights.py", "-i m -o o --quant-method int3"),
    ("convert_cpu_weights.py", "-i m -o o --input-type bf32"),
    ("convert_cpu_weights.py", "-i m -o o --threadpool-count two"),
    ("convert_cpu_weights.py", "-i m -o o --no-such-flag"),
    ("convert_cpu_weights.py", "--input m -o o"),  # no guessed abbreviations
    ("merge_cpu_weights.py", "-i m"),
    ("compare_weights.py", "--path1 a"),
    ("convert_moe_to_bf16.py", "--model-dir a"),
    ("convert_kimi_k2_fp8_to_bf16_cpu.py", ""),
    ("convert_gpu_weights.py", "--model_id m --output_dir o --quant_method AWQ"),
    ("convert_gpu_weights.py", "--model m --output_dir o"),
    ("check_cpu_features.py", "--fast"),
    ("convert_kt_to_sglang_adapter.py", "i o"),
    ("convert_kt_to_sglang_adapter.py", "i o --base-model-name-or-path m --lora-alpha x"),
    ("convert_lora.py", "--base_path m --lora_path a"),
])
def test_usage_errors(stand_in, script, line):
    result, args = stand_in(script, line)
    assert result.returncode == 2 and args is None
    assert result.stderr.startswith("usage: ") and "Traceback" not in result.stderr


@pytest.mark.parametrize("script", sorted({row[0] for row in TRANSLATIONS}))
def test_help(script):
    result = run_script(script, ["--help"])
    assert result.returncode == 0 and "kt " in result.stdout


def test_where_kt_is_looked_for(tmp_path):
    """KT_PROGRAM, then the build beside the scripts, then PATH; else one line."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("kt_program.py", "check_cpu_features.py"):
        (scripts / name).write_bytes((SCRIPTS / name).read_bytes())

    def program(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {path}\n")
        path.chmod(0o755)
        return path

    def call(**env):
        clean = {name: value for name, value in os.environ.items() if name != "KT_PROGRAM"}
        return subprocess.run([sys.executable, str(scripts / "check_cpu_features.py")], capture_output=True, text=True,
                              env={**clean, "PATH": str(tmp_path / "path"), **env})

    nothing = call()
    line, = nothing.stderr.splitlines()
    assert nothing.returncode == 2 and "KT_PROGRAM" in line and "make" in line
    on_path = program(tmp_path / "path" / "kt")
    assert call().stdout == f"{on_path}\n"
    built = program(tmp_path / "build" / "bin" / "kt")
    assert call().stdout == f"{built}\n"
    named = program(tmp_path / "named")
    assert call(KT_PROGRAM=str(named)).stdout == f"{named}\n"
    wrong = call(KT_PROGRAM=str(tmp_path / "absent"))
    line, = wrong.stderr.splitlines()
    assert wrong.returncode == 2 and "absent" in line


# --- on models -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def models(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")

    def made(name, **options):
        return checkpoints.Model(at / name, **options).save().folder

    return {
        "bf16": checkpoints.trained_model() or made("plain"),
        "fp16": made("fp16", kind="fp16"),
        "14 layers": made("deep", layers=14, experts=2),
        "Qwen3-Next-80B-A3B-Instruct": made("Qwen3-Next-80B-A3B-Instruct", model_type="qwen3_next"),
        "Qwen3-30B-A3B": made("Qwen3-30B-A3B"),
    }


def moe_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    return list(range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]))


def expert_count(folder):
    config = json.loads((folder / "config.json").read_text())
    return config.get("num_experts") or config["n_routed_experts"]


def check_merged(model, out, parts=2):
    layers = moe_layers(model)
    total = len(layers) + 1
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    tensors, _ = checkpoints.read_folder(out)
    wanted = {f"blk.{layer}.ffn_{projection}_exps.{expert}.numa.{n}.{kind}"
              for layer in layers for projection in checkpoints.PROJECTIONS for expert in range(expert_count(model))
              for n in range(parts) for kind in ("weight", "scale")}
    assert {name for name in tensors if "_exps." in name} == wanted
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes(), name
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == tensors.keys()
    assert (out / "kt_manifest.json").exists()


def check_folder(model, out, first=0, method="INT4", parts=2):
    layers = [layer for layer in moe_layers(model) if layer >= first]
    assert {path.name for path in out.glob("_layer_*")} == {f"_layer_{layer}" for layer in layers}
    for layer in layers:
        for n in range(parts):
            names = [path.name for path in (out / f"_layer_{layer}" / f"_numa_{n}").iterdir()]
            assert len(names) == 6 * expert_count(model)
            for projection in checkpoints.PROJECTIONS:
                for kind in ("quant", "scale"):
                    name, = [name for name in names if name.startswith(f"{method}_{projection}_0_") and kind in name]
                    size = (out / f"_layer_{layer}" / f"_numa_{n}" / name).stat().st_size
                    assert name == f"{method}_{projection}_0_{size}Byte_{kind}_.kt"


CPU = "--input-path {model} --output {out} "
LOW_MEMORY = "--input-type bf16 --quant-method int4 --no-merge-safetensor "


@needs_kt
def test_moe_int8(models, tmp_path):
    out = tmp_path / "out"
    line = CPU + "--input-type bf16 --quant-method moe_int8"
    result = run_script("convert_cpu_weights.py", line.format(model=models["bf16"], out=out).split())
    assert result.returncode == 0, result.stderr
    check_merged(models["bf16"], out)


@needs_kt
def test_low_memory_run_continued_at_a_layer(models, tmp_path):
    """The guide's story: layers 0 to 11 are there, the run died, and goes on with layer 12 into the same folder."""
    model, whole, halves = models["14 layers"], tmp_path / "whole", tmp_path / "halves"
    line = CPU + LOW_MEMORY
    assert run_script("convert_cpu_weights.py", line.format(model=model, out=whole).split()).returncode == 0
    for layer in range(12):
        shutil.copytree(whole / f"_layer_{layer}", halves / f"_layer_{layer}")
    result = run_script("convert_cpu_weights.py", (line + "--resume-layer 12").format(model=model, out=halves).split())
    assert result.returncode == 0, result.stderr
    kt_files = [{name: digest for name, digest in checkpoints.digests(folder).items() if name.endswith(".kt")}
                for folder in (whole, halves)]
    assert kt_files[0] == kt_files[1]


GPU = "--model_id {model} --output_dir {out} "


@needs_kt
def test_rtn_w8a16(models, tmp_path):
    model, out = models["bf16"], tmp_path / "out"
    result = run_script("convert_gpu_weights.py",
                        (GPU + "--quant_method RTN --quant_type W8A16").format(model=model, out=out).split())
    assert result.returncode == 0, result.stderr
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors" and said["format"] == "pack-quantized"
    assert said["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    tensors, _ = checkpoints.read_folder(out)
    layer = moe_layers(model)[0]
    for projection in checkpoints.PROJECTIONS:
        at = f"model.layers.{layer}.mlp.experts.0.{projection}_proj"
        rows, cols = np.frombuffer(tensors[f"{at}.weight_shape"][2], "<i8")
        assert tensors[f"{at}.weight_packed"][:2] == ("I32", [rows, cols * 8 // 32])
        assert f"{at}.weight_scale" in tensors and f"{at}.weight" not in tensors
    assert (out / "tokenizer.json").exists()


@needs_kt
def test_gptq_of_what_does_not_run_is_refused(models, tmp_path):
    changed, out = tmp_path / "next", tmp_path / "out"
    shutil.copytree(models["Qwen3-Next-80B-A3B-Instruct"], changed)
    config = json.loads((changed / "config.json").read_text())
    config |= {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "full_attention_interval": 4}
    config.pop("layer_types", None)  # published configurations have none
    (changed / "config.json").write_text(json.dumps(config))
    line = GPU + "--quant_method GPTQ --quant_type W4A16 --max_gpu_memory 40GiB --trust_remote_code"
    result = run_script("convert_gpu_weights.py", line.format(model=changed, out=out).split())
    checkpoints.refused(result, 4, "GPTQ", "linear_attention", "RTN")
    assert not out.exists()


READER = """
import json
class ParquetFile:
    def __init__(self, path):
        content = open(path).read()
        if not content.startswith("["):
            raise ValueError("magic bytes not found\\nin the footer")
        self.rows = json.loads(content)
        self.schema_arrow = type("Schema", (), {"names": list(self.rows[0])})
    def iter_batches(self, batch_size, columns):
        for row in self.rows:
            if row.get("broken"):
                raise OSError("a page is damaged")
            yield type("Batch", (), {"to_pylist": lambda self: [{name: row[name] for name in columns}]})()
"""


@needs_kt
def test_parquet(stand_in, tmp_path, monkeypatch):
    """With a stand-in for pyarrow: files are JSON. Equal names elsewhere or new contents are other texts; a damaged
    file is one line, and nothing half-written stays."""
    (tmp_path / "site" / "pyarrow").mkdir(parents=True)
    (tmp_path / "site" / "pyarrow" / "__init__.py").write_text("")
    (tmp_path / "site" / "pyarrow" / "parquet.py").write_text(READER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "kt" / "datasets"

    def converted(rows, folder="a"):
        path = tmp_path / folder / "rows.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        result, args = stand_in("convert_gpu_weights.py", f"--model_id m --output_dir o --dataset '{path}'")
        return result, args and args[args.index("--dataset") + 1]

    texts = []
    for rows, folder in (([{"text": "one"}], "a"), ([{"text": "two"}], "b"), ([{"text": "three", "id": 3}], "a")):
        result, path = converted(rows, folder)
        assert result.returncode == 0, result.stderr
        with open(path) as lines:
            texts.append(json.loads(lines.read())["text"])
    assert texts == ["one", "two", "three"]
    asked = {"instruction": "Tell.", "input": "", "output": "Once.", "id": 1}
    result, path = converted([asked], "c")
    with open(path) as lines:
        assert json.loads(lines.read()) == {name: asked[name] for name in ("instruction", "input", "output")}
    kept = sorted(cache.iterdir())
    assert len(kept) == 4
    for rows, message in (("PAR1", "magic bytes"), ([{"text": "a"}, {"text": "b", "broken": True}], "damaged"),
                          ([{"prompt": "a"}], "columns prompt")):
        result, path = converted(rows)
        line, = result.stderr.splitlines()
        assert result.returncode == 2 and path is None and message in line and "rows.parquet" in line
        assert sorted(cache.iterdir()) == kept


@needs_kt
def test_parquet_of_a_snapshot(stand_in, tmp_path, monkeypatch):
    """The same files as kt would choose: refs/main's, of the split, without a licence in their place; .jsonl goes
    first."""
    (tmp_path / "site" / "pyarrow").mkdir(parents=True)
    (tmp_path / "site" / "pyarrow" / "__init__.py").write_text("")
    (tmp_path / "site" / "pyarrow" / "parquet.py").write_text(READER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    repository = tmp_path / "huggingface" / "hub" / "datasets--tales"
    main, other = (repository / "snapshots" / name for name in ("main", "other"))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("main")
    for folder in (main, other):
        (folder / "data").mkdir(parents=True)
        (folder / "LICENSE.txt").write_text("Permission is hereby granted.")
        for split in ("train", "train_sft", "constraint"):
            (folder / "data" / f"{split}-00000.parquet").write_text(json.dumps([{"text": f"{folder.name} {split}"}]))

    def dataset():
        result, args = stand_in("convert_gpu_weights.py",
                                "--model_id m --output_dir o --dataset tales --dataset_split train")
        assert result.returncode == 0, result.stderr
        return args[args.index("--dataset") + 1]
    with open(dataset()) as lines:
        assert lines.read() == '{"text": "main train"}\n'
    (main / "train.jsonl").write_text('{"text": "a"}\n')
    assert dataset() == "tales"


@needs_kt
def test_parquet_without_pyarrow_is_one_line(stand_in, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "pyarrow.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "rows.parquet").write_text("PAR1")
    result, args = stand_in("convert_gpu_weights.py",
                            f"--model_id m --output_dir o --dataset '{tmp_path}/rows.parquet'")
    line, = result.stderr.splitlines()
    assert (result.returncode, args) == (4, None)
    assert "rows.parquet" in line and "pip install pyarrow" in line and ".jsonl" in line and ".py converts" not in line


@needs_kt
def test_merge_and_compare(models, tmp_path):
    model, loose, merged, direct = models["fp16"], *(tmp_path / name for name in ("loose", "merged", "direct"))
    common = ["--input-path", str(model), "--quant-method", "int4"]
    assert run_script("convert_cpu_weights.py",
                      [*common, "--output", str(loose), "--no-merge-safetensor"]).returncode == 0
    assert run_script("convert_cpu_weights.py", [*common, "--output", str(direct)]).returncode == 0
    result = run_script("merge_cpu_weights.py", ["-i", str(loose), "-o", str(merged), "-r", str(model)])
    assert result.returncode == 0, result.stderr
    check_merged(model, merged)
    same = run_script("compare_weights.py", ["--path1", str(direct), "--path2", str(merged), "--tolerance", "0"])
    assert same.returncode == 0, same.stderr
    run_script("convert_cpu_weights.py", ["--input-path", str(models["Qwen3-30B-A3B"]), "--quant-method", "int4",
                                          "--output", str(tmp_path / "other")])
    other = run_script("compare_weights.py", ["--path1", str(direct), "--path2", str(tmp_path / "other")])
    assert other.returncode not in (0, 5) and "Traceback" not in other.stderr


@needs_kt
@pytest.mark.parametrize("script, into, out_of", [
    ("convert_moe_to_bf16.py", "--model-dir", "--output-dir"),
    ("convert_kimi_k2_fp8_to_bf16_cpu.py", "--input-fp8-hf-path", "--output-bf16-hf-path"),
])
def test_fp8_to_bf16(tmp_path, script, into, out_of):
    model = checkpoints.Model(tmp_path / "fp8", kind="fp8", hidden=256, layers=1).save()
    out = tmp_path / "bf16"
    result = run_script(script, [into, str(model.folder), out_of, str(out)])
    assert result.returncode == 0, result.stderr
    tensors, _ = checkpoints.read_folder(out)
    assert not any(name.endswith("weight_scale_inv") for name in tensors)
    for (layer, expert, projection), values in model.values.items():
        dtype, shape, data = tensors[f"{model.name(layer, expert, projection)}.weight"]
        assert (dtype, shape) == ("BF16", list(values.shape))
        assert data == checkpoints.bf16(values).tobytes()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    again = run_script(script, [into, str(model.folder), out_of, str(out)])
    checkpoints.refused(again, 2, "--overwrite")


@needs_kt
def test_check_cpu_features():
    result = run_script("check_cpu_features.py", [])
    assert result.returncode == 0 and result.stdout
