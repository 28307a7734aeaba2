"""What rounding activations costs a model with outlier channels, by `kt perplexity --kl-against f32`: prompts as little
as single tokens, whole rows of weights as little as groups. Such models are made of the demo model and of a test model
(tools/make_outliers.py): the same function in exact arithmetic, a few channels up to 256 times as large."""
import json
import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(__file__))
from checkpoints import DATA, KT, ROOT, kt_ok, trained_model

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
TEXT = ROOT / "demo" / "stories.txt"
FORMATS = ["int8", "int4", "int4_g32", "int4_g128"]
MODELS = ["tiny-deepseekv3", *(["tiny-qwen3moe"] if DATA else [])]

def measured(model, *options):
    return json.loads(kt_ok("perplexity", model, "--file", TEXT, "--json", "--threads", 2, *options).stdout)


@pytest.fixture(scope="module", params=MODELS)
def outliers(request, tmp_path_factory):
    model, out = trained_model(request.param), tmp_path_factory.mktemp("outliers") / "model"
    command = [sys.executable, ROOT / "tools/make_outliers.py", model, out, "--channels", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return model, out


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
