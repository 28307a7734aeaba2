"""Files of examples, as messages: alpaca, sharegpt, messages of OpenAI's form, pairs of answers, judged answers."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from .events import TrainingError

Message = dict[str, Any]
_SHOWN_ROWS = 8


@dataclasses.dataclass
class Row:
    """An example; which parts it has depends on the stage."""

    file: str
    number: int  # from 1, of the rows in the file
    messages: list[Message]  # the conversation; of pairs and judged answers what stands before the answer
    tools: list[Any] | None = None
    chosen: list[Message] | None = None
    rejected: list[Message] | None = None
    answer: list[Message] | None = None
    wanted: bool | None = None


class Dropped:
    """Rows that are no examples, by the reason."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, str], list[int]] = defaultdict(list)

    def add(self, file: str, number: int, reason: str) -> None:
        self.reasons[file, reason].append(number)

    def __len__(self) -> int:
        return sum(map(len, self.reasons.values()))

    def lines(self) -> Iterator[str]:
        """"pirate.jsonl: 3 rows dropped, without an assistant turn: 4, 9, 17"."""
        for (file, reason), numbers in self.reasons.items():
            named = ", ".join(map(str, numbers[:_SHOWN_ROWS]))
            more = f" and {len(numbers) - _SHOWN_ROWS} more" if len(numbers) > _SHOWN_ROWS else ""
            count = f"{len(numbers)} rows" if len(numbers) > 1 else "a row"
            yield f"{os.path.basename(file)}: {count} dropped, {reason}: {named}{more}"


class Unfit(Exception):
    """Why a row is no example."""


def read_rows(source: dict[str, Any], most: int | None, system: str | None, dropped: Dropped) -> list[Row]:
    """Those of a dataset of the plan. Errors name file and row where a file is not what it should be."""
    limits = [limit for limit in (most, source["most"] or None) if limit]
    out: list[Row] = []
    for file in source["files"]:
        for number, raw in enumerate(_objects(file), 1):
            if limits and len(out) >= min(limits):
                return out
            try:
                row = _row(source, file, number, raw)
                if system and not any(m["role"] == "system" for m in row.messages):
                    row.messages.insert(0, {"role": "system", "content": system})
                out.append(row)
            except Unfit as error:
                dropped.add(file, number, str(error))
    return out


def _objects(file):
    with open(file, encoding="utf-8-sig") as text:
        try:
            if not file.endswith(".jsonl"):
                try:
                    rows = json.load(text)
                    yield from rows if isinstance(rows, list) else [rows]
                    return
                except json.JSONDecodeError as error:
                    if "Extra data" not in str(error):
                        raise TrainingError(f"{file}: {error}") from None
                    text.seek(0)  # objects a line, whatever the file is called
            for number, line in enumerate(text, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise TrainingError(f"{file}: line {number}: {error}") from None
        except UnicodeDecodeError as error:
            raise TrainingError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from None


def _row(source, file, number, raw):
    if not isinstance(raw, dict):
        raise Unfit(f"a {type(raw).__name__} and no object")
    reader = _Reader(source["columns"], source["tags"], raw)
    layout = source["layout"]
    if layout == "alpaca":
        row = reader.alpaca()
    elif layout in ("sharegpt", "messages"):
        row = reader.conversation()
    else:
        row = Row("", 0, reader.prompt())
    row.file, row.number, row.tools = file, number, reader.tools()
    if source["ranking"]:
        row.chosen, row.rejected = reader.answer("chosen"), reader.answer("rejected")
        row.messages, row.chosen, row.rejected = _apart(row.messages, row.chosen, row.rejected)
        if row.chosen == row.rejected:
            raise Unfit("both answers the same")
        if not _said(row.chosen) or not _said(row.rejected):
            raise Unfit("an answer is empty")
    elif "kto_tag" in source["columns"]:
        row.wanted = reader.label()
        if layout == "judged":
            row.answer = reader.answer("completion")
        else:
            row.messages, row.answer = row.messages[:-1], row.messages[-1:]
        if not _said(row.answer) or row.answer[-1]["role"] != "assistant":
            raise Unfit("without an answer")
    elif not any(m["role"] == "assistant" for m in row.messages):
        raise Unfit("without an assistant turn")
    elif row.messages[-1]["role"] != "assistant":
        raise Unfit("the last turn is not the assistant's")
    elif not _said(row.messages[-1:]):
        raise Unfit("its answer is empty")
    if not any(_said([m]) for m in row.messages):
        raise Unfit("empty")
    return row


def _said(messages):
    return bool(messages) and all(m.get("tool_calls") or str(m.get("content") or "").strip() for m in messages)


def _apart(prompt, chosen, rejected):
    """Answers that repeat the conversation before them: what both begin with is the prompt."""
    if len(chosen) == 1 and len(rejected) == 1:
        return prompt, chosen, rejected
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    before = chosen[:same]
    return (prompt if not before or prompt == before else before), chosen[same:], rejected[same:]


class _Reader:
    """The columns of one row."""

    def __init__(self, columns, tags, raw):
        self.columns, self.tags, self.raw = columns, tags, raw

    def column(self, role):
        name = self.columns.get(role)
        return None if name is None else self.raw.get(name)

    def text(self, role):
        value = self.column(role)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise Unfit(f"{self.columns[role]} is no text")
        return value

    def alpaca(self):
        messages = []
        if system := self.text("system"):
            messages.append({"role": "system", "content": system})
        for turn in self.column("history") or []:
            if not (isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(t, str) for t in turn)):
                raise Unfit("its history is no list of pairs")
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        messages.append({"role": "user",
                         "content": "\n".join(t for t in (self.text("prompt"), self.text("query")) if t)})
        answer = self.column("response")
        if isinstance(answer, str) and answer.strip():
            messages.append({"role": "assistant", "content": answer})
        return Row("", 0, messages)

    def conversation(self):
        turns = self.column("messages")
        if not isinstance(turns, list) or not turns:
            raise Unfit("without messages")
        messages = [self.message(turn) for turn in turns]
        if system := self.text("system"):
            messages.insert(0, {"role": "system", "content": system})
        return Row("", 0, messages)

    def message(self, turn):
        if not isinstance(turn, dict):
            raise Unfit("a message is no object")
        said, content = turn.get(self.tags["role_tag"]), turn.get(self.tags["content_tag"])
        roles = {self.tags[f"{role}_tag"]: name for role, name in (
            ("user", "user"), ("assistant", "assistant"), ("observation", "tool"), ("system", "system"),
            ("function", "function"))}
        role = roles.get(said)
        if role is None and said in ("user", "assistant", "system", "tool", "developer"):
            role = said
        if role is None:
            raise Unfit(f"a message of {said!r}, which no tag names")
        if role == "function":
            return _call(content)
        calls = turn.get("tool_calls")
        if not isinstance(content, str) and not calls:
            raise Unfit("a message without text")
        return {"role": role, "content": content or "", **({"tool_calls": calls} if calls else {})}

    def prompt(self):
        value = self.column("prompt")
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        return self.listed(value, "prompt")

    def answer(self, role):
        value = self.column(role)
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        return self.listed([value] if isinstance(value, dict) else value, role)

    def listed(self, value, role):
        if not isinstance(value, list) or not value:
            raise Unfit(f"without {self.columns.get(role, role)}")
        tags = self.tags or {}
        if not tags:
            self.tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
                             "observation_tag": "tool", "function_tag": "function", "system_tag": "system"}
        return [self.message(turn) for turn in value]

    def label(self):
        value = self.column("kto_tag")
        if not isinstance(value, bool):
            raise Unfit(f"{self.columns['kto_tag']} is neither true nor false")
        return value

    def tools(self):
        value = self.column("tools")
        if isinstance(value, str):
            if not value.strip():
                return None
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise Unfit("its tools are no JSON") from None
        return value or None


def _call(content):
    """A function call, as text of JSON."""
    try:
        said = json.loads(content)
        calls = said if isinstance(said, list) else [said]
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    except (TypeError, ValueError, KeyError):
        if not isinstance(content, str):
            raise Unfit("a function call without text") from None
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}
