"""A GGUF file by itself is a model: logits of every family against transformers on the numbers the file holds, its
tokenizer against PyPI's tokenizers, `kt generate` and `kt perplexity` on it, and what `kt quant` makes of it.

KT_PROGRAM names the kt program, KT_MODEL_PROBE model_probe and KT_TOKENIZER_PROBE tokenizer_probe (see
model_logits_test.py and tokenizer_test.py). Activations are float32 on both sides and every format is exact in that, so
that the bound is the same for all types of tensors.
"""

import functools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gguf_files
import tiny_models

PROBE = os.environ.get("KT_MODEL_PROBE")
TOKENIZER_PROBE = os.environ.get("KT_TOKENIZER_PROBE")
KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(
    not (PROBE and TOKENIZER_PROBE and KT), reason="KT_MODEL_PROBE, KT_TOKENIZER_PROBE or KT_PROGRAM is not set"
)

BOUND = 1e-4  # max|a - b| / max|b| of a position, as in model_logits_test.py
TYPE = gguf.GGMLQuantizationType
# Every family, and the ways it can turn that a GGUF file can say.
MODELS = [
    "qwen3_moe",
    "qwen3_moe-some_dense-tied-yarn-not_normalised",
    "qwen2_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v2-greedy-no_q_rank",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe-no_qk_norm-groups",
    "minimax_m2",
    "gpt_oss",
    "qwen3",
    "llama",
    "llama-linear-biases",
    "llama-longrope",
    "llama-longrope_apart",
    "dots1",
    "hy_v3",
    "hy_v3-biases-tied",
    "ernie4_5_moe",
    "ernie4_5_moe-every_second-untied",
    "mistral4",
    "mistral4-groups-first_dense",
    "glm4_moe_lite",
    "solar_open",
    "solar_open-biases-yarn",
    "glm_moe_dsa",
    "glm_moe_dsa-shared-biases",
    "deepseek_v32",
    "qwen3_next",
    "qwen3_next-some_dense-listed-biases",
    "qwen3_5_moe",
    "qwen3_5_moe-tied-more_heads",
    "qwen3_5",
    "llama4",
    "gemma4",
    "gemma4-dense-listed-untied-biases-no_cap",
]
ANOTHER_S_FILES = ["glm4_moe_lite", "solar_open"]  # deepseek2 and glm4moe
FAMILIES = [key for key in MODELS if "-" not in key and key not in ANOTHER_S_FILES]
# Those whose files hold other numbers than the published checkpoint: they run, and are not turned back.
CONVERTED = [key for key in FAMILIES if key not in tiny_models.DELTA_MODELS]
FUSED = ["gpt_oss", "mistral4", "llama4", "gemma4"]  # experts one by one are no names of their checkpoints
QUESTION = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def all_of(kind):
    """Matrices of that type where its blocks fit, else F16."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return lambda name, columns: kind if columns % block == 0 else TYPE.F16


def mixed(name, columns, wide=("ffn_down", "output.weight", "attn_v")):
    """About what a "medium" file has: more bits for down, output and v."""
    if columns % 32 != 0:
        return TYPE.F16
    if any(word in name for word in wide):
        return TYPE.Q6_K if columns % 256 == 0 else TYPE.Q8_0
    return TYPE.Q4_K if columns % 256 == 0 else TYPE.Q4_0


def prompt(tokens, seed=0):
    numbers = random.Random(1000 * seed + tokens)
    return [numbers.randrange(tiny_models.VOCAB) for _ in range(tokens)]


PROMPTS = [prompt(1), prompt(90)]


def probe(path, *options):
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in PROMPTS)
    done = subprocess.run([PROBE, str(path), "--acts", "f32", *options], input=lines.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return np.frombuffer(done.stdout, "<f4").reshape(sum(map(len, PROMPTS)), tiny_models.VOCAB)


def check(ours, theirs, bound=BOUND):
    assert ours.shape == theirs.shape and np.isfinite(ours).all()
    error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
    assert error.max() <= bound, f"position {error.argmax()}: {error.max():.3g}, allowed {bound:g}"


def save_rounded(source, model, folder):
    """The checkpoint of the numbers a file holds."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    rounded = {name: np.ascontiguousarray(values) for name, values in model.rounded.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference(folder):
    """transformers' logits from a folder, in float32."""
    return tiny_models.logits(tiny_models.load(folder).eval(), PROMPTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@functools.cache
def published(root, key):
    """The folder that transformers saves, with the tokenizer of the tests."""
    folder = tiny_models.save(tiny_models.build(key), root / key)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|end|>", "chat_template": QUESTION}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def expected(root, key):
    return reference(published(root, key))


# --- tokenizer --------------------------------------------------------------------------------------------------------

WORDS = "Once upon a time there was a fox who didn't know 1234567 things, and the fox asked the heron. "
SPECIAL = ["<|endoftext|>", "<|user|>", "<|bot|>", "<|end|>"]
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def tokenizer():
    """Byte-level BPE of 300 tokens, split as Qwen's."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    size = tiny_models.VOCAB - len(SPECIAL) - 1
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([WORDS * 3], trainer)
    while made.get_vocab_size() < size:  # where the text was too short for more merges
        made.add_tokens([f"[unused{made.get_vocab_size()}]"])
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return made


def add_tokenizer(writer, pre="qwen2", model="gpt2", bos=False, chat=QUESTION, eos=None, eot=None):
    gguf_files.add_vocabulary(writer, tokenizer(), pre, model)
    writer.add_uint32("tokenizer.ggml.bos_token_id", tokenizer().token_to_id("<|endoftext|>"))
    writer.add_uint32("tokenizer.ggml.eos_token_id", tokenizer().token_to_id("<|endoftext|>") if eos is None else eos)
    writer.add_uint32("tokenizer.ggml.eot_token_id", tokenizer().token_to_id("<|end|>") if eot is None else eot)
    writer.add_bool("tokenizer.ggml.add_bos_token", bos)
    if chat:
        writer.add_string("tokenizer.chat_template", chat)


TEXTS = [WORDS, "", "  spaces\n\n and <think>tabs\t</think> <|user|>hello<|end|>", "Füchse, 狐狸, 🦊 and 12345!"]


def encoded(path, *options):
    data = b"".join(each.encode() + b"\xff<end>\xff" for each in TEXTS)
    done = subprocess.run([TOKENIZER_PROBE, str(path), "encode", *options], input=data, capture_output=True)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.decode().split("\n")[:-1]]


# --- logits -----------------------------------------------------------------------------------------------------------


class TestLogits:
    @pytest.mark.parametrize("key", MODELS)
    def test_f32(self, root, key, tmp_path):
        model = gguf_files.Model(published(root, key))
        # Where a file is silent, queries grow as those of the published model.
        model.says_growth = model.config["rope_parameters"].get("llama_4_scaling_beta", 0.1) != 0.1
        check(probe(model.write(tmp_path / "m.gguf")), expected(root, key))

    @pytest.mark.parametrize("key", ["deepseek_v2", "deepseek_v3"])
    def test_kv_b_in_one_piece(self, root, key, tmp_path):
        model = gguf_files.Model(published(root, key), split_kv_b=False)
        assert "blk.0.attn_kv_b.weight" in model.tensors
        check(probe(model.write(tmp_path / "m.gguf")), expected(root, key))

    def test_projections_as_published(self, root, tmp_path):
        model = gguf_files.Model(published(root, "qwen3_next"), split_qkvz=False)
        assert "blk.0.ssm_in.weight" in model.tensors
        check(probe(model.write(tmp_path / "m.gguf")), expected(root, "qwen3_next"))

    # Each block type with every second family: the readers do not know families.
    @pytest.mark.parametrize(
        "key,kind",
        [(key, TYPE.F16) for key in FAMILIES]
        + [(key, TYPE.Q4_0 if i % 2 else TYPE.Q8_0) for i, key in enumerate(FAMILIES)],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_rounded(self, root, key, kind, tmp_path):
        model = gguf_files.Model(published(root, key), all_of(kind))
        theirs = reference(save_rounded(published(root, key), model, tmp_path / "rounded"))
        check(probe(model.write(tmp_path / "m.gguf")), theirs)

    @pytest.mark.parametrize("key", ["qwen3_moe", "llama", "deepseek_v3"])
    @pytest.mark.parametrize("wide", [("ffn_down", "output.weight", "attn_v"), ("ffn_up",), ("ffn_gate",)],
                             ids=lambda words: words[0])
    def test_mixed_types(self, key, wide, tmp_path, monkeypatch):
        family, overrides = tiny_models.MODELS[key]
        sizes = dict(overrides, hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=2)
        monkeypatch.setitem(tiny_models.MODELS, "wide", (family, sizes))
        folder = tiny_models.save(tiny_models.build("wide"), tmp_path / "published")
        tokenizer().save(str(folder / "tokenizer.json"))
        model = gguf_files.Model(folder, functools.partial(mixed, wide=wide))
        kinds = {name: kind for name, (_, kind) in model.tensors.items()}
        assert {TYPE.Q4_K, TYPE.Q6_K, TYPE.F32} <= set(kinds.values())
        gate = [name for name in kinds if ".ffn_gate_exps." in name or ".ffn_gate." in name]
        apart = [kinds[name] != kinds[name.replace("gate", "up")] for name in gate]
        assert apart and all(apart) == any(apart) == (wide[0] != "ffn_down")
        rounded = save_rounded(folder, model, tmp_path / "rounded")
        path = model.write(tmp_path / "m.gguf", add_tokenizer)
        check(probe(path), reference(rounded))
        ours, theirs = (kt_ok("generate", each, "-p", WORDS, "--acts", "f32", "--max-tokens", 8, "--json").stdout
                        for each in (path, rounded))
        assert json.loads(ours)["tokens"] == json.loads(theirs)["tokens"]

    @pytest.mark.parametrize("recipe", list(gguf_files.RECIPES))
    @pytest.mark.parametrize("key", ["qwen3_moe", "deepseek_v3", "dots1"])
    def test_published_recipes(self, key, recipe, tmp_path, monkeypatch):
        """Types as files of these names mix them: by tensor and by layer, gate and up apart, other types for narrow
        rows."""
        family, overrides = tiny_models.MODELS[key]
        sizes = dict(overrides, hidden_size=256, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=4)
        monkeypatch.setitem(tiny_models.MODELS, "wide", (family, sizes))
        folder = tiny_models.save(tiny_models.build("wide"), tmp_path / "published")
        tokenizer().save(str(folder / "tokenizer.json"))
        model = gguf_files.Model(folder, gguf_files.recipe(recipe, 4))
        kinds = {name: kind.name for name, (_, kind) in model.tensors.items()}
        assert gguf_files.RECIPES[recipe]["has"] <= set(kinds.values()), set(kinds.values())
        if recipe == "UD-Q2_K_XL":
            gate = [name for name in kinds if ".ffn_gate_exps." in name]
            assert any(kinds[name] != kinds[name.replace("gate", "up")] for name in gate)
        rounded = save_rounded(folder, model, tmp_path / "rounded")
        path = model.write(tmp_path / "m.gguf", add_tokenizer)
        check(probe(path), reference(rounded))
        ours, theirs = (kt_ok("generate", each, "-p", WORDS, "--acts", "f32", "--max-tokens", 8, "--json").stdout
                        for each in (path, rounded))
        assert json.loads(ours)["tokens"] == json.loads(theirs)["tokens"]

    def test_types_of_another_program_are_named(self, root, tmp_path):
        """ik_llama.cpp's, which the library that writes files does not know: the number in the header is changed."""
        path = gguf_files.Model(published(root, "qwen3_moe"),
                                all_of(TYPE.Q8_0)).write(tmp_path / "m.gguf", add_tokenizer)
        name = b"blk.0.ffn_up_exps.weight"
        for number, called in ((139, "IQ4_K"), (152, "IQ5_KS"), (212, "Q4_K_R4"), (339, "IQ4_K_R4")):
            data = bytearray(path.read_bytes())
            at = data.index(name) + len(name) + 4 + 3 * 8  # behind the count of dimensions and three of them
            data[at : at + 4] = number.to_bytes(4, "little")
            other = tmp_path / "other.gguf"
            other.write_bytes(data)
            done = kt("generate", other, "-p", "a")
            line = (f"kt: {other}: {name.decode()}: {called} ({number}) is a type of ik_llama.cpp, which no other "
                    "program reads")
            assert done.returncode == 4 and done.stderr.splitlines() == [line], done.stderr

    def test_a_correction_bias_tells_the_scores(self, root, tmp_path):
        model = gguf_files.Model(published(root, "deepseek_v3"))
        model.says_gating = False
        check(probe(model.write(tmp_path / "m.gguf")), expected(root, "deepseek_v3"))

    @pytest.mark.parametrize("key", ["glm4_moe", "qwen3_5_moe", "glm_moe_dsa"])
    def test_layers_that_predict_further_tokens_are_left_alone(self, root, key, tmp_path):
        """They look like the last layer, which attends; and the estimate says that they are idle."""
        model = gguf_files.Model(published(root, key))
        layers = model.config["num_hidden_layers"]
        last, extra = f"blk.{layers - 1}.", f"blk.{layers}."
        model.config["num_nextn_predict_layers"] = 1
        model.tensors |= {name.replace(last, extra): tensor for name, tensor in model.tensors.items() if last in name}
        model.tensors[extra + "nextn.eh_proj.weight"] = (np.zeros((64, 128), np.float32), gguf_files.F32)

        def says_so(writer):
            writer.add_uint32(gguf_files.ARCHITECTURES[model.type] + ".nextn_predict_layers", 1)

        path = model.write(tmp_path / "m.gguf", says_so)
        check(probe(path), expected(root, key))
        assert f"layers for further tokens ({extra}" in kt("estimate", path, "--bandwidth", 10).stderr

    def test_split(self, root, tmp_path):
        model = gguf_files.Model(published(root, "qwen3_moe"))
        model.write(tmp_path / "m.gguf", split=12)
        parts = sorted(tmp_path.glob("m-*-of-*.gguf"))
        assert len(parts) > 2
        for path in (parts[0], parts[-1], tmp_path):
            check(probe(path), expected(root, "qwen3_moe"))

    def test_a_permutation_left_out_is_seen(self, root, tmp_path):
        """The comparison would notice q and k in the wrong order."""
        model = gguf_files.Model(published(root, "llama"))

        def undo(tensors):
            for name in list(tensors):
                if ".attn_q." in name:
                    raw, kind = tensors[name]
                    tensors[name] = (gguf_files.permuted(raw, 4), kind)

        error = np.abs(probe(model.write(tmp_path / "m.gguf", change=undo)) - expected(root, "llama")).max()
        assert error > 100 * BOUND


# --- tokenizer and programs -------------------------------------------------------------------------------------------


def kt(*words):
    return subprocess.run([KT, *map(str, words)], capture_output=True, text=True, timeout=600)


def kt_ok(*words):
    done = kt(*words)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def whole(root):
    """A file with everything, and the folder it came from."""
    folder = published(root, "qwen3_moe")
    return gguf_files.Model(folder).write(root / "whole.gguf", add_tokenizer), folder


class TestTokenizer:
    def test_ids_are_the_library_s(self, whole):
        theirs = [tokenizer().encode(text, add_special_tokens=False).ids for text in TEXTS]
        assert encoded(whole[0]) == theirs == encoded(whole[1] / "tokenizer.json")

    def test_begin_of_text_where_the_file_asks_for_it(self, root, tmp_path):
        path = gguf_files.Model(published(root, "qwen3")).write(
            tmp_path / "m.gguf", functools.partial(add_tokenizer, bos=True)
        )
        begin = tokenizer().token_to_id("<|endoftext|>")
        assert encoded(path, "--add-special") == [[begin, *ids] for ids in encoded(path)]


class TestPrograms:
    def test_generate_as_from_the_folder(self, whole):
        path, folder = whole
        for words in (["-p", WORDS], ["--chat", "-p", "Why?", "--system", "Be brief."]):
            ours, theirs = (
                json.loads(kt_ok("generate", model, *words, "--acts", "f32", "--max-tokens", 24, "--json").stdout)
                for model in (path, folder)
            )
            for same in ("text", "tokens", "finish", "prompt_tokens"):
                assert ours[same] == theirs[same]
        rendered = "<|endoftext|><|user|>Be brief.<|end|><|user|>Why?<|end|><|bot|>"
        assert ours["prompt_tokens"] == len(tokenizer().encode(rendered).ids)

    def test_converted_experts_run_with_the_file_they_name(self, whole, tmp_path):
        """Nothing but experts is written of such a file, merged or not."""
        path, out = tmp_path / "m.gguf", tmp_path / "out"
        shutil.copy(whole[0], path)
        kt_ok("quant", path, "-o", out, "--method", "int8", "--numa-nodes", 1)

        def run(*words):
            return json.loads(kt_ok("generate", *words, "-p", WORDS, "--max-tokens", 8, "--json").stdout)["tokens"]

        assert run(out) == run(path, "--weights", out)
        path.rename(tmp_path / "elsewhere.gguf")
        gone = kt("generate", out, "-p", WORDS)
        assert gone.returncode == 2 and f"{path}, is not there" in gone.stderr and f"--weights {out}" in gone.stderr

    def test_stats_name_what_ran(self, root, whole):
        for model, ending in ((published(root, "llama"), "; a dense model"), (whole[0], "; gguf experts")):
            done = kt_ok("generate", model, "-p", "a", "--max-tokens", 2, "--stats")
            assert done.stderr.splitlines()[0].endswith(ending), done.stderr

    def test_generation_ends_at_either_end(self, root, tmp_path):
        def run(**ends):
            path = gguf_files.Model(published(root, "qwen3")).write(
                tmp_path / "m.gguf", functools.partial(add_tokenizer, **ends)
            )
            return json.loads(kt_ok("generate", path, "-p", WORDS, "--max-tokens", 3, "--json").stdout)

        first = run()
        assert first["finish"] == "length" and len(first["tokens"]) == 3
        for end in ("eos", "eot"):
            assert run(**{end: first["tokens"][0]})["finish"] == "stop"

    def test_perplexity_as_from_the_folder(self, whole, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text(WORDS * 20)
        flags = ["--file", text, "--context", 64, "--max-tokens", 256, "--acts", "f32", "--json"]
        ours, theirs = (json.loads(kt_ok("perplexity", model, *flags).stdout) for model in whole)
        assert ours["tokens"] == theirs["tokens"]
        assert ours["nll"] == pytest.approx(theirs["nll"], rel=1e-5)
        assert ours["experts"] == "gguf"

    def test_perplexity_s_windows_are_no_longer_than_the_context(self, tmp_path):
        folder = tiny_models.save(tiny_models.build("qwen3", max_position_embeddings=128), tmp_path / "short")
        tokenizer().save(str(folder / "tokenizer.json"))
        text = tmp_path / "text.txt"
        text.write_text(WORDS * 40)
        flags = ["--file", text, "--max-tokens", 256, "--json"]
        assert json.loads(kt_ok("perplexity", folder, *flags).stdout)["context"] == 128
        done = kt("perplexity", folder, *flags, "--context", 256)
        assert done.returncode == 2 and f"--context: {folder} has a context of 128, got 256" in done.stderr

    def test_converted_experts_with_the_file(self, whole, root, tmp_path):
        path, folder = whole
        kt_ok("quant", path, "-o", tmp_path / "int8", "--method", "int8")
        kt_ok("quant", folder, "-o", tmp_path / "same", "--method", "int8")
        ours, theirs = probe(path, "--weights", tmp_path / "int8"), probe(folder, "--weights", tmp_path / "same")
        check(ours, theirs)


class TestErrors:
    def refused(self, path, *words, code=2):
        done = kt("generate", path, "-p", "a", "--max-tokens", 1)
        lines = [line for line in done.stderr.splitlines() if line.startswith("kt: ")]
        assert done.returncode == code and len(lines) == 1, (done.returncode, done.stderr)
        missing = [word for word in words if word not in lines[0]]
        assert not missing, lines[0]

    def spoiled(self, root, tmp_path, key="qwen3_moe", change=lambda tensors: None, **tokens):
        model = gguf_files.Model(published(root, key))
        return model.write(tmp_path / "m.gguf", functools.partial(add_tokenizer, **tokens), change)

    @pytest.mark.parametrize(
        "key,name",
        [
            ("qwen3_moe", "blk.1.attn_k_norm.weight"),
            ("qwen3_moe", "token_embd.weight"),
            ("deepseek_v3", "blk.2.exp_probs_b.bias"),
            ("deepseek_v3", "blk.0.ffn_up.weight"),
            ("gpt_oss", "blk.0.attn_sinks.weight"),
            ("mixtral", "blk.2.ffn_gate_inp.weight"),
            ("qwen2_moe", "blk.1.ffn_gate_inp_shexp.weight"),
        ],
    )
    def test_missing_tensor(self, root, tmp_path, key, name):
        path = self.spoiled(root, tmp_path, key, lambda tensors: tensors.pop(name))
        self.refused(path, str(path), name)

    def test_tensors_nobody_reads(self, root, tmp_path):
        """A model without them would be another one; biases of zero and layers for further tokens are idle."""
        def path_with(name, value):
            row = (np.full(64, value, np.float32), gguf_files.F32)
            return self.spoiled(root, tmp_path, change=lambda tensors: tensors.update({name: row}))

        for name, value in (("blk.1.attn_gate.weight", 1), ("blk.1.attn_output.bias", 1), ("blk.0.attn_q.bias2", 0)):
            self.refused(path_with(name, value), "1 tensor", name, "m.gguf")
        for name, value, why in (("blk.1.attn_output.bias", 0, "biases of zero"),
                                 ("blk.97.nextn.eh_proj.weight", 1, "layers for further tokens")):
            path = path_with(name, value)
            for verb in (["generate", path, "-p", "a", "--max-tokens", 1], ["estimate", path, "--bandwidth", 10]):
                done = kt(*verb)
                assert done.returncode == 0, done.stderr
                assert done.stderr == f"kt warning: {path}: 1 tensor not used: {why} ({name})\n"

    def test_tensors_of_a_folder_nobody_reads(self, root, tmp_path):
        """The same of safetensors; what is idle is said once, also where the model is opened twice."""
        def folder_with(name, value):
            folder = tmp_path / name
            shutil.copytree(published(root, "qwen3_moe"), folder)
            save_file({name: np.full(64, value, np.float32)}, folder / "more.safetensors", metadata={"format": "pt"})
            return folder

        for name in ("model.layers.1.self_attn.g_proj.weight", "model.layers.1.mlp.experts.scale"):
            self.refused(folder_with(name, 1), "1 tensor", name, "has no use for")
        folder = folder_with("model.layers.3.eh_proj.weight", 1)
        story = tmp_path / "story.txt"
        story.write_text(WORDS * 3)
        said = f"kt warning: {folder}: 1 tensor not used: layers for further tokens (model.layers.3.eh_proj.weight)"
        for verb in (["generate", folder, "-p", "a", "--max-tokens", 1],
                     ["perplexity", folder, "--file", story, "--context", 16, "--kl-against", "f32"],
                     ["bench", folder, "--prompt", 8, "--batch", 1, "--tokens", 2, "--repeat", 1],
                     ["run", folder, "--dry-run"]):
            done = kt(*verb)
            assert done.returncode == 0, done.stderr
            assert [line for line in done.stderr.splitlines() if "not used" in line] == [said], verb[0]

    def test_missing_experts(self, root, tmp_path):
        path = self.spoiled(root, tmp_path, change=lambda tensors: tensors.pop("blk.1.ffn_up_exps.weight"))
        self.refused(path, "layer 1", "up projection", "blk.1")

    def test_wrong_shape(self, root, tmp_path):
        wrong = (np.zeros((64, 64), np.float32), gguf_files.F32)
        path = self.spoiled(root, tmp_path, change=lambda tensors: tensors.update({"blk.0.attn_q.weight": wrong}))
        self.refused(path, "blk.0.attn_q.weight: expected [128, 64], found [64, 64]")

    def test_unknown_architecture(self, tmp_path):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
        add_tokenizer(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        known = "deepseek2, deepseek32, dots1, ernie4_5-moe, gemma4, glm4moe, glm-dsa, gpt-oss, hy_v3, llama"
        self.refused(path, "architecture mamba is not known", known, "qwen3moe", code=4)

    def test_tokenizers_that_are_not_read(self, root, tmp_path):
        self.refused(self.spoiled(root, tmp_path, model="t5"), 'tokenizer.ggml.model "t5" is not read', code=4)
        self.refused(self.spoiled(root, tmp_path, model="llama"), "tokenizer.ggml.scores is missing")
        self.refused(self.spoiled(root, tmp_path, pre="unheard-of"), 'pre-tokenizer "unheard-of" is not known; known: ',
                     code=4)

    def test_no_tokenizer(self, root, tmp_path):
        path = gguf_files.Model(published(root, "qwen3")).write(tmp_path / "m.gguf")
        self.refused(path, "tokenizer.ggml.model is missing")

    def test_metadata_of_the_wrong_kind(self, root, tmp_path):
        self.refused(self.spoiled(root, tmp_path, eos=2**32 - 1), str(tmp_path / "m.gguf"),
                     "tokenizer.ggml.eos_token_id is 4294967295, there are 300 tokens")
        self.refused(self.spoiled(root, tmp_path, chat=b"\xff"), "m.gguf: tokenizer.chat_template is not UTF-8")

        def spoil(writer, add, key, value):
            add_tokenizer(writer)
            getattr(writer, add)(key, value)

        for add, key, value, message in (
            ("add_float32", "qwen3moe.rope.scaling.factor", float("nan"), "is nan, expected a finite number"),
            ("add_int32", "qwen3moe.nextn_predict_layers", -1, "is -1, expected a whole number of at least 0"),
            ("add_string", "qwen3moe.rope.scaling.type", b"yarn\xff", "is not UTF-8"),
            ("add_string", "split.count", "one", 'is "one", expected a whole number of at least 0'),
        ):
            model = gguf_files.Model(published(root, "qwen3_moe"))
            path = model.write(tmp_path / "m.gguf", functools.partial(spoil, add=add, key=key, value=value))
            self.refused(path, f"{path}: {key} {message}")
            for flags in ([], ["gpu", "--method", "RTN", "--type", "W4A16"]):
                done = kt("quant", *flags, path, "-o", tmp_path / "out", "--group-size", 32)
                assert done.returncode == 2 and f"{path}: {key} {message}" in done.stderr, done.stderr

    def test_faults_are_told_in_the_words_of_the_file(self, root, tmp_path):
        model = gguf_files.Model(published(root, "qwen3_moe"))
        del model.config["num_attention_heads"]
        path = model.write(tmp_path / "m.gguf", add_tokenizer)
        self.refused(path, f"{path}: qwen3moe.attention.head_count is missing")

    def test_no_chat_template(self, root, tmp_path):
        path = self.spoiled(root, tmp_path, chat=None)
        done = kt("generate", path, "--chat", "-p", "a")
        assert done.returncode == 2 and f"--chat: {path} has no chat template" in done.stderr


# --- conversions ------------------------------------------------------------------------------------------------------


def converted(root, key, out, *flags, kind=None, tokens=add_tokenizer):
    model = gguf_files.Model(published(root, key), kind or (lambda name, columns: gguf_files.F32))
    path = model.write(out.parent / "source.gguf", tokens)
    verb = ["gpu"] if flags[0] == "gpu" else []
    done = kt_ok("quant", *verb, path, "-o", out, *flags[len(verb) :])
    return model, done


class TestConversions:
    """A checkpoint made from a file equals the one made from the folder that the file was made from."""

    @pytest.mark.parametrize(
        "key,targets",
        [(key, "experts") for key in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")]
        + [(key, "all") for key in CONVERTED],
    )
    def test_gpu(self, root, tmp_path, key, targets):
        flags = ("gpu", "--method", "RTN", "--type", "W8A16", "--group-size", "-1", "--targets", targets)
        converted(root, key, tmp_path / "out", *flags)
        kt_ok("quant", "gpu", published(root, key), "-o", tmp_path / "same", *flags[1:])
        ours, theirs = (gguf_files.read_checkpoint(tmp_path / name)[1] for name in ("out", "same"))
        assert set(ours) == set(theirs) - ({"lm_head.weight"} if "lm_head.weight" not in ours else set())
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
        check(probe(tmp_path / "out"), probe(tmp_path / "same"))

    @pytest.mark.parametrize("key", ["qwen3_moe", "gpt_oss"])
    def test_group_size(self, root, tmp_path, key):
        converted(root, key, tmp_path / "out", "--group-size", 32)
        kt_ok("quant", published(root, key), "-o", tmp_path / "same", "--group-size", 32)
        check(probe(tmp_path / "out"), probe(tmp_path / "same"))
        assert encoded(tmp_path / "out" / "tokenizer.json") == encoded(published(root, key) / "tokenizer.json")
        flags = ["-p", WORDS, "--max-tokens", 8, "--acts", "f32", "--json"]
        ours, theirs = (json.loads(kt_ok("generate", tmp_path / name, *flags).stdout) for name in ("out", "same"))
        assert ours["tokens"] == theirs["tokens"]

    def test_the_written_tokenizer_is_the_library_s_to_read(self, root, tmp_path):
        tokens = functools.partial(add_tokenizer, bos=True)
        converted(root, "qwen3_moe", tmp_path / "out", "--group-size", 32, tokens=tokens)
        made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        begin = tokenizer().token_to_id("<|endoftext|>")
        for text in TEXTS:
            assert made(text)["input_ids"] == [begin, *tokenizer().encode(text, add_special_tokens=False).ids]
        assert made.chat_template == QUESTION and made.eos_token == "<|endoftext|>"

    def test_quantised_source(self, root, tmp_path):
        flags = ("gpu", "--method", "RTN", "--type", "W4A16", "--group-size", "-1")
        model, done = converted(root, "mixtral", tmp_path / "out", *flags, kind=all_of(TYPE.Q8_0))
        assert "are written as bf16" in done.stderr
        ours = gguf_files.read_checkpoint(tmp_path / "out")[1]
        name = "model.layers.1.self_attn.q_proj.weight"
        theirs = torch.from_numpy(model.rounded[name]).bfloat16().float().numpy()
        np.testing.assert_array_equal(ours[name], theirs)

    @pytest.mark.parametrize("words", [["dequant"], ["gpu", "--method", "RTN", "--targets", "all"]],
                             ids=lambda words: words[0])
    def test_recurrent_layers_are_not_turned_back(self, root, tmp_path, words):
        path = gguf_files.Model(published(root, "qwen3_next")).write(tmp_path / "source.gguf", add_tokenizer)
        done = kt("quant", words[0], path, "-o", tmp_path / "out", *words[1:])
        assert (done.returncode == 4 and "recurrent layers (blk.0.ssm_" in done.stderr
                and not (tmp_path / "out").exists())

    @pytest.mark.parametrize("key", CONVERTED)
    def test_dequant(self, root, tmp_path, key):
        """The numbers of the file, those of quantised matrices rounded to bf16: what transformers loads."""
        model = gguf_files.Model(published(root, key), all_of(TYPE.Q8_0))
        kt_ok("quant", "dequant", model.write(tmp_path / "source.gguf", add_tokenizer), "-o", tmp_path / "out")
        ours = gguf_files.read_checkpoint(tmp_path / "out")[1]
        same = [name for name in ours if name in model.rounded]
        assert len(same) > 10
        for name in same:
            exact = torch.from_numpy(np.ascontiguousarray(model.rounded[name]))
            assert any(np.array_equal(ours[name], values.numpy()) for values in (exact, exact.bfloat16().float())), name
        assert encoded(tmp_path / "out" / "tokenizer.json") == encoded(published(root, key) / "tokenizer.json")
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert "quantization_config" not in config
        # Rounding may choose another expert for a token here and there.
        made, source = probe(tmp_path / "out"), probe(tmp_path / "source.gguf")
        if key in tiny_models.DSA_MODELS:  # and other keys, from the first token on that sees more than are chosen
            made, source = made[:tiny_models.DSA_BUDGET], source[:tiny_models.DSA_BUDGET]
        assert np.quantile(np.abs(made - source).max(axis=1) / np.abs(source).max(axis=1), 0.8) < 0.02
        if key not in FUSED:
            check(probe(tmp_path / "out"), reference(tmp_path / "out"))

    def test_dequant_of_some_files(self, root, tmp_path):
        path = gguf_files.Model(published(root, "qwen3_moe")).write(tmp_path / "source.gguf", add_tokenizer)
        done = kt("quant", "dequant", path, "-o", tmp_path / "out", "--files", "source.gguf")
        assert done.returncode == 2 and "as a whole" in done.stderr and not (tmp_path / "out").exists()

    def test_transformers_reads_the_config(self, root, tmp_path):
        for key in ("llama", "deepseek_v3"):
            out = tmp_path / key / "out"
            out.parent.mkdir()
            flags = ("gpu", "--method", "RTN", "--type", "W8A16", "--group-size", "-1", "--targets", "all")
            converted(root, key, out, *flags)
            config = json.loads((out / "config.json").read_text())
            del config["quantization_config"]
            folder = tmp_path / key / "plain"
            shutil.copytree(published(root, key), folder)
            (folder / "config.json").write_text(json.dumps(config))
            check(reference(folder), expected(root, key))

    def test_only_what_was_rounded_is_called_so(self, root, tmp_path):
        for kind in (gguf_files.F32, TYPE.BF16, TYPE.Q8_0):
            out = tmp_path / kind.name / "out"
            out.parent.mkdir()
            done = converted(root, "qwen3_moe", out, "--group-size", 32, kind=all_of(kind))[1]
            assert ("already" in done.stderr) == (kind == TYPE.Q8_0), done.stderr

    def test_a_chat_template_that_is_not_utf8(self, root, tmp_path):
        tokens = functools.partial(add_tokenizer, chat=b"\xff")
        for flags in ((), ("gpu", "--method", "RTN", "--type", "W4A16")):
            out = tmp_path / ("gpu" if flags else "cpu") / "out"
            out.parent.mkdir()
            done = converted(root, "qwen3_moe", out, *flags, "--group-size", 32, tokens=tokens)[1]
            assert "no tokenizer files are written" in done.stderr
            assert "tokenizer.chat_template is not UTF-8" in done.stderr

    def test_an_unreadable_tokenizer_is_said_not_to_be_written(self, root, tmp_path):
        tokens = functools.partial(add_tokenizer, model="t5")
        done = converted(root, "qwen2_moe", tmp_path / "out", "--group-size", 32, tokens=tokens)[1]
        assert "no tokenizer files are written" in done.stderr and 'model "t5" is not read' in done.stderr
        assert not (tmp_path / "out" / "tokenizer.json").exists()

    def test_unknown_architecture(self, tmp_path):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "arctic")
        writer.add_block_count(1)
        for part, shape in (("gate", (2, 32, 64)), ("up", (2, 32, 64)), ("down", (2, 64, 32))):
            writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        done = kt("quant", path, "-o", tmp_path / "out", "--group-size", 32)
        assert done.returncode == 4 and "architecture arctic has are not known" in done.stderr, done.stderr
