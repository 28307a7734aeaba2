"""What the command line rests on: flags of SGLang's server, misspelt flags, saved runs, help. KT_PROGRAM names kt."""
import fcntl
import json
import os
import pathlib
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, kt_ok, refused
from cli_place import DEMO, place_fixture, weights_fixture  # noqa: F401 (pytest finds them)

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


# --- flags of SGLang's server, misspelt ones, and values behind them --------------------------------------------------

def test_all_ignored_flags_are_in_one_note(place):
    words = ("--page-size", 64, "demo", "--schedule-policy=lpm", "--enable-torch-compile", "--cuda-graph-bs", 1, 2, 4)
    done = place.ok("run", "--dry-run", *words)
    assert ("note: ignored, for they mean nothing here: --page-size, --schedule-policy, --enable-torch-compile, "
            "--cuda-graph-bs\n" in done.stdout)
    refused(place.kt("run", "--dry-run", *words, "--strict"), 2,
            "--page-size, --schedule-policy, --enable-torch-compile")
    done = place.ok("run", "--dry-run", "--json", *words)
    assert json.loads(done.stdout)["fits"] and "--page-size" in done.stderr


@pytest.mark.parametrize("words, said", [
    (["run", "--prot", "8080"], ["--prot", "--port", "kt run --help"]),
    (["run", "demo", "--max-runing-requests", "3"], ["--max-running-requests"]),
    (["run", "--such-flag-is-none", "demo"], ["--such-flag-is-none", "kt run --help"]),
    (["generate", "demo", "--promt", "a"], ["--promt", "--prompt", "kt generate --help"]),
    (["quant", "gpu", "demo", "--methd", "RTN"], ["--methd", "--method", "kt quant gpu --help"]),
    (["quant", "demo", "--mem-fraction-static", "0.9"], ["--mem-fraction-static", "kt quant --help"]),  # of no server
    (["run", "demo", "--page-size"], ["--page-size", "expected a value"]),
    (["run", "demo", "--port"], ["--port: expected a value", "kt run --help"]),
    (["run", "demo", "--mem-fraction-statc", "0.9"], ["--mem-fraction-static"]),
    (["bench", "-t", "mla", "-m", "demo"], ["--type mla", "'demo'", "kt microbench mla --help"]),
    (["bench", "demo", "-t", "moe"], ["--type moe", "'demo'", "kt microbench moe --help"]),
    (["run", "demo", "--enable-torch-compile=1"], ["takes no value"]),
    (["run", "--cuda-graph-bs", "1", "2", "demo"], ["no model", "--cuda-graph-bs", "demo"]),
    (["run", "--cuda-graph-bs", "demo"], ["no model", "--cuda-graph-bs", "demo"]),
    (["run", "--mem-fraction-static", "0.8"], ["no model; give a folder"]),
    (["run", "-Z", "demo"], ["'-Z'"]),
    (["model", "list", "--\x1b[31mx"], ["\\x1b[31mx"]),
])
def test_flags_that_are_none(place, words, said):
    line = refused(place.kt(*words), 2, *said)
    assert "no model named" not in line  # a value behind it was not taken for one


# --- saved runs ------------------------------------------------------------------------------------------------------

class TestSavedRuns:
    def test_a_command_line_comes_back(self, place):
        first = place.ok("run", "demo", "--dry-run", "--served-model-name", "mine", "--max-total-tokens", 512,
                         "--page-size", 64, "--save", "small").stdout
        again = place.ok("run", "@small", "--dry-run").stdout
        assert again.splitlines()[0] == first.splitlines()[0] and "--page-size" in again
        # What is typed wins.
        assert place.ok("run", "@small", "--dry-run", "--served-model-name", "other").stdout.startswith("other: ")
        assert str(place.weights) in place.ok("run", "@small", place.weights, "--dry-run").stdout
        assert json.loads(place.ok("run", "@small", "--dry-run", "--json").stdout)["fits"]
        file = place.folder / "home" / "runs.yaml"
        assert "--dry-run" not in file.read_text() and file.stat().st_mode & 0o77 == 0

    def test_paths_mean_the_same_elsewhere(self, place):
        shutil.copytree(DEMO, place.folder / "model")
        place.ok("run", "model", "--weights-path", os.path.relpath(place.weights, place.folder), "--dry-run",
                 "--save", "here")
        (place.folder / "below").mkdir()
        done = kt_ok("run", "@here", "--dry-run", env=place.env, cwd=place.folder / "below")
        assert str(place.folder / "model") in done.stdout and str(place.weights) in done.stdout

    def test_one_can_be_saved_again_and_forgotten(self, place):
        place.ok("run", "demo", "--dry-run", "--save", "one")
        place.ok("run", "@one", "--served-model-name", "mine", "--dry-run", "--save", "one")
        assert place.ok("run", "@one", "--dry-run").stdout.startswith("mine: ")
        place.ok("run", "--forget", "one")
        refused(place.kt("run", "@one"), 2, "no run is saved as 'one'")
        refused(place.kt("run", "--forget", "one"), 2, "'one'")

    def test_mistakes(self, place):
        refused(place.kt("run", "@none"), 2, "'none'", "--save NAME")
        place.ok("run", "demo", "--dry-run", "--save", "one")
        refused(place.kt("run", "@none"), 2, "known are one")
        refused(place.kt("run", "demo", "--dry-run", "--save", "a/b"), 2, "a/b")
        refused(place.kt("run", "demo", "--dry-run", "--api-key", "secret", "--save", "two"), 2, "--api-key-file")
        for secret in ("--admin-api-key=secret", "--ssl-keyfile-password=secret"):
            refused(place.kt("run", "demo", "--dry-run", secret, "--save", "two"), 2, secret.split("=")[0],
                    "would be kept")
        refused(place.kt("run", "demo", "--dry-run", "--save", ""), 2, "--save")
        refused(place.kt("run", "nonsense", "--save", "three"), 2, "nonsense")  # nothing wrong is kept
        refused(place.kt("run", "@three"), 2, "known are one")

    @pytest.mark.parametrize("content, said",
                             [("runs: 3", "expected a mapping"), ("runs:\n  one: 3", "expected a list of words"),
                              ("runs:\n  one: [1]", "expected words"), ("saved: {}", "unknown key 'saved'")])
    def test_files_of_other_versions(self, place, content, said):
        (place.folder / "home").mkdir()
        (place.folder / "home" / "runs.yaml").write_text(content)
        refused(place.kt("run", "@one"), 2, "runs.yaml", said)
        refused(place.kt("run", "demo", "--dry-run", "--save", "one"), 2, "runs.yaml", said)
        assert (place.folder / "home" / "runs.yaml").read_text() == content


# --- help ------------------------------------------------------------------------------------------------------------

def all_verbs(path=()):
    section = re.search(r"^Subcommands:\n((?:  +.*\n?)+)", kt_ok(*path, "--help").stdout, re.M)
    for name in re.findall(r"^  ([a-z][\w-]*)", section[1], re.M) if section else []:
        yield (*path, name)
        yield from all_verbs((*path, name))


def test_help_begins_with_what_people_come_for():
    assert [path for path in all_verbs() if len(path) == 1][:3] == [("run",), ("chat",), ("generate",)]


def test_every_verb_has_examples_of_its_own():
    for path in all_verbs():
        page = kt_ok(*path, "--help").stdout
        section = re.search(r"^Examples?:\n((?:  .*\n?)+)", page, re.M)
        assert section and any(f"kt {' '.join(path)}" in line for line in section[1].splitlines()), (path, page)
        assert "Exit codes: 0 done" not in page  # the program's


@pytest.mark.parametrize("width", [40, 80, 110])
def test_help_fits_the_terminal(width):
    for path in [(), *all_verbs()]:
        for line in kt_ok(*path, "--help", env={**os.environ, "COLUMNS": str(width)}).stdout.splitlines():
            # A word that is longer by itself stays one.
            assert len(line) <= width or len(line.removesuffix(" \\").split()) == 1, (path, line)


def test_help_has_plain_types():
    for path in [(), *all_verbs()]:
        page = kt_ok(*path, "--help").stdout
        assert not re.search(r"\b(INT|UINT|FLOAT)\b|TEXT:|:\{|\[\d+ - \d+\]", page), (path, page)


def test_help_on_a_terminal():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    # A pager reads standard output, and standard error is the terminal.
    paged = subprocess.run([KT, "run", "--help"], stdout=subprocess.PIPE, stderr=theirs, text=True, env=env)
    os.close(theirs)
    os.close(ours)
    assert 40 < max(map(len, paged.stdout.splitlines())) <= 50
