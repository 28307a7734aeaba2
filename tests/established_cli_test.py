"""Every option of the help pages of the established kt (0.7), page by page: it does what it says, or kt says why not.
KT_PROGRAM names kt."""
import fcntl
import http.server
import json
import os
import pathlib
import pty
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from chat_test import Api
from checkpoints import KT, refused
from cli_place import DEMO, place_fixture, weights_fixture  # noqa: F401 (pytest finds them)

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")

# The pages of `kt VERB --help` of 0.7: names of each option; arguments in capitals.
PAGES = {
    "run": ["MODEL", "--host -H", "--port -p", "--gpu-experts", "--cpu-threads", "--numa-nodes",
            "--tensor-parallel-size --tp", "--model-path", "--weights-path", "--kt-method",
            "--kt-gpu-prefill-threshold", "--attention-backend", "--max-total-tokens", "--max-running-requests",
            "--chunked-prefill-size", "--mem-fraction-static", "--watchdog-timeout", "--served-model-name",
            "--disable-shared-experts-fusion", "--enable-shared-experts-fusion", "--quantize -q",
            "--advanced", "--dry-run"],
    "chat": ["--host -H", "--port -p", "--model -m", "--temperature -t", "--max-tokens", "--system -s",
             "--save-history", "--no-save-history", "--history-file", "--stream", "--no-stream"],
    "quant": ["MODEL", "--method -m", "--output -o", "--input-type -i", "--cpu-threads", "--numa-nodes", "--no-merge",
              "--gpu", "--yes -y"],
    "bench": ["--type -t", "--model -m", "--output -o", "--iterations -n"],
    "microbench": ["COMPONENT", "--batch-size -b", "--seq-len -s", "--iterations -n", "--warmup -w", "--output -o"],
    "model download": ["REPO", "--local-dir -d", "--repo-type -t", "--resume", "--no-resume", "--yes -y"],
    "model list": ["--verbose -v", "--all", "--moe", "--no-moe", "--no-cache"],
    "model clear-cache": [""],
    "model path-list": [""],
    "model link-cpu": ["CPU_MODEL GPU_MODELS"],
    "model unlink-cpu": ["CPU_MODEL"],
    "model path-add": ["PATH"],
    "model path-remove": ["PATH"],
    "model scan": ["--min-size", "--max-depth"],
    "model add": ["PATH"],
    "model edit": ["NAME"],
    "model info": ["NAME"],
    "model remove": ["NAME", "--yes -y"],
    "model refresh": [""],
    "model verify": ["NAME", "--verbose -v"],
    "model verify-all": [""],
    "model auto-repo": ["--apply -a", "--dry-run -d"],
    "config init": [""],
    "config show": ["KEY"],
    "config set": ["KEY VALUE"],
    "config get": ["KEY"],
    "config reset": ["--yes -y"],
    "config path": [""],
    "doctor": ["--verbose -v"],
    "version": ["--verbose -v"],
    "edit": ["NAME"],
    "sft": ["train chat export"],
}
ROWS = {}  # (page, option): the test of it


def row(page, option):
    def put(check):
        assert (page, option) not in ROWS and option in PAGES[page], (page, option)
        ROWS[page, option] = check
        return check
    return put


def test_the_table_has_every_option():
    assert set(ROWS) == {(page, option) for page, options in PAGES.items() for option in options}


@pytest.mark.parametrize("page, option", [(page, option) for page, options in PAGES.items() for option in options],
                         ids=lambda value: str(value).replace(" ", "_") or "-")
def test_it_does_it_or_says_why_not(page, option, place):
    ROWS[page, option](place)


# --- run -------------------------------------------------------------------------------------------------------------

def ignored(place, flag, *words):
    said = place.plan(*words)
    assert re.search(rf"^note: ignored, for they mean nothing here: .*{flag}", said, re.M), said
    refused(place.kt("run", "demo", "--dry-run", *words, "--strict"), 2, "--strict", flag)
    return said


@row("run", "MODEL")
def _(place):
    assert str(DEMO) in place.plan()


@row("run", "--host -H")
def _(place):
    for flag in ("--host", "-H"):
        refused(place.kt("run", "demo", flag, "256.1.1.1"), 2, "256.1.1.1")


@row("run", "--port -p")
def _(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "-p"):
            refused(place.kt("run", "demo", flag, port), 2, port)


@row("run", "--gpu-experts")
def _(place):
    assert "--gpu-experts is ignored: no GPU is used" in ignored(place, "--gpu-experts", "--gpu-experts", 4)
    refused(place.kt("run", "demo", "--gpu-experts", "many"), 2, "many")


@row("run", "--cpu-threads")
def _(place):
    assert "1 thread," in place.plan("--cpu-threads", 1)


@row("run", "--numa-nodes")
def _(place):
    assert "1 NUMA node;" in place.plan("--numa-nodes", 1)
    # Several are the nodes' own numbers.
    assert "2 thread pools on NUMA node 0" in place.plan("--numa-nodes", 0, "--numa-nodes", 0, "--cpu-threads", 2)
    refused(place.kt("run", "demo", "--dry-run", "--numa-nodes", 0, "--numa-nodes", 711), 2, "--numa-nodes", "711")
    refused(place.kt("run", "demo", "--dry-run", "--numa-nodes", 0), 2, "--numa-nodes")


@row("run", "--tensor-parallel-size --tp")
def _(place):
    for flag in ("--tensor-parallel-size", "--tp", "--tp-size"):
        assert f"{flag} is ignored: experts are shared by all NUMA nodes" in ignored(place, flag, flag, 2)


@row("run", "--model-path")
def _(place):
    assert str(DEMO) in place.ok("run", "--dry-run", "--model-path", DEMO).stdout


@row("run", "--weights-path")
def _(place):
    assert f"experts from {place.weights}" in place.plan("--weights-path", place.weights)


@row("run", "--kt-method")
def _(place):
    assert place.figures("--kt-method", "AMXINT4")["bytes"]["peak"] < place.figures()["bytes"]["peak"]


@row("run", "--kt-gpu-prefill-threshold")
def _(place):
    assert "no GPU is used" in ignored(place, "--kt-gpu-prefill-threshold", "--kt-gpu-prefill-threshold", 4096)
    refused(place.kt("run", "demo", "--kt-gpu-prefill-threshold", "many"), 2, "many")


@row("run", "--attention-backend")
def _(place):
    ignored(place, "--attention-backend", "--attention-backend", "flashinfer")


@row("run", "--max-total-tokens")
def _(place):
    plan = place.figures("--max-total-tokens", 512, "--max-running-requests", 2)
    assert plan["context"] == 256


@row("run", "--max-running-requests")
def _(place):
    refused(place.kt("run", "demo", "--dry-run", "--max-running-requests", 2000), 2, "2000")


@row("run", "--chunked-prefill-size")
def _(place):
    small, large = (place.figures("--chunked-prefill-size", size)["bytes"] for size in (64, 1024))
    assert small["peak"] < large["peak"]


@row("run", "--mem-fraction-static")
def _(place):
    assert "--max-memory" in ignored(place, "--mem-fraction-static", "--mem-fraction-static", 0.9)


@row("run", "--watchdog-timeout")
def _(place):
    ignored(place, "--watchdog-timeout", "--watchdog-timeout", 3000)


@row("run", "--served-model-name")
def _(place):
    assert place.plan("--served-model-name", "mine").startswith("mine: ")


@row("run", "--disable-shared-experts-fusion")
def _(place):
    ignored(place, "--disable-shared-experts-fusion", "--disable-shared-experts-fusion")


@row("run", "--enable-shared-experts-fusion")
def _(place):
    ignored(place, "--enable-shared-experts-fusion", "--enable-shared-experts-fusion")


@row("run", "--quantize -q")
def _(place):
    done = place.ok("run", DEMO, "--dry-run", "--quantize")
    assert ("--quantize writes ./tiny-deepseekv3-int4 first" in done.stderr
            and not (place.folder / "tiny-deepseekv3-int4").exists())
    refused(place.kt("run", DEMO, "-q", "--port", 0, "--max-memory", "1MiB"), 3, "memory")  # converted, then refused
    assert (place.folder / "tiny-deepseekv3-int4" / "kt_manifest.json").exists()
    again = place.ok("run", DEMO, "-q", "--dry-run")
    assert "experts from ./tiny-deepseekv3-int4" in again.stdout and "--quantize" not in again.stderr
    refused(place.kt("run", DEMO, "-q", "--weights", place.weights), 2, "--quantize")
    # What happens to lie under that name is not taken for it.
    manifest = place.folder / "tiny-deepseekv3-int4" / "kt_manifest.json"
    made = json.loads(manifest.read_text())
    made["settings"]["contents"]["model-00001-of-00002.safetensors"] = "0" * 64  # another fine-tune of the same sizes
    manifest.write_text(json.dumps(made))
    refused(place.kt("run", DEMO, "-q", "--dry-run"), 2, "was not made of")


@row("run", "--advanced")
def _(place):
    assert "kt run --help has all options" in ignored(place, "--advanced", "--advanced")


@row("run", "--dry-run")
def _(place):
    assert "ready:" not in place.plan()


# --- chat ------------------------------------------------------------------------------------------------------------

def talk(place, *flags, lines="hello\n", api=None):
    """What a pipe gets of it, and the requests of the server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), api or Api)
    server.daemon_threads = True
    server.requests, server.gone, server.key = [], threading.Event(), None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = str(server.server_address[1])
        done = subprocess.run([KT, "chat", *(flag.replace("PORT", port) for flag in flags)], input=lines,
                              capture_output=True, text=True, env=place.env, cwd=place.folder, timeout=600)
        return done, server.requests
    finally:
        server.shutdown()
        server.server_close()


@row("chat", "--host -H")
def _(place):
    for flag in ("--host", "-H"):
        assert talk(place, flag, "localhost", "--port", "PORT")[0].stdout == "you said: hello\n"
    refused(talk(place, "--host", "localhost", "--url", "http://127.0.0.1:PORT")[0], 2, "--url")


@row("chat", "--port -p")
def _(place):
    for flag in ("--port", "-p"):
        assert talk(place, flag, "PORT")[0].stdout == "you said: hello\n"
    refused(talk(place, "-p", "0")[0], 2, "port")
    refused(talk(place, "demo", "-p", "PORT")[0], 2, "--port")


@row("chat", "--model -m")
def _(place):
    for flag in ("--model", "-m"):
        assert talk(place, "-p", "PORT", flag, "echo-2")[1][0]["model"] == "echo-2"


@row("chat", "--temperature -t")
def _(place):
    for flag in ("--temperature", "-t"):
        assert talk(place, "-p", "PORT", flag, "0.25")[1][0]["temperature"] == 0.25


@row("chat", "--max-tokens")
def _(place):
    assert talk(place, "-p", "PORT", "--max-tokens", "9")[1][0]["max_tokens"] == 9


@row("chat", "--system -s")
def _(place):
    for flag in ("--system", "-s"):
        assert talk(place, "-p", "PORT", flag,
                    "be kind")[1][0]["messages"][0] == {"role": "system", "content": "be kind"}


def typed(place, *flags):
    """A line typed on a terminal, and the end of the chat."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    server.requests, server.gone, server.key = [], threading.Event(), None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([KT, "chat", "-p", str(server.server_address[1]), *flags], stdin=theirs, stdout=theirs,
                               stderr=theirs, start_new_session=True, env={**place.env, "TERM": "xterm"},
                               cwd=place.folder)
    os.close(theirs)
    shown, said, end = b"", False, time.monotonic() + 300
    while time.monotonic() < end:
        if not select.select([ours], [], [], 0.3)[0]:
            # Nothing more comes: it waits for a line, or for the end.
            if b"you said: hello" in shown:
                os.write(ours, b"\x04")
            elif shown and not said:
                os.write(ours, b"hello\r")
                said = True
            continue
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        shown += data
    assert process.wait(60) == 0, shown
    os.close(ours)
    server.shutdown()
    server.server_close()


@row("chat", "--save-history")
def _(place):
    typed(place, "--save-history")
    assert (place.folder / "home" / "chat_history").read_text() == "hello\n"


@row("chat", "--no-save-history")
def _(place):
    typed(place, "--no-save-history")
    assert not (place.folder / "home" / "chat_history").exists()
    refused(talk(place, "-p", "PORT", "--no-save-history", "--history-file", "x")[0], 2, "--history-file")


@row("chat", "--history-file")
def _(place):
    done, _ = talk(place, "-p", "PORT", "-s", "be kind", "--history-file", "talk.json", lines="hello\nagain\n")
    assert done.returncode == 0
    kept = json.loads((place.folder / "talk.json").read_text())
    assert kept["model"] == "echo-1"
    assert [message["content"] for message in kept["messages"]] == ["be kind", "hello", "you said: hello", "again",
                                                                    "you said: again"]
    (place.folder / "other.json").write_text("[1, 2]")
    refused(talk(place, "-p", "PORT", "--history-file", "other.json")[0], 2, "other.json", "no conversation")
    assert (place.folder / "other.json").read_text() == "[1, 2]"
    typed(place, "--history-file", "typed.json")
    assert json.loads((place.folder / "typed.json").read_text())["messages"][0]["content"] == "hello"


@row("chat", "--stream")
def _(place):
    assert talk(place, "-p", "PORT", "--stream")[0].stdout == "you said: hello\n"


@row("chat", "--no-stream")
def _(place):
    """An answer that breaks off in its middle is not shown."""
    half, _ = talk(place, "-p", "PORT", lines="break\n")
    assert "half an ans" in half.stdout and half.returncode == 2
    none, _ = talk(place, "-p", "PORT", "--no-stream", lines="break\n")
    assert none.stdout == "" and none.returncode == 2
    assert talk(place, "-p", "PORT", "--no-stream", lines="think\n")[0].stdout == "you said: think\n"


# --- quant -----------------------------------------------------------------------------------------------------------

@row("quant", "MODEL")
def _(place):
    """Without an output: the model's name and the method, here."""
    done = place.ok("quant", DEMO, "--numa-nodes", 1)
    assert done.stdout.splitlines()[-1] == "next: kt run ./tiny-deepseekv3-int4"
    place.ok("run", "./tiny-deepseekv3-int4", "--dry-run")
    refused(place.kt("quant", DEMO, "--numa-nodes", 1), 2, "tiny-deepseekv3-int4")  # never over what is there


@row("quant", "--method -m")
def _(place):
    for flag, method in (("--method", "int8"), ("-m", "int4")):
        place.ok("quant", DEMO, flag, method, "--numa-nodes", 1)
        assert (place.folder / f"tiny-deepseekv3-{method}").is_dir()


@row("quant", "--output -o")
def _(place):
    for flag in ("--output", "-o"):
        place.ok("quant", DEMO, flag, f"out{flag}", "--numa-nodes", 1)
        assert (place.folder / f"out{flag}" / "kt_manifest.json").exists()


@row("quant", "--input-type -i")
def _(place):
    for flag in ("--input-type", "-i"):
        refused(place.kt("quant", DEMO, flag, "fp8"), 2, "fp8")


@row("quant", "--cpu-threads")
def _(place):
    assert json.loads(place.ok("quant", DEMO, "--cpu-threads", 1, "--numa-nodes", 1, "--json").stdout)["threads"] == 1


@row("quant", "--numa-nodes")
def _(place):
    place.ok("quant", DEMO, "--numa-nodes", 2, "-o", "two", "--no-merge")
    assert {path.name for path in (place.folder / "two").rglob("_numa_*")} == {"_numa_0", "_numa_1"}


@row("quant", "--no-merge")
def _(place):
    place.ok("quant", DEMO, "--no-merge", "--numa-nodes", 1)
    assert list((place.folder / "tiny-deepseekv3-int4").rglob("*.kt"))


@row("quant", "--gpu")
def _(place):
    assert "--gpu: not needed" in place.ok("quant", DEMO, "--gpu", "--numa-nodes", 1).stderr


@row("quant", "--yes -y")
def _(place):
    for flag in ("--yes", "-y"):
        place.ok("quant", DEMO, flag, "--numa-nodes", 1, "-o", f"out{flag}")


# --- bench and microbench --------------------------------------------------------------------------------------------

SMALL = ("--prompt", 4, "--tokens", 2, "--batch", 1)
TINY = ("--experts", 4, "--hidden", 256, "--inter", 128, "--top-k", 2, "--layers", 2, "--format", "int8",
        "--threads", 1)


@row("bench", "--type -t")
def _(place):
    assert "A step of decode" in place.ok("bench", "demo", "-t", "all", *SMALL).stdout
    assert "A step of" not in place.ok("bench", "demo", "--type", "inference", *SMALL).stdout
    figures = json.loads(place.ok("bench", "-t", "moe", "-n", 3, *TINY, "--tokens", 1, "--json").stdout)
    assert figures["windows"] == 3 and figures["experts"] == 4
    refused(place.kt("bench", "demo", "-t", "everything"), 2, "everything")


@row("bench", "--model -m")
def _(place):
    for flag in ("--model", "-m"):
        done = place.ok("bench", flag, "demo", *SMALL)
        assert done.stdout.splitlines()[-1] == "next: kt run demo"
    refused(place.kt("bench", "-m", "no-such-model"), 2, "no-such-model")
    refused(place.kt("bench", "demo", "-m", "demo"), 2, "--model")


@row("bench", "--output -o")
def _(place):
    for flag in ("--output", "-o"):
        table = place.ok("bench", "demo", *SMALL, flag, "figures.json").stdout
        assert "decode tokens/s" in table
        assert json.loads((place.folder / "figures.json").read_text())["points"][0]["prompt"] == 4


@row("bench", "--iterations -n")
def _(place):
    for flag in ("--iterations", "-n"):
        place.ok("bench", "demo", *SMALL, flag, 1)
    refused(place.kt("bench", "demo", "-n", 0), 2, "--repeat")


def measured(place, component, *words):
    sizes = {"moe": TINY,
             "linear": ("--outputs", 96, "--inputs", 256, "--copies", 2, "--format", "int8", "--threads", 1),
             "attention": ("--heads", 4, "--kv-heads", 2, "--head-dim", 32, "--layers", 2, "--threads", 1),
             "mla": ("--heads", 2, "--layers", 2, "--threads", 1)}[component]
    return json.loads(place.ok("microbench", component, *sizes, *words, "--json").stdout)


@row("microbench", "COMPONENT")
def _(place):
    for component in ("mla", "moe", "linear", "attention"):
        assert measured(place, component, "-n", 3, "-s", 16)["windows"] == 3
    latent = measured(place, "mla", "-n", 3, "-s", 16)
    assert latent["mla"] and (latent["d"], latent["dv"]) == (576, 512)
    # None is moe, and it may stand behind its flags.
    assert json.loads(place.ok("microbench", *TINY, "-n", 3, "-b", 1, "--json").stdout)["experts"] == 4
    late = place.ok("microbench", "-n", 3, "-b", 1, "-s", 16, "mla", "--heads", 2, "--layers", 2,
                    "--threads", 1, "--json")
    assert json.loads(late.stdout)["mla"]
    refused(place.kt("microbench", "--expert", 4), 2, "'--expert'", "--experts", "kt microbench moe --help")
    refused(place.kt("microbench", "nonsense"), 2, "nonsense", "mla")


@row("microbench", "--batch-size -b")
def _(place):
    for flag in ("--batch-size", "-b"):
        assert measured(place, "moe", "-n", 3, flag, 5)["tokens"] == 5
        assert measured(place, "linear", "-n", 3, flag, 5)["tokens"] == 5
        assert measured(place, "attention", "-n", 3, "-s", 16, flag, 5)["batch"] == 5
    refused(place.kt("microbench", "moe", "-b", 2, "--tokens", 3), 2, "--tokens")
    refused(place.kt("microbench", "moe", "-b", 65536, "-s", 2**24), 2, "65536")


@row("microbench", "--seq-len -s")
def _(place):
    for flag in ("--seq-len", "-s"):
        assert measured(place, "moe", "-n", 3, "-b", 2, flag, 3)["tokens"] == 6
        assert measured(place, "mla", "-n", 3, flag, 20)["context"] == 20


@row("microbench", "--iterations -n")
def _(place):
    for flag in ("--iterations", "-n"):
        assert measured(place, "linear", "-b", 1, flag, 7)["windows"] == 7
    refused(place.kt("microbench", "linear", "-n", 7, "--seconds", 1), 2, "--seconds")


@row("microbench", "--warmup -w")
def _(place):
    for flag in ("--warmup", "-w"):
        assert measured(place, "linear", "-b", 1, "-n", 3, flag, 4)["windows"] == 3
    refused(place.kt("microbench", "linear", "-w", -1), 2, "--warmup")


@row("microbench", "--output -o")
def _(place):
    for flag in ("--output", "-o"):
        shown = measured(place, "attention", "-n", 3, "-s", 16, flag, "figures.json")
        assert json.loads((place.folder / "figures.json").read_text()) == shown


# --- model -----------------------------------------------------------------------------------------------------------

@row("model download", "REPO")
def _(place):
    refused(place.kt("model", "download", "no repository"), 2, "no repository")


def offline(place, *words):
    """What a command line that is right runs into first."""
    line = refused(place.kt("model", "download", "a/b", *words, HF_HUB_OFFLINE="1"), (2, 4))
    assert "offline" in line.lower() or "libcurl" in line, line


@row("model download", "--local-dir -d")
def _(place):
    offline(place, "--local-dir", "x")
    offline(place, "-d", "x")


@row("model download", "--repo-type -t")
def _(place):
    for flag in ("--repo-type", "-t"):
        offline(place, flag, "huggingface")
        refused(place.kt("model", "download", "a/b", flag, "gitlab"), 2, "gitlab", "modelscope")


@row("model download", "--resume")
def _(place):
    offline(place, "--resume")


@row("model download", "--no-resume")
def _(place):
    offline(place, "--no-resume")  # what it does is in hub_test.py


@row("model download", "--yes -y")
def _(place):
    offline(place, "-y")
    offline(place, "--yes")


@row("model list", "--verbose -v")
def _(place):
    for flag in ("--verbose", "-v"):
        assert "CPU weights" in place.ok("model", "list", flag).stdout


@row("model list", "--all")
def _(place):
    assert place.ok("model", "list", "--all").stdout == place.ok("model", "list").stdout


@row("model list", "--moe")
def _(place):
    assert "demo" in place.ok("model", "list", "--moe").stdout


@row("model list", "--no-moe")
def _(place):
    assert ("experts" in place.ok("model", "list").stdout
            and "experts" not in place.ok("model", "list", "--no-moe").stdout)


@row("model list", "--no-cache")
def _(place):
    assert place.ok("model", "list", "--no-cache").stdout == place.ok("model", "list").stdout


@row("model clear-cache", "")
def _(place):
    assert place.ok("model", "clear-cache").stdout.startswith("nothing to clear: ")


@row("model path-list", "")
def _(place):
    place.ok("model", "path-add", place.folder)
    assert place.ok("model", "path-list").stdout == f"{place.folder}\n"


@row("model link-cpu", "CPU_MODEL GPU_MODELS")
def _(place):
    place.ok("model", "add", "one", DEMO)
    place.ok("model", "add", "two", DEMO)
    place.ok("model", "link-cpu", place.weights, "one", "two")
    assert {place.models()[name]["weights"] for name in ("one", "two")} == {str(place.weights)}
    refused(place.kt("model", "link-cpu", place.weights, "one", "three"), 2, "three", "one")
    refused(place.kt("model", "link-cpu", DEMO, "one"), 2, "CPU weights were expected")


@row("model unlink-cpu", "CPU_MODEL")
def _(place):
    refused(place.kt("model", "unlink-cpu", place.weights), 2, "no registered model uses it")
    place.ok("model", "add", "one", DEMO, "--weights", place.weights)
    place.ok("model", "add", "packed", place.weights)
    place.ok("model", "unlink-cpu", "packed")  # by its name, too
    assert place.models()["one"]["weights"] is None and place.weights.is_dir()


@row("model path-add", "PATH")
def _(place):
    refused(place.kt("model", "path-add", "no-such-folder"), 2, "no-such-folder")


@row("model path-remove", "PATH")
def _(place):
    place.ok("model", "path-add", place.folder)
    place.ok("model", "path-remove", place.folder)
    assert place.ok("model", "path-list").stdout == ""


@row("model scan", "--min-size")
def _(place):
    def found(*words):
        return len(json.loads(place.ok("model", "scan", DEMO, "--json", *words).stdout)["models"])

    assert found() == 1 and found("--min-size", "2.0") == 0 and found("--min-size", "0") == 1


@row("model scan", "--max-depth")
def _(place):
    shutil.copytree(DEMO, place.folder / "a" / "b" / "model")
    found = lambda depth: len(json.loads(  # noqa: E731
        place.ok("model", "scan", place.folder / "a", "--json", "--max-depth", depth).stdout)["models"])
    assert found(1) == 0 and found(2) == 1


@row("model add", "PATH")
def _(place):
    place.ok("model", "add", DEMO)
    assert place.models()["tiny-deepseekv3"]["path"] == str(DEMO)


@row("model edit", "NAME")
def _(place):
    place.ok("model", "add", "one", DEMO)
    place.ok("model", "edit", "one", "--name", "two")
    assert "two" in place.models()


@row("model info", "NAME")
def _(place):
    assert str(DEMO) in place.ok("model", "info", "demo").stdout


@row("model remove", "NAME")
def _(place):
    place.ok("model", "add", "one", DEMO)
    place.ok("model", "remove", "one")
    assert "one" not in place.models()


@row("model remove", "--yes -y")
def _(place):
    for flag in ("--yes", "-y"):
        place.ok("model", "add", "one", DEMO)
        place.ok("model", "remove", "one", flag)


@row("model refresh", "")
def _(place):
    assert "no model is registered" in place.ok("model", "refresh").stdout
    copy = shutil.copytree(DEMO, place.folder / "copy")
    place.ok("model", "add", "copy", copy)
    place.ok("model", "add", "gone", shutil.copytree(DEMO, place.folder / "gone"), "--weights",
             shutil.copytree(place.weights, place.folder / "packed"))
    shutil.rmtree(place.folder / "gone")
    shutil.rmtree(place.folder / "packed")
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = ["DeepseekV2ForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config))
    states = {one["name"]: one for one in json.loads(place.ok("model", "refresh", "--json").stdout)}
    assert states["gone"]["state"] == "missing" and "CPU weights missing" in states["gone"]["notes"][0]
    assert states["copy"]["state"] == "updated" and place.models()["copy"]["architecture"] == "DeepseekV2ForCausalLM"
    assert "--remove forgets" in place.ok("model", "refresh").stdout and "gone" in place.models()
    place.ok("model", "refresh", "--remove")
    assert "gone" not in place.models() and "copy" in place.models()


@row("model verify", "NAME")
def _(place):
    assert "whole" in place.ok("model", "verify", "demo").stdout


@row("model verify", "--verbose -v")
def _(place):
    for flag in ("--verbose", "-v"):
        assert re.search(r"^right    [0-9a-f]{64}  .*\.safetensors$",
                         place.ok("model", "verify", place.weights, flag).stdout, re.M)


@row("model verify-all", "")
def _(place):
    assert "no model is registered" in place.ok("model", "verify-all").stdout
    place.ok("model", "add", "one", DEMO)
    place.ok("model", "add", "two", shutil.copytree(DEMO, place.folder / "two"))
    assert place.ok("model", "verify-all", "--quick").stdout.count("whole") == 2
    next((place.folder / "two").glob("*.safetensors")).unlink()
    done = place.kt("model", "verify-all", "--quick")
    refused(done, 2, "1 of 2 models have faults: two")
    assert done.stdout.count("whole") == 1
    assert ([one["ok"] for one in json.loads(place.kt("model", "verify-all", "--quick", "--json").stdout)]
            == [True, False])


@row("model auto-repo", "--apply -a")
def _(place):
    for flag in ("--apply", "-a"):
        folder = shutil.copytree(DEMO, place.folder / flag / "Qwen3-30B-A3B")
        place.ok("model", "add", f"by{flag}", folder)
        place.ok("model", "auto-repo", flag)
        assert place.models()[f"by{flag}"]["repo"] == "Qwen/Qwen3-30B-A3B"
    assert "every registered model has a repository" in place.ok("model", "auto-repo").stdout


@row("model auto-repo", "--dry-run -d")
def _(place):
    """By what the files say: the config's own name, where it is the folder's."""
    folder = shutil.copytree(DEMO, place.folder / "mine")
    config = json.loads((folder / "config.json").read_text())
    for name, found in (("org/other", None), ("org/Mine", "org/Mine"), ("/data/mine", None), ("../mine", None)):
        (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": name}))
        place.ok("model", "add", "mine", folder)
        for flag in ("--dry-run", "-d"):
            said = place.ok("model", "auto-repo", flag).stdout
            assert (f" {found} " in said) if found else ("--repo ORG/REPO" in said), said
        assert place.models()["mine"]["repo"] is None


# --- config, doctor, version, and what is elsewhere ------------------------------------------------------------------

@row("config init", "")
def _(place):
    place.ok("config", "init")
    refused(place.kt("config", "init"), 2, "exists")


@row("config show", "KEY")
def _(place):
    said = place.ok("config", "show", "server.port").stdout
    assert "server.port" in said and "30000" in said and "server.host" not in said
    assert list(json.loads(place.ok("config", "show", "server.port", "--json").stdout)) == ["server.port"]
    refused(place.kt("config", "show", "server.prot"), 2, "server.port")
    place.ok("config", "set", "server.api-key", "secret")
    assert "secret" not in place.ok("config", "show", "server.api-key").stdout


@row("config set", "KEY VALUE")
def _(place):
    place.ok("config", "set", "server.port", 8080)
    assert place.ok("config", "get", "server.port").stdout == "8080\n"


@row("config get", "KEY")
def _(place):
    assert place.ok("config", "get", "server.port").stdout == "30000\n"


@row("config reset", "--yes -y")
def _(place):
    for flag in ("--yes", "-y"):
        place.ok("config", "set", "server.port", 8080)
        place.ok("config", "reset", flag)
        assert place.ok("config", "get", "server.port").stdout == "30000\n"
    refused(place.kt("config", "reset"), 2, "--yes")


@row("config path", "")
def _(place):
    assert place.ok("config", "path").stdout == f"{place.folder / 'home' / 'config.yaml'}\n"


@row("doctor", "--verbose -v")
def _(place):
    for flag in ("--verbose", "-v"):
        done = place.kt("doctor", "--cpu", "--quick", flag)
        assert (done.returncode in (0, 4)
                and len(done.stdout.splitlines()) > len(place.kt("doctor", "--cpu", "--quick").stdout.splitlines()))


def python(folder, body):
    """A program called python3 that does so."""
    folder.mkdir(exist_ok=True)
    (folder / "python3").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "python3").chmod(0o755)
    return str(folder)


@row("version", "--verbose -v")
def _(place):
    assert place.ok("version").stdout.startswith("Python: n/a\n")
    here = os.path.dirname(sys.executable)
    for flag in ("--verbose", "-v"):
        said = place.ok("version", flag, PATH=f"{here}:{os.environ['PATH']}").stdout
        assert said.startswith(f"Python: {sys.version.split()[0]}\n"), said
        for name in ("kt_kernel", "torch", "transformers", "sglang"):
            assert re.search(rf"^{name} +(not installed|\d\S*)$", said, re.M), said
    # No code of the folder it is called in.
    (place.folder / "json.py").write_text("raise SystemExit('ran')\n")
    (place.folder / "torch.py").write_text("open('ran', 'w')\n")
    assert (place.ok("version", "-v", PATH=f"{here}:{os.environ['PATH']}").stdout == said
            and not (place.folder / "ran").exists())
    answer = '{"version": "9.9", "packages": {"torch": "7.7", "sglang": 5}}'
    said = place.ok("version", "-v", PATH=python(place.folder / "a", f"echo '{answer}'")).stdout
    assert (said.startswith("Python: 9.9\n") and re.search(r"^torch +7\.7$", said, re.M)
            and re.search(r"^sglang +not installed$", said, re.M))
    assert "does not work" in place.ok("version", "-v", PATH=python(place.folder / "b", "exit 1")).stdout
    assert "none on PATH" in place.ok("version", "-v", PATH=str(place.folder / "none")).stdout
    begin = time.monotonic()
    slow = python(place.folder / "c", "/bin/sleep 600")
    assert "no answer within 10 s" in place.ok("version", "-v", PATH=slow).stdout
    assert time.monotonic() - begin < 60


@row("edit", "NAME")
def _(place):
    refused(place.kt("edit", "demo"), 2, "edit", "kt model edit")


@row("sft", "train chat export")
def _(place):
    """train and chat take a recipe, export an adapter."""
    refused(place.kt("sft", "train"), 2, "sft train", "FILE")
    refused(place.kt("sft", "chat"), 2, "sft chat", "FILE")
    refused(place.kt("sft", "export"), 2, "sft export", "ADAPTER")
