"""Has vLLM put its C++ functions in the place of Triton's kernels, once for all engines to come.

It looks for the kernels through all modules, which takes each engine a third of a second.
"""

from __future__ import annotations

from vllm.platforms import current_platform

current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
