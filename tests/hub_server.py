"""A hub of our own for tests: the published layout of Hugging Face's (and as much of ModelScope's as kt asks) over HTTP
or HTTPS, serving repositories that tests make, with the faults that tests ask for. Two servers: the hub, and another
one that it sends large files to, as the real one does."""
import collections
import hashlib
import http.server
import json
import re
import ssl
import subprocess
import threading
import time
import urllib.parse


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repo:
    """Files by path. Those of `lfs` (by default what ends as weights do) are large ones: sha256, and served
    elsewhere."""

    def __init__(self, files, kind="models", lfs=(".safetensors", ".gguf", ".bin", ".parquet"),
                 token=None, gated=False):
        self.files, self.kind, self.lfs, self.token, self.gated = dict(files), kind, lfs, token, gated
        self.commit = hashlib.sha1(json.dumps(sorted((p, git_sha1(d)) for p, d in files.items())).encode()).hexdigest()
        self.listing = None  # instead of the true one, where a test lies

    def is_lfs(self, path):
        return path.endswith(tuple(self.lfs))

    def etag(self, path):
        data = self.files[path]
        return hashlib.sha256(data).hexdigest() if self.is_lfs(path) else git_sha1(data)

    def tree(self):
        if self.listing is not None:
            return self.listing
        out = []
        for path, data in sorted(self.files.items()):
            entry = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
            if self.is_lfs(path):
                entry["lfs"] = {"oid": self.etag(path), "size": len(data), "pointerSize": 134}
                entry["oid"] = "0" * 40
            out.append(entry)
        return out


class Hub:
    """repos: "ORG/REPO" -> Repo. Faults, each a set or dict of paths: `broken` (connection ends in the middle, so many
    times), `wrong` (other bytes), `failing` (status 503, so many times), `no_ranges`; `slow` (bytes a second)."""

    def __init__(self, certificate=None):
        self.repos, self.requests, self.page = {}, [], 1000
        self.broken, self.failing = collections.Counter(), collections.Counter()
        self.wrong, self.no_ranges = set(), set()
        self.slow, self.failure = 0, 503
        self.redirect_to = None  # an address instead of the other server
        self.gate = None  # called with (path, start) before bytes are sent
        self.lock = threading.Lock()
        self.server, self.elsewhere = (self._serve(certificate, part) for part in ("hub", "elsewhere"))
        scheme = "https" if certificate else "http"
        self.endpoint = f"{scheme}://localhost:{self.server.server_address[1]}"
        self.other = f"{scheme}://127.0.0.1:{self.elsewhere.server_address[1]}"

    def _serve(self, certificate, part):
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub, Handler.part = hub, part
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def close(self):
        for server in (self.server, self.elsewhere):
            server.shutdown()
            server.server_close()

    def asked(self, part="hub", method="GET"):
        return [r for r in self.requests if r["part"] == part and r["method"] == method]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = part = None

    def log_message(self, *words):
        pass

    def answer(self, status, body=b"", fields=None):
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (fields or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        with self.hub.lock:
            self.hub.requests.append({"part": self.part, "method": self.command, "path": self.path,
                                      "range": self.headers.get("Range"), "token": self.headers.get("Authorization")})
        try:
            self.route(urllib.parse.unquote(url.path), urllib.parse.parse_qs(url.query))
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.close_connection = True

    def route(self, path, query):
        if self.part == "elsewhere":
            _, name, rest = path.split("/", 2)
            return self.send_file(self.hub.repos[name.replace("--", "/")], rest, {})
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)/(revision|tree)/(.+)", path):
            return self.api(*found.groups(), query)
        if found := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", path):
            return self.modelscope(found[1], bool(found[2]), query)
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self.repo(found[2], found[3])
            return repo and self.resolve(repo, found[2], found[4])
        return self.answer(404)

    def repo(self, name, revision):
        repo = self.hub.repos.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == "bad":
            return self.answer(401, fields={"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo is None:
            # As the real one: nobody learns what exists.
            return self.answer(404 if token else 401, fields={"X-Error-Code": "RepoNotFound"})
        if repo.token and token != repo.token:
            if repo.gated:
                return self.answer(403 if token else 401, fields={"X-Error-Code": "GatedRepo"})
            return self.answer(404 if token else 401, fields={"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", "master", "v1", repo.commit):
            return self.answer(404, fields={"X-Error-Code": "RevisionNotFound"})
        return repo

    def api(self, kind, name, what, revision, query):
        repo = self.repo(name, revision)
        if not repo or repo.kind != kind:
            return repo and self.answer(404, fields={"X-Error-Code": "RepoNotFound"})
        if what == "revision":
            return self.answer(200, {"id": name, "modelId": name, "sha": repo.commit, "private": False, "tags": [],
                                     "siblings": [{"rfilename": p} for p in sorted(repo.files)]})
        start = int(query.get("cursor", ["0"])[0])
        entries = repo.tree()
        fields = {}
        if start + self.hub.page < len(entries):
            more = (f"{self.hub.endpoint}/api/{kind}/{name}/tree/{revision}?recursive=true"
                    f"&cursor={start + self.hub.page}")
            fields["Link"] = f'<{more}>; rel="next"'
        return self.answer(200, entries[start:start + self.hub.page], fields)

    def modelscope(self, name, listing, query):
        repo = self.repo(name, query.get("Revision", ["master"])[0])
        if not repo:
            return None
        if not listing:
            return self.send_file(repo, query["FilePath"][0], {})
        files = [{"Path": p, "Name": p.rsplit("/", 1)[-1], "Type": "blob", "Size": len(d),
                  "Sha256": hashlib.sha256(d).hexdigest()} for p, d in sorted(repo.files.items())]
        return self.answer(200, {"Code": 200, "Data": {"Files": files}})

    def resolve(self, repo, name, path):
        if path not in repo.files:
            return self.answer(404, fields={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        fields = {"X-Repo-Commit": repo.commit, "ETag": f'"{repo.etag(path)}"', "Accept-Ranges": "bytes"}
        if not repo.is_lfs(path):
            return self.send_file(repo, path, fields)
        fields.update({"X-Linked-Etag": f'"{repo.etag(path)}"', "X-Linked-Size": str(len(repo.files[path]))})
        to = self.hub.redirect_to or f"{self.hub.other}/{name.replace('/', '--')}/{urllib.parse.quote(path)}"
        return self.answer(302, fields={**fields, "Location": to})

    def send_file(self, repo, path, fields):
        hub, data = self.hub, repo.files[path]
        with hub.lock:
            failing = hub.failing[path] > 0
            hub.failing[path] -= failing
            broken = hub.broken[path] > 0 and self.command == "GET"
            hub.broken[path] -= broken
        if failing:
            return self.answer(hub.failure, fields={"Retry-After": "0"})
        if path in hub.wrong:
            data = bytes(b ^ 1 for b in data)
        start, end, status = 0, len(data), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted and path not in hub.no_ranges:
            start, end, status = int(wanted[1]), min(len(data), int(wanted[2] or len(data)) + 1), 206
            fields = {**fields, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if hub.gate:
            hub.gate(path, start)
        body = data[start:end]
        if broken:
            self.wfile.write(body[:len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            return self.connection.close()
        for at in range(0, len(body), 65536):
            self.wfile.write(body[at:at + 65536])
            if hub.slow:
                time.sleep(min(65536, len(body) - at) / hub.slow)
        return None


def make_certificate(folder):
    """(certificate, key) of localhost and 127.0.0.1, signed by itself."""
    paths = folder / "cert.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]],
                   check=True, capture_output=True)
    return [str(path) for path in paths]
