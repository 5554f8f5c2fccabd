"""Time of a call, for benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], repeats: int, *, on_gpu: bool) -> float:
    """Median milliseconds of ``run`` over ``repeats`` calls, after one that is not counted.

    Args:
        on_gpu: time it by events of the current CUDA stream, else by the host's clock.
    """
    run()
    times = []
    for _ in range(repeats):
        if on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)
