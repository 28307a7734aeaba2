"""`kt run` over TLS: the openai and anthropic clients from PyPI, kt's own, and what only TLS can do wrong. Certificates
are made here, by the program openssl.

KT_PROGRAM names kt."""
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.parse

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, kt
from server_process import Server

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 16}


def make_pair(folder, name, subjects="DNS:localhost,IP:127.0.0.1"):
    """NAME.pem, which signs itself, and NAME.key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-days", "30",
                    "-subj", f"/CN={name}", "-addext", f"subjectAltName={subjects}", "-keyout", key,
                    "-out", certificate],
                   check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


def has_tls():
    return bool(KT) and "without TLS" not in kt("chat", "https://127.0.0.1:1").stderr


pytestmark = [pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program"),
              pytest.mark.skipif(not shutil.which("openssl"), reason="the program openssl is not installed"),
              pytest.mark.skipif(not has_tls(), reason="kt was built without TLS")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def pair(folder):
    return make_pair(folder, "server")


@pytest.fixture(scope="module")
def server(pair):
    with Server("demo", "--ssl-certfile", pair[0], "--ssl-keyfile", pair[1], "--api-key", "sesame", key="sesame",
                ca=pair[0]) as running:
        assert running.url.startswith("https://") and "warning" not in running.said()
        yield running


def openai_client(server):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    return openai.OpenAI(base_url=server.url + "/v1", api_key=server.key, max_retries=0, timeout=600,
                         http_client=openai.DefaultHttpxClient(verify=server.tls))


def test_openai(server):
    client = openai_client(server)
    assert [model.id for model in client.models.list().data] == ["demo"]
    whole = client.chat.completions.create(messages=STORY, **GREEDY)
    chunks = client.chat.completions.create(messages=STORY, stream=True, **GREEDY)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content and whole.usage.completion_tokens == 16
    reply = client.responses.create(model="demo", input=STORY[0]["content"], temperature=0, max_output_tokens=16)
    assert reply.output_text == streamed
    with client.responses.stream(model="demo", input=STORY[0]["content"], temperature=0,
                                 max_output_tokens=16) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == streamed


def test_anthropic(server):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=600,
                                 http_client=anthropic.DefaultHttpxClient(verify=server.tls))
    request = {"model": "demo", "messages": STORY, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = client.messages.count_tokens(model="demo", messages=STORY)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


def test_clients_that_do_not_know_the_certificate(server):
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="sesame", max_retries=0).models.list()
    done = kt("chat", server.url, "--api-key", "sesame")
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 2 and server.url in line and "not trusted" in line and "--ca-file" in line
    done = kt("bench", "--server", server.url, "--api-key", "sesame")
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "not trusted" in line


def chat(*args, env=None):
    return subprocess.run([KT, "chat", *map(str, args), "--api-key", "sesame", "--temperature", "0",
                           "--max-tokens", "8"],
                          input="Hi\n", capture_output=True, text=True, timeout=600, env={**os.environ, **(env or {})})


def test_chat(server, pair):
    said = chat(server.url, "--ca-file", pair[0])
    assert said.returncode == 0 and said.stdout.strip(), said.stderr
    assert chat("--url", server.url + "/v1/", env={"SSL_CERT_FILE": str(pair[0])}).stdout == said.stdout
    named = server.url.replace("127.0.0.1", "localhost")
    assert chat(named, "--ca-file", pair[0], "--model", "demo").stdout == said.stdout
    done = chat(server.url, "--ca-file", "/no/such")
    assert done.returncode == 2 and "/no/such" in done.stderr


def test_bench(server, pair):
    done = kt("bench", "--server", server.url, "--ca-file", pair[0], "--api-key", "sesame", "--concurrency", "1,3",
              "--requests", "4", "--prompt", "8", "--tokens", "4", "--warmup", "1", "--errors", "3", "--json")
    assert done.returncode == 0, done.stderr
    for point in json.loads(done.stdout)["points"]:
        assert point["ok"] == 4 and point["failed"] == 0 and point["output_tokens"] == 16


def port_of(server):
    return urllib.parse.urlsplit(server.url).port


def test_plain_http_is_told_so(server):
    with socket.create_connection(("127.0.0.1", port_of(server))) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = b""
        while piece := plain.recv(4096):
            reply += piece
    assert reply.startswith(b"HTTP/1.1 400 ") and b"https://" in reply
    done = chat(server.url.replace("https", "http"))
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "https://" in line


def test_https_to_plain_http():
    with Server("demo") as plain:
        done = chat(plain.url.replace("http", "https"))
    assert done.returncode == 2 and "does not speak TLS" in done.stderr


def test_versions(server):
    def shaken(version):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        with socket.create_connection(("127.0.0.1", port_of(server))) as plain, context.wrap_socket(plain) as secure:
            return secure.version()
    assert shaken(ssl.TLSVersion.TLSv1_2) == "TLSv1.2" and shaken(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.raises(ssl.SSLError):
        shaken(ssl.TLSVersion.TLSv1_1)


def test_a_certificate_for_another_name(folder):
    certificate, key = make_pair(folder, "other", "DNS:other.example,DNS:localhost")
    with Server("demo", "--ssl-certfile", certificate, "--ssl-keyfile", key, "--host", "localhost", key="sesame",
                ca=certificate) as server:
        done = chat(server.url.replace("localhost", "127.0.0.1"), "--ca-file", certificate)
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "its certificate is not for 127.0.0.1 but for other.example, localhost" in line


def make_old(folder, pair):
    """A certificate of the pair's key that has run out."""
    certificate, request = folder / "old.pem", folder / "old.csr"
    names = folder / "old.names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for words in (["req", "-new", "-key", pair[1], "-subj", "/CN=old", "-out", request],
                  ["x509", "-req", "-in", request, "-days", "-1", "-signkey", pair[1], "-extfile", names,
                   "-out", certificate]):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    return certificate


def test_a_certificate_that_has_run_out(pair, folder):
    old = make_old(folder, pair)
    dry = kt("run", "demo", "--dry-run", "--ssl-certfile", old, "--ssl-keyfile", pair[1])
    line, = dry.stderr.strip().splitlines()
    assert dry.returncode == 0 and f"{old}: the certificate ran out on 20" in line
    with Server("demo", "--ssl-certfile", old, "--ssl-keyfile", pair[1], ca=pair[0], healthy=False) as server:
        done = chat(server.url, "--ca-file", old)
        line, = done.stderr.strip().splitlines()
        assert done.returncode == 2 and server.url in line and "its certificate ran out on 20" in line


def hello_bytes():
    """How a client of TLS begins."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(into, out, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return out.read()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def open_files(server):
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def test_clients_that_shake_hands_slowly_or_never_hold_up_nobody(server):
    client, hello = openai_client(server), hello_bytes()
    client.models.list()
    before = open_files(server)

    def connect():
        return socket.create_connection(("127.0.0.1", port_of(server)), timeout=60)
    silent, begun, waiting = ([connect() for _ in range(40)] for _ in range(3))
    for each in begun:
        each.sendall(hello[:40])
    for each in waiting:  # the server has answered, and hears no more
        each.sendall(hello)
    start = time.monotonic()
    assert client.chat.completions.create(messages=STORY, **GREEDY).usage.completion_tokens == 16
    assert time.monotonic() - start < 25, "the handshakes of others run out after 30 s"
    for each in silent + begun + waiting:
        each.close()
    for i in range(200):  # vanish in the middle: with a word, without one, with a reset
        gone = connect()
        gone.sendall(hello[:len(hello) * (i % 4 + 1) // 4])
        if i % 3 == 0:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif i % 3 == 1:
            gone.shutdown(socket.SHUT_WR)
        gone.close()
    wait_for(lambda: open_files(server) <= before)
    assert client.models.list().data and server.alive()


def test_clients_that_leave_a_long_stream(server):
    """With TLS's word for it, and without; each frees its place."""
    request = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body = json.dumps(request).encode()
    head = ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    for says_so in (True, False):
        plain = socket.create_connection(("127.0.0.1", port_of(server)), timeout=300)
        with server.tls.wrap_socket(plain, server_hostname="localhost") as secure:
            secure.sendall(head.encode() + body)
            seen = b""
            while seen.count(b"data: ") < 3:
                seen += secure.recv(65536)
            assert server.metrics()["kt_requests_running"] == 1
            if says_so:
                secure.settimeout(60)
                try:
                    secure.unwrap().close()
                except OSError:  # tokens came instead of the server's own word
                    pass
            else:
                secure.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: server.metrics()["kt_requests_running"] == 0)
    assert server.metrics()['kt_http_replies_total{status="499"}'] >= 2


@pytest.fixture()
def copies(pair, tmp_path):
    """Files of a server's own, to be changed."""
    for source, name in zip(pair, ("c.pem", "c.key")):
        shutil.copy(source, tmp_path / name)
    (tmp_path / "c.key").chmod(0o600)
    return tmp_path / "c.pem", tmp_path / "c.key"


def test_reload(copies, folder):
    certificate, key = copies
    fresh = make_pair(folder, "fresh")
    key.chmod(0o644)
    with Server("demo", "--ssl-certfile", certificate, "--ssl-keyfile", key, ca=certificate) as server:
        warning, = server.stderr_path.read_text().splitlines()
        assert f"warning: every user of this machine can read {key}" in warning
        key.chmod(0o600)
        shown = ssl.get_server_certificate(("127.0.0.1", port_of(server)))

        def said_after(phrase):
            """The one line that a signal makes the server say."""
            before = server.stderr_path.read_text().splitlines()
            server.process.send_signal(signal.SIGHUP)
            wait_for(lambda: phrase in "\n".join(server.stderr_path.read_text().splitlines()[len(before):]))
            line, = server.stderr_path.read_text().splitlines()[len(before):]
            return line
        for broken, why in ((fresh[0].read_text(), "do not belong together"),
                            ("-----BEGIN CERTIFICATE-----\nMIIB", str(certificate)),
                            ("", "expected a certificate")):
            certificate.write_text(broken)
            assert why in said_after("what was read before goes on")
            assert ssl.get_server_certificate(("127.0.0.1", port_of(server))) == shown
        shutil.copy(fresh[0], certificate)
        shutil.copy(fresh[1], key)
        said_after(f"read {certificate} again")
        assert ssl.get_server_certificate(("127.0.0.1", port_of(server))) == fresh[0].read_text() != shown
        assert server.stop() == 0


@pytest.mark.parametrize("words, expected", [
    (["CERT", "OTHER"], "do not belong together"),
    (["/no/such", "KEY"], "/no/such"),
    (["KEY", "KEY"], "expected a certificate"),
    (["CERT", "CERT"], "expected a private key"),
])
def test_files_that_are_no_pair(pair, folder, words, expected):
    other = make_pair(folder, "another")[1]
    certificate, key = ({"CERT": pair[0], "KEY": pair[1], "OTHER": other}.get(word, word) for word in words)
    done = kt("run", "demo", "--dry-run", "--ssl-certfile", certificate, "--ssl-keyfile", key)
    line, = done.stderr.strip().splitlines()
    assert done.returncode == 2 and expected in line


def test_one_file_of_two(pair):
    done = kt("run", "demo", "--dry-run", "--ssl-certfile", pair[0])
    assert done.returncode == 2 and "--ssl-keyfile" in done.stderr


def test_flags_of_sglang_beside_ours(pair):
    """Its names are our options; the rest of its TLS is noted, and says why."""
    done = kt("run", "demo", "--dry-run", "--ssl-certfile", pair[0], "--ssl-keyfile", pair[1], "--enable-ssl-refresh",
              "--ssl-ca-certs", "x")
    assert done.returncode == 0
    note, *reasons = [line for line in done.stdout.splitlines() if line.startswith("note:")]
    assert (note.endswith(": --enable-ssl-refresh, --ssl-ca-certs") and "SIGHUP" in reasons[0]
            and "--api-key-file" in reasons[1])
    assert kt("run", "demo", "--dry-run", "--strict", "--ssl-certfile", pair[0],
              "--ssl-keyfile", pair[1]).returncode == 0
