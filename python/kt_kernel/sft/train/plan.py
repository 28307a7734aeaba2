"""The plan that `kt sft train` makes: JSON, read once."""

from __future__ import annotations

import json
import sys
from typing import Any

VERSION = 1


class Plan:
    """Its parts by name; `settings` are the recipe's keys with their defaults."""

    def __init__(self, parts: dict[str, Any]) -> None:
        if parts.get("version") != VERSION:
            raise ValueError(f"plan: expected version {VERSION}, found {parts.get('version')!r}; "
                             "kt and kt_kernel differ")
        self.parts = parts
        self.model: dict[str, Any] = parts["model"]
        self.lora: dict[str, Any] = parts["lora"]
        self.data: dict[str, list[dict[str, Any]]] = parts["data"]
        self.settings: dict[str, Any] = parts["settings"]
        self.output: str = parts["output"]
        self.resume: str | None = parts["resume"]
        self.adapter: str | None = parts["adapter"]
        self.devices: list[str] = parts["devices"]
        self.bf16: bool = parts["bf16"]
        self.rows_of_batch: int = parts["batch"]["rows"]

    @property
    def stage(self) -> str:
        return str(self.settings["stage"])

    @property
    def on_cpu(self) -> bool:
        return self.devices == ["cpu"]

    def __getitem__(self, key: str) -> Any:
        """A key of the recipe."""
        return self.settings[key]


def read_plan(path: str) -> Plan:
    """path: a file, or "-" for standard input."""
    if path == "-":
        return Plan(json.load(sys.stdin))
    with open(path, encoding="utf-8") as file:
        return Plan(json.load(file))
