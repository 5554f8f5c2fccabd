"""In the place of SGLang's CUDA kernels, whose wheel cannot be imported without NVIDIA's driver.

SGLang's modules import names from here. On a CPU its layers take their plain torch paths and call none of them; its
attention and its decoding with drafts call those of ``cpu``. The others are names that do nothing but raise.
"""

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel import cpu

globals().update({kernel.__name__: kernel for kernel in cpu.KERNELS})


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    return missing
