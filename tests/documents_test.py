"""The commands of the documents that people follow (kt-kernel's README, the guide to its conversion scripts, the KT-CLI
guide), as they stand there, on small models: of kt, of the scripts and of kt_kernel, as far as they need no GPU. Only
the folders /path/to and /mnt/data/models are elsewhere. KT_PROGRAM names kt; PYTHONPATH a folder with the built
package."""
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
from convert_scripts_test import check_folder, check_merged, moe_layers
from server_process import Server

KT, ROOT, DATA = checkpoints.KT, checkpoints.ROOT, checkpoints.DATA
DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


def check_rtn(model, out):
    tensors, _ = checkpoints.read_folder(out)
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["format"] == "pack-quantized" and said["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    at = f"model.layers.{moe_layers(model)[0]}.mlp.experts.0.up_proj"
    assert f"{at}.weight_packed" in tensors and f"{at}.weight" not in tensors


def check_gptq(model, out):
    report = json.loads((out / "kt_calibration.json").read_text())
    assert report["samples"] == 40 and len(report["layers"]) == len(moe_layers(model))


def check_last_layers(model, out):
    check_folder(model, out, 12)


# (the stand-in for the model that the command names, what came of it, the command). The document lacks a backslash
# before --resume-layer.
CONVERSIONS = [
    ("bf16", check_merged, """python scripts/convert_cpu_weights.py \\
  --input-path /path/to/bf16/model \\
  --input-type bf16 \\
  --output /path/to/output \\
  --quant-method int4"""),
    ("fp16", check_merged, """python scripts/convert_cpu_weights.py \\
  --input-path /path/to/fp16/model \\
  --input-type fp16 \\
  --output /path/to/output \\
  --quant-method int8"""),
    ("fp8", check_merged, """python scripts/convert_cpu_weights.py \\
  --input-path /path/to/fp8/model \\
  --input-type fp8 \\
  --output /path/to/output \\
  --quant-method int4"""),
    ("bf16", check_merged, """python scripts/convert_cpu_weights.py \\
--input-path /path/to/model \\
--input-type bf16 \\
--output /path/to/output \\
--quant-method int4"""),
    ("bf16", check_merged, """python scripts/convert_cpu_weights.py \\
--input-path /path/to/model \\
--input-type bf16 \\
--output /path/to/cpu-weights \\
--quant-method int8 # or int4 or moe_int8 (for amd now)"""),
    ("bf16", check_folder, """python scripts/convert_cpu_weights.py \\
  --input-path /path/to/model \\
  --input-type bf16 \\
  --output /path/to/output \\
  --quant-method int4 \\
  --no-merge-safetensor"""),
    ("14 layers", check_last_layers, """python scripts/convert_cpu_weights.py \\
  --input-path /path/to/model \\
  --input-type bf16 \\
  --output /path/to/output \\
  --quant-method int4 \\
  --no-merge-safetensor \\
  --resume-layer 12"""),
    ("fp8", check_merged, """python scripts/convert_cpu_weights.py \\
  --input-path /mnt/data/models/DeepSeek-V3.1 \\
  --input-type fp8 \\
  --output /mnt/data/models/DeepSeek-V3.1-INT4 \\
  --quant-method int4 \\
  --cpuinfer-threads 60 \\
  --threadpool-count 2"""),
    ("bf16", check_folder, """python scripts/convert_cpu_weights.py \\
  --input-path /mnt/data/models/Qwen3-Next-80B-A3B-Instruct \\
  --input-type bf16 \\
  --output /mnt/data/models/Qwen3-Next-80B-A3B-Instruct-INT4 \\
  --quant-method int4 \\
  --cpuinfer-threads 60 \\
  --threadpool-count 2 \\
  --no-merge-safetensor"""),
    ("bf16", check_merged, """python scripts/convert_cpu_weights.py \\
--input-path /mnt/data/models/Qwen3-30B-A3B \\
--input-type bf16 \\
--output /mnt/data/models/Qwen3-30B-A3B-INT8 \\
--quant-method int8"""),
    ("trained", check_gptq, """python scripts/convert_gpu_weights.py \\
  --model_id /path/to/model \\
  --output_dir /path/to/output \\
  --quant_method GPTQ \\
  --quant_type W4A16"""),
    ("trained", check_rtn, """python scripts/convert_gpu_weights.py \\
  --model_id /path/to/model \\
  --output_dir /path/to/output \\
  --quant_method RTN \\
  --quant_type W4A16"""),
    ("trained", check_gptq, """python scripts/convert_gpu_weights.py \\
  --model_id /path/to/model \\
  --output_dir /path/to/output \\
  --quant_method GPTQ \\
  --quant_type W4A16 \\
  --num_calibration_samples 512 \\
  --max_sequence_length 2048 \\
  --dataset HuggingFaceH4/ultrachat_200k \\
  --dataset_split train_sft"""),
    ("trained", check_gptq, """python scripts/convert_gpu_weights.py \\
  --model_id /path/to/model \\
  --output_dir /path/to/output \\
  --quant_method GPTQ \\
  --quant_type W4A16 \\
  --max_gpu_memory "40GiB\""""),
    # The model itself mixes tokens in a way that kt does not run; what is said then: convert_scripts_test.py.
    ("trained", check_gptq, """python scripts/convert_gpu_weights.py \\
  --model_id /mnt/data/models/Qwen3-Next-80B-A3B-Instruct \\
  --output_dir /mnt/data/models/Qwen3-Next-80B-A3B-Instruct-GPTQ-W4A16 \\
  --quant_method GPTQ \\
  --quant_type W4A16 \\
  --num_calibration_samples 512 \\
  --max_sequence_length 2048 \\
  --max_gpu_memory "40GiB" \\
  --trust_remote_code"""),
    ("trained", check_rtn, """python scripts/convert_gpu_weights.py \\
  --model_id /mnt/data/models/DeepSeek-R1-0528-BF16 \\
  --output_dir /mnt/data/models/DeepSeek-R1-0528-RTN-W4A16 \\
  --quant_method RTN \\
  --quant_type W4A16 \\
  --max_gpu_memory "70GiB" \\
  --trust_remote_code"""),
    ("trained", check_gptq, """python scripts/convert_gpu_weights.py \\
  --model_id /mnt/data/models/GLM-4.5-Air \\
  --output_dir /mnt/data/models/GLM-4.5-Air-GPTQ-W8A16 \\
  --quant_method GPTQ \\
  --quant_type W8A16 \\
  --dataset "tatsu-lab/alpaca" \\
  --dataset_split "train" \\
  --num_calibration_samples 256 \\
  --max_gpu_memory "40GiB" \\
  --trust_remote_code"""),
]

# (command, words of what it prints)
PACKAGE = [
    ("""python -c "from kt_kernel import KTMoEWrapper; print('✓ kt-kernel installed successfully')\"""",
     ["✓ kt-kernel installed successfully"]),
    ("""# Override automatic CPU detection (for testing or debugging)
export KT_KERNEL_CPU_VARIANT=avx2 # Force specific variant
# Enable debug output to see detection process
export KT_KERNEL_DEBUG=1
python -c "import kt_kernel\"""", ["kt_kernel: portable: runs here", "KT_KERNEL_CPU_VARIANT=avx2"]),
]

VERIFY = """import kt_kernel
# Check which CPU variant was loaded
print(f"CPU variant: {kt_kernel.__cpu_variant__}")
print(f"Version: {kt_kernel.__version__}")
# Check CUDA support
from kt_kernel import kt_kernel_ext
cpu_infer = kt_kernel_ext.CPUInfer(4)
has_cuda = hasattr(cpu_infer, 'submit_with_cuda_stream')
print(f"CUDA support: {has_cuda}")
print("✓ kt-kernel installed successfully!")
"""

LAYER = """from kt_kernel import KTMoEWrapper
# Initialize the MoE wrapper
wrapper = KTMoEWrapper(
layer_idx=0,
num_experts=8,
num_experts_per_tok=2,
hidden_size=4096,
moe_intermediate_size=14336,
num_gpu_experts=2,
cpuinfer_threads=32,
threadpool_count=2,
weight_path="/path/to/weights",
chunked_prefill_size=512,
method="AMXINT4" # Options: "AMXINT4", "AMXINT8", "LLAMAFILE"
)
# Load weights (from disk - pre-quantized)
wrapper.load_weights(physical_to_logical_map)
# Or load weights from tensors (online quantization)
wrapper.load_weights_from_tensors(gate_proj, up_proj, down_proj, physical_to_logical_map)
# Run inference
output = wrapper.forward(hidden_states, topk_ids, topk_weights, cuda_stream)
# Or use async API for better performance
wrapper.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
# ... do other work ...
output = wrapper.sync_forward(hidden_states, cuda_stream)
"""

ADVANCED = """# Initialize with additional options
wrapper = KTMoEWrapper(
layer_idx=0,
num_experts=8,
num_experts_per_tok=2,
hidden_size=4096,
moe_intermediate_size=14336,
num_gpu_experts=2,
cpuinfer_threads=32,
threadpool_count=2,
weight_path="/path/to/weights",
chunked_prefill_size=512,
method="AMXINT4",
cpu_save=False, # Keep weights in CPU memory after loading
max_deferred_experts_per_token=0 # Number of experts to defer (for pipelined execution)
)
# Pre-allocate buffers for specific batch sizes (improves performance)
KTMoEWrapper.set_capture_batch_sizes([1, 2, 4, 8, 16])
# Query captured batch sizes
batch_sizes = KTMoEWrapper.get_capture_batch_sizes()
# Clear buffer cache to free memory
KTMoEWrapper.clear_buffer_cache()
"""

# What a reader has before the blocks above, and a small layer in place of 4096 x 14336.
BEFORE = """import torch
torch.manual_seed(1)
gate_proj, up_proj = torch.randn(2, 8, 14336, 4096).bfloat16() * 0.05
down_proj = torch.randn(8, 4096, 14336).bfloat16() * 0.05
physical_to_logical_map = torch.arange(8)
hidden_states, cuda_stream = torch.randn(4, 4096).bfloat16(), 0
topk_ids, topk_weights = torch.tensor([[2, 3], [4, 5], [6, 7], [0, 7]]), torch.rand(4, 2)
"""
AFTER = """
x = hidden_states.float()
def layer(e):
    gate, up = x @ gate_proj[e].float().T, x @ up_proj[e].float().T
    return (torch.nn.functional.silu(gate) * up) @ down_proj[e].float().T
want = torch.zeros(4, 4096)
for t in range(4):
    for e, w in zip(topk_ids[t], topk_weights[t]):
        if e >= 2:  # the first two are the GPU's
            want[t] += w * layer(e)[t]
assert torch.nn.functional.cosine_similarity(output.float().flatten(), want.flatten(), 0) > 0.97
assert batch_sizes == [1, 2, 4, 8, 16]
"""

PROGRAM = ["kt version", "kt doctor", "kt run m2", "kt chat", "kt --help"]
# Of the guide's tables.
COMMANDS = ["version", "run", "chat", "quant", "bench", "microbench", "doctor", "model", "config"]

# What the documents have beside these, and why it is not run here.
LEFT_OUT = {
    r"git |wget |tar |cd |rm |\./configure|sudo |make$": "fetches and builds other programs",
    r"conda |pip install (huggingface-hub|accelerate|ktransformers-|flash_attn|custom_flashinfer|https:|-r |"
    r"-e \"|-e '|-e \.\[)":
        "installs other programs",
    r"KTRANSFORMERS_FORCE_BUILD=": "installs the framework before kt-kernel",
    r"huggingface-cli download": "another program, and downloads",
    r"python -m sglang\.launch_server": "starts another program; kt run takes these flags: established_cli_test.py",
    r"(USE_KT=1 |API_PORT=8000 )?llamafactory-cli": "starts another program",
    r"pip install (kt-kernel|\.|-e \.)$": "python_wheel_test.py installs wheel and sdist in an empty environment",
    r"pip install kt-kernel-cuda": "one wheel has both: docs/python.md",
    r"\./install\.sh|export CPUINFER_": "package_test.py runs install.sh with these words and variables",
    r"export TORCH_CUDA_ARCH_LIST": "builds the framework before kt-kernel",
    r"cmake -B build|make format": "for people who change the sources",
    r"lscpu|numactl": "another program",
    r"kt (\[OPTIONS\]|\w+( <model>)? \|)": "a line of a table",
    r"KTRANSFORMERS_USE_CUDA=ON but|USE_KT=1, we": "no command",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")

    def made(name, **options):
        return checkpoints.Model(at / name, **options).save().folder
    return {"bf16": made("bf16"), "fp16": made("fp16", kind="fp16"), "fp8": made("fp8", kind="fp8", hidden=256),
            "14 layers": made("deep", layers=14, experts=2), "trained": DEMO}


class Reader:
    """Somebody in a checkout who types what a document says."""

    def __init__(self, folder):
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        (tools / "kt").symlink_to(pathlib.Path(KT).resolve())
        (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (tools / "python").chmod(0o755)
        (folder / "scripts").symlink_to(ROOT / "scripts")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("KT_", "CPUINFER_"))}
        self.env |= {"PATH": f"{tools}:{os.environ['PATH']}", "KT_PROGRAM": str(tools / "kt"),
                     "KT_HOME": str(folder / "home"),
                     "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}

    def here(self, command):
        return re.sub(r"/(path/to|mnt/data/models)\b", rf"{self.folder}/\1", command)

    def model(self, path, stand_in):
        at = pathlib.Path(self.here(path))
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(stand_in)

    def dataset(self, name, split, rows):
        folder = self.folder / "hf" / "hub" / f"datasets--{name.replace('/', '--')}" / "snapshots" / "0" / "data"
        folder.mkdir(parents=True)
        (folder / f"{split}-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def types(self, command, said=""):
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", self.here(command)], input=said, capture_output=True,
                              text=True, cwd=self.folder, env=self.env, timeout=600)
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout + done.stderr


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


@pytest.mark.parametrize("stand_in, check, command", CONVERSIONS, ids=range(len(CONVERSIONS)))
def test_conversions(reader, models, stand_in, check, command):
    reader.dataset("HuggingFaceH4/ultrachat_200k", "train_sft", [
        {"messages": [{"role": "user", "content": f"Tell me of {n} foxes."},
                      {"role": "assistant", "content": f"There were {n} foxes in a wood."}]} for n in range(40)])
    reader.dataset("tatsu-lab/alpaca", "train", [{"text": f"The {n} owls sang all night."} for n in range(40)])
    model, out = (re.search(rf"--{flag} (\S+)", command)[1] for flag in ("(?:input-path|model_id)", "output(?:_dir)?"))
    reader.model(model, models[stand_in])
    reader.types(command)
    check(models[stand_in], pathlib.Path(reader.here(out)))


def test_the_package(reader):
    pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
    for command, wanted in PACKAGE:
        said = reader.types(command)
        assert all(word in said for word in wanted), said
    said = subprocess.run([sys.executable, "-c", VERIFY], capture_output=True, text=True, env=reader.env,
                          check=True).stdout
    assert re.fullmatch(r"CPU variant: \w+\nVersion: \S+\nCUDA support: (True|False)\n✓ kt-kernel installed "
                        r"successfully!\n", said)


def test_a_layer_in_python(reader, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
    checkpoints.Model(tmp_path / "plain", layers=1, experts=8, hidden=256, inter=512).save()
    checkpoints.kt_ok("quant", tmp_path / "plain", "-o", reader.here("/path/to/weights"), "--method", "int4",
                      "--numa-nodes", 2)
    program = re.sub(r"\b4096\b", "256", re.sub(r"\b14336\b", "512", BEFORE + LAYER + ADVANCED + AFTER))
    done = subprocess.run([sys.executable, "-c", reader.here(program)], capture_output=True, text=True, env=reader.env)
    assert done.returncode == 0, done.stderr


def test_the_program(reader):
    """The quick start: a server of the model called m2, and a chat with it from another terminal."""
    snapshot = reader.folder / "hf" / "hub" / "models--MiniMaxAI--MiniMax-M2" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(DEMO)
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    reader.types(f"kt config set server.port {port}")  # the usual one may be taken here
    version, doctor, run, chat, page = PROGRAM
    said = reader.types(version)
    assert re.match(r"(KTransformers CLI v\S+\n\n?)?Python: \S+\nPlatform: Linux\S+\nCUDA: \S+\nkt-kernel: "
                    r"\S+ \(\w+\)\nsglang: \S+\n", said), said
    reader.types(doctor)
    with Server(*run.split()[2:], "--port", port, env=reader.env):
        assert len(reader.types(chat, said="hello\n").strip()) > 0
    listed = reader.types(page)
    assert all(re.search(rf"^  {name}\b", listed, re.M) for name in COMMANDS)
    for name in COMMANDS:
        assert f"kt {name}" in reader.types(f"kt {name} --help")


def plain(command):
    """A command on one line, without the comment at its end."""
    return re.sub(r"\s+#.*$", "", " ".join(command.replace("\\\n", " ").split()))


def test_nothing_of_the_documents_is_forgotten():
    documents = sorted(pathlib.Path(DATA or "/nonexistent", "seeds").glob("*.txt"))
    if not documents:
        pytest.skip("KT_TEST_DATA has no seeds/ (the documents)")
    known = {plain(command) for _, _, command in CONVERSIONS} | set(PROGRAM)
    known |= {plain(line) for block, _ in PACKAGE for line in block.splitlines() if not line.startswith("#")}
    starts = (r"(python3?|pip3?|kt|\./\S+|git|conda|huggingface-cli|cmake|make|sudo|wget|tar|cd|rm|export|lscpu|"
              r"numactl|llamafactory-cli|[A-Z_]+=\S+ \S+)\s")
    commands, lines = set(), set()
    for document in documents:
        lines |= {line.strip() for line in document.read_text().splitlines()}
        body = document.read_text().replace("--no-merge-safetensor\n  --resume-layer",
                                            "--no-merge-safetensor --resume-layer")
        body = body.replace("--no-merge-safetensor\n--resume-layer", "--no-merge-safetensor --resume-layer")
        # One of them has lost its line ends: a command and what follows it stand together.
        body = re.sub(r"(?<=\S)(python scripts/)", r"\n\1", body.replace("\\\n", " "))
        body = re.sub(r'(int4|safetensor|W4A16|"40GiB"|train_sft|datasets)(?=[A-Z])', r"\1\n", body)
        commands |= {plain(line.strip()) for line in body.splitlines() if re.match(starts, line.strip() + " ")}
    assert len(commands) > 60
    forgotten = {line for line in commands - known if not any(re.match(pattern, line) for pattern in LEFT_OUT)}
    assert not forgotten
    # Nor does the table have what no document says.
    assert known - commands == {"kt --help"}
    assert not set((VERIFY + LAYER + ADVANCED).splitlines()) - lines
