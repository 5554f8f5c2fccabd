"""How the process of a point is started, followed and stopped: on this machine, or by submitit (Slurm)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specvocab_model.config import Config, ConfigError
from train.sweep.points import LOG_FILE, Point

if TYPE_CHECKING:
    from submitit import Job as SubmititJob
    from submitit.helpers import DelayedSubmission

TRAIN = Path(__file__).resolve().parent.parent / "main.py"
POLL_S = 1.0
GRACE_S = 60.0  # for a run to write its checkpoint once it was told to end
STOP_FILE = "stop"  # tells a job of submitit's, wherever it runs, to end its run
INSTALL = "pip install 'specvocab[sweep]'"


class Job(Protocol):
    """A run that has been started."""

    def exit_code(self) -> int | None:
        """None while it runs or waits; negative: the signal that killed it."""

    def stop(self) -> None:
        """Ask it to end, which takes some time: it writes a checkpoint first."""

    def kill(self) -> None:
        """End it now."""


class Launcher(Protocol):
    def start(self, point: Point) -> Job: ...


def build_launcher(config: Config, folder: Path, lock: int) -> Launcher:
    """
    Args:
        lock: descriptor that processes on this machine inherit: should the sweep be killed alone, its lock is held
            for as long as one of them lives.

    Raises:
        ConfigError: what the launcher needs is not here, or its parameters are not submitit's.
    """
    if config.sweep.launcher == "here":
        return Here(config.sweep.accelerate, lock)
    return Submitit(config, folder)


def command(point: Point, accelerate_flags: Sequence[str]) -> list[str]:
    """``accelerate launch train/main.py`` as a user would type it for this point."""
    single = point.config.distributed.strategy == "single"
    flags = ["--num_processes=1", "--num_machines=1", "--dynamo_backend=no", "--mixed_precision=no"] if single else []
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags, *accelerate_flags]
    return [*launcher, str(TRAIN), *point.arguments]


class Here:
    """Processes on this machine, each in a session of its own: a signal to it reaches all of its ranks."""

    def __init__(self, accelerate_flags: Sequence[str], lock: int) -> None:
        self.accelerate_flags = accelerate_flags
        self.lock = lock

    def start(self, point: Point) -> Job:
        return LocalProcess(command(point, self.accelerate_flags), point.folder / LOG_FILE, inherited=(self.lock,))


class LocalProcess:
    """A command whose output goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, inherited: Sequence[int] = ()) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            # SIGUSR2 is how submitit is told to make room, and not meant for the run itself.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                pass_fds=inherited, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
            )

    def exit_code(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # the session has ended
            os.killpg(self.process.pid, number)


class Submitit:
    """Jobs of submitit: of Slurm, or of its executor for one machine (``submitit_local``)."""

    def __init__(self, config: Config, folder: Path) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ConfigError(f"sweep.launcher={config.sweep.launcher} needs submitit: {INSTALL}") from error
        self.accelerate_flags = config.sweep.accelerate
        cluster = config.sweep.launcher.removeprefix("submitit_")
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise ConfigError("sweep.launcher=submitit_slurm: there is no sbatch on this machine; start the sweep on a "
                              "login node of the cluster, or choose sweep.launcher=here")
        self.executor = submitit.AutoExecutor(folder=folder / "submitit" / "%j", cluster=cluster)
        defaults = {"local": {"timeout_min": 60 * 24 * 30}}.get(cluster, {})
        try:
            self.executor.update_parameters(**{"name": folder.name, **defaults, **config.sweep.submitit})
        except (NameError, TypeError, ValueError, AssertionError) as error:  # submitit's, of wrong parameters
            raise ConfigError(f"sweep.submitit={config.sweep.submitit}: {' '.join(str(error).split())}") from error

    def start(self, point: Point) -> Job:
        (point.folder / STOP_FILE).unlink(missing_ok=True)
        run = PointCommand(command(point, self.accelerate_flags), point.folder)
        return ClusterJob(self.executor.submit(run), point.folder)


class ClusterJob:
    """A job of submitit's, which may be on another machine: it is told to stop by a file."""

    def __init__(self, job: SubmititJob[int], folder: Path) -> None:
        self.job = job
        self.folder = folder

    def exit_code(self) -> int | None:
        if not self.job.done():
            return None
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return self.job.result()
        except (FailedJobError, UncompletedJobError) as error:  # cancelled, out of time, or the node went away
            with (self.folder / LOG_FILE).open("a") as log:
                log.write(f"error: job {self.job.job_id} broke off: {str(error).splitlines()[-1]}\n")
            return -signal.SIGKILL

    def stop(self) -> None:
        if self.job.state in ("PENDING", "REQUEUED"):
            self.job.cancel()
        else:
            (self.folder / STOP_FILE).touch()

    def kill(self) -> None:
        self.job.cancel()


class PointCommand:
    """What a job of submitit's runs; pickled on the way there."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command = list(command)
        self.folder = folder
        self.process: LocalProcess | None = None

    def __call__(self) -> int:
        """Exit code of the run."""
        self.process = LocalProcess(self.command, self.folder / LOG_FILE)
        try:
            while (code := self.process.exit_code()) is None:
                if (self.folder / STOP_FILE).exists():
                    return end(self.process)
                time.sleep(POLL_S)
            return code
        finally:
            self.process.kill()  # of a cancelled job; nothing is left of one that has ended

    def checkpoint(self) -> DelayedSubmission:
        """submitit calls this when the job's time is over or its node is wanted; what it returns is queued again."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            end(self.process)
        return DelayedSubmission(PointCommand(self.command, self.folder))


def end(job: Job, grace: float = GRACE_S) -> int:
    """Ask a run to end and wait; kill it after ``grace`` seconds. Returns its exit code."""
    job.stop()
    deadline = time.monotonic() + grace
    while (code := job.exit_code()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)
    if code is None:
        job.kill()
        code = -signal.SIGKILL
    return code
