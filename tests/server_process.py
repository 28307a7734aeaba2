"""A `kt run` process to test against: started on a free port, waited for, and ended with everything it printed."""
import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

KT = os.environ.get("KT_PROGRAM")
URL = re.compile(r"http://(?:127\.0\.0\.1|localhost):\d+")
READY_S = 120


def can_run():
    """Whether KT_PROGRAM is a kt that knows `run`."""
    if not KT:
        return False
    return subprocess.run([KT, "run", "--help"], capture_output=True, timeout=60).returncode == 0


class ServerProcess:
    """url, process, and output(): all lines so far."""

    def __init__(self, *words, command=("run", "demo", "--port", "0"), env=None):
        self.lines, self._fresh = [], queue.Queue()
        self.process = subprocess.Popen([KT, *command, *map(str, words)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, **(env or {})})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.url = self._wait_for_url(time.monotonic() + READY_S)
            self._wait_for_health(time.monotonic() + READY_S)
        except BaseException:
            self.stop()
            raise

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self._fresh.put(line)
        self._fresh.put(None)

    def output(self):
        return "".join(self.lines)

    def _wait_for_url(self, until):
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                line = self._fresh.get(timeout=1)
                if line is None:
                    raise AssertionError(f"kt run ended with {self.process.wait()} before it served:\n{self.output()}")
                if found := URL.search(line):
                    return found[0]
        raise AssertionError(f"kt run named no address within {READY_S} s:\n{self.output()}")

    def _wait_for_health(self, until):
        while time.monotonic() < until:
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(self.url + "/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            assert self.process.poll() is None, f"kt run ended:\n{self.output()}"
            time.sleep(0.1)
        raise AssertionError(f"{self.url}/health was not 200 within {READY_S} s:\n{self.output()}")

    def stop(self, grace_s=20):
        """SIGTERM, then SIGKILL. The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        if self.process.poll() is None:
            self.process.kill()
        status = self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def server(*words, **options):
    process = ServerProcess(*words, **options)
    try:
        yield process
    finally:
        process.stop()
