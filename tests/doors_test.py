"""Doors that lead on: what `kt quant` wrote runs by itself, by every verb that takes a model, and says in one line what
is missing where it does not; threads and NUMA nodes of launch lines made for larger machines; the page that `kt` alone
shows, and the next command that each verb names.

KT_PROGRAM names kt."""

import fcntl
import json
import os
import pathlib
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import server_process
from checkpoints import KT, ROOT, kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO, STORIES = ROOT / "demo" / "tiny-deepseekv3", ROOT / "demo" / "stories.txt"
PROMPT = ("-p", "Once upon a time", "--max-tokens", "12", "--json")


def tokens(*words):
    return json.loads(kt_ok("generate", *words, *PROMPT).stdout)["tokens"]


def perplexity(*words):
    return json.loads(kt_ok("perplexity", *words, "--file", STORIES, "--context", 64, "--max-tokens", 128,
                            "--json").stdout)["perplexity"]


# --- converted folders -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """source/, whole/ and apart/ (--no-merge), side by side."""
    root = tmp_path_factory.mktemp("doors")
    shutil.copytree(DEMO, root / "source")
    kt_ok("quant", root / "source", "-o", root / "whole", "--numa-nodes", 1)
    kt_ok("quant", root / "source", "-o", root / "apart", "--numa-nodes", 1, "--no-merge")
    return root


@pytest.fixture
def moved(here, tmp_path):
    """The outputs with nothing of their source: links, so that the folders are others."""
    for name in ("whole", "apart"):
        shutil.copytree(here / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


@pytest.mark.parametrize("name", ["whole", "apart"])
def test_an_output_runs_by_itself(here, name):
    out, given = here / name, (here / "source", "--weights", here / name)
    assert tokens(out) == tokens(*given) != tokens(here / "source")
    assert perplexity(out) == perplexity(*given)
    alone, both = (json.loads(kt_ok("estimate", *words, "--bandwidth", 10, "--json").stdout)
                   for words in ((out,), given))
    assert alone["decode"] == both["decode"]
    for part in ("experts", "dense", "kv_cache", "workspace"):
        assert alone["bytes"][part] == both["bytes"][part] > 0
    plan = kt_ok("run", out, "--dry-run").stdout
    assert "kt-int4 experts" in plan and ("all but the experts from" in plan) == (name == "apart")
    kt_ok("bench", out, "--prompt", 4, "--tokens", 2, "--batch", 1, "--json")
    chat = subprocess.run([KT, "chat", out, "--max-tokens", "4", "--json"], input="Hello\n",
                          capture_output=True, text=True)
    assert chat.returncode == 0 and json.loads(chat.stdout)


def test_the_whole_one_needs_no_source(moved):
    assert tokens(moved / "whole")
    assert kt_ok("run", moved / "whole", "--dry-run", "--kt-method", "AMXINT4").stdout


def test_a_source_that_is_gone(moved):
    facts = moved / "apart" / "kt_weights.json"
    known = json.loads(facts.read_text())
    gone = str(moved.parent / "gone" / "model")
    known["origin"]["path"] = gone
    facts.write_text(json.dumps(known))
    out = moved / "apart"
    for verb in (("run",), ("generate", *PROMPT), ("estimate",)):
        refused(kt(verb[0], out, *verb[1:]), 2, f"{out}: holds converted experts only", f"{gone}, is not there",
                f"--weights {out}")
    assert tokens(DEMO, "--weights", out)  # as the line says


def test_a_source_beside_it_is_found(here, moved):
    facts = moved / "apart" / "kt_weights.json"
    known = json.loads(facts.read_text())
    known["origin"]["path"] = "/no/such/source"
    facts.write_text(json.dumps(known))
    refused(kt("estimate", moved / "apart"), 2, "/no/such/source, is not there")
    shutil.copytree(here / "source", moved / "source")
    assert tokens(moved / "apart") == tokens(here / "apart")


def test_a_source_that_changed(here, moved):
    shutil.copytree(here / "source", moved / "source")
    facts = moved / "apart" / "kt_weights.json"
    known = json.loads(facts.read_text())
    known["origin"]["path"] = str(moved / "source")
    facts.write_text(json.dumps(known))
    config = json.loads((moved / "source" / "config.json").read_text())
    (moved / "source" / "config.json").write_text(json.dumps({**config, "rope_theta": 20000}))
    refused(kt("generate", moved / "apart", *PROMPT), 2,
            f"{moved / 'source'}, has changed: config.json holds something else", f"--weights {moved / 'apart'}")


def test_outputs_of_earlier_versions(moved):
    """Those that are whole run; those without a word of their source say so."""
    assert not (moved / "whole" / "kt_weights.json").exists()
    facts = moved / "apart" / "kt_weights.json"
    known = json.loads(facts.read_text())
    del known["origin"]
    facts.write_text(json.dumps(known))
    refused(kt("run", moved / "apart"), 2, "does not name the model they were made from",
            f"--weights {moved / 'apart'}")
    assert tokens(DEMO, "--weights", moved / "apart") == tokens(moved / "whole")


# --- threads and nodes -----------------------------------------------------------------------------------------------

USABLE = len(os.sched_getaffinity(0))
CUT = f"{USABLE + 6400} threads were asked for, but {USABLE} cpus are usable: using {USABLE} threads"


@pytest.mark.parametrize("words", [
    ("run", DEMO, "--dry-run"), ("generate", DEMO, *PROMPT), ("estimate", DEMO, "--bandwidth", 9),
    ("perplexity", DEMO, "--file", STORIES, "--context", 32, "--max-tokens", 32),
    ("bench", DEMO, "--prompt", 4, "--tokens", 2, "--batch", 1), ("chat", DEMO, "--max-tokens", 2),
    ("microbench", "roofline", "--isa", "portable"), ("quant",)], ids=lambda words: words[0])
def test_more_threads_than_cpus_are_cut_with_a_line(words, tmp_path):
    flag = "--threads" if words[0] in ("microbench", "quant") else "--kt-cpuinfer"
    if words[0] == "quant":
        words = ("quant", DEMO, "-o", tmp_path / "out", "--numa-nodes", 1)
    done = kt_ok(*words, flag, USABLE + 6400)
    assert done.stderr.count(CUT) == 1, done.stderr
    assert f"{USABLE + 6400} threads" not in done.stdout


def test_the_documents_launch_line():
    """On one CPU too, where there are more pools than that."""
    words = ("run", "--model", DEMO, "--kt-method", "BF16", "--kt-cpuinfer", 6400,
             "--kt-threadpool-count", 2, "--dry-run")
    assert "threads, 2 thread pools on 1 NUMA node" in kt_ok(*words).stdout or USABLE > 2
    one = subprocess.run(["taskset", "-c", str(min(os.sched_getaffinity(0))), KT, *map(str, words)],
                         capture_output=True, text=True)
    assert one.returncode == 0 and "2 threads, 2 thread pools on 1 NUMA node" in one.stdout, one.stderr


def nodes():
    """Of this machine that have CPUs of ours."""
    found = []
    for folder in pathlib.Path("/sys/devices/system/node").glob("node[0-9]*"):
        ranges = [r.split("-") for r in (folder / "cpulist").read_text().strip().split(",") if r]
        if any(int(r[0]) <= cpu <= int(r[-1]) for r in ranges for cpu in os.sched_getaffinity(0)):
            found.append(int(folder.name[4:]))
    return sorted(found) or [0]


def test_nodes_by_their_numbers():
    first, known = nodes()[0], ", ".join(map(str, nodes()))
    plan = ("run", "--dry-run", "--kt-numa-nodes")
    for words in ([f"{first}", DEMO], [f"{first}", "--", DEMO], [f"{first}", "--kt-cpuinfer", 1, DEMO]):
        assert f", NUMA node {first}; " in kt_ok(*plan, *words).stdout
    twice = kt_ok(*plan, first, first, "--model", DEMO).stdout
    assert f"2 thread pools on NUMA node {first}; " in twice
    for bad in ("711", f"{first},711", f"{first}-711"):
        line = refused(kt(*plan, bad, "--model", DEMO), 2, "--kt-numa-nodes: there is no NUMA node", f"nodes: {known}")
        assert "711" in line or "-" in bad
    refused(kt(*plan, "0;1", "--model", DEMO), 2,
            "--kt-numa-nodes: '0;1': expected numbers of NUMA nodes such as 0,2 or 0-3")
    refused(kt(*plan, f"{first},{first}", "--kt-threadpool-count", 1, "--model", DEMO), 2,
            "2 nodes are named for 1 pools")


# --- the first page, and what comes next -----------------------------------------------------------------------------


def on_terminal(*words, width=80, **env):
    """What kt shows on a terminal of so many columns, standard error too."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = subprocess.Popen([KT, *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True,
                               env={**os.environ, "NO_COLOR": "1", **{key: str(value) for key, value in env.items()}})
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait(600) == 0, shown
    return shown.decode().replace("\r\n", "\n")


@pytest.fixture
def home(tmp_path):
    """kt's own folder, with nothing in it."""
    return {"KT_HOME": tmp_path / "home"}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_first_page(home, here, width):
    shown = on_terminal(width=width, **home)
    assert max(map(len, shown.splitlines())) <= width
    for phrase in ("CPU ", "kernels", "RAM ", "available", "GPU ", "Models", "demo", "Try", "kt chat demo",
                   "kt run demo", "kt doctor"):
        assert phrase in shown, shown
    kt_ok("model", "add", "a-much-longer-name-of-mine", here / "source",
          env={**os.environ, "KT_HOME": str(home["KT_HOME"])})
    shown = on_terminal(width=width, **home)
    assert "a-much-longer-name-of-mine" in shown and max(map(len, shown.splitlines())) <= width


def test_its_commands_work_as_they_stand(home):
    """Those that end by themselves; chat reads its end, run only plans."""
    shown = on_terminal(**home)
    commands = re.findall(r"^  (kt [a-z]+ ?[a-z-]*)  ", shown, re.MULTILINE)
    assert len(commands) == 3, shown
    for command in commands:
        words = shlex.split(command)[1:] + (["--dry-run"] if " run " in command else ["--quick"]
                                            if "doctor" in command else [])
        done = kt(*words, env={**os.environ, "KT_HOME": str(home["KT_HOME"])})
        assert done.returncode == 0 or (words[0] == "doctor" and done.returncode == 4), (command, done.stderr)


def test_help_where_nobody_looks(home):
    env = {**os.environ, "KT_HOME": str(home["KT_HOME"])}
    alone, asked = kt(env=env), kt("--help", env=env)
    assert alone.returncode == 0 and alone.stdout == asked.stdout and "Examples:" in alone.stdout and alone.stderr == ""


def last_line(*words, **env):
    return kt_ok(*words, env={**os.environ, **{key: str(value) for key, value in env.items()}}).stdout.splitlines()[-1]


def test_the_last_line_names_the_next_command(home, here, tmp_path):
    out, source = tmp_path / "an output", here / "source"
    assert last_line("quant", source, "-o", out, "--numa-nodes", 1, **home) == f"next: kt run '{out}'"
    assert last_line("model", "add", "mine", source, **home) == "next: kt run mine"
    assert last_line("estimate", "mine", "--bandwidth", 9, "--format", "int8",
                     **home) == "next: kt run mine --format int8"
    assert last_line("estimate", source, "--bandwidth", 9, "--max-memory", "1MiB",
                     **home) == f"next: kt estimate {source} --format int4"
    assert last_line("run", "mine", "--dry-run", **home) == "next: kt run mine"
    assert last_line("bench", "mine", "--prompt", 4, "--tokens", 2, "--batch", 1, **home) == "next: kt run mine"
    assert last_line("model", "verify", "mine", "--quick", **home) == "next: kt run mine"
    assert last_line("model", "remove", "mine", **home) == "next: kt model list"
    assert last_line("microbench", "roofline", "--isa", "portable", **home) == "next: kt microbench moe"


def test_a_server_names_the_chat_when_it_is_ready(here):
    with server_process.Server(here / "whole") as server:
        end = time.monotonic() + 60
        while "next: " not in server.said() and time.monotonic() < end:
            time.sleep(0.02)
        lines = server.stdout_path.read_text().splitlines()
        assert lines[-2].startswith("ready: ") and lines[-1] == f"next: kt chat --url {server.url}"
        chat = subprocess.run([KT, *shlex.split(lines[-1])[2:], "--max-tokens", "4", "--json"], input="Hello\n",
                              capture_output=True, text=True)
        assert chat.returncode == 0 and json.loads(chat.stdout), chat.stderr


def test_what_programs_read_stays_as_it_was(home, here):
    """Nothing behind JSON, lists and completions, but on a terminal, and there beside them."""
    env = {**os.environ, "KT_HOME": str(home["KT_HOME"])}
    for words in (("estimate", "demo", "--bandwidth", 9, "--json"), ("model", "list", "--json"),
                  ("model", "list", "--names"),
                  ("model", "list"), ("config", "path"), ("config", "get", "server.port"), ("version",),
                  ("perplexity", "demo", "--file", STORIES, "--context", 32, "--max-tokens", 32),
                  ("generate", "demo", "-p", "a", "--max-tokens", 2)):
        done = kt_ok(*words, env=env)
        assert "next:" not in done.stdout + done.stderr
    assert on_terminal("generate", "demo", "-p", "a", "--max-tokens", 2, **home).endswith("\nnext: kt chat demo\n")
    assert on_terminal("version", **home).endswith("\nnext: kt doctor\n")
    assert "next:" not in on_terminal("model", "list", "--names", **home)
