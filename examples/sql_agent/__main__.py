"""Trains two agents of a text-to-SQL graph and leaves the third alone: `python -m examples.sql_agent`.

Makes its own small world and its own tiny model, so that it needs no download, no key and no GPU. `--data` and
`--model` put real ones in their place. Run the same command again after an interruption: it goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import agentlightning as agl

from .. import _shared
from . import data
from .graph import build_graph
from .logs import make_logs
from .world import make_world, score

RECIPE: dict[str, Any] = {
    "lora": 16,
    "steps": 150,
    "tasks_per_step": 8,
    "rollouts_per_task": 8,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
"""For the tiny model in its own world."""
AGENTS = ["write_query", "rewrite_query"]
DATA = "folder with train.jsonl, dev.jsonl and databases/, as Spider's"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit status is 0 when it came to its end."""
    started = time.monotonic()
    options = _shared.parser("sql_agent", __doc__, agents=AGENTS, data=DATA, warm=800).parse_args(arguments)
    out = _shared.folder_of("sql_agent", options)
    world = None if options.data and options.model else make_world(out / "databases", options.seed)
    if options.data:
        train, val = data.load(options.data, options.val or 8, options.seed)
    elif world:
        train, val = world.train, world.heldout[: options.val or 200]
    model = options.model
    if world and not model:
        logs = lambda count: make_logs(world, count, options.seed)
        model = _shared.warm_started(out / "model", logs, seed=options.seed, steps=options.warm)
    result, *errors = _shared.learn(options, out, program, model=model, train=train, val=val, recipe=RECIPE)
    _shared.report(result, _shared.summarise(result, *errors, started=started), options.json)
    return 0


def program(base_url: str) -> Callable[..., float]:
    """The user's side: a graph that is built once, and one line more in its config."""
    graph = build_graph(base_url, api_key="unused", model="policy")
    config = {"callbacks": [agl.callback("langgraph")]}

    @agl.rollout
    def solve(task: Any, policy: Any) -> float:
        answer = graph.invoke({key: task[key] for key in ("question", "schema", "database")}, config=config)
        first = float(score(task, answer["queries"][0]))
        agl.emit_reward(first, target="agent:write_query", name="first_query")
        return float(score(task, answer["sql"]))

    return solve


if __name__ == "__main__":
    sys.exit(main())
