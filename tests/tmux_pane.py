"""kt on a terminal: tmux types and looks at the screen."""
import os
import re
import shlex
import shutil
import subprocess
import time

import pytest

KT = os.environ.get("KT_PROGRAM")
TMUX = shutil.which("tmux")
on_terminal = pytest.mark.skipif(not TMUX, reason="tmux is not installed")
PATIENCE = 300  # seconds; the machine may be busy


class Pane:
    """kt in a tmux session of its own, with `folder` as its home; `cwd` is where it runs."""
    count = 0

    def __init__(self, folder, *args, width=80, height=24, term="tmux-256color", env=None, cwd="."):
        Pane.count += 1
        self.socket = f"kt-{os.getpid()}-{Pane.count}"
        command = " ".join(map(shlex.quote, [KT, *map(str, args)]))
        settings = {"KT_HOME": folder, "TERM": term, "NO_COLOR": "", **(env or {})}
        shown = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in settings.items())
        # cat keeps the screen; stty says whether the terminal was given back; Ctrl-C is not for the shell.
        script = (f"trap : INT; cd {shlex.quote(str(cwd))}; env {shown} {command}; echo \"exit code $?\"; "
                  "stty -a | grep -o ' -\\?echo '; exec cat")
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c", script)

    def tmux(self, *args):
        return subprocess.run([TMUX, "-u", "-L", self.socket, *args], check=True, capture_output=True, text=True).stdout

    def send(self, *keys):
        self.tmux("send-keys", *keys)

    def type(self, typed):
        self.tmux("send-keys", "-l", typed)

    def say(self, typed):
        self.type(typed)
        self.send("Enter")

    def text(self):
        return self.tmux("capture-pane", "-p")

    def everything(self):
        """Also what has left the screen; lines that the terminal had to break are whole."""
        return self.tmux("capture-pane", "-p", "-J", "-S", "-")

    def wait(self, pattern, times=1):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            text = self.everything()
            if len(re.findall(pattern, text, re.MULTILINE)) >= times:
                return text
            time.sleep(0.05)
        pytest.fail(f"{pattern!r} did not appear {times} times; the screen is\n{self.everything()}")

    def prompt(self):
        """Waits until the last line that is not blank is an empty prompt."""
        return self.wait(r"^>\s*\Z")

    def ended(self, code):
        self.wait(rf"^exit code {code}$")
        self.wait(r"^ echo $")

    def close(self):
        subprocess.run([TMUX, "-L", self.socket, "kill-server"], capture_output=True)
