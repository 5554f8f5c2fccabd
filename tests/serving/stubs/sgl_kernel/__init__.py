"""In the place of SGLang's CUDA kernels, whose wheel cannot be imported without NVIDIA's driver: names, no functions.

SGLang's modules import them by name; on a CPU its layers take their plain torch paths and call none of them.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    return missing
