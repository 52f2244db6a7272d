"""What the examples share: knobs of the command line, the tiny model's warm start, the run, its figures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl

from .sql_agent import outside
from .sql_agent.tiny_model import BATCH, make_tiny_model

REAL_RECIPE: dict[str, Any] = {
    "lora": 16,
    "steps": 2,
    "tasks_per_step": 4,
    "rollouts_per_task": 4,
    "learning_rate": 1e-4,
}
"""For a real model on real data, on a laptop: shows that it runs. `--steps` makes it longer."""

KNOBS: dict[str, type] = {
    "steps": int,
    "tasks_per_step": int,
    "rollouts_per_task": int,
    "learning_rate": float,
    "lora": int,
}


def parser(
    name: str, description: str | None, *, agents: Sequence[str], data: str, warm: int
) -> argparse.ArgumentParser:
    """The command line of an example. `data`: what `--data` is; `warm`: steps of the tiny model's warm start."""
    made = argparse.ArgumentParser(prog=f"python -m examples.{name}", description=description)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="write the summary to this file")
    made.add_argument("--out", type=Path, help="folder of the store, the model and the results")
    made.add_argument("--agents", type=lambda text: text.split(","), default=list(agents))
    made.add_argument("--data", type=Path, help=data)
    made.add_argument("--model", type=Path, help="folder of a Hugging Face model, or a .gguf file")
    made.add_argument("--val", type=int, help="held-out tasks")
    made.add_argument("--warm", type=int, default=warm, help="steps of the tiny model's warm start")
    for knob, kind in KNOBS.items():
        made.add_argument(f"--{knob.replace('_', '-')}", type=kind)
    return made


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The knobs that the command line sets."""
    return {name: getattr(options, name) for name in KNOBS if getattr(options, name) is not None}


def folder_of(name: str, options: argparse.Namespace) -> Path:
    """Where the run lies."""
    out: Path = options.out or Path("runs") / f"{name}-{options.seed}"
    say(f"working in {out}")
    return out


def warm_started(
    folder: Path, make_logs: Callable[[int], Sequence[Any]], *, seed: int, steps: int, words: Sequence[str] = ()
) -> Path:
    """The tiny model, made unless `folder` is there already, from as many logs as `steps` batches take."""
    if not folder.exists():
        say(f"making a tiny model from the logs of a mediocre agent, {steps} steps")

    def progress(step: int, loss: float) -> None:
        if step % 100 == 0 or step == steps - 1:
            say(f"warm start {step}/{steps} · loss {loss:.3f}")

    return make_tiny_model(folder, list(make_logs(steps * BATCH)), seed=seed, progress=progress, words=words)


def learn(
    options: argparse.Namespace,
    out: Path,
    program: Callable[[str], Callable[..., Any]],
    *,
    model: Path | str,
    train: Sequence[Mapping[str, Any]],
    val: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
) -> tuple[Any, float | None, float | None]:
    """Trains `program(base_url)` by GRPO. The result, and the errors of `outside.py`: of the start, of untrained agents."""
    knobs = {**(REAL_RECIPE if options.data or options.model else recipe), **given(options)}
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
    return result, *(outside.largest_error(str(model), calls) for calls in (first, untrained))


def summarise(result: Any, first_error: float | None, frozen_error: float | None, *, started: float) -> dict[str, Any]:
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
        "minutes": round((time.monotonic() - started) / 60, 2),
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
