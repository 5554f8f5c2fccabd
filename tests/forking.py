"""Python processes forked from this one, in which all is imported already: a new interpreter takes seconds for that.

    with forking():
        subprocess.run([sys.executable, "train/main.py", ...])

The process is a child as any other: its own standard streams, session, environment, working directory, signals and exit
code; what it starts is forked from it in turn, ranks from their launcher. One test of each launcher starts new
interpreters all the same, and so do tests of what an import does.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from accelerate.state import AcceleratorState, GradientState

_start = subprocess.Popen.__init__


@contextmanager
def forking() -> Iterator[None]:
    """Commands that begin with ``sys.executable`` are forked while this context lasts."""
    subprocess.Popen.__init__ = _start_forked
    try:
        yield
    finally:
        subprocess.Popen.__init__ = _start


def _start_forked(
    self: subprocess.Popen, args: Sequence[object] | str, *, env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (), preexec_fn: Callable[[], object] | None = None, **options: Any,
) -> None:
    """``Popen`` calls ``preexec_fn`` in the child, once its streams and session are there, and this one never returns:
    what would be executed is not needed."""
    if not isinstance(args, str) and args[0] == sys.executable:
        environ = dict(os.environ if env is None else env)
        preexec_fn = partial(_be_python, [str(each) for each in args[1:]], environ, pass_fds, preexec_fn)
    _start(self, args, env=env, pass_fds=pass_fds, preexec_fn=preexec_fn, **options)


def _be_python(
    arguments: list[str], environ: dict[str, str], inherited: Sequence[int], first: Callable[[], object] | None
) -> NoReturn:
    code = 1
    try:
        if first is not None:
            first()
        _forget_the_parent(environ, inherited)
        _run(arguments)
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # as the interpreter ends: threads that are no daemons are waited for
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def _forget_the_parent(environ: dict[str, str], inherited: Sequence[int]) -> None:
    """Be as a new interpreter is, except for what has been imported."""
    gc.enable()
    faulthandler.disable()
    kept = {0, 1, 2, *inherited}
    with open(os.devnull) as nothing:
        for fd in {int(name) for name in os.listdir("/dev/fd")} - kept - {nothing.fileno()}:
            # Not closed: objects of the parent's that are collected later would close whatever has got their number.
            os.dup2(nothing.fileno(), fd, inheritable=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(environ)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _log_to_stderr()
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _log_to_stderr() -> None:
    """Not to pytest: what libraries have set up writes to the new stream, and the root logger is as it was at first."""
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr


def _run(arguments: list[str]) -> None:
    """What ``python`` does with these arguments: a script, ``-m module`` or ``-c code``."""
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[1], main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
