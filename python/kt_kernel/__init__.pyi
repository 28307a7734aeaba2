from . import kt_kernel_ext as kt_kernel_ext
from . import placement as placement
from .moe_wrapper import AMXSFTMoEWrapper as AMXSFTMoEWrapper
from .moe_wrapper import KTMoEWrapper as KTMoEWrapper
from .placement import generate_gpu_experts_masks as generate_gpu_experts_masks

__version__: str
__cpu_variant__: str
