"""Running the same function over the same tensors again: on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 2


class Graphs:
    """Captures every function once for each key and replays it; on the CPU, or not ``enabled``, calls it.

    A captured function has fixed shapes, waits for nothing, and leaves its results in tensors that exist before.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.device = device
        self._graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def run(self, key: tuple, function: Callable[[], object], harmless: Callable[[], Callable[[], object]]) -> None:
        """Run ``function``, which is the same for equal keys.

        Args:
            harmless: called before a capture, which runs the function some times too often: takes care that this
                changes nothing, and returns what undoes the precaution.
        """
        if not self.enabled:
            function()
            return
        if key not in self._graphs:
            undo = harmless()
            self._graphs[key] = self._capture(function)
            undo()
        self._graphs[key].replay()

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # compiles kernels, and makes libraries allocate outside the graph
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call what a capture forbids, such as a loader's, which pins memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph
