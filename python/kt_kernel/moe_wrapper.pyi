import os
from collections.abc import Sequence

import torch

from . import kt_kernel_ext

class KTMoEWrapper:
    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    chunked_prefill_size: int
    max_deferred_experts_per_token: int
    weight_path: str | None
    model: str | None
    cpu_save: bool
    method: str
    cpu_infer: kt_kernel_ext.CPUInfer
    gpu_experts_mask: torch.Tensor
    def __init__(self, layer_idx: int, num_experts: int, num_experts_per_tok: int, hidden_size: int,
                 moe_intermediate_size: int, gpu_experts_mask: torch.Tensor | int | None = None,
                 cpuinfer_threads: int | None = 0, threadpool_count: int = 0,
                 weight_path: str | os.PathLike[str] | None = None,
                 chunked_prefill_size: int | None = 512, cpu_save: bool = False,
                 max_deferred_experts_per_token: int | None = None, method: str = "AMXINT4",
                 numa_nodes: Sequence[int] | None = None, mode: str = "inference", num_gpu_experts: int = 0,
                 lora_rank: int = 16, lora_alpha: float = 32.0, lora_dropout: float = 0.0, max_cache_depth: int = 1,
                 group_size: int = 128, zero_point: bool = True, full_weight_grad: bool = False,
                 swiglu_limit: float = 0.0, swiglu_alpha: float = 0.0, *, activations: str = "default",
                 model: str | None = None) -> None: ...
    @property
    def num_gpu_experts(self) -> int: ...
    def load_weights(self, physical_to_logical_map: torch.Tensor | Sequence[int] | None = None, *,
                     physical_to_logical_map_cpu: torch.Tensor | Sequence[int] | None = None) -> None: ...
    def load_weights_from_tensors(self, gate_proj: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor,
                                  physical_to_logical_map: torch.Tensor | Sequence[int] | None = None, *,
                                  physical_to_logical_map_cpu: torch.Tensor | Sequence[int] | None = None) -> None: ...
    def select_deferred_experts(self, expert_ids: torch.Tensor, expert_scores: torch.Tensor,
                                protected_k: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def submit_forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
                       cuda_stream: int | torch.cuda.Stream | None = None) -> None: ...
    def sync_forward(self, hidden_states: torch.Tensor,
                     cuda_stream: int | torch.cuda.Stream | None = None) -> torch.Tensor: ...
    def check(self) -> None: ...
    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
                cuda_stream: int | torch.cuda.Stream | None = None) -> torch.Tensor: ...
    def submit_write_weight_scale_to_buffer(self, gpu_tp_count: int, expert_id: int, w13_weight_ptrs: Sequence[int],
                                            w13_scale_ptrs: Sequence[int] | None, w2_weight_ptrs: Sequence[int],
                                            w2_scale_ptrs: Sequence[int] | None) -> None: ...
    def sync_write_weight_scale_to_buffer(self) -> None: ...
    @staticmethod
    def set_capture_batch_sizes(capture_bs: Sequence[int]) -> None: ...
    @staticmethod
    def get_capture_batch_sizes() -> list[int]: ...
    @staticmethod
    def clear_buffer_cache() -> None: ...
