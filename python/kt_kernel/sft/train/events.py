"""What the program is told while Python trains: an object a line on standard output, or words where a person started
it."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, ClassVar


class TrainingError(Exception):
    """A sentence for people. kind: "input", "memory", "unsupported" or "internal", as the program's exit codes."""

    CODES: ClassVar = {"input": 2, "memory": 3, "unsupported": 4, "internal": 5}

    def __init__(self, message: str, kind: str = "input") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def code(self) -> int:
        return self.CODES[self.kind]


class Events:
    """One place that says things. What libraries print to standard output goes to standard error from here on."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def send(self, event: str, **facts: Any) -> None:
        record = {"event": event, **{key: _plain(value) for key, value in facts.items() if value is not None}}
        try:
            print(json.dumps(record) if self._json else _text(record), file=self._out, flush=True)
        except BrokenPipeError:
            pass  # who asked is gone, and so shall we be

    def note(self, text: str) -> None:
        self.send("note", text=text)

    def fail(self, error: TrainingError) -> None:
        if self._json:
            self.send("error", kind=error.kind, message=str(error))
        else:
            print(f"kt_kernel.sft: {error}", file=sys.stderr)


class Silence(Events):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def send(self, event: str, **facts: Any) -> None:
        self.told.append({"event": event, **facts})

    def fail(self, error: TrainingError) -> None:
        self.told.append({"event": "error", "kind": error.kind, "message": str(error)})


def _plain(value):
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _text(record):
    facts = dict(record)
    event = facts.pop("event")
    if event == "note":
        return f"note: {facts['text']}"
    return "  ".join([event, *(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in facts.items())])
