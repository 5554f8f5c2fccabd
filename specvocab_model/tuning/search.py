"""Searches the head that makes decoding fastest, by Optuna's TPE (Bergstra et al. 2011) under a constraint on τ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specvocab_model.draft_states import Coverage
from specvocab_model.tuning.choices import PRECISIONS, TILES, Choice, Judge, SpeculativeChoice, StaticChoice

if TYPE_CHECKING:
    import optuna

KEEPS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A choice, what it covers and what it costs."""

    choice: Choice
    num_candidates: int
    coverage: Coverage
    tau_ratio: float  # ρ_τ, of its simulated τ to the full head's
    seconds: float  # of one draft step's head
    speed: float  # ρ, tokens per second in relation to the full head's


def predicted_speed(tau_ratio: float, nu: float, kappa: float) -> float:
    """``ρ = ρ_τ (1 + κ) / (1 + ν κ)``, tokens per second in relation to the full head's.

    A round with the full head takes ``rest (1 + κ)``, one with another head ``rest (1 + ν κ)``, and the tokens that a
    round gives are in the relation ``ρ_τ``.
    """
    return tau_ratio * (1 + kappa) / (1 + nu * kappa)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What heads cost on a device.

    Args:
        full: seconds of the full head for one draft step.
        kappa: κ, all full draft heads of a round in relation to the rest of it: target, its own logits, draft layers.
        of_choice: seconds of a choice for one draft step; ν is that divided by ``full``.
    """

    full: float
    kappa: float
    of_choice: Callable[[Choice], float]

    def speed(self, tau_ratio: float, seconds: float) -> float:
        return predicted_speed(tau_ratio, seconds / self.full, self.kappa)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices that are searched: any combination, or those of a list alone."""

    ranks: Sequence[int] = ()
    quantizations: Sequence[str | None] = PRECISIONS
    static_sizes: Sequence[int] = ()
    listed: Sequence[Choice] = ()

    def suggest(self, trial: optuna.Trial) -> Choice:
        if self.static_sizes and trial.suggest_categorical("head", ["speculative", "static"]) == "static":
            return StaticChoice(size=self.static_sizes[trial.suggest_int("size", 0, len(self.static_sizes) - 1)])
        return SpeculativeChoice(
            rank=self.ranks[trial.suggest_int("rank", 0, len(self.ranks) - 1)],
            tile=TILES[trial.suggest_int("tile", 0, len(TILES) - 1)],
            keep=KEEPS[trial.suggest_int("keep", 0, len(KEEPS) - 1)],
            quantization=self.quantizations[trial.suggest_int("quantization", 0, len(self.quantizations) - 1)],
        )


def search(
    space: Space, judge: Judge, costs: Costs, *, min_tau_ratio: float, num_trials: int, seed: int = 0
) -> list[Outcome]:
    """Everything that was tried, each once, in the order of the search; what is listed is tried as it stands."""
    if space.listed:
        return [judged(choice, judge, costs) for choice in space.listed]
    import optuna  # of the extra `tune`

    outcomes: dict[Choice, Outcome] = {}

    def objective(trial: optuna.Trial) -> float:
        choice = space.suggest(trial)
        if choice not in outcomes:
            outcomes[choice] = judged(choice, judge, costs)
        trial.set_constraint("tau_ratio", min_tau_ratio - outcomes[choice].tau_ratio)
        return outcomes[choice].speed

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=num_trials, show_progress_bar=True)
    return list(outcomes.values())


def judged(choice: Choice, judge: Judge, costs: Costs) -> Outcome:
    found, seconds = judge(choice), costs.of_choice(choice)
    ratio = found.simulated_tau / judge.full_tau
    size = choice.size if isinstance(choice, StaticChoice) else choice.selection(judge.vocab_size).num_candidates
    return Outcome(choice=choice, num_candidates=size, coverage=found, tau_ratio=ratio, seconds=seconds,
                   speed=costs.speed(ratio, seconds))


def best_of(outcomes: Sequence[Outcome], min_tau_ratio: float) -> Outcome | None:
    """The fastest that loses no more τ than is allowed; None if all do."""
    allowed = [outcome for outcome in outcomes if outcome.tau_ratio >= min_tau_ratio]
    return max(allowed, key=lambda outcome: outcome.speed, default=None)


def pareto_front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that no other beats in both seconds and τ, the fastest first."""
    front: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda outcome: (outcome.seconds, -outcome.tau_ratio)):
        if not front or outcome.tau_ratio > front[-1].tau_ratio:
            front.append(outcome)
    return front
