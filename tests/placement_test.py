"""Which experts go to a GPU, and the statistics that decide it: kt's own orders and readers against
kt_kernel.placement, which uses torch, and against files that torch writes.

Needs torch and the program placement_probe, named by KT_PLACEMENT_PROBE."""
import importlib.util
import io
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

PROBE = os.environ.get("KT_PLACEMENT_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_PLACEMENT_PROBE does not name placement_probe")

SOURCE = pathlib.Path(__file__).parent.parent / "python" / "kt_kernel" / "placement.py"
_spec = importlib.util.spec_from_file_location("kt_placement_of_python", SOURCE)
placement = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(placement)


def probe(*arguments):
    return subprocess.run([PROBE, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def read_all(paths):
    """For each file the table, or the line that refuses it."""
    done = probe("statistics", *paths)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths)
    out = []
    for line in lines:
        if line.startswith("error: "):
            out.append(line)
            continue
        found = json.loads(line)
        out.append(torch.tensor(found["counts"], dtype=torch.int64).reshape(found["layers"], found["experts"]))
    return out


def saved(path, value, **how):
    torch.save(value, path, **how)
    return path


@pytest.mark.parametrize("strategy", placement.STRATEGIES)
@pytest.mark.parametrize("layers, experts, dense", [(1, 1, 0), (3, 5, 0), (4, 8, 1), (61, 256, 3), (48, 128, 0)])
def test_masks_are_those_of_python(tmp_path, strategy, layers, experts, dense):
    counts = torch.randint(0, 40, (layers, experts), generator=torch.Generator().manual_seed(experts))
    path = tmp_path / "counts.json"
    placement.write_statistics(path, counts)
    of_layers = ",".join(["0"] * dense + [str(experts)] * (layers - dense))
    done = probe("order", strategy, placement.RANDOM_SEED, of_layers, path)
    assert done.returncode == 0, done.stderr
    order = json.loads(done.stdout)
    total = (layers - dense) * experts
    assert len(order) == total == len({tuple(pair) for pair in order})
    for count in sorted({0, 1, total // 7, total // 2, total - 1, total}):
        mask = torch.zeros(layers, experts, dtype=torch.bool)
        mask[:dense] = True
        for layer, expert in order[:count]:
            mask[layer, expert] = True
        assert torch.equal(mask,
                           placement.place(strategy, layers, experts, count, counts, moe_layers=range(dense, layers)))


def test_random_takes_any_seed():
    for seed in (0, 1, 42, 2**31, 2**32 - 1):
        order = json.loads(probe("order", "random", seed, "1000").stdout)
        assert [e for _, e in order] == torch.randperm(1000, generator=torch.Generator().manual_seed(seed)).tolist()


def test_statistics_that_python_writes(tmp_path):
    draw = torch.Generator().manual_seed(3)
    tables = [torch.randint(0, 1000, shape, generator=draw) for shape in ((2, 3), (4, 5, 7), (1, 61, 256))]
    tables.append(torch.tensor([[0, 2**31], [2**62, 1]]))
    paths = []
    for i, table in enumerate(tables):
        for kind in ("pt", "json"):
            paths.append(tmp_path / f"{i}.{kind}")
            placement.write_statistics(paths[-1], table)
    for path, got in zip(paths, read_all(paths)):
        assert torch.equal(got, placement.read_statistics(path)), path


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_every_type_and_view_that_torch_saves(tmp_path):
    base = torch.randint(0, 100, (6, 4, 10), generator=torch.Generator().manual_seed(4))
    values = {str(dtype): base.to(dtype) for dtype in INTEGERS + FLOATS}
    values["bool"] = base > 50
    values["transposed"] = base.transpose(0, 2)
    values["part"] = base[1:, 2:, ::3]
    values["expanded"] = base[:1].expand(5, 4, 10)
    values["table"] = base[2]
    values["parameter"] = torch.nn.Parameter(base.double())
    values["grad"] = base.double().requires_grad_()
    paths, expected = [], []
    for name, value in values.items():
        table = value.detach().to(torch.int64)
        for around in ({"logical_count": value}, OrderedDict(rank=1, logical_count=value, also=value), value):
            paths.append(saved(tmp_path / f"{name}-{len(paths)}.pt", around))
            expected.append(table if table.dim() == 2 else table.sum(dim=0))
    for path, want, got in zip(paths, expected, read_all(paths)):
        assert isinstance(got, torch.Tensor) and torch.equal(got, want), (path, got)


def test_what_sglang_records_has_more_around_it(tmp_path):
    table = torch.full((5, 2, 3), 2**31 - 1, dtype=torch.int32)
    around = {"rank": 0, "logical_count": table, "average_utilization_rate_over_window": 0.5, "nothing": None,
              "list": [1, -2, 300, 70000, 2**40, -(2**40), [], ()], "text": "\u4e2d" * 300, "size": table.shape,
              "shared": [table, {"again": table}], "many": {str(i): i for i in range(3000)}}
    assert read_all([saved(tmp_path / "recorded.pt", around)])[0].tolist() == [[5 * (2**31 - 1)] * 3] * 2


def test_what_only_python_reads_is_refused_with_its_line(tmp_path):
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    counts = torch.ones(2, 3, dtype=torch.int64)
    cases = {
        "it holds torch.device": {"logical_count": counts, "on": torch.device("cpu")},
        "it holds torch._utils._rebuild_sparse_tensor": {"logical_count": counts.to_sparse()},
        "it holds torch._utils._rebuild_meta_tensor_no_storage": {"logical_count": counts.to("meta")},
        "it holds torch.ComplexFloatStorage": {"logical_count": counts.to(torch.complex64)},
        "it holds torch.int32": {"logical_count": counts, "type": torch.int32},
        "it holds numpy": {"logical_count": numpy.ones((2, 3))},
        "it holds __builtin__.eval": {"logical_count": counts, "f": eval},
        "an integer of 9 bytes": {"logical_count": counts, "large": 2**70},
        "keys are not all texts": {1: counts},
        "neither a tensor nor a dict": [counts],
    }
    paths = [saved(tmp_path / f"{i}.pt", value) for i, value in enumerate(cases.values())]
    paths.append(saved(tmp_path / "old.pt", {"logical_count": counts}, _use_new_zipfile_serialization=False))
    paths += [saved(tmp_path / f"protocol{n}.pt", {"logical_count": counts}, pickle_protocol=n) for n in (3, 4, 5)]
    wanted = [*cases, "versions before 1.6", *(f"a pickle of protocol {n}, 2 is read here" for n in (3, 4, 5))]
    for path, want, got in zip(paths, wanted, read_all(paths)):
        assert isinstance(got, str) and got.startswith(f"error: {path}: ") and want in got, (want, got)
        assert "; if you trust it, this makes JSON of it: python3 -c " in got


def test_the_line_that_makes_json_works(tmp_path):
    table = torch.arange(6).reshape(2, 3)
    saved(tmp_path / "FILE.pt", {"logical_count": table.to_sparse(), "on": torch.device("cpu")}, pickle_protocol=4)
    [line] = read_all([tmp_path / "FILE.pt"])
    command = line.split("this makes JSON of it: ")[1].replace("python3", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=300)
    assert torch.equal(read_all([tmp_path / "FILE.json"])[0], table)


class Calls:
    def __reduce__(self):
        return os.mkdir, ("made by a file",)


def test_nothing_in_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = io.BytesIO()
    torch.save({"logical_count": torch.ones(1, 2)}, plain)
    source = zipfile.ZipFile(plain)
    with zipfile.ZipFile("hostile.pt", "w") as out:
        for each in source.infolist():
            pickled = each.filename.endswith("data.pkl")
            out.writestr(each.filename, pickle.dumps({"logical_count": Calls()}, 2) if pickled else source.read(each))
    [line] = read_all([tmp_path / "hostile.pt"])
    assert "it holds posix.mkdir" in line and os.listdir() == ["hostile.pt"]


def test_mutated_files_are_read_or_refused_in_a_line(tmp_path):
    draw = random.Random(5)
    whole = io.BytesIO()
    table = torch.arange(24, dtype=torch.int32).reshape(2, 3, 4)
    torch.save({"rank": 0, "logical_count": table, "other": [torch.ones(2), {"a": 1.5}]}, whole)
    whole = whole.getvalue()
    paths = []
    for i in range(500):
        changed = bytearray(whole)
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(changed))
            what = draw.randrange(4)
            if what == 0:
                del changed[at:at + draw.randrange(1, 20)]
            elif what == 1:
                changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 20)))
            else:
                changed[at] = draw.choice([0, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        paths.append(tmp_path / f"{i}.pt")
        paths[-1].write_bytes(changed)
    refused = 0
    for path, got in zip(paths, read_all(paths)):
        if isinstance(got, str):
            refused += 1
            assert got.startswith(f"error: {path}: ") and len(got) < 1000, got
    assert refused > 100
