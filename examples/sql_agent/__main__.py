"""Trains two agents of a text-to-SQL graph and leaves the third alone: `python -m examples.sql_agent`.

Makes its own small world and its own tiny model, so that it needs no download, no key and no GPU. `--data` and
`--model` put real ones in their place. Run the same command again after an interruption: it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl

from . import data, outside
from .graph import build_graph
from .logs import make_logs
from .tiny_model import BATCH, make_tiny_model
from .world import World, make_world, score

RECIPE: dict[str, Any] = {
    "lora": 16,
    "steps": 150,
    "tasks_per_step": 8,
    "rollouts_per_task": 8,
    "learning_rate": 3e-3,
    "schedule": "linear",
}
"""For the tiny model in its own world."""
REAL_RECIPE: dict[str, Any] = {
    "lora": 16,
    "steps": 2,
    "tasks_per_step": 4,
    "rollouts_per_task": 4,
    "learning_rate": 1e-4,
}
"""For a real model on real data, on a laptop: shows that it runs. `--steps` makes it longer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; the exit status is 0 when it came to its end."""
    started = time.monotonic()
    options = parse(arguments)
    out = options.out or Path("runs") / f"sql_agent-{options.seed}"
    say(f"working in {out}")
    world = None if options.data and options.model else make_world(out / "databases", options.seed)
    if options.data:
        train, val = data.load(options.data, options.val or 8, options.seed)
    elif world:
        train, val = world.train, world.heldout[: options.val or 200]
    model = options.model or (world and warm_started(out / "model", world, options.seed, options.warm))
    knobs = {**(REAL_RECIPE if options.data or options.model else RECIPE), **given(options)}
    trainer = agl.Trainer(
        agl.algorithm("grpo", model=str(model), agents=options.agents, seed=options.seed, **knobs),
        store=f"sqlite:///{out / 'runs.db'}",
        folder=out,
        seed=options.seed,
    )
    result = trainer.fit(program(trainer.base_url), train=train, val=val)
    first = outside.calls_of(trainer.store, result.run_id, "before-sampled")
    untrained = outside.calls_of(trainer.store, result.run_id, "after-sampled", without=options.agents)
    trainer.close()
    errors = [outside.largest_error(str(model), calls) for calls in (first, untrained)]
    summary = summarise(result, *errors, seconds=time.monotonic() - started)
    report(result, summary, options.json)
    return 0


def warm_started(folder: Path, world: World, seed: int, steps: int) -> Path:
    """The tiny model, made unless `folder` is there already."""
    if not folder.exists():
        say(f"making a tiny model from the logs of a mediocre agent, {steps} steps")

    def progress(step: int, loss: float) -> None:
        if step % 100 == 0 or step == steps - 1:
            say(f"warm start {step}/{steps} · loss {loss:.3f}")

    made: Path = make_tiny_model(folder, make_logs(world, steps * BATCH, seed), seed=seed, progress=progress)
    return made


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.sql_agent", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--out", type=Path, help="folder of the store, the model and the results")
    parser.add_argument("--agents", type=lambda text: text.split(","), default=["write_query", "rewrite_query"])
    parser.add_argument("--data", type=Path, help="folder with train.jsonl, dev.jsonl and databases/, as Spider's")
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model, or a .gguf file")
    parser.add_argument("--val", type=int, help="held-out questions")
    parser.add_argument("--warm", type=int, default=800, help="steps of the tiny model's warm start")
    for name, kind in KNOBS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    return parser.parse_args(arguments)


KNOBS: dict[str, type] = {
    "steps": int,
    "tasks_per_step": int,
    "rollouts_per_task": int,
    "learning_rate": float,
    "lora": int,
}


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The knobs that the command line sets."""
    return {name: getattr(options, name) for name in KNOBS if getattr(options, name) is not None}


def summarise(result: Any, first_error: float | None, frozen_error: float | None, *, seconds: float) -> dict[str, Any]:
    """The figures of the run. `max_logprob_error` is over every call that was trained, and calls of the start."""
    errors = [step.metrics["logprob_error"] for step in result.steps if "logprob_error" in step.metrics]
    errors += [first_error] if first_error is not None else []
    figures: dict[str, Any] = {}
    for name in ("greedy", "sampled"):
        figures[f"{name}_before"], figures[f"{name}_after"] = result.before[name].mean, result.after[name].mean
    return {
        **figures,
        "calls_before": result.before["sampled"].mean_calls,
        "calls_after": result.after["sampled"].mean_calls,
        "minutes": round(seconds / 60, 2),
        "max_logprob_error": max(errors, default=None),
        "trained_agents": result.trained_agents,
        "frozen_unchanged": None if frozen_error is None else frozen_error <= outside.TOLERANCE,
    }


def report(result: Any, summary: dict[str, Any], path: Path | None) -> None:
    """The last step's ledger and the summary, for people and for `--json`."""
    if result.steps:
        say(f"ledger of the last step: {json.dumps(result.steps[-1].ledger)}")
    text = json.dumps(summary, indent=2)
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
