"""What rounding activations costs a model with outlier channels, by `kt perplexity --kl-against f32`: prompts as little as
single tokens, whole rows of weights as little as groups. Such models are made of the demo model and of a test model
(tools/make_outliers.py): the same function in exact arithmetic, a few channels up to 256 times as large."""
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("KT_PROGRAM")
DATA = os.environ.get("KT_TEST_DATA")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="KT_PROGRAM does not name kt")
TEXT = ROOT / "demo/stories.txt"
FORMATS = ["int8", "int4", "int4_g32", "int4_g128"]
# Tile units multiply whole rows of codes, and round activations once a row: what is said here is not true of them.
TILES = {"amx"}


@functools.cache
def vector_isa():
    """The best instruction set here that has no tile unit."""
    lines = subprocess.run([PROGRAM, "version"], check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in lines[lines.index(next(line for line in lines if line.startswith("ISA "))) + 1 :]]
    return [row[0] for row in rows if row[1] == "runs" and row[0] not in TILES][-1]


def measured(model, *options):
    command = [PROGRAM, "perplexity", str(model), "--file", str(TEXT), "--json", "--threads", "2", *options]
    env = {**os.environ, "KT_ISA": vector_isa()}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def models():
    yield "demo", ROOT / "demo/tiny-deepseekv3"
    if DATA:
        yield "qwen3moe", pathlib.Path(DATA) / "models/tiny-qwen3moe"


@pytest.fixture(scope="module", params=[model for _, model in models()], ids=[name for name, _ in models()])
def outliers(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("outliers") / "model"
    command = [sys.executable, ROOT / "tools/make_outliers.py", request.param, out, "--channels", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return request.param, out


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_cost_what_single_tokens_cost(outliers, name):
    _, model = outliers
    options = ["--context", "64", "--max-tokens", "64", "--format", name, "--linear-format", name]
    prompts = measured(model, *options, "--kl-against", "f32")
    single = measured(model, *options, "--kl-against", "f32", "--chunked-prefill-size", "1")
    # One scale for a row or for 512 columns costs ten times as much.
    assert single["kl"] < 0.1
    assert prompts["kl"] <= 1.5 * single["kl"]
    assert abs(prompts["perplexity"] / single["perplexity"] - 1) < 0.03


def test_the_change_computes_the_same(outliers):
    before, after = outliers
    options = ["--context", "256", "--max-tokens", "256", "--acts", "f32"]
    assert measured(after, *options)["nll"] == pytest.approx(measured(before, *options)["nll"], rel=1e-6)


def test_f32_is_the_arithmetic_and_not_a_format(outliers):
    _, model = outliers
    options = ["--context", "64", "--max-tokens", "64", "--format", "int4", "--acts", "f32", "--kl-against", "f32"]
    assert measured(model, *options)["kl"] == 0
