"""kt_kernel.inject and enable(rules=) on stock models of transformers: operators of others to the bit, ours against
weights that torch rounds, the tutorial's operator, PEFT, what comes back, and what is refused before anything changes.

The rules are files of rule_files.py; which modules they take, rule_walk.py says."""

import copy
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import kt_kernel
import kt_kernel.transformers
import rule_files
import tiny_models
from kt_kernel import kt_kernel_ext
from logits import prompt
from rule_models_test import round_by
from rule_walk import text_of, walk

nn = torch.nn
BOUND = 1e-4
FULL = os.environ.get("KT_TEST_FULL") == "1"
CPU = {"cuda": "cpu", "xpu": "cpu", "npu": "cpu"}
IDS = torch.tensor([prompt(24, tiny_models.VOCAB, seed) for seed in (0, 1)])
FAMILIES = sorted({family for family, _, _, _ in rule_files.FILES.values() if family})
EXACT = dict(activations="f32", threads=1)


def fresh(family, layers=3):
    """float32, of bf16 numbers."""
    return tiny_models.build(family, torch.bfloat16, **({} if layers == 3 else dict(num_hidden_layers=layers)))


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def worst(ours, theirs):
    return ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max().item()


def written(folder, rules, name="r"):
    path = folder / f"{name}.yaml"
    path.write_text(rules if isinstance(rules, str) else text_of(rules), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stock():
    """A model of each family that tests bring back to what it was, and its logits."""
    made = {}

    def get(family):
        if family not in made:
            model = fresh(family)
            made[family] = (model, logits(model), list(model.state_dict()))
        return made[family]

    return get


def pass_through(rules):
    """A class for every operator that the rules name, which does what the module did."""
    names = {rule["replace"]["class"].rpartition(".")[2] for rule in rules} - {"default"}
    return [type(name, (kt_kernel.BaseInjectedModule,), {}) for name in sorted(names)]


FILES = [name for name, (family, _, _, _) in rule_files.FILES.items() if family]


@pytest.mark.parametrize("name", FILES)
def test_pass_through_operators_change_no_bit(tmp_path, stock, name):
    family, _, _, rules = rule_files.FILES[name]
    model, before, names = stock(family)
    taken = {}
    walk(model, "", rules, taken)
    placement = kt_kernel.inject(model, written(tmp_path, rules), pass_through(rules), devices=CPU)
    try:
        assert torch.equal(logits(model), before)
        assert list(model.state_dict()) == names
        assert {at: rule["rule"] - 1
                    for at, rule in placement.modules.items()} == {at: i for at, i in taken.items() if i is not None}
        replaced = [at for at, module in model.named_modules() if isinstance(module, kt_kernel.BaseInjectedModule)]
        assert replaced
        for at in replaced:
            assert type(model.get_submodule(at)).__name__ == rules[taken[at]]["replace"]["class"].rpartition(".")[2]
        if FULL or name == "V3-Chat":
            tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    finally:
        placement.remove()
    assert torch.equal(logits(model), before)
    assert not any(isinstance(module, kt_kernel.BaseInjectedModule) for module in model.modules())
    if FULL or name == "V3-Chat":
        assert torch.equal(model.generate(IDS, max_new_tokens=6, do_sample=False), tokens)


OURS = ["V2-Lite-Chat-use-adapter", "V3-Chat-amx", "Qwen3Moe-serve-amx", "rocm-V3", "Internlm2_5-7b-Chat-1m", "Mixtral"]


@pytest.mark.parametrize("name", FILES if FULL else OURS)
def test_ours_are_weights_that_torch_rounds(tmp_path, name):
    family, _, _, rules = rule_files.FILES[name]
    model, rounded = fresh(family), fresh(family)
    count = round_by(rounded, rules)
    before = logits(model)
    placement = kt_kernel.inject(model, written(tmp_path, rules), devices=CPU, **EXACT)
    expected = logits(rounded)
    assert worst(logits(model), expected) <= BOUND, placement
    assert not count or worst(before, expected) > 10 * BOUND
    kinds = {at: type(module).__name__ for at, module in model.named_modules()}
    assert all((kinds[at] == rule["becomes"]) == (rule["becomes"] != "default")
               for at, rule in placement.modules.items() if at)
    assert ("KTExperts" in kinds.values()) == any("xperts" in rule["replace"]["class"] for rule in rules)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False),
                       rounded.generate(IDS, max_new_tokens=4, do_sample=False))
    if any(kind in ("KTExperts", "KTLinear") for kind in kinds.values()):
        with pytest.raises(ValueError, match="save_pretrained"):
            model.save_pretrained(tmp_path / "out")
    placement.remove()
    assert torch.equal(logits(model), before)


def test_a_path_never_has_what_is_replaced_and_the_plan_is_that_of_kt(tmp_path, monkeypatch):
    _, _, _, rules = rule_files.FILES["V3-Chat-amx"]
    rounded = fresh("deepseek_v3")
    folder = tiny_models.save(tiny_models.build("deepseek_v3", torch.bfloat16), tmp_path / "model", torch.bfloat16)
    round_by(rounded, rules)
    path = written(tmp_path, rules)
    made = []
    original = torch.nn.Parameter.__new__

    def watched(cls, data=None, requires_grad=True):
        if data is not None and data.device.type != "meta" and data.ndim == 3:
            made.append(tuple(data.shape))
        return original(cls, data, requires_grad)

    monkeypatch.setattr(torch.nn.Parameter, "__new__", watched)
    model = kt_kernel.transformers.enable(folder, rules=path, rule_devices=CPU, dtype=torch.float32,
                                          attn_implementation="eager", **EXACT)
    monkeypatch.undo()
    assert made == []  # experts
    assert worst(logits(model), logits(rounded)) <= BOUND
    placement = model.kt_placement
    assert isinstance(placement, kt_kernel.Placement) and json.loads(placement.to_json()) == placement.as_dict()
    assert str(placement).startswith("placement of deepseek_v3, 3 layers: ")
    with pytest.raises(ValueError, match="never in torch"):
        placement.remove()
    if os.environ.get("KT_PROGRAM"):
        done = subprocess.run([os.environ["KT_PROGRAM"], "estimate", folder, "--rules", path,
                               "--rule-devices", "cuda=cpu", "--json"],
                              capture_output=True, text=True, check=True)
        said, ours = json.loads(done.stdout)["rules"], placement.as_dict()
        # torch has no matrices for single norms' parts to differ in: bytes, devices, formats and rules are the same.
        assert said.keys() == ours.keys() and said["file"] == ours["file"] and said["rules"] == ours["rules"]
        assert [part["part"] for part in said["parts"]] == [part["part"] for part in ours["parts"]]
        for theirs, part in zip(said["parts"], ours["parts"]):
            for key in ("layers", "device", "formats", "rules"):
                assert theirs[key] == part[key], (theirs, part)
            assert part["bytes"] == pytest.approx(theirs["bytes"], rel=0.01)


# --- operators of one's own ---

TUTORIAL = """- match:
    name: "^model\\\\.layers\\\\..*$"
    class: torch.nn.Linear
  replace:
    class: my.place.LinearTorchInject
    kwargs:
      generate_device: "cuda"
      my_param: True
"""


class LinearTorchInject(kt_kernel.BaseInjectedModule, kt_kernel.KLinearBase):
    """As the tutorial writes one."""

    def __init__(self, key, gguf_loader, config, orig_module=None, generate_device="cuda", my_param=True, **kwargs):
        super().__init__(key, gguf_loader, config, orig_module, generate_device, **kwargs)
        kt_kernel.KLinearBase.__init__(self)
        self.my_param = my_param
        self.has_bias = False
        self.dtype = torch.get_default_dtype()
        self.w = None
        self.has_bias = False

    def load(self, w=None, device=None):
        if device is None:
            device = self.device
        if w is None:
            w = self.load_weight(device=device)
        if isinstance(w, nn.Parameter):
            self.w = w.to(dtype=self.dtype).view(self.out_features, self.in_features).T
            self.has_bias = False
        elif isinstance(w, tuple):
            self.w = w[0].to(dtype=self.dtype).view(self.out_features, self.in_features).T
            self.bias = w[1].to(dtype=self.dtype)
            self.has_bias = True
        else:
            raise ValueError("Invalid weight type")
        self.w = self.w.to(device)
        if self.has_bias:
            self.bias = self.bias.to(device)

    def unload(self):
        if self.w is not None:
            self.w = None
        if self.has_bias:
            self.bias = None

    def forward(self, x):
        dtype = x.dtype
        out_device = x.device
        x = x.to(device=self.device, dtype=self.dtype)
        x = x @ self.w
        if self.has_bias:
            x = x + self.bias
        return x.to(dtype=dtype, device=out_device)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "llama", "qwen3_moe"])
@pytest.mark.parametrize("source", ["model", "safetensors"])
def test_the_operator_of_the_tutorial(tmp_path, family, source):
    model = fresh(family)
    biased = [module for module in model.modules() if isinstance(module, nn.Linear) and module.bias is not None]
    assert bool(biased) == (family == "qwen2_moe")
    before, names = logits(model), list(model.state_dict())
    weights = None if source == "model" else tiny_models.save(fresh(family), tmp_path / "model", torch.bfloat16)
    placement = kt_kernel.inject(model, written(tmp_path, TUTORIAL), [LinearTorchInject], weights, CPU)
    ours = [module for module in model.modules() if isinstance(module, LinearTorchInject)]
    assert ours and all(module.my_param and module.w is not None for module in ours)
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names
    placement.remove()
    assert torch.equal(logits(model), before) and not any(hasattr(m, "my_param") for m in model.modules())


def saved(family, folder):
    return tiny_models.save(tiny_models.build(family, torch.bfloat16), folder, torch.bfloat16)


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_the_tutorial_on_a_path(tmp_path, family, source):
    before, folder, weights = logits(fresh(family)), saved(family, tmp_path / "model"), None
    if source == "gguf":
        weights = gguf_file(folder, tmp_path)
    ours = kt_kernel.transformers.enable(folder, weights=weights, rules=written(tmp_path, TUTORIAL),
                                         operators=[LinearTorchInject],
                                         rule_devices=CPU, dtype=torch.float32, attn_implementation="eager")
    module = ours.model.layers[0].self_attn.q_proj
    assert isinstance(module, LinearTorchInject) and module.orig_module.weight.device.type == "meta"
    assert torch.equal(logits(ours), before)


def gguf_file(folder, root, **kind):
    pytest.importorskip("gguf")
    import gguf_files

    return gguf_files.Model(folder, **kind).write(root / "m.gguf")


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_the_loader_has_all_under_the_models_names(tmp_path, family):
    from kt_kernel.tensor_sources import CheckpointTensors

    model, folder = fresh(family), saved(family, tmp_path / "model")
    for path in (folder, gguf_file(folder, tmp_path)):
        loader = CheckpointTensors(path, torch.float32)
        for name, tensor in model.state_dict().items():
            assert loader.has_tensor(name), name
            assert loader.tensor_info[name]["shape"] == list(tensor.shape), name
            assert torch.equal(loader.load_gguf_tensor(name, "cpu"), tensor.float()), name
        assert loader.tensor_file_map["model.norm.weight"].startswith(str(tmp_path))
        assert not loader.has_tensor("model.nothing.weight") and "model.nothing" not in loader.tensor_info
        with pytest.raises(ValueError, match="model.nothing.weight"):
            loader.load_tensor("model.nothing.weight")


def test_linears_and_experts_as_a_gguf_file_has_them(tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = saved("qwen3_moe", tmp_path / "model")
    types = gguf.GGMLQuantizationType
    path = gguf_file(folder, tmp_path, kind=lambda name, columns: types.Q8_0 if columns % 32 == 0
                                                                  and "token_embd" not in name and
                     "ffn_gate_inp" not in name else types.F32)
    from kt_kernel.tensor_sources import CheckpointTensors

    loader, expected, model = CheckpointTensors(path, torch.float32), fresh("qwen3_moe"), fresh("qwen3_moe")
    expected.load_state_dict({name: loader.load_tensor(name) for name in expected.state_dict()})
    rules = ("- match: {name: 'mlp.experts$'}\n  replace: {class: KTransformersExperts}\n  recursive: False\n"
             "- match: {class: torch.nn.Linear}\n  replace: {class: KTransformersLinear, kwargs: {generate_op: "
             "KLinearCPUInfer, generate_device: cpu}}\n")
    kt_kernel.inject(model, written(tmp_path, rules), weights=path, **EXACT)
    assert model.model.layers[0].self_attn.q_proj._layer.format == "q8_0"
    assert worst(logits(model), logits(expected)) <= BOUND
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager")
    empty.model.rotary_emb = fresh("qwen3_moe").model.rotary_emb
    kt_kernel.inject(empty.eval(), written(tmp_path, rules), weights=path, **EXACT)  # the rest is read too
    assert worst(logits(empty), logits(expected)) <= BOUND


def test_children_of_an_operator_are_replaced_inside_it(tmp_path):
    class Block(kt_kernel.BaseInjectedModule):
        def forward(self, *args, **kwargs):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(*args, **kwargs)

    model = fresh("qwen2_moe")
    before = logits(model)
    rules = TUTORIAL + "- match: {name: '^model.layers.*self_attn$'}\n  replace: {class: Block}\n"
    kt_kernel.inject(model, written(tmp_path, rules), [LinearTorchInject, Block], devices=CPU)
    attention = model.model.layers[1].self_attn
    assert isinstance(attention, Block) and isinstance(attention.q_proj, LinearTorchInject)
    assert attention.orig_module.q_proj is attention.q_proj
    assert torch.equal(logits(model), before) and attention.calls == 1
    model.train()
    assert attention.orig_module.training and attention.training
    model.double()
    assert attention.q_norm.weight.dtype == torch.float64 if hasattr(attention, "q_norm") else True


def test_attributes_and_assignment():
    orig = nn.Linear(3, 2)
    new = kt_kernel.BaseInjectedModule("k", None, None, orig, generate_device="cpu")
    assert new.in_features == 3 and new.weight is orig.weight and new.key == "k" and new.device == "cpu"
    new.fresh = 5
    assert orig.fresh == 5 and "fresh" not in new.__dict__
    new.bias = torch.zeros(2)  # a plain attribute here; the parameter stays
    assert (isinstance(orig.bias, nn.Parameter) and "bias" in new.__dict__
            and list(new.state_dict()) == ["weight", "bias"])
    with pytest.raises(AttributeError, match="neither BaseInjectedModule nor its Linear has 'nothing'"):
        _ = new.nothing
    assert torch.equal(copy.deepcopy(new).weight, orig.weight)


def test_operators_are_found_by_registration_and_in_imported_modules(tmp_path):
    @kt_kernel.operator("Twice")
    class Other(kt_kernel.BaseInjectedModule):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    model = fresh("llama")
    q = model.model.layers[0].self_attn.q_proj
    one = "- match: {{name: '0.self_attn.q_proj'}}\n  replace: {{class: {}}}\n"
    with torch.no_grad():
        expected = 2 * q(torch.ones(1, q.in_features))
    for dotted in ("Twice", "anything.Twice"):
        placement = kt_kernel.inject(model, written(tmp_path, one.format(dotted)))
        with torch.no_grad():
            assert torch.equal(model.model.layers[0].self_attn.q_proj(torch.ones(1, q.in_features)), expected)
        placement.remove()
    placement = kt_kernel.inject(model, written(tmp_path, one.format(f"{__name__}.LinearTorchInject")), devices=CPU)
    assert type(model.model.layers[0].self_attn.q_proj) is LinearTorchInject
    placement.remove()
    with pytest.raises(ValueError,
                       match=r"r.yaml:2: rule 1: replace: class: no operator \"Thing\".*a file causes no import"):
        kt_kernel.inject(model, written(tmp_path, one.format("antigravity.Thing")))
    assert "antigravity" not in sys.modules


# --- KTLinear ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_ktlinear(dtype, bias):
    torch.manual_seed(1)
    linear = nn.Linear(96, 40, bias=bias).to(dtype)
    ours = kt_kernel.KTLinear.from_linear(linear, activations="f32", threads=1)
    assert list(ours.state_dict()) == list(linear.state_dict()) and ours.weight.shape == linear.weight.shape
    assert ours.weight.dtype == dtype and isinstance(ours, nn.Linear) and ours.packed_bytes > 0
    for shape in ((96,), (1, 96), (2, 3, 96), (130, 96), (0, 96)):
        x = torch.randn(shape).to(dtype)
        with torch.no_grad():
            expected = (x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)).to(dtype)
            got = ours(x)
        assert got.shape == expected.shape and got.dtype == dtype
        # The sum in f32; the result rounded once.
        assert torch.allclose(got.double(), expected.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    strided = torch.randn(8, 2, 96).to(dtype)[:, 1]
    with torch.no_grad():
        assert torch.equal(ours(strided), ours(strided.contiguous()))


GRIDS = [name for name in kt_kernel_ext.formats() if name.startswith(("iq1", "iq2", "iq3"))]


@pytest.mark.parametrize("format", GRIDS)
def test_ktlinear_rounds_nothing_to_a_grid(format):
    with pytest.raises(NotImplementedError,
                       match=f"{format}: weights are read and computed in this format, not rounded to it"):
        kt_kernel.KTLinear.from_linear(nn.Linear(256, 128, bias=False), format, threads=1)


@pytest.mark.parametrize("format", [name for name in kt_kernel_ext.formats() if name not in GRIDS])
def test_ktlinear_has_every_format(format):
    torch.manual_seed(2)
    linear, x = nn.Linear(256, 128, bias=False), torch.randn(3, 256)
    ours = kt_kernel.KTLinear.from_linear(linear, format, activations="f32", threads=1)
    with torch.no_grad():
        theirs, got, weight = linear(x), ours(x), ours(torch.eye(256)).T
    # What it multiplies by is what it shows for unit vectors, and near the weight as its bits allow.
    assert torch.allclose(got, x @ weight.T, atol=1e-4)
    assert (got - theirs).norm() / theirs.norm() < {"q2_k": 0.5, "q3_k": 0.3}.get(format, 0.2)


def test_ktlinear_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="no format 'int5'; there are int8, int4"):
        kt_kernel.KTLinear(8, 8, format="int5")
    ours = kt_kernel.KTLinear(64, 32, name="a.b")
    with pytest.raises(RuntimeError, match="a.b: has no weights yet"):
        ours(torch.ones(1, 64))
    with pytest.raises(ValueError, match=r"a.b: expected a weight \[32, 64\], got \[64, 32\]"):
        ours.load(torch.ones(64, 32))
    stored = nn.Linear(64, 32, bias=False)
    ours.load_state_dict(stored.state_dict())
    with torch.no_grad():
        assert torch.allclose(ours(torch.ones(1, 64)), stored(torch.ones(1, 64)), atol=1e-2)
    with pytest.raises(ValueError, match=r"a.b: expected \[..., 64\]"):
        ours(torch.ones(1, 32))
    with pytest.raises(RuntimeError, match="a.b: linears on KT have no backward pass"):
        ours(torch.ones(1, 64, requires_grad=True)).sum().backward()
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(ours)
    with pytest.raises(NotImplementedError, match="the weight of a linear, which is on KT and not in torch"):
        ours.weight + 1


# --- PEFT ---


def adapted(model, seed):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    out = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"],
                                                     init_lora_weights=False))
    return out.eval()


def test_peft_before_and_after(tmp_path):
    peft = pytest.importorskip("peft")
    _, _, _, rules = rule_files.FILES["Qwen3Moe-sft-amx"]
    rules = written(tmp_path, "- match: {class: torch.nn.Linear, name: self_attn}\n  replace: {class: "
                              "KTransformersLinear, kwargs: {generate_device: cpu, generate_op: KLinearCPUInfer}}\n"
                    + text_of(rules))
    trained = adapted(fresh("qwen3_moe"), 7)
    trained.save_pretrained(tmp_path / "lora")
    base = fresh("qwen3_moe")
    kt_kernel.inject(base, rules, devices=CPU, **EXACT)
    reference = fresh("qwen3_moe")
    round_by(reference, rule_files.FILES["Qwen3Moe-sft-amx"][3])
    expected = logits(peft.PeftModel.from_pretrained(reference, tmp_path / "lora").eval())
    assert worst(expected, logits(trained.get_base_model())) > BOUND
    after = peft.PeftModel.from_pretrained(base, tmp_path / "lora").eval()
    assert any(isinstance(module, kt_kernel.KTLinear) for module in after.modules())
    assert worst(logits(after), expected) <= BOUND
    placement = kt_kernel.inject(trained, rules, devices=CPU, **EXACT)  # names without base_model.model.
    assert "model.layers.0.self_attn.q_proj" in placement.modules
    assert worst(logits(trained), expected) <= BOUND
    placement.remove()
    assert not any(isinstance(module, kt_kernel.KTLinear) for module in trained.modules())


# --- faults ---


def whole(model, before):
    assert torch.equal(logits(model), before) and "kt_placement" not in model.__dict__
    assert not any(isinstance(m, (kt_kernel.KTLinear, kt_kernel.BaseInjectedModule, kt_kernel.transformers.KTExperts))
                   for m in model.modules())


ONE = "- match: {{class: torch.nn.Linear, name: self_attn}}\n  replace: {{class: {}, kwargs: {{{}}}}}\n"


def test_operators_that_fail_leave_the_model_as_it_was(tmp_path):
    model = fresh("llama")
    before, names = logits(model), [(name, id(module)) for name, module in model.named_modules()]

    class Raises(kt_kernel.BaseInjectedModule):
        count = 0

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.mark = 1
            Raises.count += 1
            if Raises.count == 5:
                raise RuntimeError("five is enough")

    class Loads(kt_kernel.BaseInjectedModule):
        gone = 0

        def load(self):
            if self.key == "model.layers.1.self_attn.k_proj":
                raise OSError("no such disk")

        def unload(self):
            Loads.gone += 1

    with pytest.raises(RuntimeError, match="five is enough"):
        kt_kernel.inject(model, written(tmp_path, ONE.format("Raises", "")), [Raises])
    whole(model, before)
    with pytest.raises(OSError, match="no such disk"):
        kt_kernel.inject(model, written(tmp_path, ONE.format("Loads", "")), [Loads])
    assert Loads.gone == 12
    whole(model, before)
    assert ([(name, id(module)) for name, module in model.named_modules()] == names
            and not hasattr(model.model.layers[0].self_attn.q_proj, "mark"))

    class Strict(kt_kernel.BaseInjectedModule):
        def __init__(self, key, gguf_loader, config, orig_module):
            super().__init__(key, gguf_loader, config, orig_module)

    with pytest.raises(TypeError, match="r.yaml:1: rule 1: model.layers.0.self_attn.q_proj: .*unexpected keyword "
                                        "argument 'stride'"):
        kt_kernel.inject(model, written(tmp_path, ONE.format("Strict", "stride: 3")), [Strict])
    whole(model, before)
    with pytest.raises(TypeError, match="operator dict: expected a class derived from torch.nn.Module"):
        kt_kernel.inject(model, written(tmp_path, ONE.format("dict", "")), [dict])
    with pytest.raises(TypeError, match="operators: expected a list of classes, got the class Loads"):
        kt_kernel.inject(model, written(tmp_path, ONE.format("Loads", "")), Loads)
    with pytest.raises(TypeError, match="expected a class derived from torch.nn.Module"):
        kt_kernel.operator("X")(int)

    class Short(kt_kernel.BaseInjectedModule):  # its shape is the model's to refuse
        def forward(self, x):
            return super().forward(x)[..., :-1]

    placement = kt_kernel.inject(model, written(tmp_path, ONE.format("Short", "")), [Short])
    with pytest.raises(RuntimeError):
        logits(model)
    placement.remove()
    whole(model, before)


REFUSED = {
    "an operator": (ONE.format("KTransformersLinea", ""), ValueError,
                    "no operator \"KTransformersLinea\"; the nearest is KTransformersLinear"),
    "an argument": (ONE.format("default", "devise: cpu"), ValueError,
                    "kwargs: devise: default takes no such argument; the nearest is device"),
    "a device": (ONE.format("default", "device: cudo"), ValueError, "no device \"cudo\"; the nearest is cuda"),
    "a format": (ONE.format("default", "format: int9"), ValueError, "no format \"int9\""),
    "no GPU": (ONE.format("default", "device: 'cuda:0'"), ValueError,
               "model.layers.0.self_attn.q_proj: on cuda:0, and torch finds no GPU"),
    "two devices in a layer": (ONE.format("default", "device: 'cuda:0'")
                               + "- match: {name: 'self_attn$'}\n  replace: {kwargs: {device: cpu}}\n",
                               ValueError, "and model.layers.0.self_attn of the same layer is on cpu"),
    "another family": ("- match: {class: Qwen3MoeAttention}\n  replace: {class: KQwen3MoeAttention}\n", ValueError,
                       "none of 1 rules matches a module of this model, llama; rule 1 this model, llama, has no class "
                       "Qwen3MoeAttention"),
    "a shape": (ONE.format("default", "{device: cpu, format: q4_k}".strip("{}")), ValueError, "q4_k"),
    "no rules": ("[]", ValueError, "r.yaml"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_one_line_and_changes_nothing(tmp_path, stock, what):
    text, kind, message = REFUSED[what]
    model, before, _ = stock("llama")
    with pytest.raises(kind) as caught:
        kt_kernel.inject(model, written(tmp_path, text))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    whole(model, before)


def test_models_that_are_refused(tmp_path):
    model = fresh("qwen3_moe")
    rules = written(tmp_path,
                    "- match: {name: 'mlp.experts$'}\n  replace: {class: KTransformersExperts}\n  recursive: False\n")
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got str"):
        kt_kernel.inject("model", rules)
    compiled = nn.Module()  # as torch.compile wraps one, without the seconds that it takes
    compiled._orig_mod = model
    with pytest.raises(ValueError, match="the model is compiled"):
        kt_kernel.inject(compiled, rules)
    with pytest.raises(FileNotFoundError):
        kt_kernel.inject(model, tmp_path / "none.yaml")
    placement = kt_kernel.inject(model, rules, threads=1)
    with pytest.raises(ValueError, match="has a placement already"):
        kt_kernel.inject(model, rules)
    placement.remove()
    with pytest.raises(ValueError, match="removed already"):
        placement.remove()
    placement = kt_kernel.inject(model, rules, threads=1)
    placement.release()
    with pytest.raises(ValueError, match="the replaced modules were released"):
        placement.remove()
    enabled = kt_kernel.transformers.enable(fresh("qwen3_moe"), threads=1)
    with pytest.raises(ValueError, match="mlp.experts is on KT already"):
        kt_kernel.inject(enabled, rules)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="mlp.experts: on the meta device; weights= names a checkpoint"):
        kt_kernel.inject(empty, rules)
    with pytest.raises(TypeError, match="format: rules say what goes where"):
        kt_kernel.transformers.enable(fresh("qwen3_moe"), rules=rules, format="int8")


def test_a_module_with_two_names(tmp_path):
    model = fresh("llama")
    model.model.layers[2].mlp = model.model.layers[1].mlp
    before = logits(model)
    placement = kt_kernel.inject(model, ["mlp=cpu:int8"], **EXACT)
    assert model.model.layers[2].mlp.up_proj is model.model.layers[1].mlp.up_proj
    assert isinstance(model.model.layers[2].mlp.up_proj, kt_kernel.KTLinear)
    placement.remove()
    assert torch.equal(logits(model), before)
    with pytest.raises(ValueError, match="are one module, and rules make two things of it"):
        kt_kernel.inject(model, [r"layers\.1\.mlp=cpu:int8"])
    whole(model, before)


def test_what_a_module_is_called_with_is_brought_to_its_device():
    """meta stands for a second device."""
    from kt_kernel.device_moves import Moves, moved

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first = layers[0].weight.clone()
    moves = Moves(layers, {"0": "host", "1": "meta", "2": "meta"})
    assert moves.apply() == 2  # the first is where it should be
    assert layers[1].weight.device.type == "meta" and torch.equal(layers[0].weight, first)
    with torch.no_grad():
        assert layers[0](torch.ones(2, 4)).device.type == "cpu"
        assert layers(torch.ones(2, 4)).device.type == "meta"
    brought = moved({"a": (torch.ones(1), [torch.ones(2)]), "b": 3}, torch.device("meta"))
    assert brought["a"][1][0].device.type == "meta" and brought["b"] == 3
