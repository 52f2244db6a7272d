"""What an algorithm works with: sample rollouts, publish what they read next, report what a step brought.

    def run(self, loop):
        policy = loop.serve(make_policy())
        for step in loop.steps(self.steps):
            episodes = loop.sample(loop.draw(8), n=8)
            ...
            loop.report({"loss": 0.1})

A step is finished when `report` returns: its checkpoint and its record are on disk. Everything in between can be killed
and is taken up again from the last finished step.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import pluggy

from agentlightning import doctor, plugins
from agentlightning.errors import ConfigError, NothingToTrain, PluginError, RolloutError
from agentlightning.evaluation import Evaluation, evaluation_of
from agentlightning.explain import notes
from agentlightning.schema import (
    Budget,
    Endpoint,
    Episode,
    Resource,
    Reward,
    Rollout,
    Run,
    Span,
    Step,
    now_ns,
)
from agentlightning.store.base import Store
from agentlightning.tasks import Task, draw
from agentlightning.trajectory import Batch, Ledger, collect
from agentlightning.trials import Trial, figures, planned, refuse_total_failure

logger = logging.getLogger(__name__)

PATIENCE = 5
"""Steps in a row that may give nothing to train before a run stops."""

EVALUATIONS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}}
"""What `val` tasks are run with, before the first step and after the last one."""


class Serving(Protocol):
    """The part of a policy that the loop handles; see `policy/base.py` of the algorithms for the whole."""

    version: int

    def start(self) -> Endpoint: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def close(self) -> None: ...


class Watcher(Protocol):
    """Who is told how far things are: the progress display."""

    def sampling(self, title: str, total: int) -> None: ...
    def finished(self, episodes: Sequence[Episode]) -> None: ...
    def step(self, step: Step, total: int) -> None: ...
    def evaluated(self, evaluation: Evaluation) -> None: ...


PolicyT = TypeVar("PolicyT", bound=Serving)


class Loop:
    """One run, as its algorithm sees it."""

    def __init__(
        self,
        store: Store,
        run: Run,
        folder: Path,
        *,
        train: Sequence[Task],
        val: Sequence[Task] = (),
        seed: int = 0,
        timeout_s: float | None = None,
        max_attempts: int = 2,
        budget: Budget | None = None,
        observers: pluggy.PluginManager | None = None,
        watcher: Watcher | None = None,
        strays: Callable[[], int] | None = None,
        check: Callable[[Collection[str]], None] | None = None,
        begin: Callable[[], object] = lambda: None,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        """`strays`: counts calls that name no attempt. `check`: refuses a program that asks for unknown resources.
        `begin`: starts whoever runs rollouts, called when the first are wanted, so that what a killed process left in the
        queue never meets an endpoint that is gone. `alive`: raises when nobody can run them any more."""
        self.store, self.run, self.folder = store, run, folder
        self.train, self.val, self.seed = list(train), list(val), seed
        self.history = store.steps(run.id)
        """Finished steps, those before a restart included."""
        self.before: dict[str, Evaluation] = {}
        self.after: dict[str, Evaluation] = {}
        self.policy: Serving | None = None
        self.total = 0
        self._number = len(self.history)
        self._timeout_s, self._max_attempts = timeout_s, max_attempts
        self._budget = budget
        self._observers = observers or plugins.manager()
        self._watcher = watcher
        self._strays = strays or (lambda: 0)
        self._check, self._begin, self._alive = check, begin, alive
        self._begun = False
        self._strays_before = 0
        self._endpoint: Endpoint | None = None
        self._resources: dict[str, int] = {}
        self._known_agents: Counter[str] = Counter()
        self._batch: Batch | None = None
        self._episodes: list[Episode] = []
        self._idle, self._warned = 0, False
        self._finished = False
        self._kept: list[Callable[[], object]] = []
        self.details: Any = None
        """What the algorithm has to show besides its steps; `Result.details` of the run."""

    @property
    def done(self) -> int:
        """Number of the last finished step; 0 before the first."""
        return len(self.history)

    # What runs read.

    def serve(self, policy: PolicyT) -> PolicyT:
        """Starts a policy, at the last finished step's checkpoint if there is one, and publishes it as `policy`."""
        self.policy = policy
        self._endpoint = policy.start()
        if self._budget is not None:
            self._endpoint = msgspec.structs.replace(self._endpoint, budget=self._budget)
        checkpoint = self.history[-1].checkpoint if self.history else None
        if checkpoint is not None:
            policy.load(Path(checkpoint))
        self._publish_policy()
        return policy

    def publish(self, *resources: Resource) -> None:
        """Makes these versions the ones that rollouts from now on read; without arguments: the policy's new weights."""
        if not resources:
            return self._publish_policy()
        self.store.publish(self.run.id, resources, moved=any(r.kind == "policy" for r in resources))
        for resource in resources:
            self._resources[resource.name] = resource.version
            plugins.notify(self._observers, "agl_resource_published", resource=resource)

    def keep(self, close: Callable[[], object]) -> None:
        """Calls `close` when the run is over, however it ends."""
        self._kept.append(close)

    def close(self) -> None:
        """Ends the policy, and all that was given to `keep`."""
        if self.policy is not None:
            self.policy.close()
        while self._kept:
            self._kept.pop()()

    def _publish_policy(self) -> None:
        if self.policy is None or self._endpoint is None:
            raise ConfigError("there is no policy to publish: call loop.serve(policy) first, or publish resources.")
        if self._resources.get("policy") != self.policy.version:
            value = msgspec.to_builtins(self._endpoint)
            self.publish(Resource("policy", self.policy.version, "policy", value))

    # Steps.

    def steps(self, total: int) -> Iterator[int]:
        """Numbers of the steps that are still to do; evaluates `val` before the first step and after the last one.

        Raises RolloutError when a step was not reported.
        """
        self.total = total
        self.before = self._evaluate("before", 0)
        for number in range(self.done + 1, total + 1):
            if self._finished:
                break
            self._number = number
            self._strays_before, self._batch, self._episodes = self._strays(), None, []
            yield number
            if self.done < number:
                raise RolloutError(
                    f"step {number} was not reported: call loop.report(metrics) at the end of each step."
                )
        self.after = self._evaluate("after", total)

    def finish(self) -> None:
        """`steps` gives no further one: the goal is reached, or nothing is left to pay for another step with."""
        self._finished = True

    def draw(self, count: int) -> list[Task]:
        """The next `count` training tasks: each once per pass over the data."""
        return draw(self.train, count, max(self._number, 1), self.seed)

    def sample(
        self,
        tasks: Sequence[Task],
        n: int = 1,
        *,
        sampling: Mapping[str, Any] | None = None,
        mode: str = "train",
    ) -> list[Episode]:
        """Runs each task `n` times and returns what happened, task after task. Blocks until all have ended.

        `sampling` overrides the parameters of the calls that trained agents make. Raises RolloutError when every rollout
        failed, with the first error.
        """
        if self._check:
            self._check(self._resources)
        wanted = [
            self._rollout(task, index, i, dict(sampling or {}), mode)
            for index, task in enumerate(tasks)
            for i in range(n)
        ]
        if self._watcher:
            self._watcher.sampling(f"step {self._number}/{self.total}" if mode == "train" else mode, len(wanted))
        if self.policy is not None and not self.history and not self._begun and wanted:
            self._run(wanted[:1])
            doctor.first_look(self.store.episodes([wanted[0].id])[0], self._strays())
            self._run(wanted[1:])
        else:
            self._run(wanted)
        return self._seen(wanted, mode)

    def _seen(self, wanted: Sequence[Rollout], mode: str) -> list[Episode]:
        """What the rollouts brought, counted for the step."""
        episodes = self.store.episodes([rollout.id for rollout in wanted])
        for episode in episodes:
            self._known_agents.update(completion.path for completion in episode.completions)
        if mode == "train":
            counted = {episode.rollout.id for episode in self._episodes}
            self._episodes.extend(e for e in episodes if e.rollout.id not in counted)
        refuse_total_failure(episodes)
        return episodes

    def try_out(self, trials: Sequence[Trial], mode: str = "train") -> list[Episode]:
        """Runs each trial once, all of them at the same time, and returns what happened, in their order. A trial that was run
        before in this run is not run again: what it brought is returned.

        Raises RolloutError when every rollout failed, with the first error.
        """
        pins = [{**self._resources, **trial.resources} for trial in trials]
        for known in pins:
            if self._check:
                self._check(known)
        wanted = [self._trial(trial, pinned, mode) for trial, pinned in zip(trials, pins, strict=True)]
        if self._watcher:
            self._watcher.sampling(f"step {self._number}/{self.total}" if mode == "train" else mode, len(wanted))
        self._run(wanted)
        return self._seen(wanted, mode)

    def rehearse(self, task: Task) -> Episode:
        """Runs a task once and returns what happened, whatever that was."""
        if self._check:
            self._check(self._resources)
        rollout = self._rollout(task, 0, 0, {}, "rehearsal")
        self._run([rollout])
        return self.store.episodes([rollout.id])[0]

    def _rollout(self, task: Task, index: int, i: int, sampling: dict[str, Any], mode: str) -> Rollout:
        return self._made(task, (mode, self._number, index, task.id), i, mode, dict(self._resources), sampling)

    def _trial(self, trial: Trial, pinned: dict[str, int], mode: str) -> Rollout:
        place = ("trial", mode, sorted(pinned.items()), trial.task.id)
        return self._made(trial.task, place, trial.number, mode, pinned, {})

    def _made(
        self, task: Task, place: tuple[Any, ...], i: int, mode: str, resources: dict[str, int], sampling: dict[str, Any]
    ) -> Rollout:
        made = planned(self.run.id, self.seed, task, place, i)
        made.step, made.mode, made.resources, made.sampling = self._number, mode, resources, sampling
        made.timeout_s, made.max_attempts = self._timeout_s, self._max_attempts
        return made

    def _run(self, wanted: Sequence[Rollout]) -> None:
        """Returns when all have ended."""
        self.store.enqueue(wanted)
        if not self._begun:
            self._begun = True
            self._begin()
        self._await([rollout.id for rollout in wanted])

    def _await(self, rollout_ids: Sequence[str]) -> None:
        open_ids = set(rollout_ids)
        while open_ids:
            self._alive()
            ended = self.store.wait(sorted(open_ids), timeout_s=1.0)
            open_ids -= ended
            if ended and self._watcher:
                self._watcher.finished(self.store.episodes(sorted(ended)))

    @property
    def pays_spans(self) -> bool:
        """Whether a plug-in gives rewards for spans."""
        return bool(self._observers.hook.agl_reward_from_span.get_hookimpls())

    def span_reward(self, span: Span) -> Reward | None:
        """What the first plug-in that has a word says of a span (`agl_reward_from_span`). Raises PluginError if one fails."""
        try:
            found: Reward | None = self._observers.hook.agl_reward_from_span(span=span)
        except Exception as error:
            raise PluginError(
                f"agl_reward_from_span failed for span {span.name!r}, {type(error).__name__}: {error}; mend the plug-in, or "
                "take it out of `plugins=`: rewards must not be missing silently."
            ) from error
        return found

    def collect(self, episodes: Sequence[Episode], selectors: Sequence[str]) -> Batch:
        """What the step can learn from: calls of today's policy version only, grouped, with its ledger.

        Raises UnknownAgent for a selector that no call matched so far, and NothingToTrain when the first step gives no
        trainable call.
        """
        version = self.policy.version if self.policy else None
        self._batch = batch = collect(episodes, selectors, version)
        strays = self._strays() - self._strays_before
        batch.ledger.seen += strays
        batch.ledger.drop("unattributed", strays)
        if not self.history:
            doctor.refuse(batch.ledger, self._known_agents, selectors)
        if batch.ledger.broken and not self._warned:  # once is enough: a template does the same in every step
            self._warned = True
            logger.warning("%s", doctor.continued(batch.ledger))
        return batch

    # The end of a step.

    def report(self, metrics: Mapping[str, float]) -> Step:
        """Ends the step: saves the policy, records metrics and ledger, tells the observers.

        Raises NothingToTrain after `PATIENCE` steps in a row that trained no call.
        """
        ledger = self._batch.ledger if self._batch else Ledger()
        merged = {"merge_ratio": ledger.merge_ratio} if ledger.sequences else {}
        checkpoint = None
        if self.policy is not None:
            checkpoint = self.folder / f"checkpoint-{self._number:06d}"
            if checkpoint.exists():  # of a step that was killed before it was recorded
                shutil.rmtree(checkpoint)
            self.policy.save(checkpoint)
        step = Step(
            self.run.id,
            self._number,
            {**figures(self._episodes), **merged, **{name: float(value) for name, value in metrics.items()}},
            ledger.as_dict(),
            str(checkpoint) if checkpoint else None,
            now_ns(),
        )
        if self._batch is not None:
            self.store.add(spans=notes(self._batch.groups, self.run.id, self._number))
        self.store.add_step(step)
        self._forget_last_checkpoint(step)
        self.history.append(step)
        plugins.notify(self._observers, "agl_step_finished", step=step.number, metrics=step.metrics, ledger=step.ledger)
        if self._watcher:
            self._watcher.step(step, self.total)
        self._idle = 0 if ledger.trained or self._batch is None else self._idle + 1
        if self._idle >= PATIENCE:
            raise NothingToTrain(f"{PATIENCE} steps in a row trained nothing. {ledger}. {doctor.cure(ledger)}")
        return step

    def _forget_last_checkpoint(self, step: Step) -> None:
        last = self.history[-1].checkpoint if self.history else None
        if step.checkpoint and last and last != step.checkpoint:
            shutil.rmtree(last, ignore_errors=True)

    def _evaluate(self, when: str, number: int) -> dict[str, Evaluation]:
        if not self.val:
            return {}
        self._number = number
        if self.policy is None:  # no sampling is ours to choose: one evaluation, of the resources as they are
            trials = [Trial(task, number=int(when == "after")) for task in self.val]
            found = {"val": evaluation_of(f"{when}-val", self.try_out(trials, mode="val"))}
            if self._watcher:
                self._watcher.evaluated(found["val"])
            return found
        found = {}
        for name, sampling in EVALUATIONS.items():
            mode = f"{when}-{name}"
            found[name] = evaluation_of(mode, self.sample(self.val, sampling=sampling, mode=mode))
            if self._watcher:
                self._watcher.evaluated(found[name])
        return found
