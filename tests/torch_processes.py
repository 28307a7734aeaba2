"""Scripts in processes of their own that find torch loaded. Importing it takes two seconds, so one process does, and
forks for each script; what a script sees is otherwise as with `python -c`: variables, output, an end of its own."""
import atexit
import functools
import json
import os
import subprocess
import sys

SERVER = """
import json, os, signal, sys, tempfile
import torch
for line in sys.stdin:
    asked = json.loads(line)
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    out.seek(0), err.seek(0)
    said = (file.read().decode(errors="replace") for file in (out, err))
    print(json.dumps([os.waitstatus_to_exitcode(status), *said]), flush=True)
else:
    raise SystemExit
signal.alarm(asked["seconds"])
for there, here in enumerate((open(os.devnull), out, err)):
    os.dup2(here.fileno(), there)
os.environ.update(asked["variables"])
code = compile(asked["code"], "<string>", "exec")
for name in [name for name in globals() if not name.startswith("__") and name not in ("code", "name")]:
    del globals()[name]
exec(code)
"""


@functools.cache
def server(library_path):
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "LD_LIBRARY_PATH": library_path})
    atexit.register(process.communicate)
    return process


LIBRARY_PATH = os.environ.get("LD_LIBRARY_PATH", "")


def run(code, library_path=LIBRARY_PATH, seconds=900, **variables):
    """As subprocess.run with text. `library_path` is where libraries are looked for first."""
    process = server(library_path)
    process.stdin.write(json.dumps({"code": code, "seconds": seconds, "variables": variables}) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the process that has torch ended"
    return subprocess.CompletedProcess("-c", *json.loads(answer))
