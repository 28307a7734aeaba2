"""ruff on every Python file and mypy on the package, as pyproject.toml sets both: neither has anything to say. What
they find follows from the files and from their versions, which scripts/test.sh pins."""
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("words", [("ruff", "check", "--no-cache", "--output-format=concise", "."),
                                   ("mypy", "--no-error-summary", "--cache-dir={folder}")], ids=lambda words: words[0])
def test_nothing_to_say(words, tmp_path):
    tool, *words = (word.format(folder=tmp_path) for word in words)
    if not importlib.util.find_spec(tool):
        pytest.skip(f"{tool} is not installed")
    paths = {"PYTHONPATH", "MYPYPATH"}  # of a package that is built already
    env = {name: value for name, value in os.environ.items() if name not in paths}
    done = subprocess.run([sys.executable, "-m", tool, *words], cwd=ROOT, env=env, capture_output=True, text=True)
    said = "\n".join(line for line in done.stdout.splitlines() if line != "All checks passed!")
    assert (done.returncode, said) == (0, ""), f"{tool}:\n{done.stdout}{done.stderr}"
