"""Who may use `kt run`: keys from wherever they stand, names of the server, and what it says where anyone may.

KT_PROGRAM names kt."""
import http.client
import os
import pathlib
import pty
import re
import signal
import socket
import sys
import time
import urllib.parse

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, kt
from server_process import Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
READ = ("/", "/v1/models", "/v1/models/demo", "/kt/status", "/metrics", "/page.js")
WRITE = {"/v1/completions": b'{"prompt": "Once", "max_tokens": 1}', "/tokenize": b'{"prompt": "Once"}'}


def ask(server, path, host=None, body=None, key=None, origin=None):
    """The status that a request for the server's port gets under some other name."""
    where = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=60)
    headers = {"Host": host or where.netloc}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if origin:
        headers["Origin"] = origin
    connection.request("POST" if body else "GET", path, body, headers)
    reply = connection.getresponse()
    return reply.status, reply.read()


def check_hosts(server, key=None):
    for path in READ:
        assert ask(server, path, key=key)[0] == 200, path
        status, reply = ask(server, path, "evil.example", key=key)
        assert status == 403 and b"evil.example" in reply, path
    for path, body in WRITE.items():
        assert ask(server, path, None, body, key)[0] == 200, path
        assert ask(server, path, "evil.example:80", body, key)[0] == 403, path
        assert ask(server, path, "evil.example", body, key, origin="http://evil.example")[0] == 403, path
    for name in ("localhost", "127.0.0.1:1", "[::1]", "10.0.0.1", socket.gethostname()):
        assert ask(server, "/v1/models", name, key=key)[0] == 200, name
    assert ask(server, "/health", "evil.example")[0] == 200


def test_names_on_loopback():
    with Server("demo") as server:
        check_hosts(server)
        assert "warning" not in server.said()


def test_open_to_all_without_a_key_is_said_in_one_line():
    with Server("demo", "--host", "0.0.0.0", "--allow-host", "models.example", "--allow-host", "m") as server:
        warning, = (line for line in server.stderr_path.read_text().splitlines() if "warning" in line)
        assert warning.startswith("kt: warning: ") and "0.0.0.0" in warning and "--api-key-file" in warning
        check_hosts(server)
        assert ask(server, "/metrics", "models.example:30000")[0] == ask(server, "/metrics", "m")[0] == 200


def test_a_key_from_a_file(tmp_path):
    (tmp_path / "key").write_text("# of the team\nsesame\n\nopen\n")
    (tmp_path / "key").chmod(0o600)
    with Server("demo", "--host", "0.0.0.0", "--api-key-file", tmp_path / "key", key="sesame") as server:
        assert "warning" not in server.said() and "sesame" not in server.said()
        assert ask(server, "/v1/models")[0] == 401
        check_hosts(server, "sesame")
        assert (ask(server, "/v1/models", key="open")[0] == 200
                and ask(server, "/v1/models", key="# of the team")[0] == 401)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_keys_are_read_again(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    keys.chmod(0o644)
    with Server("demo", "--api-key-file", keys, key="old") as server:
        warning, = (line for line in server.stderr_path.read_text().splitlines() if "warning" in line)
        assert f"every user of this machine can read {keys}" in warning
        keys.write_text("new\n")
        keys.chmod(0o600)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: f"read {keys} again" in server.said())
        assert ask(server, "/v1/models", key="new")[0] == 200 and ask(server, "/v1/models", key="old")[0] == 401
        keys.write_text("# nobody\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "goes on" in server.said())
        assert ask(server, "/v1/models", key="new")[0] == 200 and ask(server, "/v1/models")[0] == 401
        said = server.said()
        assert said.count("warning") == 2 and "the key is blank" in said


def test_a_terminal_that_goes_takes_its_server_along(tmp_path):
    """The same signal as for reading files again."""
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(KT, [KT, "run", "demo", "--port", "0", "--api-key-file", str(keys)])
    said = b""
    while b"ready: " not in said:
        said += os.read(terminal, 65536)
    os.kill(pid, signal.SIGHUP)
    while b"again" not in said:  # it still is there
        said += os.read(terminal, 65536)
    os.close(terminal)
    end = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)[0]) == 0 and time.monotonic() < end:
        time.sleep(0.02)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended


def test_reload_without_files_says_so():
    with Server("demo") as server:
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "no keys or certificates to read again" in server.said())
        assert ask(server, "/v1/models")[0] == 200


def test_requests_are_logged_without_their_contents(tmp_path):
    with Server("demo", "--log-requests", "--api-key", "sesame", key="sesame") as server:
        assert ask(server, "/v1/completions", body=WRITE["/v1/completions"], key="sesame")[0] == 200
        assert ask(server, "/v1/models?token=sesame&q=Once")[0] == 401
        assert ask(server, "/a%0a2026%20b", key="sesame")[0] == 404
        with socket.create_connection(("127.0.0.1", urllib.parse.urlsplit(server.url).port)) as broken:
            broken.sendall(b"nonsense\r\n\r\n")
            assert b" 400 " in broken.recv(1000)
        wait_for(lambda: server.stderr_path.read_text().count(" tokens=") >= 5)
        lines = [line for line in server.stderr_path.read_text().splitlines() if " /health " not in line]
    pattern = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ 127\.0\.0\.1:\d+ (\S+) (\S+) (\d{3}) tokens=(\S+) "
                         r"ms=\d+\.\d")
    logged = [pattern.fullmatch(line).groups() for line in lines if " tokens=" in line]
    prompt = int(logged[0][3].split("+")[0])
    assert prompt > 0 and logged[0] == ("POST", "/v1/completions", "200", f"{prompt}+1")
    assert logged[1:] == [("GET", "/v1/models", "401", "-"), ("GET", "/a\\x0a2026%20b", "404", "-"),
                          ("-", "-", "400", "-")]
    assert "sesame" not in "".join(lines) and "Once" not in "".join(lines)


def test_a_key_from_the_environment():
    with Server("demo", key="sesame", env={"KT_API_KEY": "sesame"}) as server:
        assert ask(server, "/v1/models")[0] == 401
        assert ask(server, "/v1/models", key="sesame")[0] == 200


@pytest.mark.parametrize("args, message", [
    (["--api-key", ""], "--api-key: the key is blank"),
    (["--api-key", "  "], "--api-key: the key is blank"),
    (["--api-key-file", "/no/such"], "/no/such cannot be read"),
    (["--api-key-file", ""], "--api-key-file: no file is named"),
    (["--api-key", "k" * 5000], "--api-key: a key of 5000 characters: at most 4096 can be sent"),
    # What an unset variable leaves must not serve without what was asked for.
    (["--ssl-certfile", "", "--ssl-keyfile", ""], "--ssl-certfile: no file is named"),
    (["--host", ""], "--host: no address; 127.0.0.1 is this machine alone"),
])
def test_blank_keys(args, message):
    result = kt("run", "demo", "--dry-run", *args)
    assert result.returncode == 2, result.stderr
    line, = result.stderr.strip().splitlines()
    assert line.startswith("kt: ") and message in line


def test_a_blank_key_in_the_environment():
    result = kt("run", "demo", "--dry-run", env={**os.environ, "KT_API_KEY": ""})
    assert result.returncode == 2 and "KT_API_KEY: the key is blank" in result.stderr


def test_a_host_that_is_none_in_the_settings(tmp_path):
    home = {**os.environ, "KT_HOME": str(tmp_path)}
    assert kt("config", "set", "server.host", "", env=home).returncode == 0
    result = kt("run", "demo", "--dry-run", env=home)
    assert result.returncode == 2 and "server.host: no address" in result.stderr
    assert kt("run", "demo", "--dry-run", "--host", "127.0.0.1", env=home).returncode == 0


def test_a_file_of_keys_that_begins_with_a_mark(tmp_path):
    (tmp_path / "key").write_bytes(b"\xef\xbb\xbf# of an editor\nsesame\n")
    with Server("demo", "--api-key-file", tmp_path / "key", key="sesame") as server:
        assert ask(server, "/v1/models", key="sesame")[0] == 200
        assert ask(server, "/v1/models", key="# of an editor")[0] == 401


def test_a_blank_key_in_a_file(tmp_path):
    (tmp_path / "key").write_text(" \n\n")
    result = kt("run", "demo", "--dry-run", "--api-key-file", tmp_path / "key")
    assert result.returncode == 2 and f"--api-key-file: {tmp_path / 'key'}: the key is blank" in result.stderr
