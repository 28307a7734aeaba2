"""`kt generate` and `kt perplexity` as programs, on the demo model and on tiny random ones: tokens and perplexities
against transformers, what each flag does, and every way to fail: one line, and the exit code that says whose fault it
is.

KT_PROGRAM names kt."""

import functools
import json
import math
import pathlib
import re
import shutil
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_models
from checkpoints import KT, ROOT, kt, kt_ok

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO, STORIES = ROOT / "demo" / "tiny-deepseekv3", ROOT / "demo" / "stories.txt"
PROMPT = "Once upon a time there was a little fox"
F32 = ("--acts", "f32")


@functools.cache
def reference():
    """transformers' demo model in float32, and its tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(DEMO)


def complete(*words, model=DEMO):
    return json.loads(kt_ok("generate", model, "--json", *words).stdout)


def refused(result, code, *words):
    """Exactly one line on standard error, with all the words, and nothing else anywhere."""
    assert result.returncode == code, (result.returncode, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith("kt: "), line
    missing = [word for word in words if str(word) not in line]
    assert not missing, (missing, line)
    assert result.stdout == ""
    return line


# --- kt generate -----------------------------------------------------------------------------------------------------


class TestGreedy:
    # f32 sums in another order move these logits by less than 1e-4 of their size, which is below 20: a best token that
    # leads by more than 0.01 leads for both.
    MARGIN = 0.01

    @pytest.mark.parametrize("prompt", [
        "A small bird", "The old bear", "One day, Tom and his sister went to the river. \"Look!\""])
    def test_tokens_are_transformers(self, prompt):
        model, tokenizer = reference()
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=60, do_sample=False, return_dict_in_generate=True,
                                 output_scores=True, temperature=None, top_p=None)
        expected = out.sequences[0, ids.shape[1]:].tolist()
        best = torch.stack(out.scores)[:, 0].topk(2).values
        clear = (best[:, 0] - best[:, 1] > self.MARGIN).tolist()
        compared = clear.index(False) if False in clear else len(clear)
        assert compared >= 20, "the prompt's continuation is too uncertain to compare"
        ends = model.generation_config.eos_token_id
        expected = expected[:compared]
        if expected[-1] in ends:  # ours ends before it
            expected = expected[:-1]
        done = complete("-p", prompt, "--max-tokens", len(expected), *F32)
        assert done["tokens"] == expected
        assert done["prompt_tokens"] == ids.shape[1]
        assert done["text"] == tokenizer.decode(expected)

    def test_plain_output_is_the_text(self):
        done = complete("-p", PROMPT, "--max-tokens", 30)
        plain = kt_ok("generate", DEMO, "-p", PROMPT, "--max-tokens", 30)
        assert plain.stdout == done["text"] + "\n" and plain.stderr == ""

    def test_json_fields(self):
        done = complete("-p", PROMPT, "--max-tokens", 5)
        assert list(done) == ["text", "tokens", "finish", "prompt_tokens", "prefill_tokens_per_s",
                              "decode_tokens_per_s"]
        assert done["finish"] == "length" and len(done["tokens"]) == 5
        assert done["prefill_tokens_per_s"] > 0 and done["decode_tokens_per_s"] > 0

    def test_stats_go_to_standard_error(self):
        done = kt_ok("generate", DEMO, "-p", PROMPT, "--max-tokens", 5, "--stats")
        assert done.stdout == complete("-p", PROMPT, "--max-tokens", 5)["text"] + "\n"
        line = done.stderr.splitlines()[0]
        assert "5 tokens at" in line and "bf16 experts" in line
        assert re.fullmatch(r"a layer used \d+\.\d of 16 experts, the busiest 8 for \d+(\.\d+)?% of all choices",
                            done.stderr.splitlines()[1])

    @pytest.mark.parametrize("threads", [1, 3])
    def test_threads_change_nothing(self, threads):
        two = complete("-p", PROMPT, "--max-tokens", 40, "--threads", 2)
        assert complete("-p", PROMPT, "--max-tokens", 40, "--threads", threads)["tokens"] == two["tokens"]

    @pytest.mark.parametrize("form", ["int8", "int4", "int4_g32"])
    def test_formats(self, form):
        """The experts' format is what is asked for, and the model still tells a story in words of its vocabulary."""
        done = kt_ok("generate", DEMO, "-p", PROMPT, "--max-tokens", 40, "--format", form, "--stats")
        assert f"{form} experts" in done.stderr
        assert len(set(done.stdout.split())) > 10

    def test_int8_is_close_to_stored(self):
        """Rounding experts and activations to 8 bits hardly moves what the model expects, token after token."""
        found = json.loads(kt_ok("perplexity", DEMO, "--file", STORIES, "--max-tokens", 2048, "--format", "int8",
                                 "--kl-against", "stored", "--json").stdout)
        assert found["tokens"] == 2048 and 0 < found["kl"] < 0.001 and found["same_top"] > 0.97

    def test_a_prompt_of_many_pages(self):
        model, tokenizer = reference()
        prompt = STORIES.read_text()[:3500]
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert 600 < ids.shape[1] < 1000
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > self.MARGIN
        done = complete("-p", prompt, "--max-tokens", 1, "--ignore-eos", *F32)
        assert done["prompt_tokens"] == ids.shape[1] and done["tokens"] == [int(best.indices[0])]


class TestEnds:
    def test_end_of_turn(self):
        """The chat ends by itself; --ignore-eos goes on."""
        done = complete("--chat", "-p", "Tell me a story.", "--max-tokens", 600)
        assert done["finish"] == "stop" and not {0, 2} & set(done["tokens"])
        more = complete("--chat", "-p", "Tell me a story.", "--max-tokens", len(done["tokens"]) + 3, "--ignore-eos")
        assert more["tokens"][:len(done["tokens"])] == done["tokens"] and len(more["tokens"]) == len(done["tokens"]) + 3
        assert more["tokens"][len(done["tokens"])] in (0, 2)

    def test_context_ends_it(self):
        prompt = STORIES.read_text()[:4000]
        done = complete("-p", prompt, "--max-tokens", 100000, "--ignore-eos")
        assert done["prompt_tokens"] + len(done["tokens"]) == 1024 and done["finish"] == "length"

    def test_stop_across_tokens(self):
        """Stop strings that begin and end inside tokens, at every place of the text."""
        _, tokenizer = reference()
        whole = complete("-p", PROMPT, "--max-tokens", 30)
        text, pieces = whole["text"], [tokenizer.decode(id) for id in whole["tokens"]]
        ends = [len("".join(pieces[:i])) for i in range(len(pieces))]
        assert "".join(pieces) == text
        border = next(end for end in ends if end > 20 and text[end - 2:end + 2].isprintable())
        stop = text[border - 2:border + 2]
        done = complete("-p", PROMPT, "--max-tokens", 30, "--stop", stop)
        assert done["finish"] == "stop" and done["text"] == text[:text.index(stop)]
        assert len(done["tokens"]) < len(whole["tokens"])
        plain = kt_ok("generate", DEMO, "-p", PROMPT, "--max-tokens", 30, "--stop", stop)
        assert plain.stdout == done["text"] + "\n"

    def test_the_first_of_several_stops(self):
        text = complete("-p", PROMPT, "--max-tokens", 30)["text"]
        done = complete("-p", PROMPT, "--max-tokens", 30, "--stop", text[25:29], "--stop", "never there", "--stop",
                        text[10:13])
        assert done["text"] == text[:min(text.index(text[25:29]), text.index(text[10:13]))]

    def test_a_stop_that_only_begins(self):
        """What might have become a stop string is not lost when the text ends first."""
        whole = complete("-p", PROMPT, "--max-tokens", 12)
        done = complete("-p", PROMPT, "--max-tokens", 12, "--stop", whole["text"][-3:] + "\x01")
        assert done["text"] == whole["text"] and done["finish"] == "length"


class TestSampling:
    FLAGS = ("--temperature", "1.2", "--top-k", "50", "--max-tokens", "40", "--ignore-eos")

    def test_seed(self):
        first, again, other = (complete("-p", PROMPT, *self.FLAGS, "--seed", seed)["tokens"] for seed in (7, 7, 8))
        assert first == again and first != other

    def test_cold_is_greedy(self):
        greedy = complete("-p", PROMPT, "--max-tokens", 20)["tokens"]
        assert complete("-p", PROMPT, "--max-tokens", 20, "--temperature", "0", "--seed", "5")["tokens"] == greedy
        assert complete("-p", PROMPT, "--max-tokens", 20, "--temperature", "2", "--top-k", "1")["tokens"] == greedy


class TestPrompt:
    def test_file(self, tmp_path):
        file = tmp_path / "prompt.txt"
        file.write_text(PROMPT)
        assert complete("-f", file, "--max-tokens", 10)["tokens"] == \
            complete("-p", PROMPT, "--max-tokens", 10)["tokens"]

    @pytest.mark.parametrize("system", [None, "You are a pirate."])
    def test_chat_is_the_template(self, system):
        """The same as rendering the template and completing that."""
        _, tokenizer = reference()
        messages = ([{"role": "system", "content": system}] if system else []) + [
            {"role": "user", "content": "Tell me about the sea."}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        flags = ["--system", system] if system else []
        asked = complete("--chat", *flags, "-p", "Tell me about the sea.", "--max-tokens", 15)
        plain = complete("-p", rendered, "--max-tokens", 15)
        assert asked["prompt_tokens"] == len(tokenizer(rendered)["input_ids"])
        assert asked["tokens"] == plain["tokens"]

    def test_templates_know_the_special_tokens(self, copy):
        """bos_token and its like are words of the tokenizer's config that templates print."""
        _, tokenizer = reference()
        change_json(copy / "tokenizer_config.json", bos_token="<|endoftext|>", chat_template=(
            "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
            "{% if tools is not none or documents is not none %}Tools!{% endif %}{{ pad_token }}"))
        rendered = "<|endoftext|>Hello.<|im_end|><|endoftext|>"
        asked = complete("--chat", "-p", "Hello.", "--max-tokens", 8, model=copy)
        plain = complete("-p", rendered, "--max-tokens", 8)
        assert asked["prompt_tokens"] == len(tokenizer(rendered)["input_ids"]) == plain["prompt_tokens"]
        assert asked["tokens"] == plain["tokens"]

    def test_template_in_a_file_wins(self, copy):
        (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
        asked = complete("--chat", "-p", PROMPT, "--max-tokens", 8, model=copy)
        assert asked["tokens"] == complete("-p", PROMPT, "--max-tokens", 8)["tokens"]


# --- converted weights -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    for name, flags in {"int8": ("--method", "int8"), "int4": ("--method", "int4"),
                        "int4_g32": ("--method", "int4", "--group-size", 32)}.items():
        kt_ok("quant", DEMO, "-o", folder / name, "--numa-nodes", 1, "--yes", *flags)
    return folder


class TestWeights:
    @pytest.mark.parametrize("form", ["int8", "int4", "int4_g32"])
    def test_converted_experts(self, converted, form):
        done = complete("-p", PROMPT, "--max-tokens", 20, "--weights", converted / form)
        assert len(done["tokens"]) == 20

    def test_int8_converted_is_int8_rounded(self, converted):
        """Both round the same bf16 numbers by the same rule."""
        assert complete("-p", PROMPT, "--max-tokens", 30, "--weights", converted / "int8")["tokens"] == \
            complete("-p", PROMPT, "--max-tokens", 30, "--format", "int8")["tokens"]

    def test_another_models(self, tmp_path, converted):
        folder = random_model(tmp_path / "model")
        refused(kt("generate", folder, "-p", "x", "--weights", converted / "int8"), 2, converted / "int8", folder,
                "16 experts of 256 x 128", "8 of 64 x 32")

    def test_layers_missing(self, tmp_path, converted, copy):
        """Converted from a model that has fewer layers with experts."""
        change_json(copy / "config.json", first_k_dense_replace=0)
        refused(kt("generate", copy, "-p", "x", "--weights", converted / "int8"), 2, converted / "int8", "layer 0")

    def test_not_converted(self):
        refused(kt("generate", DEMO, "-p", "x", "--weights", DEMO / "nothing"), 2, DEMO / "nothing")

    def test_of_a_dense_model(self, tmp_path, converted):
        folder = random_model(tmp_path / "model", "qwen3")
        for flags in (("--weights", converted / "int8"), ("--format", "int4")):
            refused(kt("generate", folder, "-p", "x", *flags), 2, flags[0], folder, "no routed experts")


# --- kt perplexity ---------------------------------------------------------------------------------------------------


def documents(tokenizer):
    ids = []
    for document in STORIES.read_text().split("<|endoftext|>"):
        if document.strip("\n"):
            ids += tokenizer(document.strip("\n"))["input_ids"] + [0]
    return ids


def perplexity(*words, model=DEMO, file=STORIES):
    return json.loads(kt_ok("perplexity", model, "--file", file, "--json", *words).stdout)


@functools.cache
def log_probabilities(windows, context):
    """[windows * context, vocabulary] of transformers, and the targets."""
    model, tokenizer = reference()
    ids = torch.tensor(documents(tokenizer)[:windows * context + 1])
    assert len(ids) == windows * context + 1
    with torch.no_grad():
        rows = [model(ids[None, w * context:(w + 1) * context]).logits[0].log_softmax(-1) for w in range(windows)]
    return torch.cat(rows), ids[1:]


class TestPerplexity:
    @pytest.mark.parametrize("windows,context,flags,bound", [
        (3, 1024, F32, 1e-5), (3, 1024, (), 1e-3), (5, 100, F32, 1e-5), (1, 7, F32, 1e-5)])
    def test_is_transformers(self, windows, context, flags, bound):
        rows, targets = log_probabilities(windows, context)
        nll = -rows.gather(1, targets[:, None]).double().sum().item()
        found = perplexity("--context", context, "--max-tokens", windows * context, *flags)
        assert found["tokens"] == windows * context and found["context"] == context
        assert found["perplexity"] == pytest.approx(math.exp(nll / len(targets)), rel=bound)
        assert found["nll"] == pytest.approx(nll, rel=bound)
        assert found["experts"] == "bf16" and found["acts"] == ("f32" if flags else "default")

    def test_whole_windows_only(self):
        assert perplexity("--context", 100, "--max-tokens", 250)["tokens"] == 200

    def test_a_text_shorter_than_a_window(self, tmp_path):
        (tmp_path / "short.txt").write_text(PROMPT)
        _, tokenizer = reference()
        assert perplexity(file=tmp_path / "short.txt")["tokens"] == len(tokenizer(PROMPT)["input_ids"])

    @pytest.mark.parametrize("form,most", [("int8", 0.002), ("int4", 0.15), ("int4_g32", 0.08)])
    def test_what_a_format_costs(self, form, most):
        """int4 costs these experts a fifth of their output: little in perplexity, but more than nothing."""
        stored = perplexity("--max-tokens", 2048, *F32)
        found = perplexity("--max-tokens", 2048, "--format", form, "--kl-against", "stored", *F32)
        assert list(found)[-3:] == ["reference_perplexity", "kl", "same_top"]
        assert found["experts"] == form
        assert found["reference_perplexity"] == pytest.approx(stored["perplexity"], rel=1e-9)
        assert 0 < found["kl"] < most and 0.9 < found["same_top"] <= 1
        assert abs(found["perplexity"] / stored["perplexity"] - 1) < most

    def test_against_a_format_and_the_other_way(self):
        """KL(int8 || stored) and its parts."""
        found = perplexity("--max-tokens", 1024, "--kl-against", "int8", *F32)
        other = perplexity("--max-tokens", 1024, "--format", "int8", *F32)
        assert found["reference_perplexity"] == pytest.approx(other["perplexity"], rel=1e-9)
        assert 0 < found["kl"] < 0.002

    def test_against_itself(self):
        found = perplexity("--max-tokens", 500, "--context", 250, "--kl-against", DEMO)
        assert found["kl"] == pytest.approx(0, abs=1e-9) and found["same_top"] == 1
        assert found["reference_perplexity"] == found["perplexity"]

    def test_against_another_model(self, copy):
        """KL(reference || model) as the sum over the vocabulary says."""
        model, _ = reference()
        tensors = load_shards(copy)
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
        save_shards(copy, tensors)
        rows, targets = log_probabilities(2, 256)
        other = (rows * 2).log_softmax(-1)  # twice the log probabilities are twice the logits, but for a constant
        kl = (other.exp() * (other - rows)).sum(-1).double().mean().item()
        found = perplexity("--context", 256, "--max-tokens", 512, "--kl-against", copy, *F32)
        assert found["kl"] == pytest.approx(kl, rel=1e-3) and found["same_top"] == 1

    def test_line(self):
        done = kt_ok("perplexity", DEMO, "--file", STORIES, "--context", 64, "--max-tokens", 128, "--kl-against",
                     "int8")
        (line,) = done.stdout.splitlines()
        assert line.startswith("perplexity ") and "128 tokens" in line and "KL " in line and "against int8" in line

    def test_threads_change_nothing(self):
        one, three = (perplexity("--context", 128, "--max-tokens", 256, "--threads", n) for n in (1, 3))
        assert one == three

    @pytest.mark.parametrize("flags,words", [
        (("--context", 2000), ["--context", 1024, 2000]),
        (("--context", 4000000000), ["--context", 1024, 4000000000]),
        (("--separator", "<|nope|>"), ["--separator", "<|nope|>"]),
        (("--kl-against", "int5"), ["--kl-against", "int5", "int8", "stored"]),
        (("--format", "int5"), ["int5", "int8"]),
    ])
    def test_refused(self, flags, words):
        refused(kt("perplexity", DEMO, "--file", STORIES, *flags), 2, *words)

    def test_refused_texts(self, tmp_path):
        refused(kt("perplexity", DEMO, "--file", tmp_path / "none.txt"), 2, tmp_path / "none.txt")
        (tmp_path / "empty.txt").write_text("")
        refused(kt("perplexity", DEMO, "--file", tmp_path / "empty.txt"), 2, "2 tokens")
        refused(kt("perplexity", DEMO), 2, "--file")

    def test_another_vocabulary(self, tmp_path):
        folder = random_model(tmp_path / "model", vocab_size=4100)
        refused(kt("perplexity", DEMO, "--file", STORIES, "--kl-against", folder), 2, "--kl-against", 4096, 4100)


# --- errors ----------------------------------------------------------------------------------------------------------


def change_json(path, **values):
    said = json.loads(path.read_text())
    said.update(values)
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not Ellipsis}))


def load_shards(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(path))
    return tensors


def save_shards(folder, tensors):
    """As one file without an index."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def copy(tmp_path):
    """The demo model, to be broken."""
    return pathlib.Path(shutil.copytree(DEMO, tmp_path / "copy"))


def random_model(folder, key="qwen3_moe", **more):
    """A tiny random model that reads text as the demo model does."""
    tiny_models.save(tiny_models.build(key, torch.bfloat16, **{"vocab_size": 4096, **more}), folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def go(folder, *words):
    return kt("generate", folder, "-p", PROMPT, "--max-tokens", 4, *words)


class TestRandomModels:
    @pytest.mark.parametrize("key", ["qwen3_moe", "gpt_oss", "deepseek_v2", "glm4_moe", "mixtral", "llama"])
    def test_greedy_tokens_are_transformers(self, tmp_path, key):
        """Where the best token leads by more than twice what sums in another order move, 1e-4 of the largest."""
        folder = random_model(tmp_path / "model", key)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                  attn_implementation="eager")
        ids = reference()[1](PROMPT, return_tensors="pt")["input_ids"]
        done = complete("-p", PROMPT, "--max-tokens", 30, "--ignore-eos", *F32, model=folder)
        with torch.no_grad():
            logits = model.eval()(torch.cat([ids, torch.tensor([done["tokens"]])], 1)).logits[0, ids.shape[1] - 1:-1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2e-4 * logits.abs().amax(1)
        assert clear.sum() >= 20
        assert (logits.argmax(1) == torch.tensor(done["tokens"]))[clear].all()


class TestBadModels:
    @pytest.mark.parametrize("name", [
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.2.self_attn.kv_b_proj.weight", "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.3.mlp.gate.weight", "model.layers.5.mlp.shared_experts.gate_proj.weight"])
    def test_missing_tensor(self, copy, name):
        tensors = load_shards(copy)
        del tensors[name]
        save_shards(copy, tensors)
        refused(go(copy), 2, name)

    def test_missing_expert(self, copy):
        tensors = load_shards(copy)
        del tensors["model.layers.1.mlp.experts.7.down_proj.weight"]
        save_shards(copy, tensors)
        refused(go(copy), 2, copy, "layer 1: expert 7 has no down projection under model.layers.1.mlp.experts")

    @pytest.mark.parametrize("name,shape", [
        ("model.norm.weight", (255,)), ("model.layers.1.self_attn.o_proj.weight", (256, 500)),
        ("model.layers.2.mlp.gate.weight", (15, 256)), ("model.embed_tokens.weight", (4095, 256)),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (128, 250)),
        ("model.layers.4.self_attn.q_b_proj.weight", (768,))])
    def test_wrong_shape(self, copy, name, shape):
        tensors = load_shards(copy)
        tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
        save_shards(copy, tensors)
        refused(go(copy), 2, name.removesuffix(".weight"), *shape)

    def test_missing_shard(self, copy):
        (copy / "model-00002-of-00002.safetensors").unlink()
        refused(go(copy), 2, "model-00002-of-00002.safetensors", copy)

    def test_missing_files(self, copy):
        (copy / "tokenizer.json").unlink()
        refused(go(copy), 2, copy / "tokenizer.json")
        (copy / "config.json").unlink()
        refused(go(copy), 2, copy, "no config.json")

    def test_missing_model(self, tmp_path):
        refused(go(tmp_path / "none"), 2, tmp_path / "none")
        refused(go(tmp_path), 2, tmp_path)

    def test_unknown_architecture(self, copy):
        change_json(copy / "config.json", architectures=["NewForCausalLM"], model_type="new")
        refused(go(copy), 4, "NewForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM")

    @pytest.mark.parametrize("values", [
        dict(hidden_act="relu6"), dict(scoring_func="tanh"), dict(rope_scaling={"type": "spiral", "factor": 2.0})])
    def test_unsupported_values(self, copy, values):
        change_json(copy / "config.json", **values)
        (key, value), = values.items()
        refused(go(copy), 4, key, value["type"] if isinstance(value, dict) else value)

    @pytest.mark.parametrize("name", [
        "model.norm.weight", "lm_head.weight", "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.2.self_attn.kv_b_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.3.mlp.gate.weight"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_not_finite_weights(self, copy, name, value):
        tensors = load_shards(copy)
        tensors[name].view(-1)[11] = value
        save_shards(copy, tensors)
        refused(go(copy), 2, name.removesuffix(".weight"), "not a finite number")

    def test_not_finite_embedding(self, copy):
        """Its rows are read as tokens need them: one of the prompt's is bad."""
        _, tokenizer = reference()
        tensors = load_shards(copy)
        tensors["model.embed_tokens.weight"][tokenizer(PROMPT)["input_ids"][1]] = math.nan
        save_shards(copy, tensors)
        refused(go(copy), 2, "model.embed_tokens", "not a finite number")

    def test_not_finite_logits(self, copy):
        """Finite weights whose products are not."""
        tensors = load_shards(copy)
        tensors["model.norm.weight"][:] = 3e38
        tensors["lm_head.weight"][:, ::2] = 3e38
        tensors["lm_head.weight"][:, 1::2] = -3e38
        save_shards(copy, tensors)
        line = refused(go(copy), 2)
        assert "NaN" in line or "finite" in line

    @pytest.mark.parametrize("name", [
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    def test_broken_json(self, copy, name):
        (copy / name).write_text('{"a": ')
        refused(go(copy), 2, copy / name)


class TestBadPrompts:
    def test_past_the_context(self):
        refused(kt("generate", DEMO, "-f", STORIES), 2, 1024, "tokens")

    @pytest.mark.parametrize("words", [["-p", ""], [], ["--chat", "-p", ""]])
    def test_empty(self, words):
        refused(kt("generate", DEMO, *words), 2, "prompt")

    def test_empty_file(self, tmp_path):
        (tmp_path / "empty").write_text("")
        refused(kt("generate", DEMO, "-f", tmp_path / "empty"), 2, "prompt", tmp_path / "empty")

    def test_both(self, tmp_path):
        refused(kt("generate", DEMO, "-p", "x", "-f", STORIES), 2, "-p", "-f")
        # Said before anything is loaded.
        refused(kt("generate", tmp_path / "none", "-p", "x", "-f", STORIES), 2, "-p", "-f")

    def test_unreadable_file(self, tmp_path):
        refused(kt("generate", DEMO, "-f", tmp_path / "none"), 2, tmp_path / "none")
        refused(kt("generate", DEMO, "-f", tmp_path), 2, tmp_path, "folder")

    def test_system_without_chat(self):
        refused(kt("generate", DEMO, "-p", "x", "--system", "y"), 2, "--system", "--chat")

    def test_chat_without_a_template(self, copy):
        change_json(copy / "tokenizer_config.json", chat_template=...)
        refused(kt("generate", copy, "--chat", "-p", "x"), 2, "--chat", copy, "chat template")

    @pytest.mark.parametrize("template,words", [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", ["steps"]),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", ["nested deeper"]),
        ("{{ '(' * 5000 }}" + "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ["nested"]),
        ("{{ 'x' * 999999999999 }}", ["larger than"]),
        ("{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", ["line 1"]),
        ("{% set ns = namespace(s='x') %}{% for a in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
         ["larger than"]),
        ("{{ raise_exception('only\nroles') }}", ["only", "roles"]),
        ("{% if %}", ["line 1"]),
        ("{{ messages.__class__.__mro__ }}{{ 1 / 0 }}", ["line 1"]),
    ])
    def test_hostile_template(self, copy, template, words):
        (copy / "chat_template.jinja").write_text(template)
        refused(kt("generate", copy, "--chat", "-p", "x"), 2, "chat template", copy, *words)

    @pytest.mark.parametrize("flags,words", [
        (("--format", "int5"), ["int5", "int8", "int4_g32"]), (("--acts", "int3"), ["--acts", "int3"]),
        (("--max-tokens", "0"), ["--max-tokens"]), (("--threads", "-1"), ["--threads"]),
        (("--temperature", "-1"), ["temperature"]), (("--top-p", "0"), ["top"]),
        (("--no-such-flag",), ["--no-such-flag"])])
    def test_bad_flags(self, flags, words):
        refused(go(DEMO, *flags), 2, *words)

    def test_no_model(self):
        refused(kt("generate", "-p", "x"), 2, "MODEL")
