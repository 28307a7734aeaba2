"""`kt bench --server` against a small server in Python: what it sends, what it counts, how it fails. KT_PROGRAM names
kt."""
import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from fake_openai import FakeServer

KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


def bench(server, *args):
    url = server if isinstance(server, str) else server.url
    return subprocess.run([KT, "bench", "--server", url, *map(str, args)], capture_output=True, text=True, timeout=600)


def figures(server, *args):
    result = bench(server, *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_sweep_gives_every_figure():
    with FakeServer(delay=0.001) as server:
        report = figures(server, "--concurrency", "1,3", "--prompt", "12,30", "--tokens", "5", "--warmup", "0")
        seen = list(server.seen)
    assert (report["model"], report["api"], report["prompts_from"]) == ("fake", "completions", "tokenize")
    assert [(p["prompt"], p["concurrency"], p["ok"]) for p in report["points"]] == [(12, 1, 4), (12, 3, 12), (30, 1, 4),
                                                                                   (30, 3, 12)]
    for point in report["points"]:
        assert point["failed"] == 0 and point["failures"] == {} and point["tokens_from"] == "usage"
        assert point["output_tokens"] == 5 * point["ok"]
        assert point["prompt_tokens"] == point["prompt"] * point["ok"]
        for name in ("ttft_ms", "tpot_ms", "request_ms"):
            assert 0 < point[name]["p50"] <= point[name]["p90"] <= point[name]["p99"]
        assert point["tpot_ms"]["p50"] >= 1 and point["inter_token_max_ms"] >= point["tpot_ms"]["p50"]
        # Middles of different requests.
        assert point["request_ms"]["p50"] >= point["ttft_ms"]["p50"] + 4 * point["tpot_ms"]["p50"] * 0.5
        assert point["output_tokens_per_s"] == pytest.approx(point["output_tokens"] / point["window_s"])
        assert point["total_tokens_per_s"] > point["output_tokens_per_s"] > 0
        assert 0 <= point["client_cpu_s"] < point["window_s"] + 1
    assert len(seen) == 32
    assert all(r["stream"] and r["ignore_eos"] and r["max_tokens"] == 5 and r["model"] == "fake" for r in seen)
    firsts = [r["prompt"].split()[0] for r in seen]
    assert len(set(firsts)) == len(firsts)


def test_chat_counts_from_the_first_text_not_from_the_role():
    with FakeServer(delay=0.02) as server:
        report = figures(server, "--concurrency", "1", "--requests", "2", "--prompt", "6", "--tokens", "3",
                         "--api", "chat", "--warmup", "0")
        assert server.seen[0]["messages"][0]["role"] == "user"
    assert report["points"][0]["ttft_ms"]["p50"] >= 20
    assert report["points"][0]["output_tokens"] == 6


@pytest.mark.parametrize("name", ["content", None])
def test_other_tokenizers_and_none(name):
    with FakeServer(tokenize=name, usage=name is not None) as server:
        report = figures(server, "--concurrency", "2", "--prompt", "30", "--tokens", "4")
        words = len(server.seen[0]["prompt"].split())
    assert report["prompts_from"] == ("tokenize" if name else "words")
    assert words == (20 if name else 30)
    assert report["points"][0]["tokens_from"] == ("usage" if name else "pieces")
    assert report["points"][0]["output_tokens"] == 32


def test_shared_prefix_and_seed():
    def prompts(*args):
        with FakeServer() as server:
            figures(server, "--concurrency", "1", "--requests", "3", "--prompt", "60", "--tokens", "1",
                    "--warmup", "0", *args)
            return [r["prompt"].split() for r in server.seen]

    shared = prompts("--shared-prefix", "30")
    assert all(p[:20] == shared[0][:20] for p in shared)
    assert len({p[20] for p in shared}) == 3 and len(shared[0]) == 40
    assert prompts("--seed", "7") == prompts("--seed", "7") != prompts("--seed", "8")


def test_failures_are_listed_by_kind():
    with FakeServer(fail=4) as server:
        args = ("--concurrency", "2", "--requests", "8", "--prompt", "6", "--tokens", "2", "--warmup", "0")
        table = bench(server, *args)
        server.seen.clear()
        report = figures(server, *args)
    assert table.returncode == 0 and "2 x HTTP 503: no room" in table.stdout
    assert report["points"][0]["failures"] == {"HTTP 503: no room": 2} and report["points"][0]["ok"] == 6


@pytest.mark.parametrize("args, message", [
    (["--fail"], "every request failed"),
    (["--key"], "401"),
    (["--nobody"], "127.0.0.1:9"),
])
def test_nothing_works_is_exit_code_2(args, message):
    with FakeServer(fail=int("--fail" in args), key="k" if "--key" in args else None) as server:
        url = "http://127.0.0.1:9" if "--nobody" in args else server.url
        result = bench(url, "--concurrency", "1", "--prompt", "6", "--tokens", "2")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("kt: ") and message in line


def test_key_is_sent():
    with FakeServer(key="secret") as server:
        assert figures(server, "--concurrency", "1", "--prompt", "6", "--tokens", "2", "--api-key", "secret")


def test_slow_requests_time_out():
    with FakeServer(delay=0.5) as server:
        result = bench(server, "--concurrency", "2", "--requests", "2", "--prompt", "6", "--tokens", "20",
                       "--timeout", "0.3", "--warmup", "0")
    assert result.returncode == 2 and "no end within 0.3 s" in result.stdout


def test_errors_are_timed_while_streams_run():
    with FakeServer(delay=0.002) as server:
        report = figures(server, "--concurrency", "2", "--prompt", "6", "--tokens", "20", "--errors", "15")
        assert server.errors == 15
    errors = report["points"][0]["errors"]
    assert errors["asked"] == errors["answered"] == 15 and errors["failures"] == {} and errors["streams_failed"] == 0
    assert 0 < errors["first_byte_ms"]["p50"] <= errors["first_byte_ms"]["p95"] <= errors["first_byte_ms"]["p99"]


def test_plot_is_svg(tmp_path):
    with FakeServer() as server:
        result = bench(server, "--concurrency", "1,2", "--prompt", "6", "--tokens", "2",
                       "--plot", tmp_path / "load.svg")
    assert result.returncode == 0 and result.stdout.splitlines()[0].split()[0] == "streams"
    drawn = xml.etree.ElementTree.parse(tmp_path / "load.svg").getroot()
    assert drawn.tag.endswith("svg") and "Throughput" in "".join(drawn.itertext())


@pytest.mark.parametrize("args", [
    ["bench"],
    ["bench", "demo", "--server", "http://127.0.0.1:9"],
    ["bench", "demo", "--concurrency", "4"],
    ["bench", "--server", "http://127.0.0.1:9", "--concurrency", "0"],
    ["bench", "--server", "http://127.0.0.1:9", "--api", "other"],
    ["bench", "--server", "https://127.0.0.1:9"],
])
def test_bad_usage_is_one_line(args):
    result = subprocess.run([KT, *args], capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("kt: ")
