"""A small server with the shape of OpenAI's API, for tests of clients: it streams words, and does on request what real
servers do when things go wrong."""
import http.server
import json
import threading
import time


class FakeServer:
    """Context manager. `seen` lists the bodies of completion requests. Switches: tokenize (None: 404, else the name of
    the text), usage, delay (seconds per token), fail (every so-manieth request gets 503), key."""

    def __init__(self, tokenize="prompt", usage=True, delay=0.0, fail=0, key=None):
        self.tokenize, self.usage, self.delay, self.fail, self.key = tokenize, usage, delay, fail, key
        self.seen, self.errors, self.lock = [], 0, threading.Lock()

    def __enter__(self):
        fake = self

        class Handler(_Handler):
            server_state = fake

        self.server = _Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_):
        pass  # a client that went away


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status, message):
        self.reply(status,
                   {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})

    def allowed(self):
        key = self.server_state.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.error(401, "wrong key")
        return False

    def do_GET(self):
        if not self.allowed():
            return
        if self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        else:
            self.error(404, "no such path")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.allowed():
            return
        try:
            asked = json.loads(body)
        except ValueError:
            with self.server_state.lock:
                self.server_state.errors += 1
            return self.error(400, "not JSON")
        if self.path == "/tokenize":
            return self.do_tokenize(asked)
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self.error(404, "no such path")
        with self.server_state.lock:
            self.server_state.seen.append(asked)
            number = len(self.server_state.seen)
        if self.server_state.fail and number % self.server_state.fail == 0:
            return self.error(503, "no room")
        self.stream(asked, chat="chat" in self.path)

    def do_tokenize(self, asked):
        name = self.server_state.tokenize
        if name is None:
            self.error(404, "no such path")
        elif name not in asked:
            self.error(400, f"{name} is missing")
        else:  # three tokens for two words
            self.reply(200, {"tokens": list(range(len(asked[name].split()) * 3 // 2))})

    def event(self, value):
        data = value if isinstance(value, str) else json.dumps(value)
        piece = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def stream(self, asked, chat):
        prompt = asked["messages"][-1]["content"] if chat else asked["prompt"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if chat:
                self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            for _ in range(asked["max_tokens"]):
                time.sleep(self.server_state.delay)
                self.event({"choices": [{"index": 0, "delta": {"content": "a "}}
                                        if chat else {"index": 0, "text": "a "}]})
            if self.server_state.usage:
                words = len(prompt.split()) * 3 // 2
                self.event({"choices": [], "usage": {"prompt_tokens": words, "completion_tokens": asked["max_tokens"]}})
            self.event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()
        except OSError:
            self.close_connection = True
