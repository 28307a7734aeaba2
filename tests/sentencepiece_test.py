"""Vocabularies of SentencePiece from tokenizer.model, from the arrays of a GGUF file and from the tokenizer.json made
of those: ids and text against PyPI's sentencepiece, tokenizers and transformers; and such a model run by kt.

KT_TOKENIZER_PROBE names the program tokenizer_probe, KT_GRAMMAR_PROBE grammar_probe, KT_PROGRAM kt. The texts are those
of tokenizer_test.py, 1 MB of them, invalid bytes among them; models are trained here, in a second or less each.
"""

import base64
import functools
import importlib.util
import io
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import urllib.request

import pytest

spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tokenizer_test import END, PROBE, TEXTS, TRAINING, decoded, documents, encoded, probe

KT = os.environ.get("KT_PROGRAM")
GRAMMAR_PROBE = os.environ.get("KT_GRAMMAR_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_TOKENIZER_PROBE does not name tokenizer_probe")

LLAMA = dict(byte_fallback=True, split_digits=True, allow_whitespace_only_pieces=True, remove_extra_whitespaces=False)
SYMBOLS = ["<mask>", "[TOOL]", "été", "<|", "<|end|>"]
MODELS = {
    "llama": dict(LLAMA, vocab_size=2500),
    "no-prefix": dict(LLAMA, vocab_size=1500, add_dummy_prefix=False,
                      user_defined_symbols=["▁▁", "▁▁▁▁", "\n\n", *SYMBOLS]),
    "symbols": dict(LLAMA, vocab_size=1200, user_defined_symbols=SYMBOLS, control_symbols=["<s2>"]),
    "unknown": dict(vocab_size=900, few=True),
    "unknown-no-prefix": dict(vocab_size=700, few=True, add_dummy_prefix=False, pad_id=3),
    "few-characters": dict(byte_fallback=True, vocab_size=400, few=True),
    "across-words": dict(LLAMA, vocab_size=1500, split_by_whitespace=False, split_by_unicode_script=False,
                         split_by_number=False, max_sentencepiece_length=40),
}
SMALL = documents(21, 100_000, each=120)


def train(few=False, **options):
    """few: only lines of ASCII are learned from, so that most characters of the texts have no piece."""
    lines = [line[at : at + 400] for doc in TRAINING for line in doc.splitlines() for at in range(0, len(line), 400)]
    lines = [part for line in lines for part in (line.split("  ") if few else [line]) if not few or part.isascii()]
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines if "\0" not in line), model_writer=made, model_type="bpe",
        normalization_rule_name="identity", num_threads=1, minloglevel=2, **options,
    )
    return made.getvalue()


@functools.cache
def trained(name):
    """The bytes of tokenizer.model, and sentencepiece's reader of them."""
    model = train(**MODELS[name])
    return model, spm.SentencePieceProcessor(model_proto=model)


# The protocol buffer of a model, as far as tests look into it: lists of [number, wire type, value].


def read_varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields_of(data):
    out, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        if key & 7 == 0:
            value, at = read_varint(data, at)
        else:
            size, at = (4, at) if key & 7 == 5 else read_varint(data, at)
            value, at = data[at : at + size], at + size
        out.append([key >> 3, key & 7, value])
    return out


def varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def message(fields):
    out = b""
    for number, kind, value in fields:
        out += varint(number << 3 | kind) + (varint(value) if kind == 0 else varint(len(value)) * (kind == 2) + value)
    return out


class Model:
    """A tokenizer.model: pieces as [text, score, type], and the two specs as {number: value}."""

    TRAINER, NORMALIZER = 2, 3

    def __init__(self, data):
        self.pieces, self.specs = [], {self.TRAINER: {}, self.NORMALIZER: {}}
        for number, _, value in fields_of(data):
            inside = {} if number in (4, 5) else {field[0]: field[2] for field in fields_of(value)}
            if number == 1:
                score = struct.unpack("<f", inside.get(2, b"\0\0\0\0"))[0]
                self.pieces.append([inside[1].decode(), score, inside.get(3, 1)])
            elif number in self.specs:
                self.specs[number] = inside

    def flag(self, spec, number, otherwise):
        return self.specs[spec].get(number, otherwise)

    def data(self):
        out = [[1, 2, message([[1, 2, text.encode()], [2, 5, struct.pack("<f", score)], [3, 0, kind]])]
               for text, score, kind in self.pieces]
        for spec, inside in self.specs.items():
            kinds = [[number, 0 if isinstance(value, int) else 2, value] for number, value in inside.items()]
            # Numbers of four bytes stand in no field of these that anything depends on.
            out.append([spec, 2, message([field for field in kinds if not (field[1] == 2 and field[0] not in (1, 2))])])
        return message(out)


def folder_of(name, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained(name)[0])
    return tmp_path


def strings(docs):
    return [doc.decode("utf-8", "replace") for doc in docs]


def check_ids(ours, theirs, spelled):
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            shown = [[spelled(i) for i in ids[max(0, at - 4) : at + 6]] for ids in (a, b)]
            raise AssertionError(f"document {number}, token {at}: {shown}")


@pytest.mark.parametrize("name", MODELS)
def test_model(name, tmp_path):
    """Control pieces are no text to sentencepiece; --as-text makes them none to us."""
    processor = trained(name)[1]
    docs = SMALL + (documents(20, 1_000_000) if name == "llama" else TEXTS)
    theirs = processor.encode(strings(docs))
    ours = encoded(folder_of(name, tmp_path), docs, "--as-text")
    check_ids(ours, theirs, processor.id_to_piece)
    # An unknown piece is " ⁇ " to sentencepiece, and no text to us.
    whole = [ids for ids in ours if processor.unk_id() not in ids]
    assert len(whole) > 50
    assert decoded(tmp_path, whole) == processor.decode(whole)
    assert decoded(tmp_path, whole, mode="stream") == processor.decode(whole)


def test_begin_and_end(tmp_path):
    processor = trained("llama")[1]
    folder = folder_of("llama", tmp_path)
    text = "a </s>b"
    begin, end = processor.bos_id(), processor.eos_id()
    parts = processor.encode("a "), processor.encode("b")
    assert encoded(folder, [text.encode()], "--add-special") == [[begin, *parts[0], end, *parts[1]]]
    added = {str(processor.get_piece_size()): {"content": "<|im_start|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"not this": 1}))
    im_start = processor.get_piece_size()
    assert encoded(folder, [b"a <|im_start|>b"], "--add-special") == [[*parts[0], im_start, *parts[1], end]]
    (folder / "tokenizer_config.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps({"<|old|>": im_start}))
    assert encoded(folder, [b"a <|old|>b"], "--add-special") == [[begin, *parts[0], im_start, *parts[1]]]
    (folder / "tokenizer.json").write_text("{}")  # comes first
    result = subprocess.run([PROBE, str(folder), "encode"], input=b"x", capture_output=True)
    assert result.returncode == 2 and b"tokenizer.json" in result.stderr


# --- the same pieces in a GGUF file, and the tokenizer.json made of it -----------------------------------------------


def add_pieces(writer, model):
    """What the public converter writes of a tokenizer.model: spaces of user-defined pieces are spaces there."""
    said = Model(model)
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_string("tokenizer.ggml.pre", "default")
    writer.add_token_list([text.replace("▁", " ") if kind == 4 else text for text, _, kind in said.pieces])
    writer.add_token_scores([score for _, score, _ in said.pieces])
    writer.add_token_types([kind for _, _, kind in said.pieces])
    writer.add_bool("tokenizer.ggml.add_space_prefix", bool(said.flag(Model.NORMALIZER, 3, 1)))
    writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", bool(said.flag(Model.NORMALIZER, 4, 1)))
    for key, number, otherwise in (("bos", 41, 1), ("eos", 42, 2), ("unknown", 40, 0)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", said.flag(Model.TRAINER, number, otherwise))


def vocabulary_file(path, add):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_gguf(name, tmp_path):
    model, processor = trained(name)
    path = vocabulary_file(tmp_path / "m.gguf", lambda writer: add_pieces(writer, model))
    said = probe(path, "json")
    library = tokenizers.Tokenizer.from_str(said.decode())
    (tmp_path / "tokenizer.json").write_bytes(said)
    docs = SMALL + TEXTS[:30]
    for flags, add_special in ([], False), (["--add-special"], True):
        ours = encoded(path, docs, *flags)
        theirs = [e.ids for e in library.encode_batch_fast(strings(docs), add_special_tokens=add_special)]
        check_ids(ours, theirs, library.id_to_token)
        assert encoded(tmp_path / "tokenizer.json", docs, *flags) == ours
    for flags, skip in ([], True), (["--keep"], False):
        assert decoded(path, ours, *flags) == [library.decode(ids, skip_special_tokens=skip) for ids in ours]
    # What follows a user-defined piece is a text by itself here, which shows where texts get a prefix.
    if name != "symbols":
        check_ids(encoded(path, docs, "--as-text"), processor.encode(strings(docs)), processor.id_to_piece)


def test_gemma4(tmp_path):
    """Merges over UTF-8 with bytes for the rest, and lines that are tokens as a whole."""
    vocab = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<table>": 4}
    for piece in ["\n\n", "\n\n\n", "▁▁", *(f"<0x{byte:02X}>" for byte in range(256)), "\n"]:
        vocab[piece] = len(vocab)
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.train_from_iterator(
        [doc.replace(" ", "▁").replace("\n", "") for doc in TRAINING[:20]],
        tokenizers.trainers.BpeTrainer(vocab_size=1200, show_progress=False),
    )
    learned = json.loads(library.to_str())["model"]
    for token in learned["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [" ".join(m) if isinstance(m, list) else m for m in learned["merges"]]

    def add(writer):
        writer.add_string("tokenizer.ggml.model", "gemma4")
        writer.add_token_list(list(vocab))
        writer.add_token_types([{"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2, "<table>": 4, "▁▁": 4}.get(
            token, 6 if token.startswith("<0x") else 1) for token in vocab])
        writer.add_token_merges(merges)
        writer.add_uint32("tokenizer.ggml.bos_token_id", 2)
        writer.add_bool("tokenizer.ggml.add_bos_token", False)  # as such files say, wrongly

    path = vocabulary_file(tmp_path / "m.gguf", add)
    special = [dict(id=vocab[t], content=t, special=t != "<table>" and t[0] == "<", normalized=t == "▁▁",
                    single_word=False,
                    lstrip=False, rstrip=False)
               for t in ("<pad>", "<eos>", "<bos>", "<unk>", "<table>", "\n\n", "\n\n\n", "▁▁")]
    written = {
        "version": "1.0", "added_tokens": special,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
                  "merges": merges},
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(written))
    docs = SMALL + TEXTS[:30]
    ours = encoded(path, docs)
    check_ids(ours, [e.ids for e in library.encode_batch_fast(strings(docs))], library.id_to_token)
    assert decoded(path, ours, "--keep") == [library.decode(ids, skip_special_tokens=False) for ids in ours]
    assert encoded(path, [b"a"], "--add-special") == [[2, vocab["a"]]]
    made = tokenizers.Tokenizer.from_str(probe(path, "json").decode())
    check_ids(ours, [e.ids for e in made.encode_batch_fast(strings(docs), add_special_tokens=False)], made.id_to_token)


@pytest.mark.parametrize("name", ["llama", "no-prefix"])
def test_published_conversion(name, tmp_path):
    """The tokenizer.json that transformers makes of the model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("google.protobuf", reason="protobuf, by which transformers reads models, is not installed")
    folder = folder_of(name, tmp_path)
    made = transformers.LlamaTokenizerFast if name == "llama" else transformers.GemmaTokenizerFast
    made.from_pretrained(folder).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    docs = SMALL + TEXTS[:30]
    ours = encoded(tmp_path / "tokenizer.json", docs, "--add-special")
    check_ids(ours, [e.ids for e in library.encode_batch_fast(strings(docs))], library.id_to_token)
    assert decoded(tmp_path / "tokenizer.json", ours) == [library.decode(ids) for ids in ours]


# --- vocabularies that people have -----------------------------------------------------------------------------------


def published_data(pattern):
    found = importlib.util.find_spec("mistral_common")
    if found is None:
        pytest.skip("mistral-common, whose wheel holds vocabularies, is not installed")
    files = sorted((pathlib.Path(found.origin).parent / "data").glob(pattern))
    if not files:
        pytest.skip(f"this mistral-common holds no {pattern}")
    return files


def test_mixtral_s_own(tmp_path):
    for file in published_data("*tokenizer*.model.v*"):
        docs = documents(20, 1_000_000) if file.name.endswith("v1") else SMALL
        folder = tmp_path / file.name
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(file.read_bytes())
        processor = spm.SentencePieceProcessor(model_file=str(file))
        ours = encoded(folder, docs, "--as-text")
        check_ids(ours, processor.encode(strings(docs)), processor.id_to_piece)
        assert decoded(folder, ours) == strings(docs)


def test_tekken_s_own(tmp_path):
    """The pattern that the name "tekken" stands for, and the ranks as tiktoken has them."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    said = json.loads(published_data("tekken*.json")[0].read_text())
    pattern = said["config"]["pattern"]

    def add(writer):
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_string("tokenizer.ggml.pre", "tekken")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_merges(["a b"])

    made = json.loads(probe(vocabulary_file(tmp_path / "m.gguf", add), "json"))
    assert made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] == pattern
    size = said["config"]["default_vocab_size"] - said["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(row["token_bytes"]): row["rank"] for row in said["vocab"][:size]}
    (tmp_path / "ranks").write_text("".join(f"{base64.b64encode(t).decode()} {r}\n" for t, r in ranks.items()))
    encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    docs = TEXTS[:60]
    out = probe(tmp_path / "ranks", "tiktoken", pattern, text=END.join(docs) + END)
    assert [[int(i) for i in line.split()] for line in out.splitlines()] == [encoding.encode_ordinary(d)
                                                                             for d in strings(docs)]


# --- running ---------------------------------------------------------------------------------------------------------


def kt(*words):
    return subprocess.run([KT, *map(str, words)], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """A tiny Mixtral as a GGUF file with pieces, and the folder it came from, with its tokenizer.model."""
    if not KT:
        pytest.skip("KT_PROGRAM does not name kt")
    for package in ("torch", "transformers", "gguf"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import gguf_files
    import tiny_models

    root = tmp_path_factory.mktemp("mixtral")
    model, processor = trained("symbols")
    folder = tiny_models.save(tiny_models.build("mixtral", vocab_size=processor.get_piece_size()), root / "folder")
    (folder / "tokenizer.model").write_bytes(model)

    def add(writer):
        add_pieces(writer, model)
        writer.add_string("tokenizer.chat_template", CHAT)

    return gguf_files.Model(folder).write(root / "m.gguf", add), folder, processor


CHAT = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"
PROMPT = "Once upon a time, été\n\n  in 1234 days 🦊"


def test_run_from_the_file_and_from_the_folder(mixtral):
    path, folder, processor = mixtral
    answers = []
    for model in (path, folder):
        done = kt("generate", model, "-p", PROMPT, "--acts", "f32", "--max-tokens", 48, "--json", "--ignore-eos")
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    # The user-defined piece in the prompt cuts it in the one and not in the other: ids differ by the prefix behind it.
    ids = processor.encode(PROMPT)
    assert answers[1]["prompt_tokens"] == 1 + len(ids)
    for answer in answers:
        tokens = answer["tokens"]
        kept = [i for i in tokens if not processor.is_control(i) and not processor.is_unknown(i)]
        # The answer goes on in the text: with something before it, no space is taken from its beginning.
        front = processor.encode("x")
        text = processor.decode(front + kept)
        assert answer["text"].replace("\ufffd", "") == text[1:].replace("\ufffd", "")


def test_stop_strings(mixtral):
    path = mixtral[0]

    def run(*more):
        return json.loads(kt("generate", path, "-p", PROMPT, "--max-tokens", 40, "--ignore-eos", "--json",
                             *more).stdout)

    whole = run()["text"]
    stop = whole[7:10]
    assert run("--stop", stop)["text"] == whole[: whole.index(stop)]


def test_serve(mixtral):
    """Answers held to a schema, streamed: every text is what the schema says, whatever the random model likes."""
    from server_process import Server

    path, _, processor = mixtral
    schema = {"type": "object",
              "properties": {"a b": {"enum": ["é 🦊", " x", "\n"]}, "s": {"type": "string", "maxLength": 6}},
              "required": ["a b", "s"], "additionalProperties": False}

    def ask(url, verb, **body):
        request = urllib.request.Request(f"{url}/v1/{verb}", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.read().decode()

    with Server(path, "--max-running-requests", 2) as server:
        for seed in range(6):
            events = ask(server.url, "chat/completions", model="m", stream=True, seed=seed, max_tokens=200,
                         temperature=1, messages=[{"role": "user", "content": "Hi </s> there"}],
                         response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
            deltas = [json.loads(line[6:])["choices"] for line in events.splitlines() if line.startswith("data: {")]
            value = json.loads("".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice))
            assert (set(value) == {"a b", "s"} and value["a b"] in schema["properties"]["a b"]["enum"]
                    and len(value["s"]) <= 6)
        counted = json.loads(ask(server.url, "chat/completions", model="m", max_tokens=1,
                                 messages=[{"role": "user", "content": "Hi"}]))["usage"]["prompt_tokens"]
        assert counted == 1 + len(processor.encode("[INST] Hi [/INST]"))


def test_markers_that_users_spell(mixtral, tmp_path):
    """They are text, and nothing is put between them and what stands around: ids as if the piece were none of
    text's."""
    from server_process import Server

    path, folder, processor = mixtral
    # To sentencepiece no text is a control piece. "<|" stands within the marker alone below.
    said = Model(trained("symbols")[0])
    for piece in said.pieces:
        piece[2] = 3 if piece[0] in ("<|end|>", "<|") else piece[2]
    plain = spm.SentencePieceProcessor(model_proto=said.data())
    (tmp_path / "t.jinja").write_text(CHAT)
    marked = ["a<|end|>b", "<|end|>", "x <|end|> <|end|>y", "a</s>b", "<s>x<s2>", "<unk>é</s>", "</s><|end|></s>"]
    # In GGUF files a user-defined piece cuts the text.
    pieces = ["été<|end|>été", "a <mask> b</s>", "<mask><|end|>[TOOL]x"]
    for model, contents, begin in (path, marked, [processor.bos_id()]), (folder, marked + pieces, []):
        with Server(model, "--chat-template", tmp_path / "t.jinja") as server:
            for content in contents:
                body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
                request = urllib.request.Request(f"{server.url}/tokenize", body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=300) as reply:
                    ids = json.loads(reply.read())["tokens"]
                theirs = begin + plain.encode(f"[INST] {content} [/INST]")
                check_ids([ids], [theirs], processor.id_to_piece)


def test_convert(mixtral, tmp_path):
    path, _, processor = mixtral
    done = kt("quant", "gpu", path, "-o", tmp_path / "out", "--method", "RTN", "--type", "W8A16", "--group-size", -1)
    assert done.returncode == 0, done.stderr
    docs = SMALL[:200]
    ours = encoded(path, docs, "--add-special")
    assert encoded(tmp_path / "out" / "tokenizer.json", docs, "--add-special") == ours
    import transformers

    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [made(text)["input_ids"] for text in strings(docs)] == ours
    assert made.bos_token == "<s>" and made.unk_token == "<unk>"


@pytest.mark.parametrize("name", ["llama", "no-prefix"])
def test_constrained_answers(name, tmp_path):
    """Tokens are bytes to a grammar: whatever the mask leaves of byte pieces and of spaces is JSON in the end."""
    if not GRAMMAR_PROBE:
        pytest.skip("KT_GRAMMAR_PROBE does not name grammar_probe")
    model = trained(name)[0]
    path = vocabulary_file(tmp_path / "m.gguf", lambda writer: add_pieces(writer, model))
    (tmp_path / "tokenizer.json").write_bytes(probe(path, "json"))
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
                                               "is": {"enum": ["été", "a b", "\n", "🦊"]}},
              "required": ["name", "age", "is"], "additionalProperties": False}
    ask = json.dumps({"schema": schema, "walks": 60, "seed": 7,
                      "texts": ['{"name": "é 🦊", "age": 7, "is": "a b"}', '{"name": 1}']})
    done = subprocess.run([GRAMMAR_PROBE, str(tmp_path / "tokenizer.json"), "walk"], input=ask + "\n",
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    ended = [json.loads(walk) for walk in answer["walks"] if walk is not None]
    assert len(ended) > 30 and {value["is"] for value in ended} == {"été", "a b", "\n", "🦊"}
    # A whole text begins with a space where the tokenizer puts one; an answer, which the grammar is for, does not.
    assert answer["fits"] == [name == "no-prefix", False]


# --- bad input -------------------------------------------------------------------------------------------------------


def spoiled(change, name="few-characters"):
    said = Model(trained(name)[0])
    change(said)
    return said.data()


def put(said, index, text=None, score=None, kind=None):
    for at, value in enumerate((text, score, kind)):
        if value is not None:
            said.pieces[index][at] = value


def set_spec(said, spec, number, value):
    said.specs[spec][number] = value


@pytest.mark.parametrize(
    "change, code, reason",
    [
        (lambda m: put(m, 280, "<0x41>"), 2, "has two ids, 68 and 280"),
        (lambda m: put(m, 280, score=float("nan")), 2, "the score of token 280 is not a number"),
        (lambda m: put(m, 280, ""), 2, "piece 280 is empty"),
        (lambda m: put(m, 280, "x" * 2000), 2, "token 280 has 2000 bytes"),
        (lambda m: put(m, 280, kind=9), 2, "token 280 has type 9"),
        (lambda m: put(m, 0, kind=1), 2, "no piece is the unknown one"),
        (lambda m: m.specs[2].pop(3), 4, 'type "unigram"'),
        (lambda m: set_spec(m, 2, 3, 4), 4, 'type "char"'),
        (lambda m: set_spec(m, 2, 24, 1), 4, "treat_whitespace_as_suffix"),
        (lambda m: set_spec(m, 3, 2, b"abc"), 4, 'the normalizer "identity"'),
        (lambda m: m.pieces.clear(), 2, "no pieces"),
    ],
)
def test_bad_models(change, code, reason, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(spoiled(change))
    result = subprocess.run([PROBE, str(tmp_path), "encode"], input=b"x", capture_output=True)
    (line,) = result.stderr.decode().splitlines()
    assert result.returncode == code and str(tmp_path / "tokenizer.model") in line and reason in line, line


def test_models_that_lack_pieces(tmp_path):
    """Bytes and characters that have none are unknown; sentencepiece does not open the first."""
    (tmp_path / "tokenizer.model").write_bytes(spoiled(lambda m: m.pieces.pop(3 + 0xC3)))
    (ids,) = encoded(tmp_path, ["aéa".encode()])
    assert ids.count(0) == 1
    rng = random.Random(3)

    def thin(said):
        for piece in rng.sample([p for p in said.pieces if p[2] == 1 and len(p[0]) == 1], 12):
            said.pieces.remove(piece)
        for piece in rng.sample([p for p in said.pieces if p[2] == 1 and len(p[0]) > 1], 4):
            piece[2] = 5

    model = spoiled(thin, "unknown")
    (tmp_path / "tokenizer.model").write_bytes(model)
    processor = spm.SentencePieceProcessor(model_proto=model)
    check_ids(encoded(tmp_path, SMALL, "--as-text"), processor.encode(strings(SMALL)), processor.id_to_piece)


def test_cut_models(tmp_path):
    model = trained("few-characters")[0]
    for end in [1, 2, 5, len(model) // 2, len(model) - 1]:
        (tmp_path / "tokenizer.model").write_bytes(model[:end])
        result = subprocess.run([PROBE, str(tmp_path), "encode"], input=b"x", capture_output=True)
        (line,) = result.stderr.decode().splitlines()
        assert result.returncode in (2, 4) and "tokenizer.model: " in line, line
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # tiktoken's ranks, as some folders name them
    result = subprocess.run([PROBE, str(tmp_path), "encode"], input=b"x", capture_output=True)
    assert result.returncode == 2 and b"not a tokenizer.model of SentencePiece" in result.stderr
