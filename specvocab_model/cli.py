"""The one entry point of every command: Hydra composes, the schema checks, a mistake ends in one line.

    @hydra_main
    def main(config: Config) -> None: ...
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import hydra
from hydra.errors import CompactHydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specvocab_model.config import CONFIG_DIR, Config, ConfigError, describe, parse_config, register_schemas

EXIT_CONFIG_ERROR = 2
EXIT_INTERRUPTED = 130


def hydra_main(function: Callable[[Config], None]) -> Callable[[], None]:
    """Make ``function`` a command that takes Hydra overrides.

    A configuration that cannot run, found by Hydra, by the schema or by ``function`` itself (``ConfigError``), is
    printed as one line and exits with code 2; Ctrl-C exits with code 130. Any other exception keeps its traceback.
    """

    @functools.wraps(function)
    def command() -> None:
        try:
            for config in _compose(function):
                function(config)
        except ConfigError as error:
            _stop(str(error))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(EXIT_INTERRUPTED)

    return command


def _compose(function: Callable[[Config], None]) -> list[Config]:
    """The checked configuration; none where only something was to be shown (``--cfg job``, ``--help``).

    Hydra only composes; the command itself runs after Hydra has returned. So whatever is raised in here is about the
    configuration, and what the command raises has no Hydra frames around it.
    """
    composed: list[DictConfig] = []

    @functools.wraps(function)  # Hydra takes the command's name and --help from here
    def collect(config: DictConfig) -> None:
        composed.append(config)

    if {"-m", "--multirun"} & set(sys.argv):
        raise ConfigError("--multirun runs all points in one process and output folder; start one command per point")
    if {"-h", "--help"} & set(sys.argv):  # Hydra adds groups and values, and cannot know what the command is for
        print((sys.modules[function.__module__].__doc__ or "").strip())
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them over several lines
    register_schemas()
    with _in_one_line():
        hydra.main(config_path=CONFIG_DIR, config_name="config", version_base="1.3")(collect)()
    return [parse_config(config) for config in composed]


def compose(overrides: Sequence[str], config_dir: str | None = None) -> Config:
    """The configuration that a command would see with these overrides, and ``--config-dir`` if one is given.

    Raises:
        ConfigError: it cannot run.
    """
    register_schemas()
    search_path = [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"] if config_dir else []
    with _in_one_line(), hydra.initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        composed = hydra.compose("config", [*search_path, *overrides])
    return parse_config(composed)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Whatever Hydra raises while it composes, as a ``ConfigError``."""
    try:
        yield
    except (CompactHydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(_one_line(error)) from error
    except OSError as error:  # after the one above, because Hydra's "no such config" is an OSError as well
        raise ConfigError(f"output_dir cannot be made: {error}; choose another output_dir or run_name") from error


def _one_line(error: Exception) -> str:
    """What is wrong, from an error that Hydra raised while it composed."""
    if isinstance(error, OmegaConfBaseException):
        return describe(error)
    first = str(error).splitlines()[0].rstrip(".:")
    if isinstance(error, MissingConfigException) and error.options:
        choices = [name for name in error.options if name != "schema"]  # what they all begin with
        return f"{first} (there are: {', '.join(choices)})"
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override!r}: expected key=value in Hydra's grammar"
    reason = error.__cause__ or error.__context__
    if isinstance(reason, OmegaConfBaseException):
        return f"{first}: {describe(reason)}"
    return " ".join(str(error).split())


def _stop(line: str) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one line per machine, not one per rank
        print(f"error: {line}", file=sys.stderr)
    sys.exit(EXIT_CONFIG_ERROR)
