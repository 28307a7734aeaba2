"""kt_kernel.transformers: stock models with their experts on KT, against the same models in torch alone.

Reference models run in float32 on weights that are bf16 numbers, so that both sides see the same values. With f32
activations in KT only the order of sums differs; BOUND leaves room for other exponentials, as in model_logits_test.
With KT's default for bf16 weights, inputs and middles of experts are rounded to bf16, 2^-9 of each value at most: if
all of it lined up in every layer, logits would move by 2 * 2^-9 of their size a layer; ROUNDED doubles that for what
later layers make of it.
KT_TEST_DATA, where it is set, is the folder with the other trained model.
"""

import copy
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import kt_kernel.transformers as kt
import tiny_models
from logits import prompt

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"]
BOUND = 1e-4
ROUNDED = 3 * 2.0**-7  # three layers
PLAIN = dict(dtype=torch.float32, attn_implementation="eager", threads=2)
IDS = torch.tensor([prompt(24, tiny_models.VOCAB, seed) for seed in (0, 1)])


def worst(ours, theirs, but=0):
    """max|a - b| / max|b| over positions, all but so many of the worst."""
    assert ours.shape == theirs.shape and torch.isfinite(ours).all()
    errors = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    return errors.flatten().sort(descending=True).values[but].item()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def folder_of(root, key):
    if not (root / key / "config.json").exists():
        tiny_models.save(tiny_models.build(key, torch.bfloat16), root / key, torch.bfloat16)
    return root / key


_references = {}


def reference(key):
    """Pure transformers' logits of IDS."""
    if key not in _references:
        with torch.no_grad():
            _references[key] = tiny_models.build(key, torch.bfloat16)(IDS).logits
    return _references[key]


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


class Counter:
    """Counts of chosen experts by hooks on the routers: what a recorder must show."""

    def __init__(self, model, layers, experts):
        self.counts = torch.zeros(layers, experts, dtype=torch.int64)
        self._hooks = [
            module.register_forward_hook(self._count(int(name.split(".")[2])))
            for name, module in model.named_modules()
            if name.endswith("mlp.gate")
        ]

    def _count(self, layer):
        def hook(module, inputs, output):
            self.counts[layer] += torch.bincount(output[2].reshape(-1), minlength=self.counts.shape[1])

        return hook


class TestFamilies:
    @pytest.mark.parametrize("key", FAMILIES)
    def test_path(self, root, key):
        model = kt.enable(folder_of(root, key), activations="f32", **PLAIN)
        assert worst(logits(model), reference(key)) < BOUND
        assert not any(".experts." in name for name in model.state_dict())
        assert not any(parameter.ndim == 3 for parameter in model.parameters())

    @pytest.mark.parametrize("key", FAMILIES)
    def test_loaded_model_in_pieces(self, key):
        model = kt.enable(tiny_models.build(key, torch.bfloat16), activations="f32", threads=2, max_tokens=5)
        assert worst(logits(model), reference(key)) < BOUND
        assert not any(".experts." in name for name in model.state_dict())

    @pytest.mark.parametrize("key", FAMILIES)
    def test_rounded_activations(self, root, key):
        assert worst(logits(kt.enable(folder_of(root, key), **PLAIN)), reference(key)) < ROUNDED

    @pytest.mark.parametrize("key", FAMILIES)
    def test_generate(self, root, key):
        """Greedy tokens, cache and left padding included, up to the first that the bound leaves open."""
        model = kt.enable(folder_of(root, key), activations="f32", **PLAIN)
        mask = torch.ones_like(IDS)
        mask[1, :5] = 0
        how = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, output_logits=True, pad_token_id=0,
                   return_dict_in_generate=True)
        theirs = tiny_models.build(key, torch.bfloat16).generate(IDS, **how)
        ours = model.generate(IDS, **how)
        for row in range(len(IDS)):
            assert compared_tokens(ours, theirs, row, BOUND) >= 6


def compared_tokens(ours, theirs, row, bound):
    """Checks new tokens of a row up to the first whose margin is below twice the bound; how many were checked."""
    start = theirs.sequences.shape[1] - len(theirs.logits)
    for step, scores in enumerate(theirs.logits):
        best = scores[row].float().topk(2).values
        if best[0] - best[1] <= 2 * bound * scores[row].abs().max():
            return step
        assert ours.sequences[row, start + step] == theirs.sequences[row, start + step], f"row {row}, step {step}"
    return len(theirs.logits)


class TestFormats:
    @pytest.mark.parametrize("format,bound", [("int8", 0.05), ("AMXINT4", 0.6), ("mxfp8", 0.2)])
    def test_made_while_loading(self, root, format, bound):
        """The same numbers by path and from tensors; and near the reference (int4 of such small rows is coarse)."""
        by_path = logits(kt.enable(folder_of(root, "qwen3_moe"), format=format, **PLAIN))
        loaded = kt.enable(tiny_models.build("qwen3_moe", torch.bfloat16), format=format, threads=2)
        assert torch.equal(by_path, logits(loaded))
        # Where two experts score alike, rounding may change their places: in one of these 48 positions at most.
        assert 1e-4 < worst(by_path, reference("qwen3_moe"), but=1) < bound

    def test_names(self):
        assert [kt.method_of(name) for name in ("int4", "INT8", "bf16", "fp8", "gguf", "amxint4")] == [
            "AMXINT4", "AMXINT8", "BF16", "FP8", "LLAMAFILE", "AMXINT4"]
        with pytest.raises(ValueError, match="int5.*int4"):
            kt.method_of("int5")

    @pytest.mark.parametrize("name", ["fp8", "int4_g32"])
    def test_quantised_checkpoint(self, root, name):
        """Experts as they are stored, on KT; the rest by the checkpoint's own quantizer."""
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        import published

        sizes = dict(hidden_size=256, head_dim=64, intermediate_size=256, moe_intermediate_size=128)
        make = published.Fp8Blocks if name == "fp8" else lambda: published.Packed(4, 32, True)
        stored, plain = published.publish(tiny_models.build("qwen3_moe", **sizes), make(), root / name)
        model = kt.enable(stored, **dict(PLAIN, activations="f32", dtype=torch.bfloat16)).to(torch.float32)
        assert {m.options.method for m in model.modules() if isinstance(m, kt.KTExperts)} == {
            "FP8" if name == "fp8" else "RAWINT4"}
        # Without a GPU, transformers makes bf16 of what is fp8: the reference gets those numbers, its experts stay.
        theirs = published.load_plain(plain)
        missing = theirs.load_state_dict(model.state_dict(), strict=False)
        assert not missing.unexpected_keys and all(".experts." in key for key in missing.missing_keys)
        assert worst(logits(model), logits(theirs)) < BOUND
        split = kt.enable(stored, gpu_experts=3,
                          **dict(PLAIN, activations="f32", dtype=torch.bfloat16)).to(torch.float32)
        # Codes times scales are bf16 on the device: 2^-9 on the two matrices of an expert, three layers.
        assert worst(logits(split), logits(theirs)) < ROUNDED


    def test_awq_experts(self, root):
        """Stored by AWQ, which has no method of its own; the rest from the plain checkpoint."""
        import published
        from kt_kernel.transformers.formats import stored_method

        stored, plain = published.publish(tiny_models.build("qwen3_moe"), published.Awq(32), root / "awq")
        assert stored_method(stored) == "GPTQ_INT4"
        model = kt.enable(plain, weights=stored, **dict(PLAIN, activations="f32"))
        assert {m.options.method for m in model.modules() if isinstance(m, kt.KTExperts)} == {"GPTQ_INT4"}
        assert worst(logits(model), logits(published.load_plain(plain))) < BOUND
        with pytest.raises(ValueError, match="RAWINT4.*awq/stored.*int4 in groups of 32 .awq, zero points.*GPTQ_INT4"):
            kt.enable(plain, weights=stored, format="rawint4", **PLAIN)


class TestPlacement:
    @pytest.mark.parametrize("key", ["qwen3_moe", "deepseek_v3"])
    @pytest.mark.parametrize("gpu_experts", [1, 3, 8, 0.5])
    def test_split_gives_the_same(self, root, key, gpu_experts):
        model = kt.enable(folder_of(root, key), activations="f32", gpu_experts=gpu_experts, **PLAIN)
        modules = [m for m in model.modules() if isinstance(m, kt.KTExperts)]
        share = gpu_experts if isinstance(gpu_experts, int) else 4
        assert [int(m.gpu_experts_mask.sum()) for m in modules] == [share] * len(modules)
        assert worst(logits(model), reference(key)) < BOUND
        assert not any(".experts." in name for name in model.state_dict())

    @pytest.mark.parametrize("format", ["int8", "int4", "mxfp8", "fp8_perchannel", "rawint4", "mxfp4"])
    def test_split_of_a_format(self, format):
        sizes = dict(hidden_size=256, moe_intermediate_size=128)
        whole, split = (
            kt.enable(tiny_models.build("qwen3_moe", torch.bfloat16, **sizes), format=format, activations="f32",
                      gpu_experts=n, threads=2)
            for n in (None, 4)
        )
        # Codes times scales are rounded to bf16 on the device, as above.
        assert worst(logits(split), logits(whole)) < ROUNDED

    def test_mask_and_changes_of_it(self, root):
        mask = torch.zeros(3, 8, dtype=torch.bool)
        mask[0, 1] = mask[1, 3] = mask[1, 7] = mask[2, 0] = True
        model = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", gpu_experts=mask, **PLAIN)
        modules = [m for m in model.modules() if isinstance(m, kt.KTExperts)]
        masks = [m.gpu_experts_mask for m in modules]
        addresses = [m.gpu_w13.data_ptr() for m in modules]
        for seed in range(4):
            assert worst(logits(model), reference("qwen3_moe")) < BOUND
            generator = torch.Generator().manual_seed(seed)
            for module, count in zip(modules, (1, 2, 1)):
                chosen = torch.zeros(8, dtype=torch.bool)
                chosen[torch.randperm(8, generator=generator)[:count]] = True
                module.place(chosen, "cpu")
        assert all(m.gpu_experts_mask.data_ptr() == old.data_ptr() for m, old in zip(modules, masks))
        assert [m.gpu_w13.data_ptr() for m in modules] == addresses
        modules[0].place(torch.zeros(8, dtype=torch.bool), "cpu")
        modules[1].place(torch.ones(8, dtype=torch.bool), "cpu")
        assert worst(logits(model), reference("qwen3_moe")) < BOUND

    def test_masked_experts_run_on_the_device_only(self, root):
        """What the device holds is what is used: other numbers there change the result."""
        model = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", gpu_experts=2, **PLAIN)
        for module in model.modules():
            if isinstance(module, kt.KTExperts):
                module.gpu_w2.zero_()
        assert worst(logits(model), reference("qwen3_moe")) > 100 * BOUND

    @pytest.mark.parametrize("key", ["qwen3_moe", "deepseek_v3"])
    def test_recorder_and_update(self, root, key):
        model = kt.enable(folder_of(root, key), activations="f32", gpu_experts=2, **PLAIN)
        recorder = kt.recorder(model)
        counter = Counter(model, 3, 8)
        logits(model)
        model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert counter.counts.sum() > 0 and torch.equal(recorder.counts(), counter.counts)
        modules = {m.shape.layer: m for m in model.modules() if isinstance(m, kt.KTExperts)}
        kt.update_placement(model)
        chosen = torch.stack([counter.counts[layer][m.gpu_experts_mask].sum() for layer, m in modules.items()]).sum()
        best = counter.counts[list(modules)].flatten().topk(2 * len(modules)).values.sum()
        assert sum(int(m.gpu_experts_mask.sum()) for m in modules.values()) == 2 * len(modules)
        assert chosen == best
        assert worst(logits(model), reference(key)) < BOUND
        kt.update_placement(model, 3, per_layer=True)
        assert [int(m.gpu_experts_mask.sum()) for m in modules.values()] == [3] * len(modules)
        assert worst(logits(model), reference(key)) < BOUND

    @pytest.mark.parametrize("ending", ["pt", "json"])
    def test_statistics_file(self, root, tmp_path, ending):
        model = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", **PLAIN)
        recorder = kt.recorder(model)
        logits(model)
        recorder.save(tmp_path / f"counts.{ending}")
        again = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", gpu_experts=0.25,
                          statistics=tmp_path / f"counts.{ending}", **PLAIN)
        masks = torch.stack([m.gpu_experts_mask for m in again.modules() if isinstance(m, kt.KTExperts)])
        assert masks.sum() == 6
        assert recorder.counts()[masks].min() >= recorder.counts()[~masks].max()
        assert worst(logits(again), reference("qwen3_moe")) < BOUND

    def test_follows_routing_by_itself(self, root):
        model = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", gpu_experts=2, update_every=2, **PLAIN)
        masks = [m.gpu_experts_mask.clone() for m in model.modules() if isinstance(m, kt.KTExperts)]
        for _ in range(4):
            assert worst(logits(model), reference("qwen3_moe")) < BOUND
        after = [m.gpu_experts_mask for m in model.modules() if isinstance(m, kt.KTExperts)]
        assert any(not torch.equal(a, b) for a, b in zip(masks, after))

    @pytest.mark.parametrize("bad,error", [(-1, ValueError), (9, ValueError), (1.5, ValueError), (True, TypeError),
                                           ("all", TypeError), (torch.zeros(2, 8), TypeError),
                                           (torch.zeros(2, 8, dtype=torch.bool), ValueError)])
    def test_bad_gpu_experts(self, root, bad, error):
        with pytest.raises(error, match="gpu_experts"):
            kt.enable(folder_of(root, "qwen3_moe"), gpu_experts=bad, **PLAIN)


@pytest.fixture(scope="module")
def model(root):
    return kt.enable(folder_of(root, "qwen3_moe"), **PLAIN)


class TestLimits:
    def test_ids_outside_are_ignored(self, model):
        module = next(m for m in model.modules() if isinstance(m, kt.KTExperts))
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(6, 64, generator=generator)
        ids = torch.randint(0, 8, (6, 3), generator=generator)
        weights = torch.rand(6, 3, generator=generator)
        outside = torch.rand(6, 3, generator=generator) < 0.5
        with torch.no_grad():
            expected = module(hidden, ids, torch.where(outside, 0, weights))
            for other in (8, 1000, -1):
                ours = module(hidden, torch.where(outside, other, ids), weights)
                # An expert with fewer rows may sum in another order and round a middle value the other way.
                assert (ours - expected).abs().max() < 2.0**-8 * expected.abs().max()
            assert module(hidden[:0], ids[:0], weights[:0]).shape == (0, 64)

    def test_training(self, model):
        model.train()
        try:
            with pytest.raises(RuntimeError, match="inference"):
                model(IDS)
            with torch.no_grad():
                model(IDS)
        finally:
            model.eval()
        out = model(IDS).logits  # gradients are possible, nobody asked for them yet
        with pytest.raises(RuntimeError, match="inference"):
            out.sum().backward()

    def test_saving_and_copying(self, model, tmp_path):
        with pytest.raises(ValueError, match="save_pretrained"):
            model.save_pretrained(tmp_path)
        with pytest.raises(TypeError, match="copied"):
            copy.deepcopy(model)
        assert "kt" in repr(model.config.quantization_config) or "kt" in repr(model.config)

    def test_moves(self, root):
        model = kt.enable(folder_of(root, "qwen3_moe"), gpu_experts=2, **PLAIN).to("cpu").to(torch.bfloat16)
        # Everything but KT's experts in bf16 now: a coarse check that types meet.
        assert worst(logits(model).float(), reference("qwen3_moe")) < 0.2

    def test_refusals(self, root, model, tmp_path):
        with pytest.raises(ValueError, match="already"):
            kt.enable(model)
        with pytest.raises(ValueError, match="GptOssExperts"):
            kt.enable(tiny_models.build("gpt_oss"))
        with pytest.raises(ValueError, match="no experts"):
            kt.enable(tiny_models.build("qwen3"))
        with pytest.raises(FileNotFoundError, match="nowhere"):
            kt.enable(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match="nothing.gguf"):
            kt.enable(folder_of(root, "qwen3_moe"), weights=tmp_path / "nothing.gguf")
        with pytest.raises(ValueError, match="int5"):
            kt.enable(folder_of(root, "qwen3_moe"), format="int5")
        with pytest.raises(TypeError, match="dtype"):
            kt.enable(tiny_models.build("qwen3_moe"), dtype=torch.float32)
        with pytest.raises(ValueError, match="max_tokens"):
            kt.enable(folder_of(root, "qwen3_moe"), max_tokens=0)


STORY = "Once upon a time there was a little fox who lived at the edge of a dark wood. Every morning she"


@pytest.mark.parametrize("name", ["tiny-qwen3moe", "tiny-deepseekv3"])
def test_trained_model(name):
    folder = checkpoints.trained_model(name)
    if folder is None:
        pytest.skip(f"{name} (42 MiB) is not in the tree, and KT_TEST_DATA names no folder with it")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)(STORY, return_tensors="pt")["input_ids"]
    how = dict(max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    expected = theirs.generate(ids, **how)
    exact = kt.enable(folder, activations="f32", **PLAIN)
    assert worst(logits(exact, expected.sequences), logits(theirs, expected.sequences)) < BOUND
    assert compared_tokens(exact.generate(ids, **how), expected, 0, BOUND) >= 20
    # Inputs and middles in bf16: two roundings in each of six layers. They know nothing of each other, so their squares
    # add; twice that for what later layers make of it.
    bound = 2 * 12**0.5 * 2.0**-9
    rounded = kt.enable(folder, gpu_experts=0.25, **PLAIN)
    ours, right = (logits(model, expected.sequences) for model in (rounded, theirs))
    assert worst(ours, right) < bound
    best = right.topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * bound * right.abs().amax(-1)
    assert clear.sum() >= 20 and torch.equal(ours.argmax(-1)[clear], right.argmax(-1)[clear])


MEMORY = """
import sys, threading, time, torch, transformers, kt_kernel.transformers as kt
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
def most(load):
    # What it takes to load a model and run it; and the model, so that the next one gets none of its memory.
    before = peak = anonymous()
    done = False
    def watch():
        nonlocal peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load()
    model(torch.arange(20)[None])
    done = True
    watcher.join()
    return max(peak, anonymous()) - before, model
folder = sys.argv[1]
kt.enable(folder + "-small", format="int4", dtype=torch.bfloat16, threads=2)  # what only the first call needs
grown, ours = most(lambda: kt.enable(folder, format="int4", dtype=torch.bfloat16, threads=2))
theirs, _ = most(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
print(grown, theirs)
"""


def test_experts_are_never_in_bf16(root):
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=16)
    tiny_models.save(tiny_models.build("qwen3_moe", torch.bfloat16, **sizes), root / "medium-small", torch.bfloat16)
    tiny_models.save(tiny_models.build("qwen3_moe", torch.bfloat16, num_hidden_layers=6, **sizes), root / "medium",
                     torch.bfloat16)
    experts = 6 * 16 * 3 * 256 * 256 * 2 / 1024  # KiB in bf16
    done = subprocess.run([sys.executable, "-c", MEMORY, str(root / "medium")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours, theirs = map(int, done.stdout.split())
    # The check sees it when they are: torch has them all. KT's int4 is a quarter, and what else a model needs little.
    assert theirs > experts, (theirs, experts)
    assert ours < 0.5 * experts, (ours, experts)


def test_write_back_follows_the_weights():
    """Buffers are of the group size that the weights have, whatever the options said; other layouts are refused."""
    from kt_kernel import KTMoEWrapper
    from kt_kernel.transformers.resident import WriteBack

    hidden, inter = 256, 128
    draw = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(2, inter, hidden, generator=draw).bfloat16() for _ in range(2))
    down = torch.randn(2, hidden, inter, generator=draw).bfloat16()
    layer = KTMoEWrapper(0, 2, 1, hidden, inter, cpuinfer_threads=1, threadpool_count=1, method="RAWINT4",
                         group_size=32)
    layer.load_weights_from_tensors(gate, up, down)
    w13, w2 = WriteBack(layer, "RAWINT4", inter, hidden, 128, False).read(1)
    for ours, theirs in ((w13, torch.cat([gate[1], up[1]])), (w2, down[1])):
        assert ((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.15  # int4 in groups of 32
    with pytest.raises(ValueError, match="w13 of an expert are 32768 bytes in FP8"):
        WriteBack(layer, "FP8", inter, hidden, 128, False)


def test_automatic_updates_leave_the_counts_alone(root):
    """recorder() counts from the start, whatever follows its counts."""
    model = kt.enable(folder_of(root, "qwen3_moe"), activations="f32", gpu_experts=2, update_every=2, **PLAIN)
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(5):
        logits(model, ids)
    counts = kt.recorder(model).counts()
    layers = int((counts.sum(dim=1) > 0).sum())
    assert int(counts.sum()) == 5 * 3 * model.config.num_experts_per_tok * layers > 0
