"""A GRPO step against TRL's `GRPOTrainer`: the same model, samples and tokens, in one run.

    python -m tests.benchmarks.bench_grpo [--rounds 3] [--cpu]          # needs TRL 1.16 or later in the environment

A step begins where the rollouts have ended and ends with new weights: advantages, rows, forward, backward, optimiser. Both get
recorded rollouts, so that neither's sampling is in it (`bench_engine` measures that). Steps of both alternate, and the
median of each counts; the first is left out. TRL gets its best case: one batch, no checkpointing, no second look at the
log-probabilities, a conversation as one row with the tool's tokens masked.

`multi`: a task with a system prompt of 2,000 tokens, four rollouts, conversations of twelve turns. `single`: short prompts, eight
answers each. `cosine`: between the first updates of the weights, which shows that both did the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from agentlightning.schema import Completion, Group, Trajectory, Transition, decode, encode, floats, ids
from agentlightning.trajectory import Ledger
from agentlightning_algorithms.credit import assign
from agentlightning_algorithms.policy.base import Loss, PolicySettings, Update
from agentlightning_algorithms.policy.torch_options import parse_options
from agentlightning_algorithms.policy.torch_weights import Weights
from agentlightning_algorithms.presets import PRESETS
from agentlightning_algorithms.rows import rows_of
from tests.benchmarks._bench import report
from tests.fakes.tiny import save_tiny

RATE = 1e-4
CLOCKS: list[Callable[[], float]] = [time.perf_counter]
"""The last one counts."""
MODEL = {"hidden": 128, "layers": 4, "context": 4096}


@dataclass(frozen=True)
class Work:
    tasks: int
    rollouts: int
    system: int
    """Tokens that all rollouts of a task begin with."""
    turns: int
    answer: int
    tool: int
    """Tokens between two answers."""


WORK = {"multi": Work(1, 4, 2000, 12, 60, 40), "single": Work(8, 8, 60, 1, 60, 0)}


@dataclass
class Recorded:
    """One rollout: a prompt, then answers and what tools said, with a mask of what was sampled."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0


def recorded(work: Work, seed: int = 0) -> list[list[Recorded]]:
    """Rollouts of each task. Log-probabilities are added by `remember`."""
    rng = np.random.default_rng(seed)
    tasks = []
    for _ in range(work.tasks):
        prompt = rng.integers(10, 390, work.system).tolist()
        group = [Recorded(prompt, reward=float(reward)) for reward in rng.permutation(work.rollouts) % 2]
        for one in group:
            for turn in range(work.turns):
                said = rng.integers(10, 390, work.answer + (work.tool if turn < work.turns - 1 else 0)).tolist()
                one.tokens += said
                one.mask += [1] * work.answer + [0] * (len(said) - work.answer)
        tasks.append(group)
    return tasks


def groups_of(tasks: list[list[Recorded]]) -> list[Group]:
    """What the loop hands over: each answer a call, whose prompt is all that came before."""
    groups = []
    for number, task in enumerate(tasks):
        members = []
        for place, one in enumerate(task):
            calls, edges = [], np.flatnonzero(np.diff([0, *one.mask, 0]))
            for start, end in edges.reshape(-1, 2).tolist():
                calls.append(_call([*one.prompt, *one.tokens[:start]], one.tokens[start:end], one.logprobs[start:end]))
            members.append(Trajectory(f"r{number}-{place}", "a", "writer", one.reward, calls))
        groups.append(Group((f"g{number}", "writer"), members))
    return groups


def _call(prompt: list[int], said: list[int], logprobs: list[float]) -> Transition:
    logps = floats(logprobs or [0.0] * len(said))
    done = Completion("c", "a", "writer", None, "m", "policy", 0, ids(prompt), ids(said), logps, "stop", {}, {})
    return Transition(done, "writer", 0.0)


class Ours:
    """The worker's side of the torch back end, in this process; an update travels as it does between two."""

    def __init__(self, folder: Path) -> None:
        settings = PolicySettings(str(folder), ("writer",), learning_rate=RATE)
        self.weights = Weights(settings, parse_options(settings), folder)

    def remember(self, tasks: list[list[Recorded]]) -> None:
        """Gives the answers the log-probabilities that an engine with these weights would have reported."""
        groups = groups_of(tasks)
        assign(groups, Ledger(), PRESETS["trl"].advantage)
        rows = rows_of(groups)
        every = [one for task in tasks for one in task]
        for one, row, values in zip(every, rows, self.weights.logprobs(rows), strict=True):
            assert row.ids.tolist() == one.prompt + one.tokens
            one.logprobs = values[len(one.prompt) :].tolist()

    def step(self, groups: list[Group]) -> dict[str, float]:
        taught = assign(groups, Ledger(), PRESETS["trl"].advantage)
        update = Update(rows_of(taught), loss=Loss())
        return self.weights.update(decode(encode(update), Update))

    def values(self) -> Any:
        return flat(self.weights.parameters("writer"))


def flat(parameters: dict[str, Any]) -> Any:
    """All values in the order of their names."""
    import torch

    return torch.cat([parameters[name].detach().float().flatten() for name in sorted(parameters)])


def theirs(folder: Path, tasks: list[list[Recorded]], out: Path, steps: int, beside: Callable[[], None]) -> Any:
    """Trains with TRL; returns the seconds of each step, and its weights before and after the first. `beside` runs between."""
    import datasets
    import transformers
    import trl

    seconds: list[float] = []
    weights: list[Any] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            if not weights:
                weights.append(flat(dict(model.named_parameters())))
            self.began = CLOCKS[-1]()

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seconds.append(CLOCKS[-1]() - self.began)
            if len(weights) == 1:
                weights.append(flat(dict(model.named_parameters())))
            beside()

    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, worth, **_: worth,
        args=trl.GRPOConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=len(tasks) * len(tasks[0]),
            num_generations=len(tasks[0]),
            max_completion_length=max(len(one.tokens) for task in tasks for one in task),
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            logging_steps=10_000,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [str(n) for n in range(len(tasks))]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        rollout_func=lambda prompts, _: replay(tasks, prompts),
        callbacks=[Watch()],
    )
    trainer.train()
    return seconds, weights


def replay(tasks: list[list[Recorded]], prompts: list[str]) -> dict[str, Any]:
    """The recorded rollouts as TRL's `rollout_func` gives them; a prompt is the number of its task."""
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        chosen.append(tasks[int(prompt)][seen.get(prompt, 0)])
        seen[prompt] = seen.get(prompt, 0) + 1
    return {
        "prompt_ids": [one.prompt for one in chosen],
        "completion_ids": [one.tokens for one in chosen],
        "logprobs": [one.logprobs for one in chosen],
        "env_mask": [one.mask for one in chosen],
        "worth": [one.reward for one in chosen],
    }


@dataclass
class Measured:
    ours: float
    theirs: float
    cosine: float
    tokens: int


def measure(work: Work, rounds: int) -> Measured:
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tiny(Path(scratch, "model"), **MODEL)
        mine, tasks = Ours(folder), recorded(work)
        mine.remember(tasks)
        seconds: list[float] = []
        moved = [mine.values()]

        def step() -> None:
            groups = groups_of(tasks)  # the loop has read them by then
            began = CLOCKS[-1]()
            mine.step(groups)
            seconds.append(CLOCKS[-1]() - began)
            if len(moved) == 1:
                moved.append(mine.values())

        peer, weights = theirs(folder, tasks, Path(scratch, "trl"), rounds + 1, step)
    change, other = moved[1] - moved[0], weights[1] - weights[0]
    cosine = float(torch.nn.functional.cosine_similarity(change, other, dim=0))
    tokens = sum(len(one.prompt) + len(one.tokens) for task in tasks for one in task)
    return Measured(median(seconds[1:]), median(peer[1:]), cosine, tokens)


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds: on a machine that is busy with other things")
    options = parser.parse_args()
    if options.cpu:
        CLOCKS.append(time.process_time)
    warnings.simplefilter("ignore")
    found = {name: measure(work, options.rounds) for name, work in WORK.items()}
    metrics = {f"speedup_trl_{name}": one.theirs / one.ours for name, one in found.items()}
    metrics |= {f"seconds_{name}": one.ours for name, one in found.items()}
    metrics |= {f"cosine_{name}": one.cosine for name, one in found.items()}
    rows: list[tuple[object, ...]] = [("step", "tokens in rows", "ours, s", "TRL, s", "speedup", "cosine")]
    rows += [(name, one.tokens, one.ours, one.theirs, one.theirs / one.ours, one.cosine) for name, one in found.items()]
    report("grpo", {key: round(value, 3) for key, value in metrics.items()}, rows)


if __name__ == "__main__":
    main()
