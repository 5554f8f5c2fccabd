"""Types of command-line options for ``argparse``, which prints what they raise in one line."""

from __future__ import annotations

import argparse

import torch


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def usable_device(text: str) -> str:
    """A torch device of this machine."""
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:  # no such device, or a torch that was built without it
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {str(error).splitlines()[0]}") from error
    return text
