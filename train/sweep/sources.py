"""Where the points of a sweep come from: a grid, or Optuna's search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from specvocab_model.acceptance import AcceptanceSums, summarise
from specvocab_model.config import Config, ConfigError
from train.sweep.launchers import INSTALL
from train.sweep.points import Point, Points

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

STUDY_FILE = "study.journal"
RANGE_KEYS = {"low", "high", "log", "step"}


class Source(Protocol):
    """Points one after another; which one comes next may depend on those that have ended."""

    total: int

    def next(self) -> Point | None:
        """The next point to run; None when all have been given out."""

    def falls_behind(self, point: Point) -> bool:
        """Whether a running point should be given up."""

    def ended(self, point: Point, status: str) -> None:
        """``finished``, ``failed`` or ``pruned``."""

    def points(self) -> list[Point]:
        """Everything that was given out, in this process or an earlier one, and all that is known to come."""


def build_source(points: Points) -> Source:
    """
    Raises:
        ConfigError: there is nothing to vary, or a key or value is not one that training takes.
    """
    sweep = points.base.sweep
    if not sweep.grid and not sweep.search:
        raise ConfigError("no sweep was chosen, so there is nothing to vary; add sweep=NAME with one of "
                          "configs/sweep/, or a grid: +'sweep.grid={optim.lr: [1e-4, 2e-4]}' sweep.name=NAME")
    if not sweep.name:
        raise ConfigError("the sweep has no name, which its folder and its W&B group need; set sweep.name=NAME")
    return Grid(points) if sweep.grid else Search(points)


class Grid:
    """Every combination of the values, in the order of the file; finished ones are skipped."""

    def __init__(self, points: Points) -> None:
        grid = points.base.sweep.grid
        combinations = itertools.product(*grid.values())
        self.all = [points.make(dict(zip(grid, values, strict=True))) for values in combinations]
        if len({point.name for point in self.all}) < len(self.all):
            raise ConfigError("sweep.grid names a combination twice; remove the repeated value")
        self.total = len(self.all)
        self.waiting = iter([point for point in self.all if not point.is_finished()])

    def next(self) -> Point | None:
        return next(self.waiting, None)

    def falls_behind(self, point: Point) -> bool:
        return False

    def ended(self, point: Point, status: str) -> None:
        pass

    def points(self) -> list[Point]:
        return self.all


class Search:
    """Optuna: TPE proposes, the median pruner gives up what falls behind.

    The study lives in a file of the sweep's folder. A trial that was under way when the sweep stopped is still marked
    as running there, and is the first to be continued.
    """

    def __init__(self, points: Points) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ConfigError(f"sweep.search needs optuna: {INSTALL}") from error
        from optuna.storages.journal import JournalFileBackend

        sweep = points.base.sweep
        self.made = points
        self.distributions = {key: distribution(key, values) for key, values in sweep.search.items()}
        for parameters in corners(self.distributions):
            points.make(parameters, "check")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        points.folder.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(points.folder / STUDY_FILE)))
        pruner = optuna.pruners.MedianPruner(sweep.startup_trials, sweep.prune_after)
        self.study: Study = optuna.create_study(
            storage=storage, study_name=sweep.name, direction="maximize", load_if_exists=True,
            pruner=pruner if sweep.prune else optuna.pruners.NopPruner(),
        )
        # Another seed at every start: with the same one, a continued search would propose its first trials once more.
        seed = points.base.seed + len(self.study.get_trials(deepcopy=False))
        self.study.sampler = optuna.samplers.TPESampler(n_startup_trials=sweep.startup_trials, seed=seed)
        self.total = sweep.num_trials
        running = optuna.trial.TrialState.RUNNING
        interrupted = self.study.get_trials(deepcopy=False, states=(running,))
        self.interrupted = iter([optuna.trial.Trial(self.study, trial._trial_id) for trial in interrupted])
        self.trials: dict[str, Trial] = {}
        self.states = {"finished": optuna.trial.TrialState.COMPLETE, "failed": optuna.trial.TrialState.FAIL,
                       "pruned": optuna.trial.TrialState.PRUNED}

    def next(self) -> Point | None:
        trial = next(self.interrupted, None)
        if trial is None:
            if len(self.study.get_trials(deepcopy=False)) >= self.total:
                return None
            trial = self.study.ask(self.distributions)
        point = self._point(trial.number, trial.params)
        self.trials[point.name] = trial
        return point

    def _point(self, number: int, parameters: dict[str, Any]) -> Point:
        return self.made.make({key: parameters[key] for key in self.distributions}, f"trial-{number:04}")

    def falls_behind(self, point: Point) -> bool:
        trial = self.trials[point.name]
        known = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in point.values(self.made.base.sweep.metric):
            if step not in known:
                trial.report(value, step)
                if trial.should_prune():
                    return True
        return False

    def ended(self, point: Point, status: str) -> None:
        self.falls_behind(point)  # reports the rest
        values = point.values(self.made.base.sweep.metric)
        complete = status == "finished" and bool(values)
        self.study.tell(self.trials[point.name], values[-1][1] if complete else None,
                        state=self.states[status if complete or status == "pruned" else "failed"])

    def points(self) -> list[Point]:
        return [self._point(trial.number, trial.params) for trial in self.study.get_trials(deepcopy=False)]


def distribution(key: str, values: Any) -> BaseDistribution:
    """What Optuna draws a parameter from.

    Args:
        values: a list of choices, or ``{low, high}`` with ``log`` or ``step``; two integers make an integer.

    Raises:
        ConfigError: anything else.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list) and values:
        return CategoricalDistribution(values)
    if not isinstance(values, dict) or not {"low", "high"} <= values.keys() <= RANGE_KEYS:
        raise ConfigError(f"sweep.search.{key}={values!r} must be a list of values, or a range: "
                          "{low: 1e-5, high: 1e-3, log: true}")
    low, high, log, step = values["low"], values["high"], values.get("log", False), values.get("step")
    try:
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=log, step=1 if step is None else step)
        return FloatDistribution(low, high, log=log, step=step)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sweep.search.{key}={values!r}: {error}") from error


def corners(distributions: dict[str, BaseDistribution]) -> Iterator[dict[str, Any]]:
    """Few combinations in which every bound and every choice occurs."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    ends: dict[str, list[Any]] = {}
    for key, one in distributions.items():
        if isinstance(one, CategoricalDistribution):
            ends[key] = list(one.choices)
        elif isinstance(one, FloatDistribution | IntDistribution):
            ends[key] = [one.low, one.high]
    for index in range(max(map(len, ends.values()))):
        yield {key: values[index % len(values)] for key, values in ends.items()}


def check_metric(config: Config) -> None:
    """
    Raises:
        ConfigError: the metric is none that validation logs, or one that is not to be large.
    """
    logged = summarise(AcceptanceSums.zeros(config.draft.num_unroll_steps)).keys()
    known = {f"validation/{name}" for name in logged - {"loss", "aux_loss", "teacher_entropy"}}
    if config.sweep.metric not in known:
        raise ConfigError(f"sweep.metric={config.sweep.metric!r} is not logged at validation, or not to be large; "
                          f"choose one of {', '.join(sorted(known))}")
