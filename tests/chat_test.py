"""`kt chat` from outside: on a terminal (tmux types and looks at the screen), through a pipe, with the demo model in
its own process and with a small server that speaks the API.

KT_PROGRAM names kt. What needs a terminal skips without tmux."""
import http.server
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from server_process import KT, Server
from tmux_pane import PATIENCE, Pane, on_terminal

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "demo" / "tiny-deepseekv3")


# --- a server that speaks the API ------------------------------------------------------------------------------------

class Api(http.server.BaseHTTPRequestHandler):
    """Echoes, or does what the last message says: think, slow, refuse, break, error, length, escape."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        key = self.server.key
        if not key or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {"error": {"message": "a key is needed"}})
        return False

    def do_GET(self):
        if self.allowed():
            self.reply(200, {"object": "list", "data": [{"id": "echo-1", "max_model_len": 2048}, {"id": "echo-2"}]})

    def event(self, value):
        data = (f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n").encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def piece(self, finish=None, **delta):
        self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        if not self.allowed():
            return
        message = request["messages"][-1]["content"]
        if message == "refuse":
            return self.reply(400, {"error": {"message": "no room for that\nat all"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.piece(role="assistant", content="")
        try:
            self.answer(message, request)
        except OSError:
            self.server.gone.set()

    def answer(self, message, request):
        if message == "slow":
            for number in range(1200):
                self.piece(content=f"tick{number} ")
                time.sleep(0.05)
        if message == "break":
            self.piece(content="half an ans")
            self.close_connection = True
            return
        if message == "error":
            self.event({"error": {"message": "the model is gone"}})
        if message == "think":
            self.piece(reasoning_content="let me ")
            self.piece(reasoning_content="see")
        if message == "escape":
            self.piece(content="a\x1b]0;title\x07b")
        self.piece(content="you said: ")
        self.piece(content=message)
        self.piece(finish="length" if message == "length" else "stop")
        if request.get("stream_options", {}).get("include_usage"):
            self.event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}})
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def api():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.daemon_threads = True
    server.requests, server.gone, server.key = [], threading.Event(), None
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


# --- through a pipe --------------------------------------------------------------------------------------------------

def chat(tmp_path, *args, typed, **env):
    return subprocess.run([KT, "chat", *args], input=typed, capture_output=True, text=True, timeout=PATIENCE * 4,
                          env={**os.environ, "KT_HOME": str(tmp_path), **env})


def refused(result, code, *words):
    assert result.returncode == code, (result.returncode, result.stderr)
    (line,) = result.stderr.splitlines()
    assert line.startswith("kt: ") and all(word in line for word in words), line


def test_help_has_examples():
    result = subprocess.run([KT, "chat", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "Examples:" in result.stdout


class TestPipe:
    def test_lines_are_messages_of_one_conversation(self, api, tmp_path):
        result = chat(tmp_path, "--url", api.url, "--system", "be kind", typed="hello\n\n/help\nwörld\n")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "you said: hello\nyou said: /help\nyou said: wörld\n"
        assert [m["content"] for m in api.requests[-1]["messages"]] == [
            "be kind", "hello", "you said: hello", "/help", "you said: /help", "wörld"]
        assert api.requests[0]["model"] == "echo-1" and api.requests[0]["stream"] is True
        assert not (tmp_path / "chat_history").exists()

    def test_options_reach_the_server(self, api, tmp_path):
        chat(tmp_path, "--url", api.url + "/v1/", "--model", "echo-2", "--temperature", "0.25", "--top-p", "0.5",
             "--top-k", "3", "--max-tokens", "9", "--seed", "5", typed="hello\n")
        request, = api.requests
        assert {key: request[key] for key in ("model", "temperature", "top_p", "top_k", "max_tokens", "seed")} == {
            "model": "echo-2", "temperature": 0.25, "top_p": 0.5, "top_k": 3, "max_tokens": 9, "seed": 5}

    def test_json(self, api, tmp_path):
        result = chat(tmp_path, "--url", api.url, "--json", typed="think\nlength\n")
        first, second = map(json.loads, result.stdout.splitlines())
        assert first["content"] == "you said: think" and first["reasoning_content"] == "let me see"
        assert first["finish_reason"] == "stop" and first["prompt_tokens"] == 10 and first["completion_tokens"] == 4
        assert second["finish_reason"] == "length" and "reasoning_content" not in second
        assert first["seconds"] >= first["seconds_to_first"] > 0

    def test_thinking_is_not_the_answer(self, api, tmp_path):
        assert chat(tmp_path, "--url", api.url, typed="think\n").stdout == "you said: think\n"

    @pytest.mark.parametrize("typed, said", [("refuse", "no room for that at all"), ("error", "the model is gone"),
                                             ("break", "")])
    def test_errors_end_it_with_one_line(self, api, tmp_path, typed, said):
        result = chat(tmp_path, "--url", api.url, typed=f"hello\n{typed}\nhello\n")
        refused(result, 2, said)
        assert result.stdout.startswith("you said: hello\n") and result.stdout.count("you said") == 1

    def test_keys(self, api, tmp_path):
        api.key = "secret"
        refused(chat(tmp_path, "--url", api.url, typed="hello\n"), 2, "401", "--api-key")
        assert chat(tmp_path, "--url", api.url, "--api-key", "secret", typed="hello\n").returncode == 0
        assert chat(tmp_path, "--url", api.url, typed="hello\n", KT_API_KEY="secret").returncode == 0

    def test_no_server(self, tmp_path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        refused(chat(tmp_path, "--url", url, typed="hello\n"), 2, "kt run", url)

    def test_settings(self, api, tmp_path):
        (tmp_path / "config.yaml").write_text(f"chat:\n  url: {api.url}\n  system: from the file\n  "
                                              "temperature: 0.125\n")
        assert chat(tmp_path, typed="hello\n").returncode == 0
        assert api.requests[0]["messages"][0]["content"] == "from the file" and api.requests[0]["temperature"] == 0.125

    @pytest.mark.parametrize("args, reason", [
        (["demo", "--url", "http://127.0.0.1:1"], "--url"), (["--temperature", "-1"], "temperature"),
        (["--url", "https://localhost"], "https"), (["no-such-model"], "no-such-model")])
    def test_bad_usage(self, tmp_path, args, reason):
        refused(chat(tmp_path, *args, typed="hello\n"), 2, reason)

    def test_model_in_this_process(self, tmp_path):
        def run(typed):
            result = chat(tmp_path, DEMO, "--temperature", "0", "--max-tokens", "40", "--json", typed=typed)
            assert result.returncode == 0, result.stderr
            return [json.loads(line) for line in result.stdout.splitlines()]

        first, second, third = run("Tell me a story about a fox.\nAnd then?\nWhy?\n")
        assert first["content"] and first["completion_tokens"] <= 40 and first["model"] == "tiny-deepseekv3"
        assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]
        # The turns before are in the cache, in whole pages of 64 tokens.
        assert first["cached_tokens"] == 0 and third["prompt_tokens"] > third["cached_tokens"] >= 64
        assert run("Tell me a story about a fox.\n")[0]["content"] == first["content"]

    def test_full_context(self, tmp_path):
        result = chat(tmp_path, DEMO, "--max-total-tokens", "64", typed="fox " * 200 + "\n")
        refused(result, 2, "64")


def test_the_real_server_answers_as_the_model_in_this_process(tmp_path):
    args = ("--temperature", "0", "--max-tokens", "40", "--json")
    typed = "Tell me a story about a fox.\nAnd then?\n"
    with Server(DEMO) as server:
        result = chat(tmp_path, "--url", server.url, *args, typed=typed)
    assert result.returncode == 0, result.stderr
    served = [json.loads(line) for line in result.stdout.splitlines()]
    here = [json.loads(line) for line in chat(tmp_path, DEMO, *args, typed=typed).stdout.splitlines()]
    for ours, theirs in zip(here, served, strict=True):
        assert all(ours[key] == theirs[key]
                   for key in ("content", "finish_reason", "prompt_tokens", "completion_tokens"))


# --- on a terminal ---------------------------------------------------------------------------------------------------

@pytest.fixture
def pane(tmp_path):
    opened = []

    def open_pane(*args, **more):
        opened.append(Pane(tmp_path, "chat", *args, **more))
        return opened[-1]

    yield open_pane
    for each in opened:
        each.close()


@on_terminal
class TestTerminal:
    def test_demo_conversation(self, pane, tmp_path):
        p = pane("demo", "--max-tokens", "30", "--temperature", "0.9")
        p.prompt()
        p.say("Tell me about a fox.")
        p.wait(r"^> Tell me about a fox\.\n\S.*[^$]*^>\s*\Z")
        p.say("/help")
        p.wait(r"^/retry +another answer")
        p.prompt()
        p.say("/retry")
        p.wait(r"^> /retry\n\S.*[^$]*^>\s*\Z")
        p.say("/history")
        assert len(re.findall(r"^you: ", p.wait(r"^model: "), re.MULTILINE)) == 1
        p.say("/info")
        p.wait(r"^context:  \d+ of 1024 tokens")
        p.wait(r"tokens/s")
        p.say("/hlep")
        p.wait(r"did you mean /help\?")
        p.say("/quit")
        p.ended(0)
        assert (tmp_path / "chat_history").read_text().splitlines()[:2] == ["Tell me about a fox.", "/help"]
        assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600

    def test_stops_the_demo(self, pane):
        p = pane("demo", "--max-tokens", "900", "--temperature", "1.5", "--seed", "3")
        p.prompt()
        for _ in range(40):  # an answer may be over before the key arrives
            p.say("Tell me a long story.")
            p.wait(r"^> Tell me a long story\.\n\S")
            p.send("C-c")
            p.prompt()
            if "(stopped)" in p.everything():
                break
        assert "(stopped)" in p.everything()
        p.send("C-d")
        p.ended(0)

    def test_ctrl_c_stops_the_answer_and_keeps_it(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.say("slow")
        p.wait("tick3 ")
        p.type("typed ahead")
        p.send("C-c")
        p.wait(r"^\(stopped\)\n> typed ahead")
        assert api.gone.wait(PATIENCE)  # the server sees it
        p.send("C-u")
        p.say("hello")
        p.wait("you said: hello")
        assert api.requests[-1]["messages"][1]["content"].startswith("tick0 tick1 tick2 ")

    def test_ctrl_c_at_the_prompt(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.type("some words")
        p.wait("^> some words$")
        p.send("C-c")
        p.prompt()
        p.send("C-c")
        p.wait(r"^\(Ctrl-C again or Ctrl-D leaves\)$")
        p.prompt()
        p.send("C-c")
        p.ended(130)

    def test_errors_leave_the_conversation(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.say("hello")
        p.wait("you said: hello")
        p.say("refuse")
        p.wait(r"^kt: http://.*: 400 Bad Request: no room for that at all$")
        p.say("again")
        p.wait("you said: again")
        assert [m["content"] for m in api.requests[-1]["messages"]] == ["hello", "you said: hello", "again"]

    def test_what_others_write_is_not_obeyed(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.say("escape")
        p.wait(r"^a\]0;titlebyou said: escape$")

    def test_thinking_is_set_apart(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.say("think")
        p.wait(r"^let me see\n\nyou said: think$")
        assert "\x1b[2mlet me see" in p.tmux("capture-pane", "-p", "-e")
        p = pane("--url", api.url, env={"NO_COLOR": "1"})
        p.prompt()
        p.say("think")
        p.wait(r"^\[thinking\]\nlet me see\n\[answer\]\nyou said: think$")
        assert "\x1b[" not in p.tmux("capture-pane", "-p", "-e")

    def test_history_and_search(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        for message in ("first words", "second words"):
            p.say(message)
            p.wait(f"you said: {message}")
        p.type("draft")
        p.send("Up", "Up")
        p.wait("^> first words$", times=2)
        p.send("Down", "Down")
        p.wait(r"^> draft\s*\Z")
        p.send("C-r")
        p.type("fir")
        p.wait(r"^\(search: fir\) first words")
        p.send("Enter")
        p.wait("you said: first words", times=2)
        p.send("C-d")
        p.ended(0)
        p = pane("--url", api.url)  # the next chat remembers
        p.prompt()
        p.send("Up")
        p.wait("^> first words")

    def test_several_lines(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.say("one\\")
        p.wait(r"^\.\s*\Z")
        p.say("two")
        p.wait(r"^you said: one\ntwo$")
        p.say('"""')
        p.wait(r'^> """\n\.')
        p.say("three")
        p.wait(r"^\. three\n\.")
        p.say('four"""')
        p.wait(r"^you said: three\nfour$")
        p.type("five")
        p.send("Escape", "Enter")
        p.wait(r"^> five\n\.")
        p.say("six")
        p.wait(r"^you said: five\nsix$")
        p.tmux("set-buffer", "seven\neight\n")
        p.tmux("paste-buffer", "-p")
        p.wait(r"^> seven\n\. eight\n\.")
        p.send("Enter")
        p.wait(r"^you said: seven\neight$")
        assert api.requests[-1]["messages"][-1]["content"] == "seven\neight"

    def test_completion(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        p.type("/ret")
        p.send("Tab")
        p.wait("^> /retry")
        p.send("C-u")
        p.type("/h")
        p.send("Tab")
        p.wait(r"^/help  /history\n> /h$")

    def test_twenty_columns_and_resizing(self, api, pane):
        p = pane("--url", api.url, width=20, height=12)
        p.prompt()
        line = "日本語 and a line that takes several rows of it"
        p.type(line)
        p.wait(r"of it\s*\Z")
        p.send("C-a")
        p.type("X")
        p.wait("^> X日本語")
        p.tmux("resize-window", "-x", "50", "-y", "12")
        p.wait("^> X" + line + r"\s*\Z")
        p.tmux("resize-window", "-x", "24", "-y", "12")
        p.wait("^> X日本語 and a line tha$")
        text = p.text()
        assert text.count("X日本語") == 1, text
        p.send("C-e")
        p.say("!")
        p.wait("you said: X日本語")
        assert api.requests[-1]["messages"][-1]["content"] == "X" + line + "!"

    def test_the_terminal_is_given_back_to_a_killed_chats_shell(self, api, pane):
        p = pane("--url", api.url)
        p.prompt()
        shell = int(p.tmux("list-panes", "-F", "#{pane_pid}"))
        child = int(subprocess.run(["ps", "-o", "pid=", "--ppid", str(shell)], capture_output=True, text=True).stdout)
        os.kill(child, signal.SIGTERM)
        p.ended(128 + signal.SIGTERM)

    def test_dumb_terminal(self, api, pane):
        p = pane("--url", api.url, term="dumb")
        p.wait(r"^>\s*\Z")
        p.say("one\\")
        p.wait(r"^\.\s*\Z")
        p.say("two")
        p.wait(r"^you said: one\ntwo$")
        p.say("/quit")
        p.ended(0)

    def test_save_and_load(self, api, pane, tmp_path):
        p = pane("--url", api.url)
        p.prompt()
        p.say("hello")
        p.wait("you said: hello")
        p.say(f"/save {tmp_path}/chat.json")
        p.wait("2 messages are in")
        p.say("/clear")
        p.say(f"/load {tmp_path}/chat.json")
        p.wait("2 messages from")
        p.say("more")
        p.wait("you said: more")
        assert [m["content"] for m in api.requests[-1]["messages"]] == ["hello", "you said: hello", "more"]
        p.say("/set temperature 0.5")
        p.say("warm")
        p.wait("you said: warm")
        assert api.requests[-1]["temperature"] == 0.5
