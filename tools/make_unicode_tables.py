#!/usr/bin/env python3
"""Writes src/text/unicode_tables.inc: what the tokenizer has to know of Unicode, as runs and streams of numbers.

General categories, combining classes and decompositions come from unicodedata; PyPI's unicodedata2 is preferred where
it is installed, because the regular expressions of PyPI's tokenizers, the reference, know Unicode 16. Scripts come
from PyPI's regex, cut to the characters assigned in that version. Usage: make_unicode_tables.py > FILE
"""
import regex

try:
    import unicodedata2 as data
except ImportError:
    import unicodedata as data

# The order is that of enum class Category in unicode.h.
CATEGORIES = ("Cn Cc Cf Co Cs Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps Sc Sk Sm So Zl Zp Zs").split()
SCRIPTS = "Arabic Bopomofo Cyrillic Devanagari Greek Han Hangul Hebrew Hiragana Katakana Latin Thai".split()
ALL = range(0x110000)
HANGUL = range(0xAC00, 0xD7A4)  # composed and decomposed by arithmetic


def emit(name, comment, numbers):
    print(f"// {comment}\nconstexpr uint32_t {name}[] = {{")
    line = " "
    for number in numbers:
        word = f"{number},"  # the tables are large: nothing that could be left out
        if len(line) + len(word) > 110:
            print(line)
            line = " "
        line += word
    print(f"{line}\n}};\n")


def runs(value, shift):
    last = None
    for code in ALL:
        now = value(chr(code))
        if now != last:
            yield code << shift | now
            last = now


def stream(form):
    for code in ALL:
        if 0xD800 <= code < 0xE000 or code in HANGUL:
            continue
        parts = data.normalize(form, chr(code))
        if parts != chr(code) and (form == "NFD" or parts != data.normalize("NFD", chr(code))):
            yield code << 8 | len(parts)
            yield from map(ord, parts)


def pairs():
    for code in ALL:
        parts = data.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<") and data.normalize("NFC", chr(code)) == chr(code):
            yield from (int(parts[0], 16), int(parts[1], 16), code)


def folds():
    for code in ALL:
        folded = chr(code).casefold()
        if len(folded) == 1 and folded != chr(code):
            yield from (code, ord(folded))


def script_ranges(name):
    pattern = regex.compile(rf"\p{{Script={name}}}")
    inside = [c for c in ALL if data.category(chr(c)) not in ("Cn", "Cs") and pattern.match(chr(c))]
    first = last = None
    for code in inside:
        if last is None or code != last + 1:
            if last is not None:
                yield from (first, last)
            first = code
        last = code
    yield from (first, last)


print(f"// Made by tools/make_unicode_tables.py from Unicode {data.unidata_version}; not to be edited.\n")
emit("kCategoryRuns", "First code point of a run << 5 | its general category.",
     runs(lambda c: CATEGORIES.index(data.category(c)), 5))
emit("kCombiningRuns", "First code point of a run << 8 | its canonical combining class.", runs(data.combining, 8))
emit("kCanonical", "Full canonical decompositions: code point << 8 | count, then count code points.", stream("NFD"))
emit("kCompatible", "Full compatibility decompositions where they differ from the canonical ones.", stream("NFKD"))
emit("kCompositions", "Triples first, second, composed.", pairs())
emit("kFolds", "Pairs code point, what it folds to; single code points only.", folds())
for script in SCRIPTS:
    emit(f"k{script}", f"Script {script}: pairs first, last.", script_ranges(script))
