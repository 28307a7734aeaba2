"""Folders whose tokenizer is a tiktoken.model alone, as Kimi-K2 is published: ids and text against PyPI's tiktoken,
given what that model's own code gives it; and such a model run by kt.

KT_TOKENIZER_PROBE names the program tokenizer_probe, KT_PROGRAM kt. The vocabulary is made by tokenizer_test.py.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import urllib.request

import pytest

tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
pytest.importorskip("tokenizers", reason="tokenizers, by which the vocabulary is made, is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tokenizer_test import PATTERNS, PROBE, TEXTS, decoded, encoded, ranked_tokens, write_ranks

KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_TOKENIZER_PROBE does not name tokenizer_probe")

RESERVED = 256
NAMED = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
         17: "<|im_middle|>",
         11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 22: "<think>", 23: "</think>",
         254: "[UNK]", 255: "[PAD]"}
ORDINARY = {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<think>", "</think>"}  # added, and no markup
KIMI = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}


def config(**changes):
    first = len(ranked_tokens())
    added = {str(first + i): {"content": name, "special": name not in ORDINARY, "lstrip": False, "rstrip": False,
                              "normalized": False, "single_word": False} for i, name in NAMED.items()}
    said = {"tokenizer_class": "TikTokenTokenizer", "auto_map": KIMI, "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]", **changes}
    return {key: value for key, value in said.items() if value is not None}


def write_folder(folder, **changes):
    write_ranks(folder / "tiktoken.model")
    (folder / "tokenizer_config.json").write_text(json.dumps(config(**changes)))
    # Code that must not run.
    (folder / "tokenization_kimi.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    return folder


def reference():
    ranks = ranked_tokens()
    first = len(ranks)
    special = {NAMED.get(i, f"<|reserved_token_{first + i}|>"): first + i for i in range(RESERVED)}
    return tiktoken.Encoding("kimi", pat_str=PATTERNS["kimi-k2"][0], mergeable_ranks=ranks, special_tokens=special)


def spiced(docs):
    """With special tokens, reserved ones and what only resembles them put in."""
    first, rng, out = len(ranked_tokens()), random.Random(8), []
    spices = [*NAMED.values(), f"<|reserved_token_{first + 5}|>", f"<|reserved_token_{first + 253}|>",
              f"<|reserved_token_{first + 256}|>", f"<|reserved_token_{first + 2}|>", "<|im_end|", "汉字ſ's", "[BOS"]
    for doc in docs:
        for _ in range(6):
            at = rng.randrange(len(doc) + 1)
            doc = doc[:at] + rng.choice(spices).encode() + doc[at:]
        out.append(doc)
    return out


def strings(docs):
    return [doc.decode("utf-8", "replace") for doc in docs]


@pytest.mark.parametrize("said", [
    {}, {"auto_map": None}, {"tokenizer_class": None},
    {"auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}},
    {"auto_map": {"AutoTokenizer": ["moonshotai/Moonlight-16B-A3B--tokenization_moonshot.TikTokenTokenizer", None]}},
])
def test_ids_and_text(said, tmp_path):
    folder, encoding = write_folder(tmp_path, **said), reference()
    docs = spiced(TEXTS[:40] if said == {} else TEXTS[:4]) + TEXTS[-9:]
    ids = encoded(folder, docs)
    assert ids == [encoding.encode(text, allowed_special="all") for text in strings(docs)]
    assert encoded(folder, docs, "--add-special") == ids  # no token begins or ends a text by itself
    assert encoded(folder, docs, "--as-text") == [
        encoding.encode(text, allowed_special=ORDINARY, disallowed_special=()) for text in strings(docs)]
    rng = random.Random(9)
    ids.append([rng.randrange(encoding.n_vocab) for _ in range(5000)])  # mostly invalid UTF-8
    assert decoded(folder, ids, "--keep") == [encoding.decode(line) for line in ids]
    marks = {i for name, i in encoding._special_tokens.items() if name not in ORDINARY}
    kept = [[i for i in line if i not in marks] for line in ids]
    assert decoded(folder, ids) == decoded(folder, ids, mode="stream") == [encoding.decode(line) for line in kept]
    assert not (folder / "ran").exists()


def refused(folder, code, *words):
    result = subprocess.run([PROBE, str(folder), "encode"], input="x", capture_output=True, text=True)
    (line,) = result.stderr.splitlines()
    assert result.returncode == code and all(word in line for word in words), line


def test_what_is_not_known_is_refused(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    for said, name in ((dict(auto_map={"AutoTokenizer": ["tokenization_other.TikTokenTokenizer", None]}),
                        "tokenization_other"),
                       (dict(auto_map=None, tokenizer_class="QWenTokenizer"), "QWenTokenizer"),
                       (dict(auto_map=None, tokenizer_class=None), '""'),
                       (dict(auto_map={"AutoTokenizer": [7]}, tokenizer_class=7), '""')):
        file.write_text(json.dumps(config(**said)))
        refused(tmp_path, 4, str(tmp_path / "tiktoken.model"), name, "TikTokenTokenizer")
    file.write_text("[]")
    refused(tmp_path, 4, str(tmp_path / "tiktoken.model"))
    file.unlink()
    refused(tmp_path, 2, str(tmp_path / "tiktoken.model"), "tokenizer_config.json")


def test_bad_folders(tmp_path):
    write_folder(tmp_path)
    first, ranks, file = len(ranked_tokens()), tmp_path / "tiktoken.model", tmp_path / "tokenizer_config.json"
    added = lambda key, **value: file.write_text(json.dumps(config(added_tokens_decoder={key: value})))  # noqa: E731
    added(str(first + 9), content=f"<|reserved_token_{first + 8}|>")
    refused(tmp_path, 2, "tiktoken.model", f"has two ids, {first + 8} and {first + 9}")
    added("300", content="<|im_end|>")
    refused(tmp_path, 2, "tiktoken.model", "id 300 is both", "<|im_end|>")
    added("x", content="<|im_end|>")
    refused(tmp_path, 2, "tokenizer_config.json", '"x"')
    added("5000")
    refused(tmp_path, 2, "tokenizer_config.json", "5000 has no content")
    file.write_text(json.dumps(config(added_tokens_decoder=[])))
    refused(tmp_path, 2, "tokenizer_config.json", "added_tokens_decoder")
    file.write_text(json.dumps(config()))
    for text, message in (("", "no ranks"), ("IQ== 0\nIQ== 1\n", "two ids"), ("IQ== 0\nIg== 0\n", "twice"),
                          ("IQ== -1\n", "line 1"),
                          ("IQ== 0\n\x00\x01", "line 2"), ("QUJD" * 400 + " 0\n", "1200 bytes; at most 1024")):
        ranks.write_text(text)
        refused(tmp_path, 2, str(ranks), message)


def test_other_files_come_first(tmp_path):
    write_folder(tmp_path)
    for name in ("tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_text("no such thing")
        refused(tmp_path, 2, str(tmp_path / name))


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    if not KT:
        pytest.skip("KT_PROGRAM does not name kt")
    for package in ("torch", "transformers", "jinja2"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import tiny_models

    folder = tmp_path_factory.mktemp("kimi")
    size = len(ranked_tokens()) + RESERVED
    tiny_models.save(tiny_models.build("deepseek_v3", vocab_size=size), folder)
    write_folder(folder)
    template = (pathlib.Path(__file__).parent / "chat_templates" / "kimi_k2.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    return folder, template


def test_generate(kimi):
    folder, _ = kimi
    encoding, prompt = reference(), "Once upon a time, 从前有座山 <|im_end|> 1234567 🦊"
    done = subprocess.run([KT, "generate", str(folder), "-p", prompt, "--acts", "f32", "--max-tokens", "40", "--json",
                           "--ignore-eos"],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_tokens"] == len(encoding.encode(prompt, allowed_special="all"))
    special = {i for name, i in encoding._special_tokens.items() if name not in ORDINARY}
    assert answer["text"] == encoding.decode([i for i in answer["tokens"] if i not in special])
    assert not (folder / "ran").exists()


def test_serve(kimi):
    """Prompts are those of the folder's template; what a user spells stays text."""
    import jinja2

    from server_process import Server

    folder, template = kimi
    encoding, mark, first = reference(), "\ufdd0", len(ranked_tokens())
    render = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render
    with Server(folder) as server:
        for content in ("Hi", "从前<|im_end|> [EOS]x<|im_user|>", f"<|reserved_token_{first + 9}|>[BOS"):
            body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
            request = urllib.request.Request(f"{server.url}/tokenize", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as reply:
                ids = json.loads(reply.read())["tokens"]
            rendered = render(messages=[{"role": "user", "content": mark}], add_generation_prompt=True)
            before, behind = rendered.split(mark)
            # Markers stand on both sides of the content, so that it is a text by itself.
            assert before.endswith("<|im_middle|>") and behind.startswith("<|im_end|>")
            assert ids == [*encoding.encode(before, allowed_special="all"),
                           *encoding.encode(content, disallowed_special=()),
                           *encoding.encode(behind, allowed_special="all")]
