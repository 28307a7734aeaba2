"""What of a model lies on a GPU: flags, settings, the plan that is shown, and each refusal, on the test driver.

KT_TEST_CUDA names the folder with the driver's libcuda.so.1, KT_PROGRAM the program."""
import importlib.util
import json
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import refused
from cli_place import place_fixture, weights_fixture  # noqa: F401 (pytest finds them)
from gpu_model_test import CUDA, DEMO, KT, kt, with_gpu

pytestmark = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists() or not KT,
                                reason="KT_TEST_CUDA or KT_PROGRAM is not there")

LAYERS, EXPERTS = 6, 16  # of the demo; the first is dense
CARD = 8 << 30           # of the test driver, where nothing else is said
ESTIMATE = ("estimate", str(DEMO), "--bandwidth", "9", "--gpu")


def ok(*words, **environment):
    done = kt(*words, **environment)
    assert done.returncode == 0, (words, done.stderr)
    return done


def of_the_model(estimate):
    """What `kt estimate` printed, without what a process takes and a machine has free: that differs from run to run."""
    lines = estimate.splitlines()
    kept = [line for line in lines if not re.search("the process itself|in all| available: ", line)]
    assert len(kept) == len(lines) - 3, estimate
    return kept


def gpu_of(*words, **environment):
    return json.loads(ok(*ESTIMATE, "--json", *words, **environment).stdout)["gpu"]


def hot(*words, **environment):
    return [layer.get("hot", {}).get("experts", []) for layer in gpu_of(*words, **environment)["placement"]["layers"]]


@pytest.fixture(scope="module")
def bare():
    """What the demo needs of a card without any expert."""
    return gpu_of("--gpu-experts", "0")


class TestThePlan:
    def test_parts_add_up(self, bare):
        assert bare["experts"] == bare["hot_experts"] == 0
        full = gpu_of()
        assert full["hot_experts"] == (LAYERS - 1) * EXPERTS
        for plan in (bare, full):
            assert plan["fits"] and plan["needed"] == sum(
                plan[part] for part in ("dense", "kv_cache", "workspace", "experts", "driver"))
            assert plan["allowed"] == plan["free"] // 100 * 95 + plan["driver"]
            assert plan["placement"]["bytes"]["GPU 0"] == plan["needed"]
        each = full["placement"]["layers"][1]["experts"]["bytes_each"]
        assert full["experts"] == full["hot_experts"] * each > 0

    def test_experts_fill_what_is_left_and_no_more(self, bare):
        each = gpu_of()["placement"]["layers"][1]["experts"]["bytes_each"]
        for more, count in ((0, 0), (each - 1, 0), (each, 1), (7 * each + each // 2, 7), (CARD - bare["needed"], 80)):
            got = gpu_of("--gpu-memory", str(bare["needed"] + more))
            assert got["hot_experts"] == count and got["needed"] <= got["allowed"] == bare["needed"] + more

    def test_a_server_and_an_estimate_have_the_same(self):
        use = ("--max-running-requests", "3", "--gpu-experts", "5", "--expert-placement", "random")
        served = json.loads(ok("run", str(DEMO), "--dry-run", "--json", "--gpu",
                               "--max-total-tokens", "600", *use).stdout)
        assert served["gpu"] == gpu_of("--context", "200", *use)

    def test_the_table_names_flags(self):
        shown = ok(*ESTIMATE, "--gpu-memory", "1GiB", "--gpu-experts", "25%").stdout
        rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
        assert "0-5     GPU 0  --gpu " in rows["dense parts"] and "routed experts" in rows
        assert "--gpu-experts 25%, uniform: 4 of 16 a layer" in shown and "`" not in shown
        assert " of 1.0 GiB (--gpu-memory)\n" in shown

    def test_what_a_gpu_takes_is_not_taken_twice(self, bare):
        plan = json.loads(ok(*ESTIMATE, "--json").stdout)
        alone = json.loads(ok("estimate", str(DEMO), "--bandwidth", "9", "--json", "--gpu", "off").stdout)
        assert "gpu" not in alone and plan["bytes"]["kv_cache"] == plan["bytes"]["dense"] == 0
        assert plan["bytes"]["experts"] == alone["bytes"]["experts"]
        assert plan["gpu"]["kv_cache"] == alone["bytes"]["kv_cache"]

    def test_the_cpu_reads_what_the_gpu_has_no_copy_of(self):
        """Experts as if routing were even: of the limit's bytes the share that is cold."""
        def rate(experts):
            return json.loads(ok(*ESTIMATE, "--json", "--gpu-experts", experts).stdout)["decode"]["tokens_per_s"]
        assert rate("50%") == pytest.approx(2 * rate("0"), rel=0.01) and rate("100%") is None
        assert "decode: the GPU reads everything" in ok(*ESTIMATE).stdout

    def test_a_share_of_the_card(self):
        assert gpu_of("--mem-fraction-static", "0.5")["allowed"] == CARD // 2
        assert gpu_of("--mem-fraction-static", "0.25", KT_TEST_CUDA_MEMORY=str(1 << 30))["allowed"] == 1 << 28

    def test_several_nodes(self):
        plan = json.loads(ok("run", str(DEMO), "--dry-run", "--json", "--gpu", "--numa-nodes", "2",
                             "--cpu-threads", "2").stdout)
        layer = plan["gpu"]["placement"]["layers"][3]
        assert len(layer["experts"]["bytes_of_node"]) == 2 and min(layer["experts"]["bytes_of_node"]) > 0
        assert layer["hot"]["bytes"] == 16 * layer["experts"]["bytes_each"] == sum(layer["experts"]["bytes_of_node"])


class TestWhichExperts:
    def test_so_many_a_layer(self):
        assert hot("--gpu-experts", "3") == [[]] + [[0, 1, 2]] * 5
        assert hot("--gpu-experts", "0") == [[]] * 6
        assert hot("--gpu-experts", "99") == [[]] + [list(range(16))] * 5
        assert [len(layer) for layer in hot("--gpu-experts", "10%")] == [0, 2, 2, 2, 1, 1]

    @pytest.mark.parametrize("one,other", [
        (("--gpu-experts", "3"), ("--kt-num-gpu-experts", "3")),
        (("--gpu-experts", "30%"), ("--kt-gpu-experts-ratio", "0.3")),
        (("--gpu-experts", "30%"), ("--gpu-experts", "9", "--kt-gpu-experts-ratio", "0.3")),
        (("--gpu-experts", "5", "--expert-placement", "front-loading"),
         ("--gpu-experts", "5", "--kt-expert-placement-strategy", "front-loading")),
    ])
    def test_other_names_mean_the_same(self, one, other):
        found = hot(*one)
        assert found == hot(*other) and any(found) and found != hot()

    @pytest.mark.parametrize("strategy", ["uniform", "front-loading", "random", "frequency"])
    def test_the_masks_are_those_of_kt_kernel(self, strategy, tmp_path):
        torch = pytest.importorskip("torch", reason="torch is not installed")
        source = pathlib.Path(__file__).parent.parent / "python" / "kt_kernel" / "placement.py"
        spec = importlib.util.spec_from_file_location("kt_kernel_placement", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        counts = torch.randint(0, 50, (4, LAYERS, EXPERTS), generator=torch.Generator().manual_seed(7),
                               dtype=torch.int32)
        counts[:, 0] = 0  # it does not route
        files = {name: tmp_path / name for name in ("counts.pt", "counts.json")}
        torch.save({"logical_count": counts}, files["counts.pt"])
        files["counts.json"].write_text(json.dumps({"logical_count": counts.sum(0).tolist()}))
        for file in files.values() if strategy == "frequency" else [None]:
            masks = module.place(strategy, LAYERS, EXPERTS, 30, file, moe_layers=range(1, LAYERS))
            words = ["--gpu-experts", "6", "--expert-placement", strategy]
            if file:
                words += ["--init-expert-location", str(file)]
            found = hot(*words)
            assert sum(map(len, found)) == 30 and found[0] == []
            assert found[1:] == [torch.nonzero(mask).flatten().tolist() for mask in masks[1:]]

    def test_statistics_choose_by_frequency_where_nothing_is_said(self, tmp_path):
        file = tmp_path / "counts.json"
        counts = [[(layer * 7 + expert * 5) % 31 for expert in range(EXPERTS)] for layer in range(LAYERS)]
        file.write_text(json.dumps(counts))
        order = sorted((-counts[layer][expert], layer, expert) for layer in range(1, LAYERS)
                        for expert in range(EXPERTS))[:20]
        expected = [sorted(expert for _, layer, expert in order if layer == number) for number in range(LAYERS)]
        for words in (("--expert-statistics", str(file)),
                      ("--init-expert-location", str(file), "--expert-placement", "frequency")):
            assert hot("--gpu-experts", "4", *words) == expected


class TestRefusals:
    @pytest.mark.parametrize("words,code,parts", [
        (("--gpu-memory", "9GiB"), 3,
         ["GPU 0 (test driver): --gpu-memory is 9.0 GiB, 8.0 GiB are free: 1.0 GiB too much"]),
        (("--gpu-memory", "20MiB"), 3, ["needed without any expert (dense parts", "20.0 MiB allowed (--gpu-memory)",
                                        "too much; try --kv int8 (", "--linear-format int4_g64", "--gpu-memory of ",
                                        " or --gpu off"]),
        (("--gpu-memory", "much"), 2, ["--gpu-memory: expected a size such as 8GiB or 40GB, got 'much'"]),
        (("--gpu-experts", "many"), 2,
         ["--gpu-experts: expected auto, experts a layer such as 8, or a share such as 25%, got 'many'"]),
        (("--gpu-experts", "101%"), 2, ["--gpu-experts: expected auto,", "'101%'"]),
        (("--kt-gpu-experts-ratio", "1.5"), 2, ["--kt-gpu-experts-ratio", "1.5"]),
        (("--mem-fraction-static", "1.5"), 2, ["--mem-fraction-static", "1.5"]),
        (("--mem-fraction-static", "0.5", "--gpu-memory", "1GiB"), 2,
         ["--gpu-memory and --mem-fraction-static: give one of them"]),
        (("--expert-placement", "best"), 2, ["--expert-placement", "best"]),
        (("--expert-placement", "frequency"), 2,
         ["the placement by frequency needs statistics: --expert-statistics names a file of them"]),
        (("--expert-statistics", "/nowhere.json"), 2, ["/nowhere.json"]),
    ])
    def test_lines(self, words, code, parts):
        done = kt("generate", str(DEMO), "-p", "x", "--gpu", *words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.count("\n") == 1 and all(part in done.stderr for part in parts), done.stderr

    def test_more_experts_than_fit(self, bare):
        each = gpu_of()["placement"]["layers"][1]["experts"]["bytes_each"]
        room = ("--gpu-memory", str(bare["needed"] + 33 * each))
        line = kt("generate", str(DEMO), "-p", "x", "--max-tokens", "4090", "--gpu", "--gpu-experts", "8", *room)
        assert line.returncode == 3 and ": --gpu-experts 8 a layer: 40 experts are " in line.stderr, line.stderr
        assert ": try --gpu-experts " in line.stderr and line.stderr.rstrip().endswith(" or auto")
        assert gpu_of("--gpu-experts", "6", *room)["hot_experts"] == 30

    def test_free_memory_counts(self, bare):
        """Not what the card has: another process holds the rest of it."""
        done = kt("generate", str(DEMO), "-p", "x", "--gpu", "--gpu-experts", "0",
                  KT_TEST_CUDA_MEMORY=str(bare["needed"] // 2))
        assert done.returncode == 3 and "free less 5 %): " in done.stderr and "too much; try " in done.stderr

    def test_an_estimate_shows_the_line(self, bare):
        shown = ok(*ESTIMATE, "--gpu-memory", "20MiB").stdout
        assert "\ndoes not fit: GPU 0 (test driver): " in shown and " or --gpu off\n" in shown
        plan = json.loads(ok(*ESTIMATE, "--gpu-memory", "20MiB", "--json").stdout)
        assert not plan["fits"] and not plan["gpu"]["fits"] and "too much" in plan["gpu"]["problem"]

    def test_statistics_of_another_model(self, tmp_path):
        file = tmp_path / "other.json"
        file.write_text(json.dumps([[1] * 8] * 4))
        done = kt(*ESTIMATE, "--expert-statistics", str(file))
        assert done.returncode == 2
        assert done.stderr == f"kt: {file}: statistics of 4 layers with 8 experts, the model has 6 with 16\n"
        done = kt(*ESTIMATE, "--expert-statistics", str(file), "--expert-placement", "uniform")
        assert done.returncode == 2 and "--expert-placement is uniform" in done.stderr

    def test_auto_says_why_it_leaves_the_gpu(self):
        plain = ok("estimate", str(DEMO), "--bandwidth", "9", "--gpu", "off")
        done = ok("estimate", str(DEMO), "--bandwidth", "9", "--gpu", "auto", "--gpu-memory", "20MiB")
        assert of_the_model(done.stdout) == of_the_model(plain.stdout)
        assert (done.stderr.startswith("kt: note: everything runs on the CPU: GPU 0 (test driver): ")
                and "--kv int8" in done.stderr)
        served = ok("run", str(DEMO), "--dry-run", "--json", "--gpu", "auto", "--gpu-memory", "20MiB")
        assert "gpu" not in json.loads(served.stdout) and served.stderr.count("everything runs on the CPU") == 1
        assert json.loads(served.stdout)["context"] == json.loads(ok("run", str(DEMO), "--dry-run", "--json",
                                                                     "--gpu", "off").stdout)["context"]


class TestWithoutAGpu:
    FLAGS = ("--gpu-memory", "1GiB", "--gpu-experts", "4", "--expert-placement", "random")

    def test_a_note(self):
        off = ("estimate", str(DEMO), "--bandwidth", "9", "--gpu", "off")
        done = ok(*off, *self.FLAGS)
        assert (done.stderr == "kt: note: --gpu-memory, --gpu-experts, --expert-placement: ignored, no GPU is "
                               "used; see --gpu\n")
        assert of_the_model(done.stdout) == of_the_model(ok(*off).stdout)

    def test_of_the_server(self, place):
        said = place.plan(*self.FLAGS, "--mem-fraction-static", "0.9", "--init-expert-location", "counts.pt")
        assert ("mean nothing here: --gpu-memory, --gpu-experts, --expert-placement, --mem-fraction-static, "
                "--init-expert-location\n" in said)
        assert "--gpu-experts is ignored: no GPU is used; see --gpu" in said
        assert "--mem-fraction-static is ignored: memory is planned before loading" in said
        refused(place.kt("run", "demo", "--dry-run", "--strict", *self.FLAGS), 2, "--strict", "--gpu-experts")

    def test_with_one_they_are_not_ignored(self, place):
        done = place.ok("run", "demo", "--dry-run", "--strict", "--gpu", *self.FLAGS, **with_gpu())
        assert "ignored" not in done.stdout and "--gpu-experts 4 a layer, random" in done.stdout


class TestSettings:
    def figures(self, place, *words):
        return json.loads(place.ok("run", "demo", "--dry-run", "--json", *words, **with_gpu()).stdout)

    def test_they_stand_for_flags(self, place, tmp_path):
        counts = tmp_path / "counts.json"
        counts.write_text(json.dumps([[expert + layer for expert in range(EXPERTS)] for layer in range(LAYERS)]))
        assert self.figures(place)["gpu"]["allowed"] > 2 << 30 and "gpu" not in self.figures(place, "--gpu", "off")
        for key, value in (("run.gpu", "0"), ("run.gpu-memory", "2GiB"), ("run.gpu-experts", "25%"),
                           ("run.expert-placement", "frequency"), ("run.expert-statistics", counts)):
            place.ok("config", "set", key, value)
        plan = self.figures(place)["gpu"]
        assert plan["allowed"] == 2 << 30 and plan["hot_experts"] == 20
        assert [len(layer["hot"]["experts"]) for layer in plan["placement"]["layers"][1:]] != [4] * 5
        flags = self.figures(place, "--gpu-memory", "1GiB", "--gpu-experts", "2")["gpu"]
        assert flags["allowed"] == 1 << 30 and flags["hot_experts"] == 10
        # In place of run.gpu-memory.
        assert self.figures(place, "--mem-fraction-static", "0.5")["gpu"]["allowed"] == CARD // 2
        assert "gpu" not in self.figures(place, "--gpu", "off")

    def test_what_they_refuse(self, place):
        for key, value, message in (("run.gpu", "fast",
                                     "expected the number of a device, or several as 0,1, auto or off"),
                                    ("run.gpu-memory", "much", "a size such as 8GiB"),
                                    ("run.gpu-experts", "few", "experts a layer such as 8"),
                                    ("run.gpu-prefill-threshold", "few", "a number of tokens, auto or off"),
                                    ("run.expert-placement", "best", "uniform, frequency, front-loading, random")):
            refused(place.kt("config", "set", key, value), 2, key, message)


class TestPrompts:
    """Experts that pass through the GPU take memory there: slots, and rows of larger steps."""

    def workspace(self, *words):
        return json.loads(ok(*ESTIMATE, "--json", "--gpu-experts", "0", *words).stdout)["gpu"]["workspace"]

    def test_what_they_take_is_planned(self):
        usual = self.workspace()
        for value in ("off", "auto"):
            assert self.workspace("--gpu-prefill-threshold", value) == usual
        passing = self.workspace("--gpu-prefill-threshold", "65")
        assert passing > usual and passing == self.workspace("--kt-gpu-prefill-threshold", "65")
        larger = self.workspace("--gpu-prefill-threshold", "65", "--gpu-prefill-chunk", "4096")
        assert larger > self.workspace("--gpu-prefill-threshold", "65", "--gpu-prefill-chunk", "2048") > usual
        # Without rounding experts of prompts stay on the CPU.
        assert self.workspace("--acts", "f32") == self.workspace("--acts", "f32", "--gpu-prefill-threshold", "65")

    @pytest.mark.parametrize("words,said", [
        (("--gpu-prefill-threshold", "many"), "expected a number of tokens, auto or off, got 'many'"),
        (("--gpu-prefill-threshold", "-3"), "got '-3'"),
        (("--gpu-prefill-chunk", "0"), "--gpu-prefill-chunk"),
    ])
    def test_what_they_refuse(self, words, said):
        refused(kt(*ESTIMATE, *words), 2, said)


class TestCopies:
    """Experts on the GPU are the CPU's bytes, wherever those come from."""
    ASK = ("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "24", "--acts", "f32")

    @pytest.mark.parametrize("words,said", [
        ((), "all routed experts; the CPU: those of prompts"),
        (("--gpu-experts", "30%"), "24 of 80 routed experts; the CPU: the others, and those of prompts"),
        (("--gpu-experts", "5", "--expert-placement", "random", "--format", "int8"), "25 of 80 routed experts;"),
    ])
    def test_they_say_what_the_cpu_says(self, words, said):
        plain = ok(*self.ASK, *(words[-2:] if "--format" in words else ()))
        done = ok(*self.ASK, "--gpu", *words)
        assert done.stdout == plain.stdout and len(plain.stdout) > 40
        assert f"kt: note: GPU 0 (test driver): attention, dense parts, the cache and {said}" in done.stderr

    def test_they_fit_where_the_plan_says_so(self):
        """On a card that has room for 20 of them: every allocation of loading and of the steps."""
        use = ("--context", "32", "--acts", "f32")
        needed, each = (gpu_of(*use, "--gpu-experts", "0")["needed"],
                        gpu_of()["placement"]["layers"][1]["experts"]["bytes_each"])
        room = str(int((needed + 20.5 * each) / 0.95))
        done = ok(*self.ASK, "--gpu", KT_TEST_CUDA_MEMORY=room)
        assert "the cache and 20 of 80 routed experts; the CPU: the others" in done.stderr
        assert gpu_of(*use, KT_TEST_CUDA_MEMORY=room)["hot_experts"] == 20

    def test_another_format_is_said(self, place):
        for words, of in ((("--format", "int8"), ""), (("--weights", str(place.weights)), f" of {place.weights}")):
            done = kt(*ESTIMATE, *words)
            assert done.returncode == 0
            assert done.stderr.startswith("kt: note: experts on GPU 0 are copies of the CPU's, ") and of in done.stderr
            assert done.stderr.endswith(f"; {DEMO} stores its own as bf16\n"), done.stderr
            assert kt(*ESTIMATE, "--gpu-experts", "0", *words).stderr == ""
        assert kt(*ESTIMATE).stderr == kt(*ESTIMATE, "--format", "bf16").stderr == ""

    def test_they_are_as_large_as_the_experts_that_are_loaded(self, place):
        own, small = gpu_of(), gpu_of("--format", "int4")
        assert small["hot_experts"] == own["hot_experts"] and small["experts"] < own["experts"] / 3
        assert gpu_of("--weights", str(place.weights))["experts"] < own["experts"] / 3


class TestRules:
    """Rules that name one GPU for dense parts and the CPU for experts are what flags say."""
    RULES = """- match: {class: torch.nn.Linear}
  replace: {class: a.KTransformersLinear, kwargs: {generate_device: cuda, generate_op: KLinearMarlin}}
- match: {name: "mlp\\\\.experts$"}
  replace: {class: a.KTransformersExperts, kwargs: {generate_device: cpu, backend: AMXInt8}}
  recursive: False
- match: {name: "^model\\\\.layers\\\\..*\\\\."}
  replace: {class: default, kwargs: {generate_device: "cuda:0"}}
"""

    def test_the_same_placement_and_the_same_words(self, tmp_path):
        path = tmp_path / "r.yaml"
        path.write_text(self.RULES)
        flags, rules = ("--gpu", "0", "--format", "int8", "--linear-format", "int4_g64"), ("--rules", str(path))
        plan = [json.loads(ok("estimate", str(DEMO), "--bandwidth", "9", "--json", *words).stdout)
                for words in (flags, rules)]
        assert plan[0]["gpu"] == plan[1]["gpu"] and plan[0]["bytes"]["experts"] == plan[1]["bytes"]["experts"]
        parts = {part["part"]: part["device"] for part in plan[1]["rules"]["parts"]}
        assert (parts["routed experts"] == "cpu" and parts["attention"] == parts["head"] == "cuda:0"
                and parts["embedding"] == "host")
        said = [json.loads(ok("generate", str(DEMO), "-p", "Once upon a time", "--max-tokens", "12", "--acts", "f32",
                              "--json", *words).stdout)
                for words in (flags, rules)]
        assert said[0]["text"] == said[1]["text"] != ""

    def test_a_gpu_that_is_not_there(self, tmp_path):
        path = tmp_path / "r.yaml"
        path.write_text(self.RULES)
        done = kt("estimate", str(DEMO), "--gpu", "7", "--rules", str(path))
        line, = done.stderr.splitlines()
        assert (done.returncode != 0 and line.startswith(f"kt: {path}:1: rule 1: lm_head: on cuda:0: ")
                and "--rule-devices cuda=cpu" in line)

    def test_rules_that_say_cpu_leave_the_gpu(self):
        done = json.loads(ok("estimate", str(DEMO), "--bandwidth", "9", "--json", "--place", "layers=cpu").stdout)
        assert "gpu" not in done
        done = kt("estimate", str(DEMO), "--gpu", "0", "--place", "layers\\.0\\.mlp=cpu")
        assert done.returncode == 4 and "dense parts of a layer in two places are not there yet" in done.stderr
