"""Which experts live on the GPU, and the counts of activations that decide it.

A placement is a bool CPU tensor [layers, experts], True where the expert is on the GPU: its row l is what
`KTMoEWrapper(gpu_experts_mask=...)` of layer l takes. Nothing here moves weights.

Statistics are counts of activations, the form SGLang records and reads (`--init-expert-location`):

* ``.pt``: a torch file with a dict whose ``logical_count`` is an integer tensor [buffer, layers, experts]; read with
  ``weights_only=True``, so that a file cannot run code.
* ``.json``: an object ``{"logical_count": [[...], ...]}``, nested lists [layers, experts] or
  [buffer, layers, experts]; other keys are ignored.

The buffer dimension (one row for each recorded step) is summed.
"""

from __future__ import annotations

import json
import operator
import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    import torch

    # Numbers in two or three dimensions.
    Table: TypeAlias = torch.Tensor | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
    Path: TypeAlias = str | os.PathLike[str]

STRATEGIES = ("uniform", "frequency", "front-loading", "random")
RANDOM_SEED = 42
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1


def generate_gpu_experts_masks(activation_freq: Table, num_gpu_experts: SupportsIndex) -> torch.Tensor:
    """The `num_gpu_experts` most used experts of the whole model.

    activation_freq: [layers, experts] counts or frequencies, a tensor or nested lists, on any device.
    num_gpu_experts: how many of all layers together; clamped to 0 ... layers * experts.
    Returns a bool CPU tensor [layers, experts]. Of equal counts the lower layer, then the lower expert comes first.
    """
    import torch

    table = _table(activation_freq, "activation_freq")
    count = min(max(_integer(num_gpu_experts, "num_gpu_experts"), 0), table.numel())
    order = torch.sort(table.reshape(-1), descending=True, stable=True).indices
    mask = torch.zeros(table.numel(), dtype=torch.bool, device="cpu")
    mask[order[:count]] = True
    return mask.reshape(table.shape)


def place(strategy: str, layers: SupportsIndex, experts: SupportsIndex, num_gpu_experts: SupportsIndex,
          statistics: Table | Path | None = None, *, moe_layers: Iterable[SupportsIndex] | None = None) -> torch.Tensor:
    """The placement of a whole model by one of the strategies of `--kt-expert-placement-strategy`.

    num_gpu_experts: how many experts of all layers together (SGLang's `--kt-num-gpu-experts` is per layer: multiply
    it); clamped to what the model has.
    statistics: counts [layers, experts] or [buffer, layers, experts], or the path of a file of them: only "frequency"
    reads it, and it must be there.
    moe_layers: the layers that have routed experts; None is all of them. The other rows come out True, as in SGLang,
    and take no share of num_gpu_experts.

    * uniform: the same number in each layer, its first experts; what does not divide goes to the first layers.
    * frequency: the most used experts of all layers (`generate_gpu_experts_masks`).
    * front-loading: whole layers from the first on.
    * random: any experts of any layers, drawn with a fixed seed: the same in every process.

    Returns a bool CPU tensor [layers, experts].
    """
    import torch

    layers = _positive(layers, "layers")
    experts = _positive(experts, "experts")
    rows = _moe_rows(moe_layers, layers)
    count = min(max(_integer(num_gpu_experts, "num_gpu_experts"), 0), len(rows) * experts)
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown placement strategy {strategy!r}; there are {', '.join(STRATEGIES)}")

    if strategy == "frequency":
        chosen = generate_gpu_experts_masks(_statistics(statistics, layers, experts)[rows], count)
    elif strategy == "uniform":
        share, more = divmod(count, max(len(rows), 1))
        each = torch.full((len(rows), 1), share, device="cpu")
        each[:more] += 1
        chosen = torch.arange(experts, device="cpu")[None, :] < each
    else:
        flat = torch.zeros(len(rows) * experts, dtype=torch.bool, device="cpu")
        if strategy == "random":
            draw = torch.Generator("cpu").manual_seed(RANDOM_SEED)
            drawn = torch.randperm(flat.numel(), generator=draw, device="cpu")
            flat[drawn[:count]] = True
        else:
            flat[:count] = True
        chosen = flat.reshape(len(rows), experts)

    mask = torch.ones(layers, experts, dtype=torch.bool, device="cpu")
    mask[rows] = chosen
    return mask


def read_statistics(path: Path) -> torch.Tensor:
    """The counts [layers, experts] of a file, int64 on the CPU. Raises ValueError naming the file and what is wrong."""
    import torch

    path = os.fspath(path)
    kind = _kind(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a FIFO would be waited for
        raise ValueError(f"{path}: expected a regular file")
    try:
        if kind == "pt":
            data = torch.load(path, map_location="cpu", weights_only=True)
        else:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
    except OSError:
        raise
    except Exception as error:  # whatever the reader of a damaged file stumbles over
        raise ValueError(f"{path}: not a readable {kind} file: {_first_line(error)}") from error
    if isinstance(data, dict):
        if "logical_count" not in data:
            raise ValueError(f"{path}: no logical_count; the file has {sorted(map(str, data)) or 'no keys'}")
        data = data["logical_count"]
    return _counts(data, path)


def write_statistics(path: Path, counts: Table) -> None:
    """Writes counts [layers, experts] or [buffer, layers, experts] as `path` says: .pt (a buffer dimension of 1 is
    added to a plain table, as SGLang expects; int32, or int64 where a count needs it) or .json. The file appears
    whole."""
    import torch

    path = os.fspath(path)
    kind = _kind(path)
    counts = _as_counts(counts, "counts")
    part = f"{path}.{os.getpid()}.part"
    try:
        if kind == "pt":
            narrow = counts.numel() == 0 or int(counts.max()) <= _INT32_MAX
            table = counts.to(torch.int32 if narrow else torch.int64)
            torch.save({"logical_count": table[None] if table.dim() == 2 else table}, part)
        else:
            with open(part, "w", encoding="utf-8") as file:
                json.dump({"logical_count": counts.tolist()}, file)
                file.write("\n")
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise


class ExpertRecorder:
    """Counts how often each expert of each layer is chosen.

    `add` is cheap and waits for no device: counts are kept where the ids are. Any thread may call any method.
    """

    def __init__(self, layers: SupportsIndex, experts: SupportsIndex) -> None:
        self.layers = _positive(layers, "layers")
        self.experts = _positive(experts, "experts")
        self._lock = threading.Lock()
        # device -> [layers, experts + 1]; the last column takes ids of no expert
        self._tables: dict[torch.device, torch.Tensor] = {}

    def add(self, layer: SupportsIndex, ids: torch.Tensor | Sequence[Any]) -> None:
        """Counts the chosen experts `ids` (any shape, integers) of one layer; ids < 0 or >= experts are ignored."""
        import torch

        layer = _integer(layer, "layer")
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is not in 0 ... {self.layers - 1}")
        if not isinstance(ids, torch.Tensor):
            ids = torch.as_tensor(ids, device="cpu")
        if ids.numel() == 0:
            return
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"ids must be integers, they are {ids.dtype}")
        flat = ids.detach().reshape(-1).to(torch.int64)
        flat = torch.where((flat < 0) | (flat >= self.experts), self.experts, flat)
        with self._lock:
            table = self._tables.get(ids.device)
            if table is None:
                with torch.inference_mode(False):  # later calls outside of it change the table too
                    table = torch.zeros(self.layers, self.experts + 1, dtype=torch.int64, device=ids.device)
                self._tables[ids.device] = table
            table[layer].index_add_(0, flat, torch.ones_like(flat))

    def counts(self) -> torch.Tensor:
        """What was counted so far: a new int64 CPU tensor [layers, experts]. Waits for the devices that counted."""
        import torch

        with self._lock, torch.inference_mode(False):
            total = torch.zeros(self.layers, self.experts, dtype=torch.int64, device="cpu")
            for table in self._tables.values():
                total += table[:, : self.experts].cpu()
            return total

    def frequencies(self) -> torch.Tensor:
        """Each expert's share of its layer's activations, float64 [layers, experts]; a layer never seen has zeros."""
        counts = self.counts().double()
        return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)

    def reset(self) -> None:
        """Forgets all counts."""
        with self._lock:
            for table in self._tables.values():
                table.zero_()

    def save(self, path: Path) -> None:
        """Writes the counts as `write_statistics` does: .pt for SGLang and `place`, or .json."""
        write_statistics(path, self.counts())


class Placement:
    """What placement rules put where: the value of ``kt_kernel.inject`` and of ``enable(..., rules=)``.

    as_dict() has the fields of `rules` in ``kt estimate --rules --json`` (file, rules, parts, bytes, idle, notes),
    str() is the table that ``kt`` prints. `modules`: of each module that a rule decides {rule, where, operator, device,
    formats, becomes}.
    """

    def __init__(self, plan: dict[str, Any], modules: dict[str, dict[str, Any]], text: str) -> None:
        self.modules = modules
        self._plan, self._text = plan, text
        self._model: Any = None
        self._undo: Any = None
        self._gone = "it was not applied to a model"

    def as_dict(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads(json.dumps(self._plan))
        return plan

    def to_json(self) -> str:
        return json.dumps(self._plan)

    def __str__(self) -> str:
        return self._text.rstrip("\n")

    def __repr__(self) -> str:
        changed = sum(each["becomes"] != "default" for each in self.modules.values())
        return f"<Placement of {self._plan['file']}: {len(self.modules)} modules, {changed} replaced>"

    def remove(self) -> None:
        """Brings the model back to what it was before. ValueError where its tensors do not exist any more."""
        if self._undo is None:
            raise ValueError(f"placement: cannot be removed: {self._gone}")
        self._undo.run(self._model)
        self._model = self._undo = None
        self._gone = "it is removed already"

    def release(self) -> None:
        """Gives up the modules that were replaced, and the memory of their weights; remove() is no more possible."""
        if self._undo is not None:
            self._keep_none(self._model, "the replaced modules were released")

    def _attach(self, model: Any, undo: Any) -> None:
        self._model, self._undo = model, undo

    def _keep_none(self, model: Any, why: str) -> None:
        self._model, self._undo, self._gone = model, None, why


def _integer(value: SupportsIndex, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, it is {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, it is {value!r}") from None


def _positive(value: SupportsIndex, name: str) -> int:
    number = _integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, it is {number}")
    return number


def _moe_rows(moe_layers: Iterable[SupportsIndex] | None, layers: int) -> list[int]:
    if moe_layers is None:
        return list(range(layers))
    rows = sorted({_integer(layer, "moe_layers") for layer in moe_layers})
    for layer in rows:
        if not 0 <= layer < layers:
            raise ValueError(f"moe_layers has {layer}, the model has layers 0 ... {layers - 1}")
    return rows


def _kind(path: str) -> str:
    for kind in ("pt", "json"):
        if path.lower().endswith("." + kind):
            return kind
    raise ValueError(f"{path}: activation statistics are .pt or .json files")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tensor(values: Any, name: str) -> torch.Tensor:
    """A dense tensor on the CPU; unsigned integers become int64, as torch compares no others."""
    import torch

    try:
        tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: not a table of numbers: {_first_line(error)}") from error
    if tensor.is_complex() or tensor.is_quantized:
        raise ValueError(f"{name}: expected counts, has {tensor.dtype}")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense tensor with values, has {tensor.layout} on {tensor.device}")
    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return _wide(tensor, name)
    return tensor


def _wide(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Unsigned integers as int64."""
    import torch

    wide = tensor.to(torch.int64)
    if bool((wide < 0).any()):
        at = torch.nonzero(wide < 0)[0].tolist()
        raise ValueError(f"{name}{at}: expected a count up to {_INT64_MAX}, has {int(wide[tuple(at)]) + 2**64}")
    return wide


def _summed(counts: torch.Tensor, name: str) -> torch.Tensor:
    """[layers, experts] of [buffer, layers, experts], whose counts may be too many for int64."""
    total = counts.sum(dim=0)
    if counts.is_floating_point() or not bool((counts.double().sum(dim=0) >= float(_INT64_MAX)).any()):
        return total
    exact = [[sum(column) for column in zip(*rows)] for rows in zip(*counts.tolist())]
    most = max(max(row) for row in exact)
    if most > _INT64_MAX:
        raise ValueError(f"{name}: the counts of an expert add up to {most}, more than {_INT64_MAX}")
    return total


def _check(tensor: torch.Tensor, name: str) -> None:
    """No count below zero, no NaN, no infinity."""
    import torch

    bad = tensor < 0
    if tensor.is_floating_point():
        bad |= ~torch.isfinite(tensor)
    if bool(bad.any()):
        at = torch.nonzero(bad)[0].tolist()
        raise ValueError(f"{name}{at}: expected a count, has {tensor[tuple(at)].item()}")


def _table(values: Any, name: str) -> torch.Tensor:
    """[layers, experts] in int64 or float64."""
    import torch

    tensor = _tensor(values, name)
    if tensor.dim() != 2:
        raise ValueError(f"{name}: expected [layers, experts], has shape {list(tensor.shape)}")
    tensor = tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)
    _check(tensor, name)
    return tensor


def _as_counts(values: Any, name: str) -> torch.Tensor:
    """Whole counts, 2-D or 3-D, int64."""
    import torch

    tensor = _tensor(values, name)
    if tensor.dim() not in (2, 3):
        raise ValueError(
            f"{name}: expected logical_count [layers, experts] or [buffer, layers, experts], has shape "
            f"{list(tensor.shape)}"
        )
    _check(tensor, name)
    whole = tensor.to(torch.int64)
    if tensor.is_floating_point() and not torch.equal(whole.to(tensor.dtype), tensor):
        raise ValueError(f"{name}: counts are whole numbers, this is a table of fractions")
    return whole


def _counts(values: Any, name: str) -> torch.Tensor:
    """[layers, experts], int64, the buffer dimension summed."""
    counts = _as_counts(values, name)
    return _summed(counts, name) if counts.dim() == 3 else counts


def _statistics(statistics: Table | Path | None, layers: int, experts: int) -> torch.Tensor:
    """What "frequency" goes by, [layers, experts]: counts or frequencies."""
    if statistics is None:
        raise ValueError('the strategy "frequency" needs statistics: counts [layers, experts] or the path of a file')
    name = "statistics"
    if isinstance(statistics, (str, os.PathLike)):
        name = os.fspath(statistics)
        statistics = read_statistics(name)
    tensor = _tensor(statistics, name)
    if tensor.dim() == 3:
        _check(tensor, name)
        tensor = _summed(tensor, name)
    table = _table(tensor, name)
    if list(table.shape) != [layers, experts]:
        raise ValueError(f"{name}: has {table.shape[0]} layers of {table.shape[1]} experts, expected {layers} "
                         f"of {experts}")
    return table
