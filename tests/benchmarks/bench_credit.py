"""How well each way of giving credit tells which decision mattered, where the truth is known.

    python -m tests.benchmarks.bench_credit [--plot credit.png]

Mean Pearson correlation of the advantages with the exact ones, over problems of three agents, at equal numbers of rollouts;
then the updates that tabular policies need to come nine tenths of the way to the best return, each credit at the step
size that suits it. `broadcast` is what other trainers do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import Credit
from tests.benchmarks._bench import report
from tests.benchmarks.credit_problems import CHOICES, Problem, Sample, credited, problem, sample

ROLLOUTS = (16, 64, 192, 768)
PROBLEMS = 40
CENTRED = Advantage("loo", "none")
METHODS: dict[str, tuple[Any, bool]] = {
    "broadcast": ("broadcast", False),
    "per_agent": ("per_agent", False),
    "turn": ("turn", False),
    "gigpo": ("gigpo", False),
    "gae": (Credit("gae", lam=0.5), False),
    "tree": ("tree", False),
    "tree_unshrunk": (Credit("tree", prior=0.0), False),
    "tree_free_text": ("tree", True),
    "tree_free_text_exact": (Credit("tree", anchors=("exact",)), True),
}
"""Name -> credit, and whether agents speak free text."""
SEEDS, TUNING, TASKS, GROUP, MOST = 10, 8, 8, 8, 150
RATES = (8.0, 16.0, 32.0, 64.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="where to draw the curves")
    options = parser.parse_args(arguments)
    fidelity = {name: curve(*METHODS[name]) for name in METHODS}
    hard = {name: curve(*METHODS[name], structured=False) for name in ("broadcast", "gigpo", "tree")}
    updates = {name: updates_needed(name) for name in ("broadcast", "gigpo", "tree")}
    metrics = {f"{name}_192": values[192] for name, values in fidelity.items()}
    metrics |= {f"{name}_192_unstructured": values[192] for name, values in hard.items()}
    metrics |= {f"updates_{name}": median(values) for name, values in updates.items()}
    metrics |= {f"updates_mean_{name}": fmean(values) for name, values in updates.items()}
    metrics["updates_saved"] = metrics["updates_broadcast"] / metrics["updates_tree"]
    rows: list[tuple[object, ...]] = [("credit", *(f"{n} rollouts" for n in ROLLOUTS), "updates of ten seeds")]
    rows += [(name, *values.values(), sorted(updates.get(name, ())) or "") for name, values in fidelity.items()]
    rows += [(f"{name}, unstructured", *values.values(), "") for name, values in hard.items()]
    if options.plot:
        plot(options.plot, fidelity)
    report("credit", {key: round(value, 3) for key, value in metrics.items()}, rows)


def curve(credit: Any, free: bool, structured: bool = True) -> dict[int, float]:
    """Rollouts -> mean correlation with the exact advantages."""
    return {count: fidelity(credit, count, free, structured) for count in ROLLOUTS}


def fidelity(credit: Any, count: int, free: bool = False, structured: bool = True, problems: int = PROBLEMS) -> float:
    rng, words = np.random.default_rng(1), np.random.default_rng(2)
    found = []
    for _ in range(problems):
        one = problem(rng, structured)
        rollouts = sample(rng, one, count)
        given = credited(rollouts, credit, CENTRED, words if free else None)
        exact = np.array([a[s, c] for a, s, c in zip(one.advantages(), rollouts.states, rollouts.choices, strict=True)])
        if given.std() > 0:
            found.append(np.corrcoef(given.ravel(), exact.ravel())[0, 1])
    return float(np.mean(found))


def updates_needed(name: str) -> list[int]:
    """For each seed, at the step size that is best for the method on other seeds."""
    credit = METHODS[name][0]
    rate = min(RATES, key=lambda one: fmean(learn(credit, 1_000 + seed, one) for seed in range(TUNING)))
    return [learn(credit, seed, rate) for seed in range(SEEDS)]


def learn(credit: Any, seed: int, rate: float) -> int:
    """Updates of `GROUP` rollouts of each of `TASKS` tasks until nine tenths of the way to the best mean return are gone."""
    rng = np.random.default_rng(seed)
    tasks = [problem(rng) for _ in range(TASKS)]
    first, best = fmean(one.value() for one in tasks), fmean(float(one.chance.max()) for one in tasks)
    for update in range(1, MOST + 1):
        for one in tasks:
            push(one, sample(rng, one, GROUP), credit, rate)
        if fmean(one.value() for one in tasks) >= first + 0.9 * (best - first):
            return update
    return MOST


def push(one: Problem, rollouts: Sample, credit: Any, rate: float) -> None:
    """One step up the policy gradient."""
    given = credited(rollouts, credit, Advantage(std="none"))
    for policy, logits, states, choices, values in zip(
        one.policies(), one.logits, rollouts.states, rollouts.choices, given, strict=True
    ):
        step = values[:, None] * (np.eye(CHOICES)[choices] - policy[states]) / GROUP
        np.add.at(logits, states, rate * step)


def plot(path: Path, fidelity: Mapping[str, Mapping[int, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, values in fidelity.items():
        axes.plot(list(values), list(values.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rollouts of the task")
    axes.set_ylabel("correlation with the exact advantage")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
