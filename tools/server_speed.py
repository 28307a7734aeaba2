#!/usr/bin/env python3
"""What the server costs beside the engine alone, on one model and machine, in one run; and another server beside ours.

    server_speed.py MODEL [--kt PROGRAM] [--threads N] [--streams 64] [--tokens 256] [--rounds 3]
                          [--llama-server PROGRAM] [--json FILE]

Rounds alternate: the engine (`kt bench`), then the server (`kt run`, measured by `kt bench --server`), so that a
machine that slows down slows both. Medians count. With one stream: the time of a token as a client sees it, and how
much of it is not the model's steps by the server's own account (requests, sampling, text, JSON, sockets, waking up);
the engine has such time too (sampling, scheduling), and the difference is what serving costs. `kt bench` draws random
tokens, a server's greedy answers repeat themselves, so the two times of a token are not subtracted. With all streams:
tokens of answers per second, prompts read in the same time, server over engine; and the time to the first byte of an
error meanwhile.
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

PROMPT = 64
SHORT_PROMPT = 4  # its step is hardly longer than a token's
ERRORS = 200


def output(*command):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Running:
    """A server process, waited for; ended with SIGTERM."""

    def __init__(self, command, url):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=subprocess.STDOUT)
        self.url = url
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(url + "/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            if self.process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {self.process.returncode}: "
                                 f"{open(self.log.name).read()[-2000:]}")
            time.sleep(0.1)
        raise SystemExit(f"{command[0]} was not ready after 300 s")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def engine_round(args):
    points = json.loads(output(args.kt, "bench", args.model, "--gpu", "off", "--threads", args.threads, "--prompt",
                               PROMPT, "--batch",
                               f"1,{args.streams}", "--tokens", args.tokens, "--repeat", 1, "--json"))["points"]
    return {point["batch"]: {"decode": point["decode_tokens_per_s"], "prefill": point["prefill_tokens_per_s"],
                             "outside_us": point["outside_of_steps_us"]} for point in points}


def answers_rate(args, figures):
    """Tokens of answers per second when prompts have to be read as well, as a server's do."""
    return args.tokens / (PROMPT / figures["prefill"] + args.tokens / figures["decode"])


def step_seconds(url):
    """Seconds in steps of the model so far; None from a server that does not say."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=10) as reply:
            found = dict(line.split(" ", 1) for line in reply.read().decode().splitlines()
                         if line.startswith("kt_step"))
        return float(found["kt_step_seconds_total"])
    except (OSError, KeyError):
        return None


def one_stream(args, url):
    load(args, url, 1)  # warm
    before = step_seconds(url)
    figures = load(args, url, 1)
    if before is not None:
        after = step_seconds(url)
        figures["outside_us"] = 1e6 * (figures["window_s"] - (after - before)) / figures["output_tokens"]
    return figures


def load(args, url, streams, errors=0):
    more = ["--errors", errors] if errors else []
    report = json.loads(output(args.kt, "bench", "--server", url, "--concurrency", streams, "--requests",
                               streams * 2 if streams > 1 else 4,
                               "--prompt", PROMPT if streams > 1 else SHORT_PROMPT, "--tokens", args.tokens, "--warmup",
                               0, "--json", *more))
    return report["points"][0] if "points" in report else report


def server_round(args, command, url):
    """Figures of one started server."""
    with Running(command, url):
        return {"one": one_stream(args, url), "all": load(args, url, args.streams),
                "errors": load(args, url, args.streams, ERRORS)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kt", default="build/bin/kt")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server")
    parser.add_argument("--json")
    args = parser.parse_args()
    total = args.streams * (PROMPT + args.tokens + 128)
    rounds = {"engine": [], "kt": [], "llama": []}
    for _ in range(args.rounds):
        rounds["engine"].append(engine_round(args))
        port = free_port()
        rounds["kt"].append(server_round(args, [args.kt, "run", args.model, "--gpu", "off", "--port", port,
                                                "--cpu-threads", args.threads,
                                                 "--max-running-requests", args.streams, "--max-total-tokens", total],
                                          f"http://127.0.0.1:{port}"))
    if args.llama_server:
        port = free_port()
        rounds["llama"].append(server_round(args, [args.llama_server, "-m", args.model, "--port", port, "-t",
                                                   args.threads, "-np",
                                                    args.streams, "-c", total, "--no-webui", "--skip-chat-parsing"],
                                            f"http://127.0.0.1:{port}"))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rounds, file, indent=1)
    report(args, rounds)


def middle(values):
    return statistics.median(list(values))


def report(args, rounds):
    alone = middle(1e6 / r[1]["decode"] for r in rounds["engine"])
    batch = middle(answers_rate(args, r[args.streams]) for r in rounds["engine"])
    print(f"{args.model}, {args.threads} threads, {args.streams} streams, {args.tokens} tokens, {args.rounds} rounds")
    print("| | one stream, us/token | outside of steps | all streams, tokens/s | of the engine | error p50 / p95 ms |")
    print("|---|---|---|---|---|---|")
    outside = middle(r[1]["outside_us"] for r in rounds["engine"])
    print(f"| engine alone | {alone:.0f} | {outside:.0f} us | {batch:.0f} | | |")
    for name in ("kt", "llama"):
        if not rounds[name]:
            continue
        one = middle(1e3 * r["one"]["tpot_ms"]["p50"] for r in rounds[name])
        every = middle(r["all"]["output_tokens_per_s"] for r in rounds[name])
        errors = [r["errors"]["errors"]["first_byte_ms"] for r in rounds[name]]
        late = f"{middle(e['p50'] for e in errors):.2f} / {middle(e['p95'] for e in errors):.2f}"
        outside = middle(r["one"].get("outside_us", 0) for r in rounds[name])
        own = outside - middle(r[1]["outside_us"] for r in rounds["engine"])
        over = f"{outside:.0f} us; server {own:.0f} us ({100 * own / one:.1f} %)" if name == "kt" else ""
        share = f"{100 * every / batch:.1f} %" if name == "kt" else ""
        print(f"| {'kt run' if name == 'kt' else 'llama-server'} | {one:.0f} | {over} | {every:.0f} | {share} "
              f"| {late} |")


if __name__ == "__main__":
    main()
