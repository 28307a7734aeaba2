"""Stock transformers models whose routed experts run on KT.

    import kt_kernel.transformers
    model = kt_kernel.transformers.enable("Qwen/Qwen3-30B-A3B", format="int4", device="cuda")
    model.generate(...)

`enable` swaps the experts modules of a model for KTExperts, before weights are read where it is given a path.
`recorder` counts which experts tokens go to, `update_placement` moves the busiest ones to the model's device.
"""

from .enable import enable
from .experts import KTExperts
from .formats import method_of
from .placement import Recorder, recorder, update_placement

__all__ = ["KTExperts", "Recorder", "enable", "method_of", "recorder", "update_placement"]
