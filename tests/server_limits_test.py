"""What large, leaving and half-closed clients cost a `kt run` server, and those beside them.

KT_PROGRAM names kt."""
import json
import pathlib
import socket
import sys
import threading
import time
import urllib.parse

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT
from server_fuzz import ask, connect, read_reply, request_bytes
from server_process import Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
MIB = 1 << 20


@pytest.fixture(scope="module")
def server():
    with Server("demo", "--max-running-requests", "2") as running:
        yield running


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def send_at_once(server, path, body, count):
    """Statuses of that many equal requests."""
    statuses = [None] * count

    def send(i):
        statuses[i] = ask(server.url, "POST", path, body, timeout=300).status
    threads = [threading.Thread(target=send, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


@pytest.mark.parametrize("what", ["parts", "words"])
def test_refused_bodies_leave_no_memory(server, what):
    """Both kinds are far longer than the context: a great many values, and one long text."""
    if what == "parts":
        content = [{"type": "text", "text": "x" * 20}] * 150_000
    else:
        content = "fox " * (3 * MIB)
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    assert len(body) < 16 * MIB
    send_at_once(server, "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
                 16)
    before = server.rss()
    for _ in range(2):
        assert set(send_at_once(server, "/v1/chat/completions", body, 6)) == {400}
    wait_for(lambda: server.rss() < before + 64 * MIB)


def test_health_does_not_wait_behind_large_texts(server):
    """More of them than there are threads: those that were handled first must not all have to end."""
    body = json.dumps({"prompt": "a" * MIB}).encode()
    ended = []

    def send(sock):
        ended.append(read_reply(sock).status)
        sock.close()
    sockets = [connect(server.url, 300) for _ in range(24)]
    for sock in sockets:
        sock.sendall(request_bytes("POST", "/tokenize", body))
    threads = [threading.Thread(target=send, args=(sock,)) for sock in sockets]
    for thread in threads:
        thread.start()
    for path in ("/health", "/metrics", "/kt/status", "/v1/models"):
        assert ask(server.url, "GET", path, timeout=300).status == 200
    assert len(ended) < 8
    # Nor does a small request.
    assert ask(server.url, "POST", "/tokenize", {"prompt": "a"}, timeout=300).status == 200
    assert len(ended) < 8
    for thread in threads:
        thread.join()
    assert set(ended) == {200}


def test_clients_that_leave_are_counted_apart(server):
    def replies(status):
        return server.metrics().get(f'kt_http_replies_total{{status="{status}"}}', 0)
    left, overloaded = replies(499), replies(503)
    body = json.dumps({"prompt": "Once", "max_tokens": 900, "ignore_eos": True}).encode()
    for _ in range(3):
        with connect(server.url) as sock:
            sock.sendall(request_bytes("POST", "/v1/completions", body))
            wait_for(lambda: server.metrics()["kt_requests_running"] == 1)
        wait_for(lambda: server.metrics()["kt_requests_running"] == 0)
    wait_for(lambda: replies(499) == left + 3)
    assert replies(503) == overloaded


@pytest.mark.parametrize("head", ["HTTP/1.1\r\nHost: localhost", "HTTP/1.1\r\nHost: localhost\r\nConnection: close",
                                  "HTTP/1.0"])
def test_half_closed_clients_get_their_answer(server, head):
    where = urllib.parse.urlsplit(server.url)
    body = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "temperature": 0}).encode()
    with socket.create_connection((where.hostname, where.port), timeout=120) as sock:
        sock.sendall(f"POST /v1/completions {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        sock.shutdown(socket.SHUT_WR)
        got = b""
        while piece := sock.recv(1 << 16):
            got += piece
    final = got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert final.startswith(b"HTTP/1.1 200 "), got[:200]
    answer = json.loads(final.split(b"\r\n\r\n", 1)[1])
    assert answer["usage"]["completion_tokens"] == 200
