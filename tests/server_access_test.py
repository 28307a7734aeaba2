"""Who may use `kt run`: keys from wherever they stand, names of the server, and what it says where anyone may.

KT_PROGRAM names kt."""
import http.client
import os
import pathlib
import socket
import sys
import urllib.parse

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, kt  # noqa: E402
from server_process import Server  # noqa: E402

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
        status, words = ask(server, path, "evil.example", key=key)
        assert status == 403 and b"evil.example" in words, path
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
    (tmp_path / "key").write_text("sesame\n")
    with Server("demo", "--host", "0.0.0.0", "--api-key-file", tmp_path / "key", key="sesame") as server:
        assert "warning" not in server.said() and "sesame" not in server.said()
        assert ask(server, "/v1/models")[0] == 401
        check_hosts(server, "sesame")


def test_a_key_from_the_environment():
    with Server("demo", key="sesame", env={"KT_API_KEY": "sesame"}) as server:
        assert ask(server, "/v1/models")[0] == 401
        assert ask(server, "/v1/models", key="sesame")[0] == 200


@pytest.mark.parametrize("args, words", [
    (["--api-key", ""], "--api-key: the key is blank"),
    (["--api-key", "  "], "--api-key: the key is blank"),
    (["--api-key-file", "/no/such"], "/no/such cannot be read"),
])
def test_blank_keys(args, words):
    result = kt("run", "demo", "--dry-run", *args)
    assert result.returncode == 2, result.stderr
    line, = result.stderr.strip().splitlines()
    assert line.startswith("kt: ") and words in line


def test_a_blank_key_in_the_environment():
    result = kt("run", "demo", "--dry-run", env={**os.environ, "KT_API_KEY": ""})
    assert result.returncode == 2 and "KT_API_KEY: the key is blank" in result.stderr


def test_a_blank_key_in_a_file(tmp_path):
    (tmp_path / "key").write_text(" \n\n")
    result = kt("run", "demo", "--dry-run", "--api-key-file", tmp_path / "key")
    assert result.returncode == 2 and f"--api-key-file: {tmp_path / 'key'}: the key is blank" in result.stderr
