"""Starting training as users do: real ranks, under a launcher, from the repository root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
from accelerate.state import AcceleratorState

from train.main import main as command

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
# As it was before any test ran: training on the CPU, in a test, hides the cards.
CARDS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def torchrun(ranks: int = 2, script: str = "train/main.py") -> list[str]:
    return python("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", script)


def accelerate_deepspeed(ranks: int = 2, script: str = "train/main.py") -> list[str]:
    return python("-m", "accelerate.commands.launch", "--use_deepspeed", f"--num_processes={ranks}",
                  "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0", script)


class Job:
    """A started command, its output in files. One that takes longer than ``limit_s`` from its start is killed."""

    def __init__(
        self, folder: Path, arguments: list[str], command: list[str], *, limit_s: float = TIMEOUT_S, **environ: str
    ) -> None:
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith(("ACCELERATE_", "PYTEST_", "WANDB_"))}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            inherited.pop(name, None)  # a DeepSpeed run in this process may have left them
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{name}-{free_port()}" for name in ("stdout", "stderr")]
        with self.files[0].open("w") as stdout, self.files[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=REPOSITORY, stdout=stdout, stderr=stderr,
                env=inherited | {"OMP_NUM_THREADS": "1"} | environ,
            )
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s

    @property
    def stdout(self) -> str:
        return self.files[0].read_text()

    @property
    def stderr(self) -> str:
        return self.files[1].read_text()

    def processes(self) -> list[psutil.Process]:
        """Launcher, ranks and loader workers; ranks lead sessions of their own."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank: the launcher starts them in their order."""
        ranks = [child for child in psutil.Process(self.process.pid).children() if os.getsid(child.pid) == child.pid]
        return sorted(ranks, key=lambda process: (process.create_time(), process.pid))[rank]

    def signal_all(self, number: signal.Signals) -> None:
        """To ``processes``, as Slurm does it."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # a loader worker, or git: it has ended meanwhile
                process.send_signal(number)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, f"it has ended{self.tails()}"
            if time.monotonic() > self.deadline:
                tails = self.tails()
                self.signal_all(signal.SIGKILL)
                raise AssertionError(f"it was not there after {self.limit_s} s{tails}")
            time.sleep(0.02)

    def wait(self) -> int:
        """Exit code."""
        try:
            return self.process.wait(max(self.deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"it had not ended after {self.limit_s} s{self.tails()}") from late
        finally:
            if self.process.returncode is None:
                self.signal_all(signal.SIGKILL)

    def tails(self) -> str:
        """What a message about it shows."""
        return "".join(f"\n--- the end of {file}\n{file.read_text()[-3000:]}" for file in self.files)


def launch(
    folder: Path, arguments: list[str], command: list[str], *, limit_s: float = TIMEOUT_S, **environ: str
) -> Job:
    """A job that has ended."""
    job = Job(folder, arguments, command, limit_s=limit_s, **environ)
    job.wait()
    return job


@dataclass(frozen=True)
class Ended:
    """Ranks that have ended: their exit codes, and what they printed, mixed."""

    codes: list[int]
    output: str


def fork_ranks(
    folder: Path, arguments: list[str], ranks: int, main: Callable[[], None] = command, *, nodes: int = 1
) -> Ended:
    """``main`` on every rank, in processes forked from this one, in which all is imported: a launcher's take long.

    One test with each launcher shows that those work; what the ranks do is the same. With several ``nodes`` they are
    numbered as if they were on as many machines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, port = folder / f"forked-{free_port()}", str(free_port())
    children = [os.fork() or _be_rank(rank, ranks, nodes, port, file, arguments, main) for rank in range(ranks)]
    try:
        deadline = time.monotonic() + TIMEOUT_S
        codes: dict[int, int] = {}
        while len(codes) < ranks:
            assert time.monotonic() < deadline, file.read_text()[-3000:]
            time.sleep(0.02)
            for child in (one for one in children if one not in codes):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    codes[child] = os.waitstatus_to_exitcode(status)
    finally:
        for child in (one for one in children if one not in codes):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return Ended([codes[child] for child in children], file.read_text())


def _be_rank(
    rank: int, ranks: int, nodes: int, port: str, file: Path, arguments: list[str], main: Callable[[], None]
) -> NoReturn:
    code = 1
    try:
        per_node = ranks // nodes
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % per_node), WORLD_SIZE=str(ranks),
                          LOCAL_WORLD_SIZE=str(per_node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        sys.stdout = sys.stderr = file.open("a", buffering=1)
        sys.argv = ["train/main.py", *arguments]
        AcceleratorState._reset_state(reset_partial_state=True)
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        print(stop.code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
