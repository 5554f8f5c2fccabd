"""How many tokens a static draft vocabulary should keep: coverage against the draft's cost.

After "Balancing Coverage and Draft Latency in Vocabulary Trimming for Faster Speculative Decoding": the size ``k``
maximises ``U(k) = α C(k) + (1 − α) R(k)`` where every domain keeps its least coverage. ``C(k)`` is the share of all
occurrences that the ``k`` kept tokens make up, ``R(k) = 1 − F(k) / F(V)`` what they save of the draft's cost ``F``.

There is one unknown, so trying every size of the grid (``exact``) is optimal and takes no time. ``tpe`` is the paper's
search, Optuna's TPE (Bergstra et al. 2011), to be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specvocab_model.config import ConfigError

EQUAL_TOTAL = 10**12  # occurrences that every domain is scaled to where all count the same


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimChoice:
    """A size and what it means."""

    size: int
    utility: float
    coverage: float  # C(k), of all domains pooled
    coverage_of: dict[str, float]  # by domain
    cost_ratio: float  # F(k) / F(V)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimProblem:
    """Everything that depends on the size, at each of ``G`` sizes; ``M`` domains share one vocabulary."""

    domains: tuple[str, ...]
    sizes: np.ndarray  # int64 [G], ascending; the last is V
    coverage: np.ndarray  # [M, G] of each domain
    pooled: np.ndarray  # [G] of all
    cost_ratio: np.ndarray  # [G]
    min_coverage: np.ndarray  # [M]
    alpha: float

    @property
    def utility(self) -> np.ndarray:
        """U(k), [G]."""
        return self.alpha * self.pooled + (1 - self.alpha) * (1 - self.cost_ratio)

    @property
    def shortfall(self) -> np.ndarray:
        """[M, G]; above 0 where a domain's coverage is below its least one."""
        return self.min_coverage[:, None] - self.coverage

    def choice(self, at: int) -> TrimChoice:
        """The grid's size number ``at``."""
        return TrimChoice(
            size=int(self.sizes[at]),
            utility=float(self.utility[at]),
            coverage=float(self.pooled[at]),
            coverage_of={name: float(self.coverage[m, at]) for m, name in enumerate(self.domains)},
            cost_ratio=float(self.cost_ratio[at]),
        )


def grid(vocab_size: int, *, first: int, step: int) -> np.ndarray:
    """``first``, every multiple of ``step`` above it, and ``vocab_size``: int64 [G]."""
    multiples = np.arange((first // step + 1) * step, vocab_size, step)
    return np.unique(np.concatenate([[min(first, vocab_size)], multiples, [vocab_size]])).astype(np.int64)


def pool(counts: Mapping[str, np.ndarray], *, equal_domains: bool) -> np.ndarray:
    """Occurrences of all domains together, int64 [V].

    Args:
        counts: domain -> int64 [V].
        equal_domains: scale all domains to the same total, so that a large one does not decide alone.

    Raises:
        ConfigError: there is no domain, or one is empty.
    """
    if empty := [name for name, of_domain in counts.items() if not of_domain.sum()]:
        raise ConfigError(f"no token was counted in {', '.join(empty)}; give data with supervised tokens, or leave it "
                          "out")
    if not counts:
        raise ConfigError("no data, so no token is frequent; give a data folder or a corpus")
    if not equal_domains:
        return np.sum(list(counts.values()), axis=0)
    shares = [of_domain / of_domain.sum() for of_domain in counts.values()]
    return np.rint(EQUAL_TOTAL * np.sum(shares, axis=0)).astype(np.int64)


def build_problem(
    counts: Mapping[str, np.ndarray],
    cost: Callable[[np.ndarray], np.ndarray],
    *,
    always_keep: Iterable[int],
    min_coverage: Mapping[str, float],
    alpha: float = 0.5,
    min_size: int = 50,
    step: int = 64,
    equal_domains: bool = False,
) -> TrimProblem:
    """Coverage and cost of every size.

    Args:
        counts: domain -> int64 [V].
        cost: sizes [G] -> F of each, in any unit.
        always_keep: ids that are kept first, whatever their frequency (``vocab.special_ids``); the smallest size has
            room for all of them.
        min_coverage: domain -> c_min; 0 for a domain that is not there.

    Raises:
        ConfigError: nothing was counted, or a least coverage is given for a domain that does not exist.
    """
    if unknown := sorted(min_coverage.keys() - counts.keys()):
        raise ConfigError(f"a least coverage is given for {', '.join(unknown)}, but the domains are "
                          f"{', '.join(counts)}; name one of these")
    all_counts = pool(counts, equal_domains=equal_domains)
    order = keeping_order(all_counts, always_keep)
    sizes = grid(len(order), first=max(min_size, len(set(always_keep)), 1), step=step)
    costs = cost(sizes)
    return TrimProblem(
        domains=tuple(counts),
        sizes=sizes,
        coverage=np.stack([covered(of_domain, order, sizes) for of_domain in counts.values()]),
        pooled=covered(all_counts, order, sizes),
        cost_ratio=costs / costs[-1],
        min_coverage=np.array([min_coverage.get(name, 0.0) for name in counts]),
        alpha=alpha,
    )


def keeping_order(counts: np.ndarray, always_keep: Iterable[int]) -> np.ndarray:
    """All ids; the first ``k`` are what ``vocab.most_frequent`` keeps at size ``k``. int64 [V]."""
    special = np.array(sorted(set(always_keep)), dtype=np.int64)
    ranked = np.argsort(-counts, kind="stable")
    return np.concatenate([special, ranked[~np.isin(ranked, special)]])


def covered(counts: np.ndarray, order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Share of all occurrences that the first ids of ``order`` make up, at each of ``sizes``."""
    cumulative = counts[order].cumsum()
    return cumulative[sizes - 1] / cumulative[-1]


def exact(problem: TrimProblem) -> TrimChoice:
    """The best size of the grid; of equally good ones the smallest. The whole vocabulary covers everything, so that
    there always is one."""
    feasible = (problem.shortfall <= 0).all(0)
    return problem.choice(int(np.where(feasible, problem.utility, -np.inf).argmax()))


def tpe(problem: TrimProblem, *, num_trials: int, seed: int) -> TrimChoice | None:
    """The best that Optuna's TPE finds; None where no size that it tries keeps every domain's least coverage."""
    import optuna  # of the extra `tune`

    utility, shortfall = problem.utility, problem.shortfall

    def objective(trial: optuna.Trial) -> float:
        at = trial.suggest_int("size", 0, len(problem.sizes) - 1)
        for name, missing in zip(problem.domains, shortfall[:, at], strict=True):
            trial.set_constraint(name, float(missing))
        return float(utility[at])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=num_trials)
    tried = sorted({trial.params["size"] for trial in study.trials})
    feasible = [at for at in tried if (shortfall[:, at] <= 0).all()]
    return problem.choice(max(feasible, key=lambda at: utility[at])) if feasible else None


def pareto_front(problem: TrimProblem) -> list[TrimChoice]:
    """Sizes that no other beats in both pooled coverage and cost, the cheapest first.

    Cost and coverage grow with the size, so that this is nearly every size: up to the last token that occurs.
    """
    front: list[int] = []
    for at in np.lexsort((-problem.pooled, problem.cost_ratio)):
        if not front or problem.pooled[at] > problem.pooled[front[-1]]:
            front.append(int(at))
    return [problem.choice(at) for at in front]
