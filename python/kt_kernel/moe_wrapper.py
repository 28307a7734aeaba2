"""KTMoEWrapper: the routed experts of one layer on the CPU, as SGLang and other engines ask for them.

No arithmetic here. Names and dialects become values of the extension; tensors are checked and cross as addresses.
"""
import errno
import inspect
import os
import threading
import types

from kt_kernel import _checks, _results, kt_kernel_ext

_torch = None  # the module, from the first wrapper on
_reals = {}  # dtypes of activations: how the extension calls them
_MODE = 14  # where `mode` stands among a wrapper's arguments
_HALVES = ()  # dtypes of topk_weights that become float32


def _import_torch():
    global _torch, _HALVES
    if _torch is None:
        import torch
        _reals.update({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
        _HALVES = (torch.bfloat16, torch.float16)
        _keep_compilers_out(torch)
        _torch = torch
    return _torch


def _keep_compilers_out(torch):
    """torch.compile breaks its graph at calls of a wrapper and runs them as they are: addresses cannot be traced. With
    the public way only where torch lacks the other: it imports all of dynamo, seconds for those who compile nothing."""
    functions = {name: f for name, f in vars(KTMoEWrapper).items() if isinstance(f, types.FunctionType)}
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        for name, function in functions.items():
            setattr(KTMoEWrapper, name, torch.compiler.disable(function))
        return
    for function in functions.values():
        function._torchdynamo_disable = True
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


class _Captures:
    """Batch sizes that graphs are captured for, and results that those write: process-wide, as graphs are."""

    def __init__(self):
        self.lock = threading.Lock()
        self.sizes = []
        self._results = {}  # number of a capture: {(tokens, address): result}

    def add(self, capture, tokens, result):
        with self.lock:
            self._results.setdefault(capture, {})[tokens, result.data_ptr()] = result

    def batch_sizes(self):
        return {tokens for results in self._results.values() for tokens, _ in results}

    def clear(self):
        """Gives back what streams have, and graphs that are gone."""
        with self.lock:
            known = set(self._results)  # others may begin meanwhile
        gone = known.difference(kt_kernel_ext.release_buffers())
        with self.lock:
            for capture in gone:
                self._results.pop(capture, None)


_captures = _Captures()
_stream_results = _results.StreamBuffers()
_large_results = _results.ThreadBuffers()


def _with_values(name, tensor):
    if tensor.device.type == "meta" or tensor.layout is not _torch.strided:
        raise ValueError(f"{name}: expected a dense tensor with values, got {_checks.shown(tensor)}, {tensor.layout}")
    return tensor


def _pinned_mask(experts):
    """Page-locked where there is a GPU. A child forked from a process that uses one sees it and cannot use it: there it
    is ordinary memory. Never on torch's default device, which is the GPU while engines construct models."""
    if _torch.cuda.is_available():
        try:
            mask = _torch.zeros(experts, dtype=_torch.bool, device="cpu", pin_memory=True)
        except RuntimeError:
            return _torch.zeros(experts, dtype=_torch.bool, device="cpu")
        try:
            kt_kernel_ext.cuda_prepare()
        except (RuntimeError, MemoryError):
            pass  # the first call in a stream says what is wrong
        return mask
    return _torch.zeros(experts, dtype=_torch.bool, device="cpu")


class KTMoEWrapper:
    """One layer's routed experts on the CPU.

    All layers may be constructed before any is loaded. ``gpu_experts_mask`` (bool [num_experts], True: computed on the
    GPU by the caller, skipped here) is one dialect, ``num_gpu_experts=N`` (the first N) the other; an int as mask means
    the second. ``method`` says how the weights are stored, not which CPU may run them. ``model`` names the model for
    deferral where layers of two models under one path are constructed by turns. Calls are thread-safe; a result is
    valid until the next layer but one is called on the same thread or stream (docs/python.md says when it lives
    longer).
    """

    def __new__(cls, *args, **kwargs):
        """mode="sft" makes an AMXSFTMoEWrapper of the same arguments."""
        if kwargs.get("mode", args[_MODE] if len(args) > _MODE else None) != "sft":
            return super().__new__(cls)
        from kt_kernel.sft.wrapper import for_training
        return for_training(inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments)

    def __init__(self, layer_idx, num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size,
                 gpu_experts_mask=None, cpuinfer_threads=0, threadpool_count=0, weight_path=None,
                 chunked_prefill_size=512, cpu_save=False, max_deferred_experts_per_token=None, method="AMXINT4",
                 numa_nodes=None, mode="inference", num_gpu_experts=0, lora_rank=16, lora_alpha=32.0, lora_dropout=0.0,
                 max_cache_depth=1, group_size=128, zero_point=True, full_weight_grad=False, swiglu_limit=0.0,
                 swiglu_alpha=0.0, *, activations="default", model=None):
        if mode != "inference":
            raise ValueError(f"mode is {mode!r}; expected 'inference' or 'sft'")
        _import_torch()
        self.layer_idx = _checks.whole("layer_idx", layer_idx, 0)
        self.num_experts = _checks.whole("num_experts", num_experts, 1)
        self.num_experts_per_tok = _checks.whole("num_experts_per_tok", num_experts_per_tok, 1)
        self.hidden_size = _checks.whole("hidden_size", hidden_size, 1)
        self.moe_intermediate_size = _checks.whole("moe_intermediate_size", moe_intermediate_size, 1)
        # -1 and None are SGLang's words for prompts that are not cut; memory grows with the calls, not with this.
        unlimited = chunked_prefill_size is None or chunked_prefill_size == -1
        self.chunked_prefill_size = _checks.whole("chunked_prefill_size",
                                                  2**31 - 1 if unlimited else chunked_prefill_size, 1)
        self.max_deferred_experts_per_token = _checks.whole("max_deferred_experts_per_token",
                                                     max_deferred_experts_per_token or 0, 0)
        self.weight_path = None if weight_path is None else _checks.text("weight_path", os.fsdecode(weight_path))
        self.model = None if model is None else _checks.text("model", model)
        self.cpu_save = bool(cpu_save)
        self.method = kt_kernel_ext.method_named(_checks.text("method", method))
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts")
        if self.max_deferred_experts_per_token > self.num_experts_per_tok:
            raise ValueError(f"max_deferred_experts_per_token is {self.max_deferred_experts_per_token}, "
                             f"num_experts_per_tok {self.num_experts_per_tok}")
        self._mask = self._new_mask(gpu_experts_mask, num_gpu_experts)
        self._local = _results.ThreadBuffers()
        self._streams = {}  # stream: (tokens, result) of a submit that waits for its sync
        # Without a number, the thread that launches the GPU's work and waits for it keeps a cpu.
        self.cpu_infer = kt_kernel_ext.CPUInfer(_checks.whole("cpuinfer_threads", cpuinfer_threads or 0, 0),
                                                _checks.whole("threadpool_count", threadpool_count, 0),
                                                _checks.nodes(numa_nodes), int(_torch.cuda.is_available()))
        self._layer = kt_kernel_ext.ExpertLayer(
            self.cpu_infer, layer=self.layer_idx, experts=self.num_experts, hidden=self.hidden_size,
            inter=self.moe_intermediate_size, top_k=self.num_experts_per_tok, method=self.method,
            weights=self.weight_path or "", model=self.model or "", max_tokens=self.chunked_prefill_size,
            max_deferred=self.max_deferred_experts_per_token, group_size=_checks.whole("group_size", group_size, 0),
            zero_point=bool(zero_point), save=self.cpu_save,
            swiglu_limit=_checks.swiglu("swiglu_limit", swiglu_limit),
            swiglu_alpha=_checks.swiglu("swiglu_alpha", swiglu_alpha),
            activations=_checks.text("activations", activations))
        self._layer.set_mask(self._mask.data_ptr(), self._mask)

    def __repr__(self):
        return (f"KTMoEWrapper(layer_idx={self.layer_idx}, num_experts={self.num_experts}, "
                f"hidden_size={self.hidden_size}, moe_intermediate_size={self.moe_intermediate_size}, "
                f"method={self.method!r})")

    # -- which experts the CPU has

    def _new_mask(self, mask, count):
        torch = _torch
        count = _checks.whole("num_gpu_experts", count, 0)
        if mask is not None and not isinstance(mask, torch.Tensor):
            number = _checks.whole("gpu_experts_mask (a bool tensor or the number of experts)", mask, 0)
            if count and number and count != number:
                raise ValueError(f"gpu_experts_mask is {number} and num_gpu_experts {count}")
            mask, count = None, max(number, count)
        if mask is None and count > self.num_experts:
            raise ValueError(f"num_gpu_experts is {count} of {self.num_experts} experts")
        with torch.inference_mode(False):  # it outlives such a mode, and is written outside of it
            live = _pinned_mask(self.num_experts)
            if mask is None:
                live[:count] = True
            else:
                live.copy_(self._checked_mask(mask))
        return live

    def _checked_mask(self, mask):
        if not isinstance(mask, _torch.Tensor) or mask.dtype != _torch.bool:
            what = _checks.shown(mask) if isinstance(mask, _torch.Tensor) else type(mask).__name__
            raise TypeError(f"gpu_experts_mask: expected a bool tensor, got {what}")
        if tuple(mask.shape) != (self.num_experts,):
            raise ValueError(f"gpu_experts_mask: expected [{self.num_experts}], got {_checks.shown(mask)}")
        return _with_values("gpu_experts_mask", mask)

    @property
    def gpu_experts_mask(self):
        """Live bool tensor [num_experts] in host memory: each forward, replayed ones too, reads what it holds then."""
        return self._mask.detach()  # the same memory; the layer reads it whatever becomes of this tensor

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask):
        self._mask.copy_(self._checked_mask(mask))

    @property
    def num_gpu_experts(self):
        """How many experts the mask leaves to the GPU now."""
        return int(self._mask.sum())

    def select_deferred_experts(self, expert_ids, expert_scores, protected_k):
        """(ids to compute now, ids to put off): -1 where the other has it. An expert that is among the protected_k
        heaviest of any token is computed now for all."""
        torch = _torch
        protected = max(0, min(_checks.whole("protected_k", protected_k, 0), expert_ids.shape[-1]))
        now = torch.zeros(self.num_experts, dtype=torch.bool, device=expert_ids.device)
        heaviest = torch.topk(expert_scores, protected, dim=-1).indices
        chosen = torch.gather(expert_ids, -1, heaviest).reshape(-1)
        now[chosen[chosen >= 0]] = True
        kept = now[expert_ids.clamp(min=0)] & (expert_ids >= 0)
        return expert_ids.masked_fill(~kept, -1), expert_ids.masked_fill(kept, -1)

    # -- weights

    def _map(self, given):
        if given is None:
            return []
        if not isinstance(given, _torch.Tensor):
            given = _torch.as_tensor(given, device="cpu")
        if given.is_floating_point() or given.is_complex() or given.dtype == _torch.bool:
            raise TypeError(f"physical_to_logical_map: expected int64, got {_checks.shown(given)}")
        if tuple(given.shape) != (self.num_experts,):
            raise ValueError(f"physical_to_logical_map: expected [{self.num_experts}], got {_checks.shown(given)}")
        return _with_values("physical_to_logical_map", given).tolist()

    def load_weights(self, physical_to_logical_map=None, *, physical_to_logical_map_cpu=None):
        """Reads this layer under ``weight_path``; slot p gets logical expert map[p]. Both names mean the same."""
        physical_to_logical_map = _checks.one_of(physical_to_logical_map, physical_to_logical_map_cpu)
        if not self.weight_path:
            raise ValueError("load_weights: weight_path was not given")
        if not os.path.exists(self.weight_path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.weight_path)
        self._layer.load(self._map(physical_to_logical_map))

    def load_weights_from_tensors(self, gate_proj, up_proj, down_proj, physical_to_logical_map=None, *,
                                  physical_to_logical_map_cpu=None):
        """Quantises gate and up [E, I, H] and down [E, H, I] as ``method`` says; the tensors are not kept. Writes them
        under ``weight_path`` too with ``cpu_save``."""
        physical_to_logical_map = _checks.one_of(physical_to_logical_map, physical_to_logical_map_cpu)
        experts, inter, hidden = self.num_experts, self.moe_intermediate_size, self.hidden_size
        tensors = []
        for name, tensor, shape in (("gate_proj", gate_proj, (experts, inter, hidden)),
                                    ("up_proj", up_proj, (experts, inter, hidden)),
                                    ("down_proj", down_proj, (experts, hidden, inter))):
            if not isinstance(tensor, _torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.dtype not in _reals or tensor.dtype != gate_proj.dtype:
                raise TypeError(f"{name}: expected float32, bfloat16 or float16, the same for all three, got "
                                f"{_checks.shown(tensor)}")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name}: expected {list(shape)}, got {_checks.shown(tensor)}")
            tensors.append(_with_values(name, tensor).detach().cpu().contiguous().resolve_neg())
        self._layer.load_values(*(t.data_ptr() for t in tensors), _reals[gate_proj.dtype],
                                self._map(physical_to_logical_map))

    # -- forward

    def _bad_input(self, name, tensor, shape, dtypes):
        """Raises what is wrong with one tensor of a forward."""
        if not isinstance(tensor, _torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if str(tensor.dtype).removeprefix("torch.") not in dtypes:
            raise TypeError(f"{name}: expected {' or '.join(dtypes)}, got {_checks.shown(tensor)}")
        raise ValueError(f"{name}: expected {shape}, got {_checks.shown(tensor)}")

    def _bad_device(self, hidden, ids, weights, stream):
        if hidden.device.type not in ("cpu", "cuda"):
            raise ValueError(f"hidden_states: expected a tensor on cpu or cuda, got {_checks.shown(hidden)}")
        for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
            if tensor.device != hidden.device:
                raise ValueError(f"{name}: expected a tensor on {hidden.device} as hidden_states, "
                                 f"got {_checks.shown(tensor)}")
        raise ValueError(f"cuda_stream is {stream}, but hidden_states are on {hidden.device}")

    def _stream(self, stream, device):
        if stream is None:
            return _torch.cuda.current_stream(device).cuda_stream
        if isinstance(stream, bool) or not isinstance(stream, int):
            stream = getattr(stream, "cuda_stream", stream)  # a torch.cuda.Stream
            if isinstance(stream, bool) or not isinstance(stream, int):
                raise TypeError(f"cuda_stream: expected an int, got {type(stream).__name__}")
        if stream < 0 or 2 < stream < 4096 or (stream > 2 and stream % 8):  # 0 to 2 are CUDA's default streams
            raise ValueError(f"cuda_stream is {stream}; expected the handle of a stream")
        return stream

    def _flat(self, hidden):
        if not isinstance(hidden, _torch.Tensor) or hidden.dim() == 0 or hidden.shape[-1] != self.hidden_size or \
                hidden.dtype not in _reals:
            self._bad_input("hidden_states", hidden, f"[tokens, {self.hidden_size}]",
                            ("float32", "bfloat16", "float16"))
        return hidden.reshape(-1, self.hidden_size) if hidden.dim() != 2 else hidden

    def _checked(self, hidden, ids, weights):
        """The three as the extension takes them, with their number of tokens. Plain attribute reads in the good case:
        this is a good part of a call's overhead."""
        torch = _torch
        hidden = self._flat(hidden)
        tokens = hidden.shape[0]
        shape = (tokens, self.num_experts_per_tok)
        if tokens > self.chunked_prefill_size:
            raise ValueError(f"hidden_states: {tokens} tokens, chunked_prefill_size is {self.chunked_prefill_size}")
        if not isinstance(ids, torch.Tensor) or ids.shape != shape or \
                (ids.dtype is not torch.int64 and ids.dtype is not torch.int32):
            self._bad_input("topk_ids", ids, list(shape), ("int32", "int64"))
        if not isinstance(weights, torch.Tensor) or weights.shape != shape or \
                (weights.dtype is not torch.float32 and weights.dtype not in _HALVES):
            self._bad_input("topk_weights", weights, list(shape), ("float32", "bfloat16", "float16"))
        if weights.dtype is not torch.float32:
            weights = weights.float()
        stride = hidden.stride()
        if stride[1] != 1 or stride[0] < self.hidden_size:
            hidden = hidden.contiguous()
        if hidden.is_neg() or ids.is_neg() or weights.is_neg():  # memory that holds the opposite
            hidden, ids, weights = hidden.resolve_neg(), ids.resolve_neg(), weights.resolve_neg()
        return tokens, hidden, ids.contiguous(), weights.contiguous()

    def submit_forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None):
        """Starts a forward. CPU tensors: computed here and now. CUDA tensors: by the time this returns, the copies to
        the host are in the stream, so later work of that stream may overwrite the inputs."""
        if getattr(hidden_states, "is_cuda", False):
            stream = self._stream(cuda_stream, hidden_states.device)
            with self._on(stream, hidden_states.device):
                tokens, hidden, ids, weights = self._checked(hidden_states, topk_ids, topk_weights)
                if ids.device != hidden.device or weights.device != hidden.device:
                    self._bad_device(hidden, ids, weights, cuda_stream)
                return self._submit_on_stream(tokens, hidden, ids, weights, stream)
        tokens, hidden, ids, weights = self._checked(hidden_states, topk_ids, topk_weights)
        if hidden.is_cpu and ids.is_cpu and weights.is_cpu and not cuda_stream:
            result = self._cpu_result(hidden.dtype, tokens)
            self._layer.forward(tokens, hidden.data_ptr(), _reals[hidden.dtype], hidden.stride(0), ids.data_ptr(),
                                ids.dtype is _torch.int64, weights.data_ptr(), result.data_ptr())
            self._local.pending = result
            return
        self._bad_device(hidden, ids, weights, cuda_stream)

    def _on(self, stream, device):
        """Torch's current device and stream are these inside: temporaries are then ordered with the copies, and the
        driver sees the device that the stream belongs to."""
        if stream == _torch.cuda.current_stream(device).cuda_stream:
            return _torch.cuda.device(device)
        return _torch.cuda.stream(_torch.cuda.ExternalStream(stream, device=device))

    def _submit_on_stream(self, tokens, hidden, ids, weights, stream):
        device = hidden.device
        hidden = hidden.contiguous()  # one copy to the host; of one row, the stride says nothing
        key = (device.index, stream)
        if tokens * self.hidden_size * hidden.element_size() > _results.OWN_BYTES and \
                not _torch.cuda.is_current_stream_capturing():
            result = _torch.empty_like(hidden)
        else:
            result = _stream_results.of(_torch, stream, self.hidden_size, hidden.dtype, device,
                                        self.layer_idx & 1).rows(tokens)
        capture = self._layer.submit(tokens, hidden.data_ptr(), _reals[hidden.dtype], self.hidden_size,
                                      ids.data_ptr(), ids.dtype is _torch.int64, weights.data_ptr(), stream)
        if capture:
            _captures.add(capture, tokens, result)
        self._streams[key] = result

    def _cpu_result(self, dtype, tokens):
        own = tokens * self.hidden_size * dtype.itemsize <= _results.OWN_BYTES
        buffers = self._local.buffers if own else _large_results.buffers
        key = dtype if own else (dtype, self.hidden_size, self.layer_idx & 1)
        found = buffers.get(key)
        if found is None:
            found = buffers[key] = _results.ResultBuffer(_torch, self.hidden_size, dtype, "cpu")
        return found.rows(tokens)

    def sync_forward(self, hidden_states, cuda_stream=None):
        """The result of the last submit_forward of this thread (CPU) or stream (CUDA), [T, H] in the type and on the
        device of hidden_states: a buffer that later calls overwrite. CUDA: the stream waits for it, the caller does
        not."""
        hidden = self._flat(hidden_states)
        if hidden.is_cuda:
            stream = self._stream(cuda_stream, hidden.device)
            result = self._streams.get((hidden.device.index, stream))
        else:
            stream, result = None, self._local.pending
        if result is None:
            raise RuntimeError("sync_forward: nothing was submitted by submit_forward, or it was synced before")
        if result.shape != hidden.shape or result.dtype is not hidden.dtype:
            raise ValueError(f"sync_forward: hidden_states are {_checks.shown(hidden_states)}, submitted were "
                             f"{_checks.shown(result)}")
        if stream is None:
            self._local.pending = None
        else:
            self._streams.pop((hidden.device.index, stream), None)
            with self._on(stream, hidden.device):
                self._layer.sync(result.data_ptr(), result.shape[0], stream)
        result = result.detach()  # the same memory; what the caller does to the tensor itself stays his
        return result if hidden_states.dim() == 2 else result.view(hidden_states.shape)

    def forward(self, hidden_states, topk_ids, topk_weights, cuda_stream=None):
        """submit_forward and sync_forward."""
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    def check(self):
        """Raises the first error of work that graphs replayed since the last call: a replay itself runs no Python, and
        gives zeros where the CPU's part failed. Every forward, submit and sync of this layer does so too."""
        self._layer.check()

    # -- write-back for prefill on the GPU

    def submit_write_weight_scale_to_buffer(self, gpu_tp_count, expert_id, w13_weight_ptrs, w13_scale_ptrs,
                                            w2_weight_ptrs, w2_scale_ptrs):
        """Writes the weights of slot ``expert_id``, cut for ``gpu_tp_count`` ranks, to host addresses (one per rank in
        each list; scales 0 or an empty list where the format has none). docs/python.md has the layouts."""
        ranks = _checks.whole("gpu_tp_count", gpu_tp_count, 1)
        expert = _checks.whole("expert_id", expert_id, 0)
        if expert >= self.num_experts:
            raise ValueError(f"expert_id is {expert} of {self.num_experts} experts")
        lists = []
        for name, given, needed in (("w13_weight_ptrs", w13_weight_ptrs, True),
                                    ("w13_scale_ptrs", w13_scale_ptrs, False),
                                    ("w2_weight_ptrs", w2_weight_ptrs, True), ("w2_scale_ptrs", w2_scale_ptrs, False)):
            addresses = [_checks.whole(name, address, 1 if needed else 0, 2**64 - 1) for address in given or ()]
            if not addresses and not needed:
                addresses = [0] * ranks
            if len(addresses) != ranks:
                raise ValueError(f"{name}: expected {ranks} addresses (gpu_tp_count), got {len(addresses)}")
            lists.append(addresses)
        self._layer.submit_write(expert, *lists)

    def sync_write_weight_scale_to_buffer(self):
        """Waits until what this layer was asked to write is written; raises what failed of it."""
        self._layer.sync_write()

    # -- process-wide

    @staticmethod
    def set_capture_batch_sizes(capture_bs):
        """Batch sizes that CUDA graphs will be captured for. ValueError for a list that leaves out a size that a graph
        already has: its buffers are in use."""
        sizes = sorted({_checks.whole("capture_bs", size, 1) for size in capture_bs})
        with _captures.lock:
            lost = sorted(_captures.batch_sizes().intersection(_captures.sizes).difference(sizes))
            if lost:
                raise ValueError(f"set_capture_batch_sizes({sizes}) after graphs were captured for {lost}; "
                                 "clear_buffer_cache() first, when they are gone")
            _captures.sizes = sizes

    @staticmethod
    def get_capture_batch_sizes():
        """The batch sizes of the last set_capture_batch_sizes, ascending."""
        return list(_captures.sizes)

    @staticmethod
    def clear_buffer_cache():
        """Gives back the buffers of streams and of captured graphs that are gone. Graphs that are not keep theirs,
        until a later call."""
        _stream_results.clear()
        _captures.clear()
