"""kt_kernel.placement: strategies against slow obvious ones, statistics files, the recorder."""

import importlib.util
import json
import pathlib
import random
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: placements are torch tensors")

SOURCE = pathlib.Path(__file__).parent.parent / "python" / "kt_kernel" / "placement.py"
_spec = importlib.util.spec_from_file_location("kt_placement_under_test", SOURCE)
placement = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(placement)


def chosen(mask):
    return {(layer, expert) for layer, row in enumerate(mask.tolist()) for expert, on in enumerate(row) if on}


def most_used(table, count):
    """The first `count` of (layer, expert) ordered by count, then place."""
    places = [(-n, layer, expert) for layer, row in enumerate(table) for expert, n in enumerate(row)]
    return {(layer, expert) for _, layer, expert in sorted(places)[:count]}


@pytest.mark.parametrize("count", [-3, 0, 1, 7, 20, 34, 35, 36, 1000])
@pytest.mark.parametrize("top", [1, 3, 1000])  # 1: every count ties; 1000: hardly any
def test_masks_are_the_most_used_of_all_layers(count, top):
    draw = random.Random(top)
    table = [[draw.randrange(top) for _ in range(7)] for _ in range(5)]
    expected = most_used(table, max(count, 0))
    for values in (table, torch.tensor(table), torch.tensor(table, dtype=torch.int32), torch.tensor(table).float()):
        mask = placement.generate_gpu_experts_masks(values, count)
        assert mask.dtype == torch.bool and mask.device.type == "cpu" and list(mask.shape) == [5, 7]
        assert chosen(mask) == expected


def test_masks_of_counts_that_float32_cannot_tell_apart():
    table = torch.tensor([[2**40, 2**40 + 1, 2**40 + 2]])
    assert chosen(placement.generate_gpu_experts_masks(table, 2)) == {(0, 1), (0, 2)}


def test_masks_of_a_transposed_view():
    table = torch.arange(12).reshape(4, 3).T
    assert chosen(placement.generate_gpu_experts_masks(table, 3)) == most_used(table.tolist(), 3)


@pytest.mark.parametrize(
    "values, count, message",
    [
        ([1, 2], 1, r"expected \[layers, experts\], has shape \[2\]"),
        ([[1.0, float("nan")]], 1, r"activation_freq\[0, 1\]: expected a count, has nan"),
        ([[1, 2], [3, -4]], 1, r"activation_freq\[1, 1\]: expected a count, has -4"),
        ([[1], [2, 3]], 1, "not a table of numbers"),
        ("abc", 1, "not a table of numbers"),
    ],
)
def test_masks_refuse(values, count, message):
    with pytest.raises(ValueError, match=message):
        placement.generate_gpu_experts_masks(values, count)


@pytest.mark.parametrize("count", [1.5, "3", None, True])
def test_masks_refuse_a_number_that_is_none(count):
    with pytest.raises(TypeError, match="num_gpu_experts must be an integer"):
        placement.generate_gpu_experts_masks([[1, 2]], count)


def test_uniform_shares_evenly_and_the_first_layers_take_the_rest():
    mask = placement.place("uniform", 4, 8, 10)
    assert mask.sum(dim=1).tolist() == [3, 3, 2, 2]
    assert chosen(mask) == {(layer, e) for layer, n in enumerate([3, 3, 2, 2]) for e in range(n)}
    assert placement.place("uniform", 4, 8, 1000).all()
    assert not placement.place("uniform", 4, 8, 0).any()


def test_front_loading_fills_layer_after_layer():
    assert placement.place("front-loading", 4, 8, 11).sum(dim=1).tolist() == [8, 3, 0, 0]
    assert chosen(placement.place("front-loading", 4, 8, 11)) >= {(1, 0), (1, 1), (1, 2)}


def test_random_is_the_same_everywhere():
    mask = placement.place("random", 6, 16, 20)
    order = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(42))[:20].tolist()
    assert chosen(mask) == {divmod(n, 16) for n in order}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert torch.equal(mask, placement.place("random", 6, 16, 20))
    assert torch.equal(state, torch.get_rng_state())


def test_frequency_takes_counts_frequencies_and_buffers():
    table = torch.randint(0, 50, (3, 5, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    expected = most_used(table.sum(dim=0).tolist(), 12)
    assert chosen(placement.place("frequency", 5, 9, 12, table)) == expected
    assert chosen(placement.place("frequency", 5, 9, 12, table.sum(dim=0))) == expected
    assert chosen(placement.place("frequency", 5, 9, 12, table.double() / 7)) == expected


@pytest.mark.parametrize("strategy", placement.STRATEGIES)
def test_layers_without_experts_are_true_and_take_no_share(strategy):
    statistics = torch.zeros(5, 4, dtype=torch.int64)  # dense layers tie with all others
    mask = placement.place(strategy, 5, 4, 6, statistics, moe_layers=range(1, 5, 2))
    assert mask[[0, 2, 4]].all()
    assert int(mask[[1, 3]].sum()) == 6
    assert placement.place(strategy, 5, 4, 6, statistics, moe_layers=[]).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("best", 2, 3, 1), "unknown placement strategy 'best'; there are uniform, frequency, front-loading, random"),
        (("frequency", 2, 3, 1), '"frequency" needs statistics'),
        (("frequency", 2, 3, 1, [[1, 2]]), "has 1 layers of 2 experts, expected 2 of 3"),
        (("uniform", 0, 3, 1), "layers must be at least 1, it is 0"),
    ],
)
def test_place_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        placement.place(*arguments)


def test_place_refuses_layers_the_model_lacks():
    with pytest.raises(ValueError, match=r"moe_layers has 5, the model has layers 0 ... 1"):
        placement.place("uniform", 2, 3, 1, moe_layers=[1, 5])


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_statistics_go_round(tmp_path, suffix):
    path = tmp_path / f"counts.{suffix}"
    table = torch.randint(0, 1000, (4, 3, 6), generator=torch.Generator().manual_seed(2))
    placement.write_statistics(path, table)
    assert torch.equal(placement.read_statistics(path), table.sum(dim=0))
    assert chosen(placement.place("frequency", 3, 6, 5, path)) == most_used(table.sum(dim=0).tolist(), 5)
    placement.write_statistics(str(path), table[0])
    assert torch.equal(placement.read_statistics(str(path)), table[0])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_pt_file_is_what_sglang_expects(tmp_path):
    path = tmp_path / "counts.pt"
    placement.write_statistics(path, [[1, 2], [3, 4]])
    table = torch.load(path, weights_only=True)["logical_count"]
    assert table.dtype == torch.int32 and list(table.shape) == [1, 2, 2]
    placement.write_statistics(path, [[1, 2**31]])
    assert placement.read_statistics(path).tolist() == [[1, 2**31]]


def test_what_sglang_records_is_read(tmp_path):
    path = tmp_path / "recorded.pt"
    table = torch.full((5, 2, 3), 2**31 - 1, dtype=torch.int32)  # the sum needs more than 32 bits
    torch.save({"rank": 0, "logical_count": table, "average_utilization_rate_over_window": 0.5}, path)
    assert placement.read_statistics(path).tolist() == [[5 * (2**31 - 1)] * 3] * 2


def test_bad_files_are_named(tmp_path):
    def refused(name, message, write):
        path = tmp_path / name
        write(path)
        with pytest.raises(ValueError, match=message) as error:
            placement.read_statistics(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    refused("a.json", "not a readable json file", lambda p: p.write_text("{"))
    refused("b.json", r"no logical_count; the file has \['other'\]", lambda p: p.write_text(json.dumps({"other": 1})))
    refused("c.json", r"has shape \[2\]", lambda p: p.write_text(json.dumps({"logical_count": [1, 2]})))
    refused("d.json", "expected a count, has -1", lambda p: p.write_text(json.dumps({"logical_count": [[1, -1]]})))
    refused("e.json", "not a table of numbers", lambda p: p.write_text(json.dumps({"logical_count": [[1], [2, 3]]})))
    refused("f.json", "whole numbers", lambda p: p.write_text(json.dumps({"logical_count": [[0.5]]})))
    refused("g.pt", "not a readable pt file", lambda p: p.write_bytes(b"no torch file"))
    refused("h.pt", "not a readable pt file", lambda p: torch.save({"logical_count": eval}, p))
    counts = torch.ones(1, 2, 3, dtype=torch.int64)
    refused("j.pt", "dense tensor with values, has torch.sparse_coo",
            lambda p: torch.save({"logical_count": counts.to_sparse()}, p))
    refused("k.pt", "dense tensor with values, has .* on meta",
            lambda p: torch.save({"logical_count": counts.to("meta")}, p))
    refused("l.pt", f"has {2**63 + 1}",
            lambda p: torch.save({"logical_count": torch.tensor([[1, 2**63 + 1]], dtype=torch.uint64)}, p))
    refused("m.json", f"add up to {2**64 - 2}",
            lambda p: p.write_text(json.dumps({"logical_count": [[[1, 2**63 - 1]]] * 2})))
    refused("i.txt", r"\.pt or \.json", lambda p: p.write_text(""))
    with pytest.raises(FileNotFoundError):
        placement.read_statistics(tmp_path / "absent.pt")


def test_counts_as_large_as_they_may_be(tmp_path):
    path = tmp_path / "counts.pt"
    torch.save({"logical_count": torch.tensor([[[1, 2**63 - 2]], [[2, 1]]], dtype=torch.uint64)}, path)
    assert placement.read_statistics(path).tolist() == [[3, 2**63 - 1]]
    assert chosen(placement.place("frequency", 1, 2, 1, path)) == {(0, 1)}
    with pytest.raises(ValueError, match=f"statistics: .* add up to {2**63}, more than"):
        placement.place("frequency", 1, 2, 1, [[[1, 2**63 - 1]], [[0, 1]]])


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="expected a count, has -1"):
        placement.write_statistics(tmp_path / "x.json", [[-1]])
    with pytest.raises(OSError):
        placement.write_statistics(tmp_path / "no folder" / "x.json", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_recorder_counts_what_routers_choose(tmp_path):
    recorder = placement.ExpertRecorder(3, 5)
    expected = [[0] * 5 for _ in range(3)]
    draw = random.Random(3)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.int16):
        for layer in range(3):
            low = 0 if dtype == torch.uint8 else -2
            ids = torch.tensor([[draw.randrange(low, 8) for _ in range(4)] for _ in range(6)], dtype=dtype)
            recorder.add(layer, ids.T)
            for n in ids.flatten().tolist():
                if 0 <= n < 5:
                    expected[layer][n] += 1
    recorder.add(1, torch.empty(0, 4, dtype=torch.int64))
    recorder.add(1, [])
    assert recorder.counts().tolist() == expected
    shares = recorder.frequencies()
    for layer in range(3):
        assert shares[layer].tolist() == pytest.approx([n / sum(expected[layer]) for n in expected[layer]])
    for name in ("r.pt", "r.json"):
        recorder.save(tmp_path / name)
        assert placement.read_statistics(tmp_path / name).tolist() == expected
    recorder.reset()
    assert not recorder.counts().any() and not recorder.frequencies().any()


def test_recorder_takes_many_threads():
    recorder = placement.ExpertRecorder(2, 4)
    ids = torch.arange(64).remainder(4)
    threads = [threading.Thread(target=lambda: [recorder.add(1, ids) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.counts().tolist() == [[0] * 4, [4 * 200 * 16] * 4]


def test_recorder_refuses():
    recorder = placement.ExpertRecorder(2, 4)
    with pytest.raises(IndexError, match=r"layer 2 is not in 0 ... 1"):
        recorder.add(2, [0])
    with pytest.raises(TypeError, match="ids must be integers, they are torch.float32"):
        recorder.add(0, torch.zeros(2))
    with pytest.raises(ValueError, match="experts must be at least 1, it is 0"):
        placement.ExpertRecorder(2, 0)
    assert not recorder.counts().any()
