from . import kt_kernel_ext as kt_kernel_ext
from . import placement as placement
from . import sft as sft
from .injection import inject as inject
from .linear import KTLinear as KTLinear
from .moe_wrapper import KTMoEWrapper as KTMoEWrapper
from .operators import BaseInjectedModule as BaseInjectedModule
from .operators import KLinearBase as KLinearBase
from .operators import operator as operator
from .placement import Placement as Placement
from .placement import generate_gpu_experts_masks as generate_gpu_experts_masks
from .sft.wrapper import AMXSFTMoEWrapper as AMXSFTMoEWrapper

__version__: str
__cpu_variant__: str
