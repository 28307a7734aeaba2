"""Finds the kt program and becomes it. For the scripts beside this file; no job of its own."""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys


def parser(description, **options):
    """An argument parser without guessed abbreviations: a flag that is not known is a usage error, exit code 2."""
    return argparse.ArgumentParser(description=description, allow_abbrev=False, **options)


def name():
    return os.path.basename(sys.argv[0])


def note(line):
    print(f"{name()}: note: {line}", file=sys.stderr)


def path(value):
    """A path that kt cannot take for a flag."""
    return os.path.join(".", value) if value.startswith("-") else value


def given(*pairs):
    """[flag, value, ...] of the pairs that have a value; True is a flag alone, a list repeats its flag."""
    words = []
    for flag, value in pairs:
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [word for item in value for word in (flag, str(item))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def find():
    """KT_PROGRAM, then the build beside the scripts, then PATH."""
    named = os.environ.get("KT_PROGRAM")
    if named:
        return named
    built = pathlib.Path(__file__).resolve().parent.parent / "build" / "bin" / "kt"
    return str(built) if os.access(built, os.X_OK) else shutil.which("kt")


def found():
    """What find() gives; ends this process where there is none."""
    program = find()
    if not program:
        sys.exit(fail("the kt program was not found: build it with `make`, or name it in KT_PROGRAM, "
                      "or put it on PATH"))
    return program


def ask(*words):
    """The lines that kt prints; None where it fails, whose words are not shown."""
    try:
        done = subprocess.run([found(), *words], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def run(*words):
    """Replaces this process by kt; its exit code is ours."""
    program = found()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, [program, *words])
    except OSError as error:
        sys.exit(fail(f"{program}: {error.strerror}; KT_PROGRAM has to name the kt program"))


def fail(line):
    print(f"{name()}: {line}", file=sys.stderr)
    return 2
