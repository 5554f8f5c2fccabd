"""The one place where an operation's ``impl`` argument is decided."""

import os
from importlib.util import find_spec

import torch

HAS_TRITON = find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which takes CPU tensors.

    Triton reads the variable when a kernel is defined, so it must be set before a process first runs one.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_impl(operation: str, impl: str, device: torch.device, *, has_kernel: bool = True) -> str:
    """Return ``"triton"`` or ``"torch"`` for tensors on ``device``.

    ``"auto"`` takes the Triton kernel on a GPU where Triton is installed, torch everywhere else: never the
    interpreter, which is for tests. ``has_kernel=False`` marks an operation that has no Triton kernel.

    Raises:
        ValueError: ``impl`` is unknown, or is ``"triton"`` where no Triton kernel can run.
    """
    if impl not in ("auto", "triton", "torch"):
        raise ValueError(f"{operation}: impl={impl!r} is not known; choose 'auto', 'triton' or 'torch'")
    on_gpu = device.type == "cuda"  # ROCm's devices carry this name too
    if impl == "auto":
        return "triton" if has_kernel and HAS_TRITON and on_gpu else "torch"
    if impl == "triton":
        if not has_kernel:
            raise ValueError(f"{operation}: impl='triton' does not exist for this operation; use 'auto' or 'torch'")
        if not HAS_TRITON:
            raise ValueError(f"{operation}: impl='triton' needs the package triton; install it or use 'auto'")
        if not on_gpu and not interpreting():
            raise ValueError(
                f"{operation}: impl='triton' needs tensors on a GPU, got {device}; use 'auto', or set "
                "TRITON_INTERPRET=1 before Python starts to run the kernel in Triton's interpreter"
            )
    return impl
