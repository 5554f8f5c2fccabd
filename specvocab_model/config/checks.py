"""What the nodes of the configuration check their values with."""

from __future__ import annotations

import math

MIN_TEMPERATURE = 1e-6
DTYPES = ("float32", "bfloat16", "float16")  # of a target and of an evaluation


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the value, the rule and the fix."""


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not minimum <= value < math.inf:
        raise ConfigError(f"{name}={value} must be at least {minimum}{' and finite' if value == math.inf else ''}")


def temperature(name: str, value: float) -> None:
    """Of sampling. Logits over one that is too small are infinite, and their softmax is no number."""
    if value != 0 and not MIN_TEMPERATURE <= value < math.inf:
        raise ConfigError(f"{name}={value} must be 0 (greedy), or at least {MIN_TEMPERATURE} and finite")


def not_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{name}={value!r} is empty; give it a value, or drop the override")


def fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}={value} must lie between 0 and 1")
