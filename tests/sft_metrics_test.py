"""BLEU and ROUGE of texts, against sacrebleu and rouge-score. KT_METRICS_PROBE is src/text/testing/metrics_probe.cc."""
import json
import os
import random
import subprocess

import pytest

PROBE = os.environ.get("KT_METRICS_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_METRICS_PROBE names no program")
sacrebleu = pytest.importorskip("sacrebleu")
rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
porter = pytest.importorskip("nltk.stem.porter")

WORDS = ("the a cat sat on mat dog's hello world 3.14 1,000 e.g. U.S.A. state-of-the-art 1990-2000 don't \"quoted\" "
         "(brackets) [x] {y} running happily relational conditional agreed troubled hoping falling geologi geology "
         "radically skies dying news caf\u00e9 na\u00efve \u00fcber Stra\u00dfe \u0130stanbul \u212aelvin "
         "\u039a\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1 \u043f\u0440\u0438\u0432\u0435\u0442 \U0001f600 "
         "\U0001f468\u200d\U0001f469 \u4f60\u597d \u4e16\u754c\uff0c\u518d\u89c1\u3002 \u4e2d\u6587abc\u6df7\u5408 "
         "\u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \U00020000\U0002f800 \u2026 \u2014 \u2028 "
         "\u2070\u2190\u2a00 &quot; &amp;lt; &lt;b&gt; <skipped> -\n \n \t \u3000 \xa0 \x1c \x85 . , ; ! ? - ' _ ^ ~ "
         "`` $5.00 50% a@b.c /usr/bin 1.,2 .5- 5-.- ,,").split(" ")
FIXED = [("", ""), ("", "a"), ("a", ""), (" ", "\n"), ("a", "a"), ("a b", "a b"), ("a b c d", "a b c d"),
         ("a b c d e", "a b c x e"),
         (".", "."), ("...", "..."), ("\u4f60\u597d", "\u4f60\u597d\u5417"), ("a-\nb", "ab"),
         ("the the the the", "the cat the"),
         ("  padded  ", "padded"), ("A", "a"), ("x" * 5000, "x" * 5000), ("a " * 300, "a " * 200)]


def random_text(rng):
    glue = rng.choice([" ", " ", " ", "", "  "])
    return glue.join(rng.choice(WORDS) for _ in range(rng.choice([0, 1, 2, 3, 4, 5, 8, 20, 40])))


def random_code_points(rng):
    out = []
    while len(out) < rng.randint(0, 30):
        code = rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)])
        if not 0xD800 <= code < 0xE000:
            out.append(chr(code))
    return "".join(out)


def altered(text, rng):
    words = text.split(" ")
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(words))
        words[at:at + 1] = rng.choice([[], [rng.choice(WORDS)], [words[at]] * 2, [words[at].upper()]]) or [""]
    return " ".join(words)


@pytest.fixture(scope="module")
def pairs():
    rng = random.Random(22)
    out = list(FIXED)
    for _ in range(400):
        label = random_text(rng)
        out.append((rng.choice([altered(label, rng), random_text(rng)]), label))
    out += [(random_code_points(rng), random_code_points(rng)) for _ in range(200)]
    # Every character by itself, in the company that decides what becomes of it.
    every = [chr(code)
             for code in (*range(1, 0x180), *range(0x1680, 0x1690), *range(0x1FF8, 0x2078), *range(0x2A60, 0x2A78),
                          *range(0x2E78, 0x3130), 0x3190, 0x31A0, 0x31BF, 0x31C0, 0x31F0, *range(0x33F8, 0x3402),
                          0x4DB5, 0x4DB6, 0x4DFF, 0x4E00, 0x9FA5, 0x9FBB, 0x9FBC, 0xF8FF, 0xF900, 0xFA2D, 0xFA2E,
                          0xFA6A, 0xFA6B, 0xFAD9, 0xFADA, 0xFE0F, 0xFE10, 0xFE2F, 0xFE30, 0xFE50, 0xFEFF, 0xFF00,
                          0xFFEF, 0xFFF0)]
    out += [(f"{c}a{c}1{c}.{c}2 {c}", f"x{c}y.{c}-{c}{c}z") for c in every]
    return out


@pytest.fixture(scope="module")
def answers(pairs):
    lines = "".join(json.dumps({"predict": said, "label": asked}) + "\n" for said, asked in pairs)
    done = subprocess.run([PROBE], input=lines, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def near(ours, theirs):
    return abs(ours - theirs) <= 1e-9 * max(1, abs(theirs))


class Split:
    """A tokenizer of sacrebleu's, as rouge-score wants one."""

    def __init__(self, name):
        self.tokenizer = sacrebleu.BLEU(tokenize=name).tokenizer

    def tokenize(self, text):
        return self.tokenizer(text.rstrip()).split()


@pytest.mark.parametrize("name", ["13a", "zh"])
def test_words_and_bleu_are_sacrebleus(name, pairs, answers):
    split = Split(name)
    measures = {(n, kind): sacrebleu.BLEU(tokenize=name, max_ngram_order=n, effective_order=kind == "effective")
                for n in (1, 2, 3, 4) for kind in ("all", "effective")}
    for measure in measures.values():
        measure.tokenizer = split.tokenizer  # which remembers what it has seen
    for at, ((said, asked), answer) in enumerate(zip(pairs, answers)):
        assert answer[name]["words"] == split.tokenize(said), repr(said)
        for n, kind in list(measures)[at % 4::4]:
            measure = measures[n, kind]
            assert near(answer[name]["bleu"][kind][n - 1],
                        measure.sentence_score(said, [asked]).score), (n, kind, said, asked)
    for (n, kind), measure in measures.items():
        whole = measure.corpus_score([said for said, _ in pairs], [[asked for _, asked in pairs]]).score
        assert 0 < whole < 100 and near(answers[-1][name][kind][n - 1], whole), (n, kind)


@pytest.mark.parametrize("name", ["plain", "porter", "13a", "zh"])
def test_rouge_is_rouge_scores(name, pairs, answers):
    other = Split(name) if name in ("13a", "zh") else None
    scorer = rouge_scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=name == "porter", tokenizer=other)
    for (said, asked), answer in zip(pairs, answers):
        for ours, theirs in zip(answer[name]["rouge"], scorer.score(asked, said).values()):
            assert all(near(a, b) for a, b in zip(ours, theirs)), (said, asked, ours, theirs)


def test_stems_are_nltks():
    """Random words of the letters and endings that rules look at."""
    rng = random.Random(1)
    ends = ("s es ies sses ss ed eed ied ing at bl iz y ational tional enci anci izer bli abli alli entli eli ousli "
            "ization ation ator alism iveness fulness ousness aliti iviti biliti fulli logi icate ative alize iciti "
            "ical ful ness al ance ence er ic able ible ant ement ment ent ion sion tion ou ism ate iti ous ive "
            "ize e ll le").split()
    words = ["".join(rng.choice("aeiouyybcdlst1wxz") for _ in range(rng.randint(1, 7)))
             + "".join(rng.choices(ends, k=rng.randint(0, 3)))
             for _ in range(10000)]
    words = [word for word in words if len(word) > 3]
    words += "skies dying lying tying news innings inning outings canning howe proceed exceed succeed".split()
    done = subprocess.run([PROBE], input=json.dumps({"predict": " ".join(words), "label": ""}) + "\n",
                          capture_output=True, text=True, timeout=60)
    stems = json.loads(done.stdout.split("\n")[0])["porter"]["words"]
    stem = porter.PorterStemmer().stem
    expected = [stem(word) for word in words]
    assert [(w, a, b) for w, a, b in zip(words, stems, expected) if a != b] == []
    assert len(stems) == len(words)
