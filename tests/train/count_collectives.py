"""train/main.py, writing collectives to FOLDER/collectives-RANK; on the last rank the gradient of step 2 and the loss
of step 3 are not finite."""

from __future__ import annotations

import os
from typing import TextIO

import torch.distributed as dist

from train import build
from train.main import main
from train.optim import Updater

NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast", "all_gather", "reduce_scatter")


def record(name: str, file: TextIO) -> None:
    function = getattr(dist, name)

    def call(*args, **kwargs):
        tensor = args[0] if args else kwargs.get("tensor", kwargs.get("output_tensor"))
        file.write(f"{name} {tuple(getattr(tensor, 'shape', ()))}\n")
        return function(*args, **kwargs)

    setattr(dist, name, call)


def poison(updater: Updater, micro_batch: int) -> None:
    """Of one micro-batch, let the gradient of step 2 be NaN while its loss is reported as it is; the loss of step 3."""
    backward, step, place = updater.backward, updater.step, [1, 0]  # step, micro-batch

    def poisoned(loss):
        if place == [3, micro_batch]:
            loss.detach().fill_(float("nan"))  # the loop holds the same tensor
        backward(loss * float("nan") if place == [2, micro_batch] else loss)
        place[1] += 1

    def counted(lr: float) -> float:
        place[:] = [place[0] + 1, 0]
        return step(lr)

    updater.backward, updater.step = poisoned, counted


def counting(folder: str) -> None:
    """The command, on a rank that is alone in its process."""
    rank = int(os.environ["RANK"])
    file = open(os.path.join(folder, f"collectives-{rank}"), "w", buffering=1)  # noqa: SIM115
    for name in NAMES:
        record(name, file)
    if rank == int(os.environ["WORLD_SIZE"]) - 1:
        built = build.Updater.__init__

        def poisoned(self, *args, **kwargs):
            built(self, *args, **kwargs)
            poison(self, micro_batch=0)

        build.Updater.__init__ = poisoned
    main()
