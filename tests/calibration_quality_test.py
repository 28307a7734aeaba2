"""The bars that calibration is held to, on trained models with both kinds of text: minutes, so only with KT_TEST_FULL.
KT_PROGRAM names kt; KT_TEST_DATA the folder with models and texts: the bars were set on book text, which is not in the
tree."""
import pathlib
import subprocess
import sys

import pytest

import checkpoints

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")


@pytest.mark.skipif(not checkpoints.FULL, reason="KT_TEST_FULL is not set")
@pytest.mark.parametrize("name", ["tiny-qwen3moe", "tiny-deepseekv3"])
def test_bars(name):
    """W4A16 against rounding to nearest in KL and in every layer's error on test tokens, W8A16 against bf16, and chats
    against the book: tools/gptq_quality.py knows the bars and fails where one is missed."""
    model = checkpoints.trained_model(name)
    texts = pathlib.Path(checkpoints.DATA or "", "data")
    if model is None or not (texts / "valid_books.txt").exists():
        pytest.skip(f"no {name} or no valid_books.txt: KT_TEST_DATA does not name the folder with them")
    result = subprocess.run([sys.executable, checkpoints.ROOT / "tools" / "gptq_quality.py",
                             "--program", checkpoints.KT,
                             "--book", texts / "valid_books.txt", "--chat", texts / "chat.jsonl.xz", model],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
