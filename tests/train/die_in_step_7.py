"""train/main.py, except that rank 1 dies before it updates the weights of step 7, as if its machine went away."""

from __future__ import annotations

import os

from train import loop
from train.main import main

learning_rate = loop.learning_rate


def dying(step: int, *args) -> float:
    if step == 7 and os.environ["RANK"] == "1":
        os._exit(1)
    return learning_rate(step, *args)


if __name__ == "__main__":
    loop.learning_rate = dying
    main()
