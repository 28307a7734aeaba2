"""A server for tests of the web page that says what a test wants to be said: the page's files as they lie in src/, a
chat that streams a script, and kt/status. Nothing of kt runs; what needs a real model asks a real server."""
import contextlib
import json
import pathlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = pathlib.Path(__file__).resolve().parent.parent / "src" / "server" / "page"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
          "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
STORY = ("Once upon a time there was a little fox who lived at the edge of a wood. Every evening she walked "
         "down to the river and looked at the lights of the village on the other side. ")


def words_of(text, size=6):
    return [{"content": text[at:at + size]} for at in range(0, len(text), size)]


class FakeServer:
    """script: deltas of the next answers; pause: seconds between them; refuse: (status, message) instead of an answer;
    fail_at: closes the connection after so many deltas. requests: the chat requests that came, with their headers."""

    def __init__(self, layers=5, experts=16, port=0):
        self.layers, self.experts = layers, experts
        self.reset()
        self.connections = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=lambda: self.http.serve_forever(poll_interval=0.02), daemon=True)
        self.thread.start()

    def reset(self):
        self.script, self.pause, self.refuse, self.fail_at = words_of(STORY * 3), 0.01, None, None
        self.finish, self.key, self.prefix = "stop", None, ""
        self.requests, self.running, self.steps = [], 0, 0
        return self

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
        for connection in list(self.connections):  # kept alive by the browser
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def status(self):
        def heat(layer, expert):
            return (layer * 7 + expert * 3 + self.steps) % 8 / 3.5
        busy = self.running > 0
        return {
            "model": "demo", "experts_format": "bf16", "isa": "neon", "threads": 2, "version": "0.1.0",
            "uptime_s": 61.0,
            "context": 1024, "running": self.running, "waiting": 0, "max_running": 8,
            "kv_tokens": {"total": 4096, "held": 1024, "cached": 512},
            "decode_tokens_per_s": 212.0 if busy else 0.0, "prefill_tokens_per_s": 0.0,
            "fraction_of_limit": 0.43 if busy else 0.0, "limit": "memory", "read_gb_per_s": 12.1 if busy else 0.0,
            "limit_read_gb_per_s": 27.0, "tokens_total": self.steps, "requests_total": len(self.requests),
            "experts": {"layers": list(range(1, self.layers + 1)), "experts": self.experts, "top_k": 4,
                        "tokens": 1 + self.steps,
                        "heat": [[heat(layer, e) for e in range(self.experts)] for layer in range(self.layers)]}}

    def _handler(fake):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def setup(self):
                super().setup()
                fake.connections.add(self.connection)

            def finish(self):
                fake.connections.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def answer(self, body, kind="application/json", status=200):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))),
                                    ("Content-Security-Policy", POLICY), ("X-Content-Type-Options", "nosniff")):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def refused(self):
                if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
                    return False
                self.answer({"error": {"message": "no API key"}}, status=401)
                return True

            def do_GET(self):
                if not self.path.startswith(fake.prefix):
                    return self.answer({"error": {"message": "outside the prefix"}}, status=404)
                name = self.path[len(fake.prefix):].split("?")[0].lstrip("/") or "index.html"
                if name == "health":
                    return self.answer({"status": "ok"})
                if name == "kt/status":
                    return None if self.refused() else self.answer(fake.status())
                if name == "v1/models":  # asked where the panel's figures are late
                    return (None if self.refused()
                            else self.answer({"object": "list", "data": [{"id": fake.status()["model"]}]}))
                file = PAGE / name
                if "/" in name or not file.is_file():
                    return self.answer({"error": {"message": "not found"}}, status=404)
                return self.answer(file.read_bytes(), TYPES[file.suffix])

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.refused():
                    return
                fake.requests.append(json.loads(body))
                if fake.refuse:
                    status, message = fake.refuse
                    return self.answer({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
                self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                fake.running += 1
                try:
                    self.stream()
                except OSError:
                    pass
                finally:
                    fake.running -= 1

            def event(self, value):
                self.wfile.write(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode())
                                 + b"\n\n")
                self.wfile.flush()

            def stream(self):
                for sent, delta in enumerate(fake.script):
                    if sent == fake.fail_at:
                        return
                    self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                    fake.steps += 1
                    time.sleep(fake.pause)
                self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": fake.finish}]})
                self.event({"choices": [], "usage": {"completion_tokens": len(fake.script)}})
                self.event(b"[DONE]")

        return Handler
