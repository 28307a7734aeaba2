"""Messages as tokens and targets by the tokenizer's own chat template; packing; batches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from .events import TrainingError
from .rows import Dropped, Row

IGNORED = -100  # a label that is no target


@dataclasses.dataclass
class Encoded:
    ids: list[int]
    labels: list[int]
    starts: list[int] | None = None  # of packed conversations that do not see each other

    def item(self) -> dict[str, Any]:
        out = {"input_ids": self.ids, "labels": self.labels}
        if self.starts is not None:
            bounds = [*self.starts, len(self.ids)]
            out["position_ids"] = [at for a, b in itertools.pairwise(bounds) for at in range(b - a)]
        return out


@dataclasses.dataclass
class Counts:
    """Of encoding: what people should know."""

    cut: int = 0
    rewritten: int = 0  # templates that change earlier turns once later ones follow


class Encoder:
    """For one recipe."""

    def __init__(self, tokenizer: Any, cutoff: int, mask_history: bool, train_on_prompt: bool,
                 thinking: bool | None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TrainingError("the tokenizer has no chat template, which says how messages become text")
        self._tokenizer, self._cutoff = tokenizer, cutoff
        self._mask_history, self._train_on_prompt = mask_history, train_on_prompt
        self._more = {} if thinking is None else {"enable_thinking": thinking}
        self._special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
        self.counts = Counts()

    def rows(self, rows: list[Row], dropped: Dropped) -> list[Encoded]:
        out = []
        for row in rows:
            encoded = self.row(row)
            if isinstance(encoded, str):
                dropped.add(row.file, row.number, encoded)
            else:
                out.append(encoded)
        return out

    def row(self, row: Row) -> Encoded | str:
        """The conversation, or why it is no example."""
        try:
            text, spans = self._spans(row)
        except TrainingError:
            raise
        except Exception as error:  # a template's own, of any type
            return f"the chat template refuses it ({' '.join(str(error).split())[:120]})"
        ids, labels = self._tokens(text, spans)
        if ids and ids[-1] not in self._special and labels[-1] != IGNORED and self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)  # a template that does not say where an answer ends
            labels.append(ids[-1])
        if self._train_on_prompt:
            labels = list(ids)
        if len(ids) > self._cutoff:
            self.counts.cut += 1
            ids, labels = ids[: self._cutoff], labels[: self._cutoff]
        # The first token is predicted from nothing.
        if all(label == IGNORED for label in labels[1:]):
            return f"longer than cutoff_len {self._cutoff} before its answer begins"
        return Encoded(ids, labels)

    def _render(self, messages, row, prompt):
        return self._tokenizer.apply_chat_template(
            messages, tools=row.tools, tokenize=False, add_generation_prompt=prompt, **self._more
        )

    def _spans(self, row):
        """The text, without what follows its last answer, and where the answers in it stand that count."""
        messages = row.messages
        whole = self._render(messages, row, False).rstrip()
        answers = [at for at, m in enumerate(messages) if m["role"] == "assistant"]
        spans = []
        for at in answers if not self._mask_history else answers[-1:]:
            head = self._render(messages[:at], row, True)
            end = len(whole) if at == len(messages) - 1 else self._end(messages[: at + 1], row, whole)
            if not whole.startswith(head) or end is None:
                if at == answers[-1]:
                    head = self._common_head(messages[:at], row, whole)
                else:
                    self.counts.rewritten += 1
                    continue
            self._check_prompt(messages, at, row, whole[len(head) :])
            spans.append((len(head), end))
        return whole, spans

    def _end(self, messages, row, whole):
        text = self._render(messages, row, False).rstrip()
        return len(text) if whole.startswith(text) else None

    def _common_head(self, before, row, whole):
        """Of a template whose generation prompt says more than a finished turn has ("<think>")."""
        head = self._render(before, row, True)
        plain = self._render(before, row, False)
        if not whole.startswith(plain):
            raise ValueError("what stands before the answer changes when it follows")
        same = len(plain)
        while same < min(len(head), len(whole)) and head[same] == whole[same]:
            same += 1
        return head[:same]

    def _check_prompt(self, messages, at, row, rest):
        """Without a generation prompt the words before an answer would be learnt as a part of it."""
        content = str(messages[at].get("content") or "").strip()
        if not content or rest.lstrip().startswith(content[:32]) or messages[at].get("tool_calls"):
            return
        if self._render(messages[:at], row, True) == self._render(messages[:at], row, False):
            raise TrainingError(
                "the chat template has no generation prompt: with add_generation_prompt it writes the same as without, "
                "so where an answer begins cannot be told"
            )

    def _tokens(self, text, spans):
        if getattr(self._tokenizer, "is_fast", False):
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids, offsets = list(found["input_ids"]), found["offset_mapping"]
            # A token that a prompt's last space and an answer's first word share is the answer's.
            labels = [
                token if any(begin < b and end > a for a, b in spans) else IGNORED
                for token, (begin, end) in zip(ids, offsets, strict=True)
            ]
            return ids, labels
        ids, labels, at = [], [], 0
        for begin, end in [*spans, (len(text), len(text))]:
            for piece, counts in ((text[at:begin], False), (text[begin:end], True)):
                tokens = self._tokenizer.encode(piece, add_special_tokens=False) if piece else []
                ids += tokens
                labels += tokens if counts else [IGNORED] * len(tokens)
            at = end
        return ids, labels


def pack(rows: list[Encoded], width: int, apart: bool) -> list[Encoded]:
    """Several in one, none longer than width: the longest first, each into the first row that has room. apart: they do
    not see each other."""
    bins: list[list[Encoded]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda one: len(one.ids), reverse=True):
        at = next((i for i, left in enumerate(room) if left >= len(row.ids)), None)
        if at is None:
            bins.append([])
            room.append(width)
            at = len(bins) - 1
        bins[at].append(row)
        room[at] -= len(row.ids)
    out = []
    for packed in bins:
        starts: list[int] = []
        ids: list[int] = []
        labels: list[int] = []
        for row in packed:
            starts.append(len(ids))
            ids += row.ids
            labels += [IGNORED, *row.labels[1:]]  # nothing is predicted from another conversation's end
        out.append(Encoded(ids, labels, starts if apart else None))
    return out


class Batches:
    """A collator: rows padded on the right to the longest."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self._pad)
        labels = torch.full((len(rows), width), IGNORED)
        seen = torch.zeros((len(rows), width), dtype=torch.long)
        positions = torch.zeros((len(rows), width), dtype=torch.long)
        apart = any("position_ids" in row for row in rows)
        for at, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[at, :n] = torch.tensor(row["input_ids"])
            labels[at, :n] = torch.tensor(row["labels"])
            seen[at, :n] = 1
            if apart:
                positions[at, :n] = torch.tensor(row["position_ids"])
                positions[at, n:] = torch.arange(width - n)  # padding is a conversation of its own
        if apart:  # without a mask: transformers tells conversations apart by their positions
            return {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {"input_ids": ids, "labels": labels, "attention_mask": seen}


class Items(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, rows: list[Encoded]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self._rows[at].item()
