"""The formulas of the papers in plain Python, one case at a time: what the golden tables were worked out with.

    python -m tests.golden.formulas        # writes the tables again

Nothing of ours is imported, and no array library: a mistake would have to be made twice, in two ways.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Case = dict[str, Any]

REWARDS: list[list[float]] = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0.5, 0.25, 0], [-2, 3, 0.1], [0, 0, 0, 0, 0, 0, 0, 1]]
BATCH: list[list[float]] = [[1, 0, 0, 0], [1, 1, 0, 0], [0.5, 0.25, 0]]
LENGTHS: list[list[float]] = [[10, 20, 30, 40], [5, 5, 1, 1], [7, 2, 2]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def without(values: Sequence[float], i: int) -> list[float]:
    return [value for j, value in enumerate(values) if j != i]


# ---- estimators: returns of one group -> advantages


def grpo(r: Sequence[float], epsilon: float = 1e-6) -> list[float]:
    return [(x - mean(r)) / (statistics.stdev(r) + epsilon) for x in r]


def grpo_population(r: Sequence[float]) -> list[float]:
    return [(x - mean(r)) / (statistics.pstdev(r) + 1e-6) for x in r]


def dr_grpo(r: Sequence[float]) -> list[float]:
    return [x - mean(r) for x in r]


def rloo(r: Sequence[float]) -> list[float]:
    return [len(r) / (len(r) - 1) * (x - mean(r)) for x in r]


def loo(r: Sequence[float]) -> list[float]:
    """Mean and deviation of the others; a deviation of 0 does not divide."""
    found = []
    for i, x in enumerate(r):
        others = without(r, i)
        spread = statistics.stdev(others) if len(others) > 1 else 0.0
        found.append((x - mean(others)) / (spread or 1.0))
    return found


def maxrl(r: Sequence[float]) -> list[float]:
    return [(x - mean(r)) / mean(r) for x in r]


def opo(r: Sequence[float], lengths: Sequence[float]) -> list[float]:
    baseline = sum(n * x for n, x in zip(lengths, r, strict=True)) / sum(lengths)
    return [x - baseline for x in r]


def reinforce_pp(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    every = [x for group in groups for x in group]
    return [[(x - mean(every)) / (statistics.stdev(every) + 1e-6) for x in group] for group in groups]


def reinforce_pp_baseline(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    centred = [dr_grpo(group) for group in groups]
    spread = statistics.stdev([x for group in centred for x in group])
    return [[x / (spread + 1e-6) for x in group] for group in centred]


ESTIMATORS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "loo": loo,
    "maxrl": maxrl,
}
PRESETS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "verl": grpo,
    "skyrl": grpo,
    "slime": grpo,
    "dapo": grpo,
    "openrlhf": lambda r: grpo(r, 1e-9),
    "trl": lambda r: grpo(r, 1e-4),
    "rllm": grpo_population,
    "art": grpo_population,
    "nemo_rl": loo,
    "prime_rl": dr_grpo,
    "tinker": dr_grpo,
    "dr_grpo": dr_grpo,
}


def advantage_cases() -> Iterator[Case]:
    for name, estimator in ESTIMATORS.items():
        for r in REWARDS:
            yield {"estimator": name, "returns": [r], "expected": [estimator(r)]}
    for name, preset in PRESETS.items():
        for r in REWARDS[:4]:
            yield {"preset": name, "returns": [r], "expected": [preset(r)]}
    yield {"estimator": "reinforce++", "returns": BATCH, "expected": reinforce_pp(BATCH)}
    yield {"estimator": "reinforce++_baseline", "returns": BATCH, "expected": reinforce_pp_baseline(BATCH)}
    found = [opo(r, n) for r, n in zip(BATCH, LENGTHS, strict=True)]
    yield {"estimator": "opo", "returns": BATCH, "lengths": LENGTHS, "expected": found}


# ---- losses of one token: ratio r to the policy that is compared with, advantage a -> loss


def clip(r: float, a: float, low: float, high: float) -> float:
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def dual(r: float, a: float, low: float, high: float, c: float) -> float:
    return clip(r, a, low, high) if a >= 0 else min(clip(r, a, low, high), -c * a)


def sapo(r: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (r - 1))) * a


def cispo(logp: float, r: float, a: float, low: float, high: float) -> float:
    return -min(max(r, 1 - low), 1 + high) * a * logp


def dppo(logp: float, old: float, a: float, low: float, high: float) -> float:
    moved = math.exp(logp) - math.exp(old)
    gone = moved > high if a > 0 else moved < -low
    return 0.0 if gone else -math.exp(logp - old) * a


TOKENS = [
    (-1.0, -1.0, 1.0),
    (-0.5, -1.0, 1.0),
    (-0.5, -1.0, -1.0),
    (-1.5, -1.0, 2.0),
    (-1.5, -1.0, -0.5),
    (-0.1, -2.0, -1),
]
"""log p now, log p then, advantage."""


def loss_cases() -> Iterator[Case]:
    for logp, old, a in TOKENS:
        r, at = math.exp(logp - old), {"logp": [logp], "old": [old], "advantages": [a]}
        yield {"loss": {"kind": "clip"}, **at, "expected": clip(r, a, 0.2, 0.2)}
        yield {"loss": {"kind": "clip", "clip": [0.2, 0.28]}, **at, "expected": clip(r, a, 0.2, 0.28)}
        yield {"loss": {"kind": "clip", "dual": 3.0}, **at, "expected": dual(r, a, 0.2, 0.2, 3.0)}
        yield {"loss": {"kind": "sapo"}, **at, "expected": sapo(r, a)}
        yield {"loss": {"kind": "cispo", "clip": [1.0, 4.0]}, **at, "expected": cispo(logp, r, a, 1.0, 4.0)}
        yield {"loss": {"kind": "cispo", "clip": [10.0, 0.2]}, **at, "expected": cispo(logp, r, a, 10.0, 0.2)}
        yield {"loss": {"kind": "dppo"}, **at, "expected": dppo(logp, old, a, 0.2, 0.2)}
        yield {
            "loss": {"kind": "dppo", "trust": 1e-3},
            **at,
            "expected": dppo(logp, old, a, 0.2, 0.2) + 1e-3 * (logp - old) ** 2,
        }
        yield {"loss": {"kind": "importance"}, **at, "expected": -r * a}
        yield {"loss": {"kind": "likelihood"}, **at, "expected": -a * logp}
        for form, d in (("k1", logp - old), ("k2", (logp - old) ** 2 / 2), ("k3", 1 / r - 1 + math.log(r))):
            loss = {"kind": "clip", "kl": 0.1, "kl_form": form}
            yield {"loss": loss, **at, "ref": [old], "expected": clip(r, a, 0.2, 0.2) + 0.1 * d}
    yield from gspo_cases()


def gspo_cases() -> Iterator[Case]:
    """Weights 1 / length: the mean over a sequence's tokens of its own loss."""
    for shift in (0.0, 2e-4, 1e-3, -1e-3):
        for a in (1.0, -1.0):
            logp = [-1.0 + shift, -0.5 + 3 * shift, -2.0 - shift]
            old = [-1.0, -0.5, -2.0]
            s = math.exp(mean([x - y for x, y in zip(logp, old, strict=True)]))
            loss = {"kind": "gspo", "clip": [3e-4, 4e-4]}
            at = {"logp": logp, "old": old, "advantages": [a] * 3, "weights": [1 / 3] * 3}
            yield {"loss": loss, **at, "expected": clip(s, a, 3e-4, 4e-4)}


# ---- corrections: log-ratios learner / engine of two sequences -> factors

LOG_W = [[0.0, 0.1, -0.1], [1.0, -2.0], [0.9, 0.8]]


def correction_cases() -> Iterator[Case]:
    for name, low, high in (("tis", 0, 2), ("icepop", 0.5, 5), ("decoupled", 0, math.inf), ("icepop", 0.9, 1.2)):
        rule = (lambda w, low=low, high=high: w if low <= w <= high else 0.0) if name == "icepop" else None
        expected = [[rule(math.exp(x)) if rule else min(math.exp(x), high) for x in row] for row in LOG_W]
        yield correction(name, low, high, expected)
    for high in (3.0, 1.2):
        products = [math.exp(sum(row)) for row in LOG_W]
        yield correction(
            "sequence_mask", 0, high, [[p if p <= high else 0.0] * len(r) for p, r in zip(products, LOG_W, strict=True)]
        )
        yield correction(
            "sequence_tis", 0, high, [[min(p, high)] * len(r) for p, r in zip(products, LOG_W, strict=True)]
        )
    for low, high in ((0.5, 2.0), (0.9, 1.1)):
        means = [math.exp(mean(row)) for row in LOG_W]
        expected = [[1.0 if low <= m <= high else 0.0] * len(r) for m, r in zip(means, LOG_W, strict=True)]
        yield correction("geometric_mask", low, high, expected)


def correction(name: str, low: float, high: float, expected: list[list[float]]) -> Case:
    bounds = None if high == math.inf else [low, high]
    return {"correction": name, "bounds": bounds, "log_w": LOG_W, "expected": expected}


# ---- aggregation: lengths of the answers of each rollout -> the weight of each of their tokens

ANSWERS = [[3], [1, 2, 3], [4, 4]]


def aggregation_cases() -> Iterator[Case]:
    tokens, sequences, rollouts = sum(map(sum, ANSWERS)), sum(map(len, ANSWERS)), len(ANSWERS)
    rules: dict[str, Callable[[int, int], float]] = {
        "token": lambda n, of: 1 / tokens,
        "sequence": lambda n, of: 1 / sequences,
        "sequence-token-mean": lambda n, of: 1 / sequences / n,
        "constant": lambda n, of: 1 / sequences / 100,
        "sum": lambda n, of: 1.0,
        "rollout": lambda n, of: 1 / rollouts / of,
    }
    for name, rule in rules.items():
        for i, answers in enumerate(ANSWERS):
            yield {
                "aggregation": name,
                "rollout": i,
                "answers": ANSWERS,
                "expected": [rule(n, sum(answers)) for n in answers],
            }


def overlong_cases() -> Iterator[Case]:
    for length, expected in ((0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (250, -1.0)):
        yield {"overlong": [length, 100, 20], "expected": expected}


TABLES: dict[str, Callable[[], Iterator[Case]]] = {
    "advantages": advantage_cases,
    "losses": loss_cases,
    "corrections": correction_cases,
    "aggregation": aggregation_cases,
    "overlong": overlong_cases,
}


def main() -> None:
    for name, cases in TABLES.items():
        lines = [json.dumps(case) for case in cases()]
        (HERE / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
