#!/usr/bin/env python3
"""A server under mixed clients for a long time: does it grow, does it slow down, does it ever answer wrongly?

    tools/soak.py [--seconds 600] [--clients 6] [--json FILE] [-- ARGUMENTS OF kt run]

Clients stream, cancel, send errors, ask for tools and schemas, send long prompts, and compare greedy answers with the
first ones. A sample of memory every two seconds. Exit status 1 when
  - memory grows steadily: a straight line fitted to the second half rises by more than 2 MiB over it, and each third of
    that half has a median above the one before; or by more than 64 MiB in whatever way;
  - the last minute's median time to first token is above 20 ms + twice the second minute's;
  - any reply is wrong, or requests, pages or connections are left over at the end, or the server ends.
Greedy answers are compared in f32: in bf16 a batch may decide between candidates that are nearly equal.
KT_PROGRAM names kt; build/bin/kt otherwise."""
import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import statistics
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("KT_PROGRAM", str(ROOT / "build" / "bin" / "kt"))
from server_fuzz import Closed, ask, complaint, connect, events, request_bytes, strict_json  # noqa: E402
from server_process import Server  # noqa: E402

SAMPLE_SECONDS = 2
STEADY_BYTES, ANY_BYTES = 2 << 20, 64 << 20
DRIFT_FACTOR, DRIFT_SECONDS = 2, 0.020
TIMEOUT = 120
GREEDY = ["Once upon a time there was a little fox", "The sun was", "In the garden",
          "A boy and his dog went to the river and"]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
          "required": ["ok", "size"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
WORDS = "time year people way day man thing woman life child world school family river garden stone".split()


class Wrong(Exception):
    """A reply that is not what was asked for."""


def want(condition, what):
    if not condition:
        raise Wrong(what)


class Client:
    """One of the clients: `once()` does one random thing and says which."""

    def __init__(self, url, seed, soak):
        self.url, self.rng, self.soak = url, random.Random(seed), soak
        self.kinds = {"greedy stream": (self.greedy, 6), "chat stream": (self.chat, 3), "cancel": (self.cancel, 3),
                      "error": (self.error, 3), "schema": (self.schema, 1), "tool": (self.tool, 1),
                      "long prompt": (self.long, 1),
                      "choices": (self.choices, 1), "tokenize": (self.tokenize, 2)}

    def once(self):
        names = list(self.kinds)
        name = self.rng.choices(names, [self.kinds[n][1] for n in names])[0]
        self.kinds[name][0]()
        return name

    def post(self, path, body):
        reply = ask(self.url, "POST", path, body, timeout=TIMEOUT)
        want(reply.status == 200, f"{path}: status {reply.status}: {reply.body[:300]!r}")
        want(complaint(reply) is None, f"{path}: {complaint(reply)}")
        return reply

    def greedy(self):
        """A stream, timed to its first text; always the same answer."""
        prompt = self.rng.choice(GREEDY)
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True}}
        start = time.monotonic()
        first = None
        with connect(self.url, TIMEOUT) as sock:
            sock.sendall(request_bytes("POST", "/v1/completions", json.dumps(body).encode(), ["Connection: close"]))
            raw = b""
            while piece := sock.recv(65536):
                raw += piece
                if first is None and b"data:" in raw:
                    first = time.monotonic()
        head, _, rest = raw.partition(b"\r\n\r\n")
        want(head.startswith(b"HTTP/1.1 200"), f"greedy stream: {head[:200]!r}")
        data = events(unchunked(rest))
        want(data and data[-1] == "[DONE]", f"greedy stream: no [DONE]: {raw[-200:]!r}")
        chunks = [json.loads(event) for event in data[:-1]]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        want(usage and usage[-1]["completion_tokens"] == 24, f"greedy stream: usage {usage}")
        self.soak.first_token(start, first - start)
        self.soak.same("stream " + prompt, text)

    def chat(self):
        body = {"messages": [{"role": "user", "content": self.rng.choice(GREEDY)}],
                "max_tokens": self.rng.randrange(1, 60),
                "temperature": 1.0, "seed": self.rng.randrange(1000), "stream": True}
        data = events(self.post("/v1/chat/completions", body).body)
        want(data[-1] == "[DONE]", "chat stream: no [DONE]")
        reasons = [choice["finish_reason"] for event in data[:-1] for choice in json.loads(event)["choices"]
                   if choice["finish_reason"]]
        want(len(reasons) == 1 and reasons[0] in ("stop", "length", "tool_calls"),
             f"chat stream: finish_reason {reasons}")

    def cancel(self):
        body = {"prompt": self.rng.choice(GREEDY), "max_tokens": 800, "stream": self.rng.random() < 0.7,
                "ignore_eos": True}
        with connect(self.url, TIMEOUT) as sock:
            sock.sendall(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
            if body["stream"]:
                want(sock.recv(4096).startswith(b"HTTP/1.1 200"), "cancel: no stream")
            time.sleep(self.rng.random() / 10)

    def error(self):
        path, body = self.rng.choice([
            ("/v1/completions", b"{"), ("/v1/completions", b'{"max_tokens": 3}'),
            ("/v1/chat/completions", b'{"messages": []}'),
            ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'), ("/v1/nothing", b"{}"),
            ("/detokenize", b'{"tokens": [-1]}'),
            ("/v1/completions", b'{"prompt": "\xff"}'), ("/v1/chat/completions", b"[" * 5000)])
        reply = ask(self.url, "POST", path, body, timeout=TIMEOUT)
        want(400 <= reply.status < 500, f"{path} {body[:40]!r}: status {reply.status}")
        want(complaint(reply) is None, f"{path}: {complaint(reply)}")

    def schema(self):
        body = {"messages": [{"role": "user", "content": "Is it ok?"}], "max_tokens": 60,
                "seed": self.rng.randrange(1000),
                "response_format": {"type": "json_schema",
                                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}
        choice = strict_json(self.post("/v1/chat/completions", body).body)["choices"][0]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            want(set(value) == {"ok", "size"} and isinstance(value["ok"], bool) and value["size"] in ("small", "large"),
                 f"schema: {value}")

    def tool(self):
        body = {"messages": [{"role": "user", "content": "Look."}], "max_tokens": 80, "tools": [TOOL],
                "tool_choice": "required",
                "seed": self.rng.randrange(1000)}
        reply = ask(self.url, "POST", "/v1/chat/completions", body, timeout=TIMEOUT)
        if reply.status == 400 and b"tool" in reply.body:
            return  # a model without a syntax for calls
        want(reply.status == 200, f"tool: status {reply.status}: {reply.body[:300]!r}")
        choice = strict_json(reply.body)["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                want(call["function"]["name"] == "look", f"tool: {call}")
                want(set(json.loads(call["function"]["arguments"])) == {"ok", "size"}, f"tool: {call}")

    def long(self):
        prompt = " ".join(self.rng.choice(WORDS) for _ in range(self.soak.long_words))
        usage = strict_json(self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4}).body)["usage"]
        want(usage["prompt_tokens"] >= self.soak.long_words // 2, f"long prompt: usage {usage}")

    def choices(self):
        body = {"prompt": self.rng.choice(GREEDY), "max_tokens": 6, "n": 3, "logprobs": 2, "temperature": 0.8,
                "stop": ["."]}
        choices = strict_json(self.post("/v1/completions", body).body)["choices"]
        want(sorted(choice["index"] for choice in choices) == [0, 1, 2], f"choices: {choices}")

    def tokenize(self):
        text = self.rng.choice(GREEDY)
        tokens = strict_json(self.post("/tokenize", {"prompt": text}).body)["tokens"]
        self.soak.same("tokens " + text, tokens)


def unchunked(data):
    out = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        n = int(size.split(b";")[0], 16)
        if n == 0:
            return out
        out += rest[:n]
        data = rest[n + 2:]
    raise Wrong("a stream without its final chunk")


class Soak:
    """What all clients share: counts, times, the first answer of each kind."""

    def __init__(self, long_words):
        self.long_words = long_words
        self.lock = threading.Lock()
        self.done, self.wrong, self.answers = collections.Counter(), [], {}
        self.first_tokens = []  # (seconds since the start, seconds)
        self.samples = []  # (seconds since the start, bytes)
        self.loads = []  # (seconds since the start, load average): other people's work on this machine shows here
        self.start = time.monotonic()

    def first_token(self, at, seconds):
        with self.lock:
            self.first_tokens.append((at - self.start, seconds))

    def same(self, key, value):
        with self.lock:
            first = self.answers.setdefault(key, value)
        want(first == value, f"{key}: {value!r}, at first {first!r}")

    def run_client(self, client, end):
        while time.monotonic() < end and len(self.wrong) < 50:
            try:
                name = client.once()
                with self.lock:
                    self.done[name] += 1
            except (Wrong, Closed, OSError, ValueError, KeyError, TypeError, IndexError) as error:
                with self.lock:
                    self.wrong.append(f"after {time.monotonic() - self.start:.0f} s: {type(error).__name__}: {error}")
                time.sleep(0.5)


def fit(points):
    """Slope of the straight line through (x, y) with the least squares."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (statistics.fmean(p[i] for p in points) for i in (0, 1))
    square = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / square if square else 0.0


def judge_memory(samples):
    half = samples[len(samples) // 2:]
    seconds = half[-1][0] - half[0][0] if len(half) > 1 else 0
    slope = fit(half)
    growth = slope * seconds
    third = max(1, len(half) // 3)
    medians = [statistics.median(y for _, y in half[i * third:(i + 1) * third] or half) for i in range(3)]
    steady = growth > STEADY_BYTES and medians[0] < medians[1] < medians[2]
    return {"start_mib": samples[0][1] / 2**20, "end_mib": samples[-1][1] / 2**20,
            "peak_mib": max(y for _, y in samples) / 2**20,
            "second_half_growth_mib": growth / 2**20, "second_half_mib_per_hour": slope * 3600 / 2**20,
            "ok": not steady and growth <= ANY_BYTES}


def judge_latency(times, loads, seconds):
    """The second minute against the last; of runs under three minutes the second sixth against the last."""
    window = min(60.0, seconds / 6)
    early = [t for at, t in times if window <= at < 2 * window]
    late = [t for at, t in times if at >= seconds - window]
    if not early or not late:
        return {"early_ms": None, "late_ms": None, "ok": False}
    before, after = statistics.median(early), statistics.median(late)
    load = [statistics.fmean([y for x, y in loads if low <= x < low + window] or [0.0])
            for low in (window, seconds - window)]
    return {"early_load": load[0], "late_load": load[1],
            "early_ms": 1000 * before, "late_ms": 1000 * after,
            "early_p90_ms": 1000 * sorted(early)[len(early) * 9 // 10],
            "late_p90_ms": 1000 * sorted(late)[len(late) * 9 // 10],
            "ok": after <= DRIFT_FACTOR * before + DRIFT_SECONDS}


def series(times, step=10):
    """Medians over every ten seconds, in ms."""
    bins = collections.defaultdict(list)
    for at, t in times:
        bins[int(at // step)].append(t)
    return [[step * i, round(1000 * statistics.median(bins[i]), 1)] for i in sorted(bins)]


def left_over(server, start, seconds=60):
    """Metrics that do not come back to where they were."""
    end = time.monotonic() + seconds
    while True:
        now = server.metrics()
        off = {name: [start.get(name), now.get(name)] for name in
               ("kt_requests_running", "kt_requests_waiting", "kt_kv_pages_held", "kt_http_connections")
               if now.get(name, 0) > start.get(name, 0)}
        if not off or time.monotonic() > end:
            return off
        time.sleep(0.5)


def touch_cache(url):
    """Fills the KV cache once. It is reserved from the start but takes memory only where it was used: else the first
    time that many long requests meet, minutes into the run, would look like growth."""
    size = strict_json(ask(url, "POST", "/tokenize", {"prompt": "a"}, timeout=TIMEOUT).body).get("max_model_len", 0)
    if size < 16:
        return
    bodies = [{"prompt": [3 + i] * (size - 8), "max_tokens": 4, "ignore_eos": True} for i in range(16)]
    threads = [threading.Thread(target=ask, args=(url, "POST", "/v1/completions", body), kwargs={"timeout": TIMEOUT})
               for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(server, args):
    soak = Soak(args.long_words)
    touch_cache(server.url)
    Client(server.url, 0, soak).post("/v1/completions", {"prompt": GREEDY[0], "max_tokens": 4})
    start_metrics = server.metrics()
    soak.start = time.monotonic()
    end = soak.start + args.seconds
    threads = [threading.Thread(target=soak.run_client, args=(Client(server.url, 1 + i, soak), end))
               for i in range(args.clients)]
    for thread in threads:
        thread.start()
    while (now := time.monotonic()) < end and server.alive() and any(t.is_alive() for t in threads):
        soak.samples.append((now - soak.start, server.rss()))
        soak.loads.append((now - soak.start, os.getloadavg()[0]))
        if sys.stderr.isatty():
            print(f"\r{now - soak.start:4.0f} s  {soak.samples[-1][1] / 2**20:7.1f} MiB  {sum(soak.done.values())} "
                  f"requests, {len(soak.wrong)} wrong ", end="", file=sys.stderr, flush=True)
        time.sleep(SAMPLE_SECONDS)
    for thread in threads:
        thread.join()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    report = {"seconds": args.seconds, "clients": args.clients, "requests": dict(soak.done), "wrong": soak.wrong,
              "alive": server.alive(),
              "memory": judge_memory(soak.samples),
              "first_token": judge_latency(soak.first_tokens, soak.loads, args.seconds),
              "left_over": left_over(server, start_metrics) if server.alive() else None,
              "first_token_series_ms": series(soak.first_tokens),
              "load_series": [[round(x), y] for x, y in soak.loads[::5]],
              "samples_mib": [[round(x, 1), round(y / 2**20, 2)] for x, y in soak.samples]}
    report["exit_code"] = server.stop()
    report["ok"] = bool(report["alive"] and report["exit_code"] == 0 and not report["wrong"] and not report["left_over"]
                        and report["memory"]["ok"] and report["first_token"]["ok"])
    return report


def table(report):
    def line(name, value, ok):
        return f"{name:<30}{value:<82}{'ok' if ok else 'FAILED'}"

    memory, first = report["memory"], report["first_token"]
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(report["requests"].items()))
    shown = "no figures" if first["early_ms"] is None else \
        f"{first['early_ms']:.1f} ms in minute 2 (load {first['early_load']:.1f}), {first['late_ms']:.1f} ms in the " \
        f"last (load {first['late_load']:.1f})"
    rows = [f"{sum(report['requests'].values())} requests in {report['seconds']:.0f} s by {report['clients']} "
            f"clients: {kinds}",
            line("wrong replies", str(len(report["wrong"])), not report["wrong"]),
            line("memory, MiB", f"{memory['start_mib']:.1f} at the start, {memory['end_mib']:.1f} at the end, "
                                f"peak {memory['peak_mib']:.1f}", True),
            line("growth over the second half", f"{memory['second_half_growth_mib']:+.2f} MiB, "
                 f"{memory['second_half_mib_per_hour']:+.1f} MiB/hour", memory["ok"]),
            line("time to first token (median)", shown, first["ok"]),
            line("left over at the end", str(report["left_over"] or "nothing"), not report["left_over"]),
            line("exit code", str(report["exit_code"]), report["alive"] and report["exit_code"] == 0)]
    return "\n".join([*rows, *report["wrong"][:10]])


def without_huge_pages():
    """From here on and in what is started. Else the kernel makes a huge page of a sparse heap when it finds the time,
    and memory rises by up to 2 MiB though nothing was allocated."""
    set_thp_disable = 41
    if ctypes.CDLL(None, use_errno=True).prctl(set_thp_disable, 1, 0, 0, 0) != 0:
        print(f"huge pages stay on: {os.strerror(ctypes.get_errno())}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--long-words", type=int, default=400, help="words of a long prompt")
    parser.add_argument("--json", type=pathlib.Path, help="write the report there")
    parser.add_argument("run", nargs="*", help="arguments of kt run; default: demo --max-running-requests 8 --acts f32")
    args = parser.parse_args()
    without_huge_pages()
    with Server(*(args.run or ["demo", "--max-running-requests", "8", "--acts", "f32"])) as server:
        report = run(server, args)
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
