"""A live server for tests: starts the program, waits until it answers, stops it. KT_PROGRAM names kt."""
import os
import pathlib
import re
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

KT = os.environ.get("KT_PROGRAM")
READY_SECONDS = 600


class Server:
    """`kt run ARGS --port 0` as a process. Context manager; `url` without a slash at the end, `pid`, `stderr_path`.
    `ca` is a file with the certificate that a server over TLS shows; without `healthy` only its address is waited
    for."""

    def __init__(self, *args, program=None, key=None, env=None, ca=None, healthy=True):
        args = [str(arg) for arg in args]
        if "--port" not in args:
            args += ["--port", "0"]
        self.key = key
        self.tls = ssl.create_default_context(cafile=str(ca)) if ca else None
        self.folder = tempfile.TemporaryDirectory(prefix="kt-server-")
        self.stdout_path = pathlib.Path(self.folder.name, "stdout")
        self.stderr_path = pathlib.Path(self.folder.name, "stderr")
        with open(self.stdout_path, "wb") as out, open(self.stderr_path, "wb") as err:
            self.process = subprocess.Popen([program or KT, "run", *args], stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=err, env={**os.environ, "NO_COLOR": "1", **(env or {})})
        self.pid = self.process.pid
        try:
            self.url = self._wait_for_url()
            if healthy:
                self._wait_for_health()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
        self.folder.cleanup()

    def said(self):
        """All it has printed so far."""
        return "".join(path.read_text(errors="replace") for path in (self.stdout_path, self.stderr_path))

    def alive(self):
        return self.process.poll() is None

    def _wait_for_url(self):
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            # The line must be whole: the port could still be growing.
            if found := re.search(r"https?://[\d.\[\]:a-z]+:\d+(?=\D)", self.said()):
                return found[0]
            if not self.alive():
                raise RuntimeError(f"kt run ended with {self.process.returncode}: {self.said()[-2000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"kt run gave no URL within {READY_SECONDS} s: {self.said()[-2000:]}")

    def _wait_for_health(self):
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=60, context=self.tls) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            if not self.alive():
                raise RuntimeError(f"kt run ended with {self.process.returncode}: {self.said()[-2000:]}")
            time.sleep(0.02)
        raise RuntimeError(f"/health did not answer within {READY_SECONDS} s: {self.said()[-2000:]}")

    def rss(self):
        """Bytes resident."""
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0

    def metrics(self):
        """/metrics by name; the names of labelled series keep their labels."""
        request = urllib.request.Request(self.url + "/metrics")
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(request, timeout=300, context=self.tls) as reply:
            lines = reply.read().decode().splitlines()
        pairs = (line.rsplit(None, 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def stop(self, seconds=300):
        """SIGTERM, SIGKILL as a last resort. The exit code; negative: the signal that ended it."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
