"""Commands and blocks of code of README, CONTRIBUTING and docs/. Every command of kt that is written there parses;
every block is run here on the demo model, or says in a comment before it who runs it or why nobody can:

    <!-- tests: run by FILE... -->     tests/FILE runs it, or what it says
    <!-- tests: not run: REASON -->    it needs what a test machine has not; these are listed
    <!-- tests: output -->             nothing to type

Blocks of Python and YAML are read by their own parsers. KT_PROGRAM names kt."""
import ast
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, kt
from completion_test import option_names, verbs_below

DEMO = ROOT / "demo" / "tiny-deepseekv3"
PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)(?:<!-- tests: (?P<mark>[^\n]*?) -->\n *)?```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
                   re.S | re.M)
SHELL = ("", "sh", "bash")
# Lines of blocks that are run here, all but for these.
EXERCISE = "formats"  # a verb that CONTRIBUTING has its readers write
LEFT_OUT = {"kt generate ./Qwen3-30B-A3B-Q4_K_M.gguf": "no GGUF file comes with the tree: "
                                                       "gguf_models_test.py runs some"}


class Block:
    def __init__(self, paper, found):
        self.paper, self.kind, self.text, self.mark = paper, found["kind"], found["text"], found["mark"] or ""
        self.name = f"{paper.relative_to(ROOT)}:{paper.read_text()[:found.start()].count(chr(10)) + 1}"

    def commands(self):
        """Lines as a shell has them, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]

    def runs_here(self):
        return self.kind in SHELL and not self.mark


BLOCKS = [Block(paper, found) for paper in PAPERS for found in BLOCK.finditer(paper.read_text())]
needs_kt = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


def test_every_block_is_found_and_marked_as_the_rules_have_it():
    fences = sum(len(re.findall(r"^ *```", paper.read_text(), re.M)) for paper in PAPERS)
    assert fences == 2 * len(BLOCKS) and len(BLOCKS) > 40
    marks = sum(paper.read_text().count("<!-- tests:") for paper in PAPERS)
    assert marks == sum(bool(block.mark) for block in BLOCKS)
    for block in BLOCKS:
        assert re.match(r"(output|run by( \w+\.py,?)+.*|not run: \w.*)?$", block.mark), block.name
        for file in re.findall(r"\w+_test\.py", block.mark):
            assert (ROOT / "tests" / file).exists(), (block.name, file)
        assert block.mark or block.kind in (*SHELL, "python", "yaml"), f"{block.name}: who reads {block.kind}?"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "python"], ids=lambda block: block.name)
def test_python_parses(block):
    ast.parse(block.text)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml"], ids=lambda block: block.name)
def test_yaml_parses(block):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    assert yaml.safe_load(block.text)


# --- every command of kt ---------------------------------------------------------------------------------------------

def written_commands():
    """(where, words) of every `kt ...`: lines of blocks, indented or fenced, and code within sentences."""
    for block in BLOCKS:
        if block.mark == "output" or block.kind not in SHELL:
            continue
        for line in block.commands():
            yield block.name, line
    for paper in PAPERS:
        prose = BLOCK.sub("", paper.read_text())
        yield from ((paper.name, line.strip()) for line in re.findall(r"^    (kt .*)$", prose, re.M))
        yield from ((paper.name, " ".join(code.split())) for code in re.findall(r"`([^`]+)`", prose))


def kt_words(line):
    """The words behind kt in a line that calls it, or None."""
    try:
        words = shlex.split(line.replace("[", " ").replace("]", " "), comments=True)
    except ValueError:
        return None  # half of a sentence between quotes
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    return words[1:] if words and words[0] in ("kt", "build/bin/kt") else None


@pytest.fixture(scope="module")
def verbs():
    """{path of a verb: its flags}, from the help pages."""
    return {tuple(path): set(option_names(path)) for path in verbs_below([])}


def fault_of(words, verbs, keys):
    path = ()
    while len(path) < len(words) and (*path, words[len(path)]) in verbs:
        path = (*path, words[len(path)])
    if not path:
        return "" if not words or words[0].startswith("-") else f"no verb {words[0]}"
    rest = words[len(path):]
    flags = [re.match(r"--?[A-Za-z][\w-]*", word)[0] for word in rest if re.match(r"--?[A-Za-z]", word)]
    known = set().union(*(verbs[path[:n]] for n in range(1, len(path) + 1))) | {"--help", "--debug"}
    unknown = [flag for flag in flags if flag not in known]
    if path[0] == "sft":
        unknown += [word for word in rest if (key := re.match(r"(\w+)=", word)) and key[1] not in keys]
    return f"kt {' '.join(path)} knows no {', '.join(unknown)}" if unknown else ""


@needs_kt
def test_every_command_parses(verbs):
    keys = set(re.findall(r"^\W*(?:\w+\.)?(\w+)\b", kt("sft", "keys").stdout, re.M))
    assert {"output_dir", "learning_rate"} <= keys
    commands = [(where, words) for where, line in written_commands() if (words := kt_words(line)) is not None]
    assert len(commands) > 250
    faults = [f"{where}: kt {' '.join(words)}: {fault}" for where, words in commands
              if words[:1] != [EXERCISE] and (fault := fault_of(words, verbs, keys))]
    assert not faults, "\n".join(faults)
    # The check can fail.
    assert fault_of(["run", "demo", "--no-such-flag"], verbs, keys) and fault_of(["rnu"], verbs, keys)
    assert fault_of(["sft", "train", "no_such_key=1"], verbs, keys)


# --- what can be run on the demo model -------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder with the demo model under the names that the papers use, and a shell that knows kt."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "demo").symlink_to(ROOT / "demo")
    (folder / "Qwen3-30B-A3B").symlink_to(DEMO)
    (folder / "tools").mkdir()
    (folder / "tools" / "kt").symlink_to(pathlib.Path(KT).resolve())
    env = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    env |= {"PATH": f"{folder}/tools:{env['PATH']}", "KT_HOME": str(folder / "home"), "KT_DEMO_MODEL": str(DEMO),
            "HF_HOME": str(folder / "hf")}
    return lambda line: subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True,
                                       cwd=folder,
                                       env=env, timeout=600)


@needs_kt
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.runs_here()], ids=lambda block: block.name)
def test_runs(block, reader):
    for line in block.commands():
        if any(line.startswith(beginning) for beginning in LEFT_OUT):
            continue
        done = reader(line)
        assert done.returncode == 0, (line, done.stderr[-1000:])
        assert done.stdout.strip()


def test_nothing_left_out_is_gone():
    lines = [line for block in BLOCKS if block.runs_here() for line in block.commands()]
    assert not [beginning for beginning in LEFT_OUT if not any(line.startswith(beginning) for line in lines)]


def test_what_needs_more_is_listed():
    left = [f"{block.name} ({block.mark.removeprefix('not run: ')})" for block in BLOCKS
            if block.mark.startswith("not run")]
    left += [f"{beginning} ({why})" for beginning, why in LEFT_OUT.items()]
    assert left
    pytest.skip(f"not run here, {len(left)} blocks and lines of the papers: " + "; ".join(left))
