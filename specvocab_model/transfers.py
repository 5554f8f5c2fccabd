"""Small tensors from the host to the device and back, while that goes on working."""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. From ordinary memory a GPU would first finish what was launched before."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


class Readback:
    """``start`` copies the tensor as it is at this point of the stream; ``wait`` returns it when it has arrived."""

    def __init__(self, source: Tensor) -> None:
        on_gpu = source.device.type == "cuda"
        self.source = source
        self.host = torch.empty(source.shape, dtype=source.dtype, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def start(self) -> None:
        self.host.copy_(self.source, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.host.tolist()
