"""Trains the solver of an AutoGen team and leaves its critic alone: `python -m examples.calculator`.

Makes its own small world and its own tiny model, so that it needs no download, no key and no GPU. `--data` and
`--model` put real ones in their place. Run the same command again after an interruption: it goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import agentlightning as agl

from .. import _shared
from .logs import WORDS, make_logs
from .problems import load, make_world
from .team import answer_of, build_team, client

RECIPE: dict[str, Any] = {
    "lora": 16,
    "steps": 50,
    "tasks_per_step": 8,
    "rollouts_per_task": 8,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
"""For the tiny model in its own world."""
DATA = "folder with train.jsonl and dev.jsonl, as GSM8K's"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit status is 0 when it came to its end."""
    started = time.monotonic()
    options = _shared.parser("calculator", __doc__, agents=["solver"], data=DATA, warm=600).parse_args(arguments)
    out = _shared.folder_of("calculator", options)
    world = make_world(options.seed)
    train, val = world.train, world.heldout[: options.val or 150]
    if options.data:
        train, val = load(options.data, options.val or 8, options.seed)
    logs = lambda count: make_logs(world, count, options.seed)
    model = options.model or _shared.warm_started(
        out / "model", logs, seed=options.seed, steps=options.warm, words=WORDS
    )
    result, *errors = _shared.learn(options, out, program, model=model, train=train, val=val, recipe=RECIPE)
    _shared.report(result, _shared.summarise(result, *errors, started=started), options.json)
    return 0


def program(base_url: str) -> Callable[..., Any]:
    """The user's side: a team for each problem, and one line more."""
    # The policy answers by the name of the weights that answered, which AutoGen takes for another price list.
    warnings.filterwarnings("ignore", message="Resolved model mismatch")
    model = client(base_url, api_key="unused", model="policy")
    agl.install("autogen")

    @agl.rollout
    async def solve(task: Any, policy: Any) -> float:
        result = await build_team(model).run(task=task["question"])
        return float(answer_of(result) == task["answer"])

    return solve


if __name__ == "__main__":
    sys.exit(main())
