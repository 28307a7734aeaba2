"""Requests no client should send, and what a server may answer to them. A library: `fuzz()` sends, checks and reports.

The rule: every well-formed HTTP request gets a reply with a status of 2xx, 4xx, 501, 503 or 505 (another version of
HTTP); errors have OpenAI's shape; what is not HTTP gets such a reply or a closed connection."""
import collections
import copy
import dataclasses
import http.client
import json
import random
import socket
import threading
import time
import urllib.parse

import server_fuzz_bodies as bodies

ANSWER_SECONDS = 120


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict
    body: bytes


@dataclasses.dataclass
class Finding:
    case: str
    what: str
    request: bytes

    def __str__(self):
        return f"{self.case}: {self.what}; request ({len(self.request)} bytes): {self.request[:600]!r}"


@dataclasses.dataclass
class Report:
    seed: int
    sent: int = 0
    left_out: int = 0  # hand-written cases that a slow machine had no time for
    abandoned: int = 0  # replies that were still coming after ANSWER_SECONDS; the client hung up
    statuses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    findings: list = dataclasses.field(default_factory=list)
    times: list = dataclasses.field(default_factory=list)  # (seconds, case)

    def __str__(self):
        slowest = ", ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(self.times, reverse=True)[:6])
        statuses = ", ".join(f"{status} x {n}" for status, n in sorted(self.statuses.items(), key=str))
        return (f"seed {self.seed}: {self.sent} requests, {self.left_out} left out, {self.abandoned} abandoned, "
                f"{statuses}, {len(self.findings)} findings; "
                f"slowest: {slowest}")


class Closed(Exception):
    """The server closed the connection without a reply."""


def connect(url, timeout=ANSWER_SECONDS):
    at = urllib.parse.urlsplit(url)
    sock = socket.create_connection((at.hostname, at.port), timeout=timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _Kept:
    """A socket's file that outlives the reply read from it: the next reply may be in its buffer already."""

    def __init__(self, sock):
        self.file = sock.makefile("rb")

    def makefile(self, *_):
        return self

    def close(self):
        pass

    def __getattr__(self, name):
        return getattr(self.file, name)


def read_replies(sock, method="POST"):
    """Replies one after the other. Closed if there is no other; TimeoutError if one does not end in time."""
    kept = _Kept(sock)
    while True:
        reply = http.client.HTTPResponse(kept, method=method)
        try:
            reply.begin()
            body = reply.read()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            raise Closed(str(error)) from error
        except http.client.BadStatusLine as error:
            raise AssertionError(f"not HTTP: {error}") from error
        yield Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, body)


def read_reply(sock, method="POST"):
    return next(read_replies(sock, method))


def request_bytes(method, path, body=b"", headers=()):
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json",
             f"Content-Length: {len(body)}",
             *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(url, method, path, body=b"", headers=(), timeout=ANSWER_SECONDS):
    """One request over its own connection; a dict is sent as JSON."""
    if isinstance(body, (dict, list)):
        body = json.dumps(body).encode()
    end = time.monotonic() + timeout
    with connect(url, timeout) as sock:
        try:
            sock.sendall(request_bytes(method, path, body, [*headers, "Connection: close"]))
        except (BrokenPipeError, ConnectionResetError):
            pass  # answered before all was sent
        sock.settimeout(max(0.1, end - time.monotonic()))
        return read_reply(sock, method)


def refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def strict_json(data):
    return json.loads(data.decode("utf-8"), parse_constant=refuse_constant)


def events(body):
    """The data of server-sent events; [DONE] must be the last."""
    out = []
    for block in body.decode("utf-8").split("\n\n"):
        lines = [line[5:].strip() for line in block.split("\n") if line.startswith("data:")]
        if lines:
            out.append("\n".join(lines))
    return out


def complaint(reply, path=""):
    """What is wrong with a reply; None: nothing."""
    status = reply.status
    if not (200 <= status < 300 or 400 <= status < 500 or status in (501, 503, 505)):
        return f"status {status}: {reply.body[:300]!r}"
    kind = reply.headers.get("content-type", "")
    try:
        if status >= 400:
            if reply.body == b"" and reply.headers.get("content-length") == "0":
                return f"status {status} without a body"
            error = strict_json(reply.body)["error"]
            if not (isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)):
                return f"not OpenAI's error shape: {reply.body[:300]!r}"
            if not {"param", "code"} <= set(error):
                return f"param or code is missing: {reply.body[:300]!r}"
        elif kind.startswith("text/event-stream"):
            data = events(reply.body)
            if not data or data[-1] != "[DONE]":
                return f"a stream without [DONE]: {reply.body[-200:]!r}"
            for event in data[:-1]:
                strict_json(event.encode())
        elif kind.startswith("application/json"):
            strict_json(reply.body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{type(error).__name__} {error} in the body of {status}: {reply.body[:300]!r}"
    return None


def answer_of(url, headers=()):
    """A greedy completion that must be the same at any time."""
    body = {"prompt": "Once upon a time there was a little fox", "max_tokens": 24, "temperature": 0}
    reply = ask(url, "POST", "/v1/completions", body, headers, timeout=60)
    assert reply.status == 200, reply
    return strict_json(reply.body)["choices"][0]["text"]


# --- mutated JSON ----------------------------------------------------------------------------------------------------


def places(value, path=()):
    """Every path in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def put(value, path, new):
    if not path:
        return new
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


def delete(value, path):
    at = value
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    return value


def mutate_value(rng, value):
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        all_places = [path for path in places(value) if path]
        if not all_places:
            return value
        path = rng.choice(all_places)
        action = rng.randrange(10)
        if action < 7:
            value = put(value, path, rng.choice(bodies.VALUES)())
        elif action < 8:
            value = delete(value, path)
        elif isinstance(value, dict):
            name = rng.choice(("unknown", "", "\x00", "mödel", "max_tokens", "n", "stop", "tools",
                               "logit_bias", "$ref"))
            value[name] = rng.choice(bodies.VALUES)()
    return value


def mutate_text(rng, data):
    """Damage to the bytes of a JSON text."""
    data = bytearray(data)
    action = rng.randrange(8)
    at = rng.randrange(len(data)) if data else 0
    if action == 0:
        del data[at:]
    elif action == 1:
        data[at:at] = rng.choice((b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00", b"\\ud800",
                                  b"\xef\xbb\xbf"))
    elif action == 2:
        data[at] = rng.randrange(256)
    elif action == 3:
        data[at:at] = rng.choice((b"NaN", b"Infinity", b"-", b"1e400", b"0x10", b"'", b"/**/", b",", b"}",
                                  b"]", b"{", b"["))
    elif action == 4:
        digits = [i for i, c in enumerate(data) if 48 <= c <= 57]
        if digits:
            i = rng.choice(digits)
            data[i:i + 1] = rng.choice((b"1e400", b"-1", b"NaN", b"9" * 400, b"1e-400", b"0.1e+", b"00",
                                        b"18446744073709551616"))
    elif action == 5 and data[:1] == b"{":
        data[1:1] = rng.choice((b'"model":1,', b'"prompt":[],', b'"messages":null,', b'"max_tokens":-1,',
                                b'"stream":"yes",'))
    elif action == 6:
        data += rng.choice((b"{}", b"\x00", b" ", b"\n\n", b"]", b"garbage"))
    else:
        rng.shuffle(data)
    return bytes(data)


def json_case(rng):
    path, value = rng.choice(bodies.VALID)
    value = mutate_value(rng, value)
    data = json.dumps(value, allow_nan=True).encode()
    if rng.random() < 0.3:
        data = mutate_text(rng, data)
    return f"POST {path}", request_bytes("POST", path, data, ["Connection: close"])


# --- the run ---------------------------------------------------------------------------------------------------------


def check_json(url, name, raw, report):
    end = time.monotonic() + ANSWER_SECONDS
    try:
        with connect(url) as sock:
            try:
                sock.sendall(raw)
            except (BrokenPipeError, ConnectionResetError):
                pass
            sock.settimeout(max(0.1, end - time.monotonic()))
            reply = read_reply(sock)
    except Closed as error:
        return Finding(name, f"closed without a reply ({error})", raw)
    except TimeoutError:
        report.abandoned += 1
        return None
    except (AssertionError, http.client.HTTPException) as error:
        return Finding(name, f"{type(error).__name__}: {error}", raw)
    except OSError as error:
        return Finding(name, f"{error}", raw)
    report.statuses[reply.status] += 1
    what = complaint(reply)
    return Finding(name, what, raw) if what else None


def check_raw(url, case, report):
    """Bytes that are not quite HTTP: replies, if any, are errors or what the case allows."""
    statuses = []
    least, most = (min(map(len, case.wants)), max(map(len, case.wants))) if case.wants else (0, 1)
    try:
        with connect(url) as sock:
            try:
                for piece in case.pieces:
                    sock.sendall(piece)
            except OSError:
                pass
            # Patient where a reply must come; where none may, or no other, a moment shows what is wrong.
            sock.settimeout(ANSWER_SECONDS if least else 1)
            for reply in read_replies(sock, case.method):
                statuses.append(reply.status)
                sock.settimeout(ANSWER_SECONDS if len(statuses) < least else 1 if len(statuses) < most else 0.3)
                if case.method != "HEAD" and (what := complaint(reply)):
                    return Finding(case.name, what, b"".join(case.pieces))
    except (Closed, TimeoutError, OSError):
        pass
    except (AssertionError, http.client.HTTPException) as error:
        return Finding(case.name, f"{type(error).__name__}: {error}", b"".join(case.pieces))
    report.statuses.update(statuses or ["closed"])
    if case.wants is not None and statuses not in case.wants:
        return Finding(case.name, f"statuses {statuses}, expected one of {case.wants}", b"".join(case.pieces))
    return None


def fuzz(url, seed, seconds, count, threads=3):
    """Sends the hand-written cases once (four times `seconds` at most), then mutated ones until there were `count`
    requests or `seconds` are over."""
    report, lock = Report(seed), threading.Lock()
    fixed = [("json", name, request_bytes("POST", path, data, ["Connection: close"]))
             for name, path, data in bodies.hostile()]
    fixed += [("raw", case.name, case) for case in bodies.raw_cases()]
    random.Random(seed).shuffle(fixed)
    end = time.monotonic() + seconds

    def worker(number):
        rng = random.Random(seed * 1000 + number)
        while True:
            with lock:
                kind, name, case = fixed.pop() if fixed else ("random", "", None)
                if (time.monotonic() > (end if kind == "random" else end + 3 * seconds)
                    or (kind == "random" and report.sent >= count)):
                    report.left_out += len(fixed) + (kind != "random")
                    fixed.clear()
                    return
                report.sent += 1
            if kind == "random":
                name, case = json_case(rng)
            mine, start = Report(seed), time.monotonic()
            found = check_raw(url, case, mine) if kind == "raw" else check_json(url, name, case, mine)
            with lock:
                report.statuses.update(mine.statuses)
                report.abandoned += mine.abandoned
                report.times.append((time.monotonic() - start, name))
                if found:
                    report.findings.append(found)

    workers = [threading.Thread(target=worker, args=(i,)) for i in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    return report
