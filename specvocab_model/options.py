"""Commands without Hydra: how they start, and types of their options, whose errors argparse prints in one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch

from specvocab_model.cli import EXIT_CONFIG_ERROR, EXIT_INTERRUPTED
from specvocab_model.config import ConfigError
from specvocab_model.engine.shapes import DraftShape
from specvocab_model.sampling import Sampling


def run_command(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], object], arguments: Sequence[str] | None
) -> None:
    """``command`` with the parsed ``arguments``; a ``ConfigError`` ends in one line and exit code 2, Ctrl-C in 130."""
    options = parser.parse_args(arguments)
    try:
        command(options)
    except ConfigError as error:
        parser.exit(EXIT_CONFIG_ERROR, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(EXIT_INTERRUPTED, "interrupted\n")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be above 0 and finite")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} must lie between 0 and 1")
    return value


def temperature(text: str) -> Sampling:
    """How tokens are drawn; 0 is greedy."""
    try:
        return Sampling(temperature=float(text))
    except ValueError as error:  # no number, or one that is out of range
        raise argparse.ArgumentTypeError(str(error)) from error


def seed(text: str) -> int:
    """What every random generator takes: 0 to 2^32 - 1."""
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"{value} must lie between 0 and {2**32 - 1}")
    return value


def usable_device(text: str) -> str:
    """A torch device of this machine."""
    try:
        torch.empty(1, device=text)
    except (RuntimeError, AssertionError) as error:  # no such device, or a torch that was built without it
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {str(error).splitlines()[0]}") from error
    return text


def draft_shape(text: str) -> DraftShape:
    """What is drafted: ``7``, a chain, or ``8x10x60``, depth, top-k and tokens of a dynamic tree."""
    try:
        shape = DraftShape(*map(int, text.split("x")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a chain's length nor DEPTHxTOP_KxTOKENS: {error}"
                                         ) from error
    if not shape.depth:
        raise argparse.ArgumentTypeError(f"{text!r} drafts nothing; give a depth of at least 1")
    return shape
