"""Files that appear whole or not at all; the log, the results and the pictures of a run."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from .events import TrainingError

STAGING = ".saving"  # what is being written; left behind by a kill, and removed by the next run
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM = 1 << 20


def write_whole(path: pathlib.Path, text: str) -> None:
    """Beside it, synced, then renamed over it."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: pathlib.Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=4, sort_keys=True) + "\n")


def sync_folder(path: pathlib.Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_tree(path: pathlib.Path) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        sync_folder(pathlib.Path(folder))


def staged(output: pathlib.Path, what: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """A folder that `write` has filled, synced, in output's staging place. A disk that is full is a TrainingError, and
    nothing is left."""
    folder = output / STAGING / what
    shutil.rmtree(folder.parent, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
        write(folder)
        sync_tree(folder)
    except Exception as error:
        shutil.rmtree(folder.parent, ignore_errors=True)
        if full := full_disk(error, output, what):
            raise full from error
        raise
    return folder


def full_disk(error: BaseException, output: pathlib.Path, what: str = "") -> TrainingError | None:
    """What is to be said where `error` came of a disk without room, whoever was writing."""
    if not _is_full(error, output):
        return None
    return TrainingError(
        f"{output / what}: no room to write it ({_reason(error)}); what was saved before is whole, and the same "
        "command goes on from there",
        "memory",
    )


def _is_full(error, folder):
    at: BaseException | None = error
    while at is not None:  # writers of tensors wrap what the system said
        if isinstance(at, OSError) and at.errno in _FULL:
            return True
        if any(cause in str(at)
               for cause in ("No space left", "File too large", "Disk quota", "writing file failed", "unexpected pos")):
            return True
        at = at.__cause__ or at.__context__
    return folder.is_dir() and shutil.disk_usage(folder).free < _ROOM


def _reason(error):
    return " ".join(str(error).split())[:200] or type(error).__name__


def put_folder(folder: pathlib.Path, place: pathlib.Path) -> None:
    """Renames a staged folder to its place, where an older one may stand."""
    old = place.with_name(f"{STAGING}-old-{place.name}")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        os.rename(place, old)
    os.rename(folder, place)
    sync_folder(place.parent)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder.parent, ignore_errors=True)


def put_files(folder: pathlib.Path, place: pathlib.Path) -> None:
    """Renames what is in a staged folder into `place`, each over its older version."""
    for path in sorted(folder.iterdir()):
        target = place / path.name
        if path.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        os.replace(path, target)
    sync_folder(place)
    shutil.rmtree(folder.parent, ignore_errors=True)


def checkpoints(output: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """By their steps."""
    found = []
    for path in output.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    return sorted(found)


def keep_last(output: pathlib.Path, limit: int | None) -> None:
    """Removes the checkpoints that were written first. None: removes none."""
    if limit is not None:
        written = sorted(checkpoints(output), key=lambda one: (one[1].stat().st_mtime_ns, one[0]))
        remove_checkpoints([path for _, path in written[: max(0, len(written) - limit)]])


def remove_checkpoints(paths: Iterable[pathlib.Path]) -> None:
    """Each loses its name first, so that none is ever half there."""
    for path in paths:
        gone = path.with_name(f"{STAGING}-gone-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def clean(output: pathlib.Path) -> None:
    """Removes what a killed run left half written."""
    for path in output.glob(f"{STAGING}*"):
        old = path.name.removeprefix(f"{STAGING}-old-")
        if old != path.name and not (output / old).exists():
            os.rename(path, output / old)  # killed between two renames: this is the checkpoint
            continue
        shutil.rmtree(path, ignore_errors=True)


class TrainerLog:
    """trainer_log.jsonl. A run that goes on keeps the lines of the steps before."""

    def __init__(self, output: pathlib.Path, first_step: int) -> None:
        self._path = output / "trainer_log.jsonl"
        kept = []
        if first_step and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["current_steps"] <= first_step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    pass  # cut off by a kill
        write_whole(self._path, "".join(kept))

    def add(self, **facts: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({key: value for key, value in facts.items() if value is not None}) + "\n")


def write_results(output: pathlib.Path, split: str, metrics: dict[str, Any]) -> None:
    """train_results.json, and the same beside others' in all_results.json."""
    write_json(output / f"{split}_results.json", metrics)
    every = output / "all_results.json"
    try:
        before = json.loads(every.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    write_json(every, {**before, **metrics})


def draw(path: pathlib.Path, title: str, points: Iterable[tuple[float, float]]) -> None:
    """An SVG of a curve by step, with a smoothed one over it."""
    points = list(points)
    if len(points) < 2:
        return
    width, height, left, right, top, bottom = 640, 400, 64, 16, 36, 40
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    if high == low:
        low, high = low - 0.5, high + 0.5

    def at(x, y):
        across = left + (x - xs[0]) / max(xs[-1] - xs[0], 1e-9) * (width - left - right)
        return f"{across:.1f},{top + (high - y) / (high - low) * (height - top - bottom):.1f}"

    smooth, value = [], ys[0]
    for x, y in points:
        value = 0.8 * value + 0.2 * y
        smooth.append((x, value))
    marks = []
    for part in range(5):
        y, x = low + (high - low) * part / 4, xs[0] + (xs[-1] - xs[0]) * part / 4
        across, down = at(x, y).split(",")
        marks.append(f'<path d="M{left} {down}H{width - right}" stroke="#ddd"/>')
        marks.append(f'<text x="{left - 6}" y="{down}" text-anchor="end" dominant-baseline="middle">{y:.4g}</text>')
        marks.append(f'<text x="{across}" y="{height - bottom + 18}" text-anchor="middle">{x:.0f}</text>')
    line = '<polyline fill="none" stroke="{}" stroke-width="{}" points="{}"/>'
    write_whole(path, "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{width / 2}" y="22" text-anchor="middle" font-size="15">{title}</text>',
        *marks,
        line.format("#9cc4e4", 1, " ".join(at(*p) for p in points)),
        line.format("#1f6fb2", 2, " ".join(at(*p) for p in smooth)),
        f'<text x="{width / 2}" y="{height - 6}" text-anchor="middle">step</text>',
        "</svg>\n",
    ]))
