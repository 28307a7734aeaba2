"""A live server among bad clients: garbage, slow ones, ones that vanish or stop reading; keys; signals. KT_PROGRAM
names kt. KT_TEST_FULL lets the fuzzer run for minutes, KT_FUZZ_SEED sets its seed."""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import server_fuzz
from server_fuzz import Closed, answer_of, ask, complaint, connect, read_reply, request_bytes, strict_json
from server_process import KT, Server


def has_server():
    return bool(KT) and subprocess.run([KT, "run", "--help"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not has_server(), reason="KT_PROGRAM does not name a kt with the verb run")
RUNNING = 8
FULL = bool(os.environ.get("KT_TEST_FULL"))
SLACK = 32 << 20  # bytes by which memory may differ after a storm: stacks, arenas, buffers that are kept


@pytest.fixture(scope="module")
def server():
    with Server("demo", "--max-running-requests", RUNNING) as running:
        answer_of(running.url)
        yield running
        assert running.alive(), running.said()[-3000:]
        assert running.stop() == 0


def stream_body(tokens, prompt="Once upon a time", **fields):
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True, **fields}


def start_stream(url, tokens, receive_buffer=None, **fields):
    """A connection on which a stream was asked for."""
    sock = connect(url, timeout=300)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.sendall(request_bytes("POST", "/v1/completions", json.dumps(stream_body(tokens, **fields)).encode()))
    return sock


def read_until(sock, word):
    seen = b""
    while word not in seen:
        piece = sock.recv(65536)
        if not piece:
            raise Closed(f"closed before {word!r}: {seen[-300:]!r}")
        seen += piece
    return seen


def vanish(sock):
    """Closes with a reset, as a killed client or a lost network does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


QUIET = ("kt_requests_running", "kt_requests_waiting")


def wait_until_quiet(server, start=None, seconds=300):
    """The metrics once nothing runs or waits, and pages and connections are back at `start`'s."""
    wanted = {name: 0.0 for name in QUIET}
    for name in ("kt_kv_pages_held", "kt_http_connections"):
        if start:
            wanted[name] = start[name]
    end = time.monotonic() + seconds
    while True:
        now = server.metrics()
        off = {name: (now.get(name), value) for name, value in wanted.items() if now.get(name) is None
               or now[name] > value}
        if not off:
            return now
        assert time.monotonic() < end, f"after {seconds} s (now, expected): {off}"
        time.sleep(0.1)


def answered(url, tokens=4):
    """A short answer comes, however long a busy machine takes for it."""
    reply = ask(url, "POST", "/v1/completions", {"prompt": "a", "max_tokens": tokens, "temperature": 0}, timeout=300)
    assert reply.status == 200, reply


def test_fuzzer(server):
    seed = int(os.environ.get("KT_FUZZ_SEED", "1"))
    before = answer_of(server.url)
    report = server_fuzz.fuzz(server.url, seed, seconds=300 if FULL else 30, count=100_000 if FULL else 600)
    print(report)
    assert server.alive(), f"{report}; the server ended: {server.said()[-3000:]}"
    wait_until_quiet(server)
    assert answer_of(server.url) == before
    listed = "\n".join(str(finding) for finding in report.findings[:20])
    assert not report.findings, f"{report}\n{listed}"
    assert report.abandoned < 20, report


def test_errors_in_a_stream_request_are_plain_replies(server):
    reply = ask(server.url, "POST", "/v1/chat/completions", {"messages": [], "stream": True})
    assert 400 <= reply.status < 500 and complaint(reply) is None


def drip(sockets, stop, byte):
    """One byte to each now and then; what the server closed is dropped."""
    open_ones = list(sockets)
    while not stop.wait(0.2):
        for sock in list(open_ones):
            try:
                sock.send(byte)
            except OSError:
                open_ones.remove(sock)


def test_slow_loris_does_not_hold_up_others(server):
    """None of the slow ones comes to an end while others are answered: a server that reads one client at a time never
    would."""
    heads = [connect(server.url) for _ in range(60)]
    bodies = [connect(server.url) for _ in range(60)]
    stop = threading.Event()
    try:
        for sock in heads:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nX: ")
        for sock in bodies:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{")
        threads = [threading.Thread(target=drip, args=args) for args in ((heads, stop, b"x"), (bodies, stop, b" "))]
        for thread in threads:
            thread.start()
        for _ in range(20):
            answered(server.url)
        stop.set()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for sock in heads + bodies:
            sock.close()
    wait_until_quiet(server)


def vanishing_client(url, kind, rng):
    with contextlib.suppress(OSError, Closed):
        if kind == "at once":
            return vanish(connect(url))
        if kind == "in the head":
            sock = connect(url)
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
        elif kind == "in the body":
            sock = connect(url)
            sock.sendall(request_bytes("POST", "/v1/completions", b"x" * 4000)[:-2000])
        else:
            prompt = " ".join(rng.choice(("fox", "tree", "river", "stone")) for _ in range(rng.choice((5, 50, 200))))
            sock = start_stream(url, 600, prompt=prompt, n=rng.choice((1, 1, 3)))
            if kind == "in the stream":
                read_until(sock, b"data:")
                time.sleep(rng.random() / 5)
        if rng.random() < 0.5:
            vanish(sock)
        else:
            sock.close()


def test_200_clients_that_vanish_leave_nothing_behind(server):
    before = answer_of(server.url)
    start = wait_until_quiet(server)
    rss = server.rss()
    kinds = ["at once", "in the head", "in the body", "before the reply", "in the stream"] * 40
    rng = random.Random(1)
    rng.shuffle(kinds)
    queue, lock = list(kinds), threading.Lock()

    def worker(number):
        mine = random.Random(number)
        while True:
            with lock:
                if not queue:
                    return
                kind = queue.pop()
            vanishing_client(server.url, kind, mine)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_quiet(server, start)
    assert server.rss() < rss + SLACK, (rss, server.rss())
    assert answer_of(server.url) == before


def test_clients_that_stop_reading_hold_up_nobody(server):
    start = wait_until_quiet(server)
    # Some megabytes each: more than sockets hold.
    stalled = [start_stream(server.url, 800, receive_buffer=2048, logprobs=20, n=RUNNING // 4) for _ in range(2)]
    try:
        for sock in stalled:
            sock.recv(100)
        for _ in range(5):
            answered(server.url)
    finally:
        for sock in stalled:
            sock.close()
    wait_until_quiet(server, start)


def test_more_requests_than_run_at_once_all_get_their_answer():
    """Waiting ones come to their turn, and each answer is the one it would get alone: in f32 a batch changes logits by
    less than 1e-5 of their size, and no two candidates here are that close."""
    with Server("demo", "--max-running-requests", RUNNING, "--acts", "f32") as server:
        answers_do_not_depend_on_the_batch(server)


def answers_do_not_depend_on_the_batch(server):
    prompts = [f"Once upon a time number {i}" for i in range(3 * RUNNING)]

    def text(prompt):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        return strict_json(ask(server.url, "POST", "/v1/completions", body, timeout=600).body)["choices"][0]["text"]

    alone = [text(prompt) for prompt in prompts]
    together = [None] * len(prompts)

    def put(i):
        together[i] = text(prompts[i])

    threads = [threading.Thread(target=put, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


# --- who may talk to it ----------------------------------------------------------------------------------------------

ENDPOINTS = [("GET", "/"), ("GET", "/metrics"), ("GET", "/v1/models"),
             ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}),
             ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
             ("POST", "/v1/embeddings", {"input": "a"}),
             ("POST", "/tokenize", {"prompt": "a", "content": "a", "text": "a"}),
             ("POST", "/detokenize", {"tokens": [1]}), ("GET", "/nowhere"), ("POST", "/v1/messages", {}),
             ("GET", "/health/x"),
             ("GET", "//health"), ("GET", "/metrics/"), ("GET", "/v1/models/demo")]


def test_key_guards_every_endpoint_but_health():
    key = "s3cret-key"
    with Server("demo", "--api-key", key, key=key) as server:
        assert ask(server.url, "GET", "/health").status == 200
        for method, path, *body in ENDPOINTS:
            for headers in ([], ["Authorization: Bearer wrong"], [f"Authorization: Bearer {key}x"],
                            [f"Authorization: Bearer {key[:-1]}"],
                            ["Authorization: Bearer "], ["Authorization:"], [f"Authorization: Basic {key}"],
                            [f"X-Key: {key}"],
                            ["Authorization: Bearer " + "k" * 8000]):
                reply = ask(server.url, method, path, *body, headers=headers)
                assert reply.status == 401, (method, path, headers, reply)
                assert complaint(reply) is None, (method, path, headers, complaint(reply))
            reply = ask(server.url, method, path, *body, headers=[f"Authorization: Bearer {key}"])
            assert reply.status != 401 and complaint(reply) is None, (method, path, reply.status, complaint(reply))
            if path in ("/", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize",
                        "/detokenize"):
                assert reply.status == 200, (method, path, reply)
        assert key not in server.said()
        # A body without the key is refused before it is read.
        with connect(server.url) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
            assert read_reply(sock).status == 401


def listening(pid):
    """Local addresses, in hexadecimal, on which a process listens."""
    inodes = set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for table in ("tcp", "tcp6")
            for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_only_loopback_listens_by_default(server):
    loopback = {"0100007F", "00000000000000000000000001000000"}
    if sys.byteorder == "big":
        loopback = {"7F000001", "00000000000000000000000000000001"}
    found = listening(server.pid)
    assert found and set(found) <= loopback


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number):
    with Server("demo", "--max-running-requests", RUNNING) as server:
        idle = connect(server.url)  # must not hold up the end
        streams = [start_stream(server.url, 600, stream_options={"include_usage": True}) for _ in range(2)]
        seen = [read_until(sock, b"data:") for sock in streams]
        server.process.send_signal(number)
        with contextlib.suppress(Closed, ConnectionError):
            while (reply := ask(server.url, "GET", "/v1/models", timeout=300)).status == 200:
                time.sleep(0.02)  # the signal has not arrived yet
            assert reply.status == 503 and complaint(reply) is None
        for i, sock in enumerate(streams):
            seen[i] += read_until(sock, b"[DONE]") if b"[DONE]" not in seen[i] else b""
            assert b'"completion_tokens":600' in seen[i].replace(b" ", b""), seen[i][-500:]
        assert server.process.wait(300) == 0, server.said()[-2000:]
        assert re.search(r"served \d{4} tokens; a layer used \d+\.\d of 16 experts", server.said()), server.said()
        for sock in (*streams, idle):
            sock.close()


def test_a_second_signal_ends_it_at_once():
    """Before the answers that it was to wait for: some of them are cut. On a busy machine they may be whole before the
    signal is sent, not again and again."""
    assert any(second_signal_cuts() for _ in range(20))


def second_signal_cuts():
    with Server("demo", "--max-running-requests", RUNNING) as server:
        streams = [start_stream(server.url, 900, n=RUNNING // 4) for _ in range(4)]
        seen = [read_until(sock, b"data:") for sock in streams]
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(Closed, ConnectionError):
            while ask(server.url, "GET", "/v1/models", timeout=300).status == 200:
                time.sleep(0.02)  # the first has not arrived yet
        if server.alive():
            server.process.send_signal(signal.SIGTERM)
        server.process.wait(300)
        for i, sock in enumerate(streams):
            with contextlib.suppress(Closed, OSError):
                seen[i] += read_until(sock, b"[DONE]")
            sock.close()
        return not all(b"[DONE]" in reply for reply in seen)


def test_a_signal_to_an_idle_server_ends_it_soon():
    with Server("demo") as server:
        assert server.stop() == 0


def test_two_servers_on_one_port_is_one_line_and_exit_code_2(server):
    port = server.url.rsplit(":", 1)[1]
    result = subprocess.run([KT, "run", "demo", "--port", port], capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith("kt: ") and port in line


def test_a_model_file_that_shrinks_under_a_server(tmp_path):
    """Rows of the embedding are read from the file as tokens need them: a download over it was the end of the
    server."""
    model = tmp_path / "model"
    shutil.copytree(pathlib.Path(__file__).parent.parent / "demo" / "tiny-deepseekv3", model)
    prompt = {"prompt": "Once upon a time there was a little fox", "max_tokens": 24}
    with Server(model) as running:
        answer_of(running.url)
        for shard in model.glob("*.safetensors"):
            os.truncate(shard, 4096)
        for _ in range(3):
            reply = ask(running.url, "POST", "/v1/completions", prompt, timeout=60)
            assert reply.status == 503, reply
            assert str(model) in strict_json(reply.body)["error"]["message"]
        health = ask(running.url, "GET", "/health", timeout=60)
        assert health.status == 503 and str(model) in health.body.decode()
        assert ask(running.url, "GET", "/metrics", timeout=60).status == 200
        assert running.alive(), running.said()[-3000:]
        assert str(model) in running.stderr_path.read_text()
        assert running.stop() == 2  # and says why
