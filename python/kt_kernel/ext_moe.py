"""kt_kernel_ext.moe: the low-level names that kt-kernel's tests and examples use, over ExpertLayer.

    config = kt_kernel_ext.moe.MOEConfig(experts, experts_per_token, hidden, inter)
    config.pool, config.max_len = cpu_infer.backend_, 512
    config.gate_proj, config.up_proj, config.down_proj = (t.data_ptr() for t in (gate, up, down))
    moe = kt_kernel_ext.moe.AMXInt8_MOE(config)
    cpu_infer.submit(moe.load_weights_task(map.data_ptr()))
    cpu_infer.submit(moe.forward_task(tokens.data_ptr(), k, ids.data_ptr(), weights.data_ptr(), x.data_ptr(),
                                      out.data_ptr()))
    cpu_infer.sync()

Tensors are host addresses, which are trusted: prefer KTMoEWrapper. A class's name says how weights are stored; each
runs on every CPU. A task is a callable for CPUInfer.submit and submit_with_cuda_stream; what it points to is read when
it runs.
"""
import ctypes
from functools import partial

from kt_kernel import kt_kernel_ext

# Name: (method, whether the addresses are of stored codes, with scales beside them; otherwise of bf16 values, which are
# rounded while they are loaded).
CLASSES = {
    "AMXInt8_MOE": ("AMXINT8", False),
    "AMXInt4_MOE": ("AMXINT4", False),
    "AMXInt4_1_MOE": ("GPTQ_INT4", False),  # with zero points
    "AMXInt4_1KGroup_MOE": ("GPTQ_INT4", False),
    "AMXInt4_KGroup_MOE": ("RAWINT4", True),
    "AMXInt4_KGroupBlocked_MOE": ("RAWINT4", True),
    "AMXBF16_MOE": ("BF16", True),
    "AMXFP8_MOE": ("FP8", True),
    "AMXFP8PerChannel_MOE": ("FP8_PERCHANNEL", True),
    "AMXFP4_KGroup_MOE": ("MXFP4", True),
    "AMXMXFP8_KGroup_MOE": ("MXFP8", True),
    "AVX2BF16_MOE": ("BF16", True),
    "AVX2FP8_MOE": ("FP8", True),
    "AVX2GPTQInt4_MOE": ("GPTQ_INT4", True),
    "AVX2RawInt4_MOE": ("RAWINT4", True),
    "AVX2MXFP4_MOE": ("MXFP4", True),
    "AVX2MXFP8_MOE": ("MXFP8", True),
    "AVXVNNI256GPTQInt4_MOE": ("GPTQ_INT4", True),
    "AVXVNNI256RawInt4_MOE": ("RAWINT4", True),
    "Int8_KERNEL_MOE": ("MOE_INT8", False),
    "Int4_KERNEL_MOE": ("MOE_INT4", False),
    "KMLInt8_MOE": ("MOE_INT8", False),
    "KMLInt4_MOE": ("MOE_INT4", False),
    "MOE": ("LLAMAFILE", True),  # GGUF blocks of gate_type, up_type, down_type; hidden_type is the activations'
}
_INSTEAD = {
    "tiling": "kernels choose their tiles themselves; leave it out",
    "MOESFTConfig": "fine-tuning is kt_kernel.sft.AMXSFTMoEWrapper",
}
_PROJECTIONS = ("gate", "up", "down")
_GROUPS = {"FP8": 128, "MXFP4": 32, "MXFP8": 32}  # columns of a scale, where a method has one choice
_BITS = {"RAWINT4": 4, "GPTQ_INT4": 4, "MXFP4": 4, "AMXINT4": 4, "MOE_INT4": 4, "AMXINT8": 8, "MOE_INT8": 8, "FP8": 8,
         "FP8_PERCHANNEL": 8, "MXFP8": 8, "BF16": 16}
_USUAL_GROUP = 128  # where values are rounded and quant_config.group_size says nothing
_HIDDEN_TYPES = {0: 0, 1: 2, 30: 1}  # GGUF's numbers of float32, float16 and bfloat16: ExpertLayer's
_BF16 = 1


class _Fields:
    """Named values; no others can be set."""

    __slots__ = ()
    _defaults = {}

    def __init__(self):
        for name, value in self._defaults.items():
            setattr(self, name, value() if callable(value) else value)

    def _copy(self):
        made = object.__new__(type(self))
        for name in self._defaults:
            value = getattr(self, name)
            setattr(made, name, value._copy() if isinstance(value, _Fields) else value)
        return made


class QuantConfig(_Fields):
    """How weights are stored, beyond what a class's name says: columns of a group, and zero points."""

    _defaults = {"quant_method": "", "bits": 0, "group_size": 0, "zero_point": False, "per_channel": False}
    __slots__ = tuple(_defaults)


def _check_addresses(name, **given):
    for field, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
            what = value if isinstance(value, int) else type(value).__name__
            raise TypeError(f"{name}: {field}: expected an address, an int, got {what}")


def _of_each(*kinds):
    return [f"{projection}_{kind}" for projection in _PROJECTIONS for kind in kinds]


class MOEConfig(_Fields):
    """One layer: sizes, the CPUInfer that runs it, and addresses of its weights."""

    _defaults = {
        **dict.fromkeys(("expert_num", "num_experts_per_tok", "hidden_size", "intermediate_size", "layer_idx"), 0),
        "pool": None, "num_gpu_experts": 0, "gpu_experts_mask": 0, "physical_to_logical_map": 0,
        **dict.fromkeys(_of_each("proj", "scale", "zero"), 0),
        "quant_config": QuantConfig, "max_len": 0,
        **dict.fromkeys(_of_each("projs", "scales", "zeros", "bwd_projs", "bwd_scales"), ()),
        "path": "", "save": False, "load": False, "share_backward_bb": False, "share_cache_pool": False,
        "m_block": 4, "group_min_len": 0, "group_max_len": 0,
        "gate_type": 0, "up_type": 0, "down_type": 0, "hidden_type": 30, "max_cache_depth": 1,
        "swiglu_limit": 0.0, "swiglu_alpha": 0.0,
    }
    __slots__ = tuple(_defaults)

    def __init__(self, expert_num, num_experts_per_tok, hidden_size, intermediate_size, gpu_experts=0, /):
        """gpu_experts: how many the GPU has, of which nothing follows here, or the address of [expert_num] bytes,
        nonzero for those that are skipped."""
        super().__init__()
        self.expert_num, self.num_experts_per_tok = expert_num, num_experts_per_tok
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        if gpu_experts < 2**31:
            self.num_gpu_experts = gpu_experts
        else:
            self.gpu_experts_mask = gpu_experts
            self.num_gpu_experts = sum(map(bool, (ctypes.c_uint8 * expert_num).from_address(gpu_experts)))


class MoE_Interface:
    """What the classes of CLASSES share."""

    _method, _takes_codes = None, False

    def __init__(self, config):
        name = type(self).__name__
        if self._method is None:
            raise TypeError(f"{name}: make one of {', '.join(CLASSES)}")
        if not isinstance(config, MOEConfig):
            raise TypeError(f"{name}: expected a MOEConfig, got {type(config).__name__}")
        if not isinstance(config.pool, kt_kernel_ext.CPUInfer):
            raise TypeError(f"{name}: MOEConfig.pool: expected CPUInfer.backend_, got {type(config.pool).__name__}")
        self._config = config = config._copy()
        self._check_weights(config)
        self._type = self._hidden_type(config)
        files = bool(config.load or config.save)
        if files and not config.path:
            raise ValueError(f"{name}: MOEConfig.load or save without a path")
        self._layer = kt_kernel_ext.ExpertLayer(
            config.pool, layer=config.layer_idx, experts=config.expert_num, hidden=config.hidden_size,
            inter=config.intermediate_size, top_k=config.num_experts_per_tok, method=self._method,
            weights=config.path if files else "", save=bool(config.save),
            model=__name__,  # or what a wrapper puts off might be taken here
            max_tokens=max(config.max_len, config.group_max_len) or 2**31 - 1, group_size=self._group_size(config),
            zero_point=not self._takes_codes or bool(config.quant_config.zero_point), swiglu_limit=config.swiglu_limit,
            swiglu_alpha=config.swiglu_alpha)
        self._layer.set_mask(config.gpu_experts_mask, None)

    def _check_weights(self, config):
        name = type(self).__name__
        for field in ("gpu_experts_mask", "physical_to_logical_map", *_of_each("proj", "scale")):
            _check_addresses(name, **{f"MOEConfig.{field}": getattr(config, field)})
        if config.load:
            return
        for projection in _PROJECTIONS:
            field = f"{name}: MOEConfig.{projection}"
            listed = getattr(config, f"{projection}_projs")
            if listed and not self._takes_codes:
                raise NotImplementedError(f"{field}_projs: weights that were packed before are read from files "
                                          "(path and load), or by KTMoEWrapper")
            if listed and len(listed) != 1:
                raise NotImplementedError(f"{field}_projs has {len(listed)} lists; expected one, with an address "
                                          "for each expert: weights are not cut by NUMA node before they are loaded")
            if not listed and not getattr(config, f"{projection}_proj"):
                raise ValueError(f"{field}_proj is null")
            if getattr(config, f"{projection}_zero") or getattr(config, f"{projection}_zeros"):
                raise NotImplementedError(f"{field}_zero: zero points are not read here; KTMoEWrapper loads "
                                          "checkpoints with them")
            if not self._takes_codes and getattr(config, f"{projection}_scale"):
                raise NotImplementedError(f"{field}_scale: expected bf16 values without scales; KTMoEWrapper loads "
                                          "quantised checkpoints")

    def _group_size(self, config):
        quant, only, bits = config.quant_config, _GROUPS.get(self._method), _BITS.get(self._method)
        if bits and quant.bits not in (0, bits):
            raise ValueError(f"{type(self).__name__}: quant_config.bits is {quant.bits}; expected {bits}")
        if only and quant.group_size not in (0, only):
            raise ValueError(f"{type(self).__name__}: quant_config.group_size is {quant.group_size}; expected {only}")
        return only or quant.group_size or (0 if self._takes_codes else _USUAL_GROUP)

    def _hidden_type(self, config):
        if self._method != "LLAMAFILE":
            return _BF16
        found = _HIDDEN_TYPES.get(int(config.hidden_type))
        if found is None:
            raise ValueError(f"{type(self).__name__}: hidden_type is {int(config.hidden_type)}; expected 0 (float32), "
                             "1 (float16) or 30 (bfloat16)")
        return found

    def _codes(self, kind):
        config = self._config
        return [list(listed[0]) if listed else [one] if one else []
                for listed, one in ((getattr(config, f"{p}_{kind}s"), getattr(config, f"{p}_{kind}"))
                                    for p in _PROJECTIONS)]

    def _load(self, address):
        config = self._config
        order = list((ctypes.c_int64 * config.expert_num).from_address(address)) if address else []
        if config.load:
            self._layer.load(order)
        elif self._takes_codes:
            types = [int(t) for t in (config.gate_type, config.up_type, config.down_type)]
            self._layer.load_codes(self._codes("proj"), self._codes("scale"), types, order)
        else:
            self._layer.load_values(config.gate_proj, config.up_proj, config.down_proj, _BF16, order)

    def load_weights_task(self, physical_to_logical_map=0):
        """Slot p gets logical expert map[p]: int64 [expert_num] at an address; 0: the config's, or 0, 1, 2 ..."""
        _check_addresses(type(self).__name__, physical_to_logical_map=physical_to_logical_map)
        return partial(self._load, physical_to_logical_map or self._config.physical_to_logical_map)

    def forward_task(self, qlen, k, expert_ids, weights, input, output, incremental=False):
        """output [T, hidden] = the experts' sum, or that added to what it holds. T is the int32 at `qlen`; ids are
        int64 [T, k], weights float32 [T, k], input [T, hidden]; input and output bfloat16, or of hidden_type for
        MOE."""
        _check_addresses(type(self).__name__, qlen=qlen, expert_ids=expert_ids, weights=weights, input=input,
                         output=output)
        if not 1 <= k <= self._config.num_experts_per_tok:
            raise ValueError(f"{type(self).__name__}: k is {k}; expected 1 to {self._config.num_experts_per_tok} "
                             "(num_experts_per_tok)")
        return partial(self._layer.forward_at, qlen, k, expert_ids, weights, input, self._type, output,
                       bool(incremental))

    def warm_up_task(self):
        """Nothing is left to warm up once weights are loaded."""
        return self.warm_up

    def write_weight_scale_to_buffer_task(self, gpu_tp_count, expert_id, w13_weight_ptrs, w13_scale_ptrs,
                                          w2_weight_ptrs, w2_scale_ptrs):
        """KTMoEWrapper.submit_write_weight_scale_to_buffer as a task."""
        lists = [list(given) or [0] * gpu_tp_count
                 for given in (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)]
        for addresses in lists:
            if len(addresses) != gpu_tp_count:
                raise ValueError(f"{type(self).__name__}: {len(addresses)} addresses for {gpu_tp_count} ranks")
        return partial(self._layer.submit_write, expert_id, *lists)

    # The same without a queue, on the calling thread.

    def warm_up(self):
        if not self._layer.loaded:
            raise ValueError(f"{type(self).__name__}: layer {self._config.layer_idx}: no weights are loaded")

    def load_weights(self):
        self.load_weights_task()()

    def forward(self, qlen, k, expert_ids, weights, input, output, incremental=False):
        self.forward_task(qlen, k, expert_ids, weights, input, output, incremental)()


for _name, (_method, _takes_codes) in CLASSES.items():
    globals()[_name] = type(_name, (MoE_Interface,), {
        "_method": _method, "_takes_codes": _takes_codes, "__module__": __name__,
        "__doc__": f"Experts of method {_method}, from {'stored codes' if _takes_codes else 'bf16 values'}."})


def __getattr__(name):
    why = "fine-tuning is kt_kernel.sft.AMXSFTMoEWrapper" if "_SFT_MOE" in name else _INSTEAD.get(name)
    raise AttributeError(f"kt_kernel_ext.moe.{name} is not in KT: {why}" if why else
                         f"module 'kt_kernel_ext.moe' has no attribute {name!r}", name=name)
