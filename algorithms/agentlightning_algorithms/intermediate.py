"""Rewards on the way, read from what spans say: a tool worked or failed, its arguments were refused, tests passed.

A source gives a score to a span. By default scores are not paid out: they make a potential Phi, the mean of the scores so
far times `weight`, and a call is paid gamma * Phi(after it) - Phi(before it), where Phi is 0 at the beginning and at the end.
Such payments cancel out over a rollout, so that the best policy stays the best (Ng, Harada and Russell 1999, theorem 1):
they only say earlier what the end will say. In the plain form each score is paid as it is, and a policy may learn to
collect scores instead of solving the task.

Each payment has an audit line: a reward span in the attempt's trace, below the span that it is for, and never read as a
reward again.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.hooks import hookimpl
from agentlightning.schema import Completion, Episode, Group, Reward, Span, SpanKind, Trajectory, finite, now_ns
from agentlightning.tasks import digest

logger = logging.getLogger(__name__)

FORMS = ("potential", "plain")
NAME = "intermediate"
Scorer: TypeAlias = Callable[[Span], "Reward | float | None"]


class Intermediate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `intermediate=` means. Raises ConfigError for what cannot work."""

    source: Any = "tools"
    """`tools`, or a function of a span that returns a number or None."""
    form: str = "potential"
    """`potential` or `plain`; see the module."""
    weight: float = 0.5
    """What a score of 1 is worth."""

    def __post_init__(self) -> None:
        if self.source != "tools" and not callable(self.source):
            raise ConfigError(f"intermediate={self.source!r}: give 'tools', or a function of a span.")
        if self.form not in FORMS:
            raise ConfigError(f"intermediate: form={self.form!r}: choose one of {', '.join(FORMS)}.")
        if not self.weight > 0:
            raise ConfigError(
                f"intermediate: weight={self.weight}: it must be above 0; leave `intermediate` out instead."
            )
        if self.form == "plain":
            logger.warning(
                "plain intermediate rewards can change which policy is the best: one that collects them may beat one that "
                "solves the task. form='potential' cannot."
            )

    @property
    def scorer(self) -> Scorer:
        return ToolRewards().agl_reward_from_span if self.source == "tools" else self.source


def intermediate_of(value: Any) -> Intermediate | None:
    """The knob. Raises ConfigError."""
    if value is None or isinstance(value, Intermediate):
        return value
    if isinstance(value, dict):
        try:
            return Intermediate(**value)
        except TypeError as error:
            fields = ", ".join(Intermediate.__struct_fields__)
            raise ConfigError(f"intermediate: {error}. Its fields are: {fields}.") from error
    return Intermediate(value)


class ToolRewards:
    """The built-in source, a plug-in like any other: scores between -1 and 1 for tool spans."""

    @hookimpl
    def agl_reward_from_span(self, span: Span) -> Reward | None:
        """See `hooks.py`; the reward's name says why."""
        found = _tool_score(span)
        if found is None:
            return None
        return Reward(digest(span.id, "tools"), span.attempt_id, found[0], found[1], f"call:{span.id}", "tools")


_TESTS = re.compile(r"(\d+) (passed|failed|errors?)\b")
_ARGUMENTS = re.compile(
    r"valid(ation)?[ _]?error|invalid (tool )?arguments?|missing \d* ?required|unexpected keyword|JSONDecode",
    re.IGNORECASE,
)


def _tool_score(span: Span) -> tuple[float, str] | None:
    if span.kind != SpanKind.TOOL or span.status == "open":
        return None
    told = str(span.attributes.get("gen_ai.tool.call.result") or "")
    counts: dict[str, int] = defaultdict(int)
    for number, word in _TESTS.findall(told):
        counts["passed" if word == "passed" else "failed"] += int(number)
    if counts:
        passed, failed = counts["passed"], counts["failed"]
        return (passed - failed) / max(1, passed + failed), f"{passed} of {passed + failed} tests passed"
    if span.status == "error":
        refused = _ARGUMENTS.search(span.error or told)
        return -1.0, "arguments refused" if refused else "tool failed"
    return 1.0, "tool succeeded"


@dataclass
class Payment:
    """What one call was paid, and why: an audit line."""

    call: Completion
    value: float
    score: float
    why: str
    span: Span | None
    """What was scored; None: the end of the trajectory, where the potential goes back to 0."""
    before: float
    after: float


def pay(
    groups: Sequence[Group],
    episodes: Sequence[Episode],
    how: Intermediate | None,
    gamma: float = 1.0,
    hook: Scorer = lambda span: None,
) -> list[tuple[Episode, Payment]]:
    """Adds the payments to the calls and to the returns of their trajectories; returns them for the audit.

    `hook`: what plug-ins say of a span (`agl_reward_from_span`); they are asked first. Raises RewardError when a source
    gives what is no finite number.
    """
    known = {episode.rollout.id: episode for episode in episodes}
    settings = how or Intermediate()
    scorers = [hook, *([how.scorer] if how else [])]
    paid = []
    for group in groups:
        for trajectory in group.trajectories:
            episode = known[trajectory.rollout_id]
            scored = _scored(trajectory, episode, scorers)
            for payment in _payments(trajectory, scored, settings, gamma) if scored else ():
                transition = next(t for t in trajectory.transitions if t.completion is payment.call)
                transition.reward += payment.value
                trajectory.reward += payment.value
                paid.append((episode, payment))
    return paid


_Scored: TypeAlias = dict[int, list[tuple[float, str, Span]]]


def _scored(trajectory: Trajectory, episode: Episode, scorers: Sequence[Scorer]) -> _Scored:
    """Scores by the call (its place in the trajectory) that led to the span. Retries make a later success worth less."""
    found: _Scored = defaultdict(list)
    failures: dict[str, int] = defaultdict(int)
    for span in episode.spans:
        told = None if span.kind == SpanKind.REWARD else next((t for s in scorers if (t := s(span)) is not None), None)
        place = None if told is None else caller(span, trajectory, episode)
        if told is None or place is None:
            continue
        score = finite(told.value if isinstance(told, Reward) else told, f"intermediate reward of span {span.name!r}")
        why = told.name if isinstance(told, Reward) else getattr(scorers[-1], "__name__", "function")
        if span.kind == SpanKind.TOOL and isinstance(told, Reward) and told.source == "tools":
            again = failures[span.name]
            failures[span.name] = again + 1 if score < 0 else 0
            if again and score > 0:
                score, why = score / (1 + again), f"{why}, after {again} failed"
        found[place].append((score, why, span))
    return found


def caller(span: Span, trajectory: Trajectory, episode: Episode) -> int | None:
    """Which call of the trajectory led to this span: the one that asked for it by id, else the latest of the agent before.

    None: it belongs to another agent, or came before all calls.
    """
    asked = span.attributes.get("gen_ai.tool.call.id")
    calls = [transition.completion for transition in trajectory.transitions]
    if asked:
        by_id = [n for n, call in enumerate(calls) if asked in _asked_ids(call)]
        if by_id:
            return by_id[-1]
        if any(asked in _asked_ids(call) for call in episode.completions):
            return None
    if span.path != trajectory.path:
        return None
    before = [n for n, call in enumerate(calls) if call.span_id == span.id or _before(call, span)]
    return before[-1] if before else None


def _before(call: Completion, span: Span) -> bool:
    """Clocks decide only where both have one; a span is stored when it ends, a call when it is answered."""
    return call.end_ns <= span.start_ns if call.end_ns and span.start_ns else call.seq < span.seq


def _asked_ids(call: Completion) -> list[str]:
    choices = call.response.get("choices")
    message = (
        choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    )
    tools = message.get("tool_calls") if isinstance(message, dict) else None
    return [tool["id"] for tool in tools or () if isinstance(tool, dict) and isinstance(tool.get("id"), str)]


def _payments(trajectory: Trajectory, scored: _Scored, how: Intermediate, gamma: float) -> list[Payment]:
    payments = []
    scores: list[float] = []
    potentials = [0.0]
    last = len(trajectory.transitions) - 1
    for place, transition in enumerate(trajectory.transitions):
        scores += [score for score, _, _ in scored.get(place, ())]
        potentials.append(how.weight * sum(scores) / len(scores) if scores and place < last else 0.0)
        gained = shaping(potentials, gamma)[-1]
        if how.form == "plain":
            for score, why, span in scored.get(place, ()):
                payments.append(Payment(transition.completion, how.weight * score, score, why, span, 0.0, 0.0))
        elif gained or scored.get(place):
            told: list[tuple[float, str, Span | None]] = [*scored.get(place, ())] or [
                (0.0, "the rollout goes on" if place < last else "the end", None)
            ]
            score, why, last_span = told[-1]
            reasons = "; ".join(reason for _, reason, _ in told)
            payments.append(
                Payment(transition.completion, gained, score, reasons, last_span, potentials[-2], potentials[-1])
            )
    return payments


def shaping(potentials: Sequence[float], gamma: float) -> list[float]:
    """gamma * Phi(next) - Phi(this), for each step between the potentials; shape [potentials - 1]."""
    return [gamma * after - before for before, after in pairwise(potentials)]


def audit(paid: Sequence[tuple[Episode, Payment]], how: Intermediate | None) -> list[Span]:
    """The audit lines, as spans for the store; the same payments give the same ids."""
    form = (how or Intermediate()).form
    lines: dict[str, int] = defaultdict(int)
    spans = []
    for episode, payment in paid:
        assert episode.attempt is not None
        place = lines[payment.call.id]
        lines[payment.call.id] += 1
        spans.append(
            Span(
                digest(payment.call.id, NAME, place, size=8),
                episode.attempt.id,
                SpanKind.REWARD,
                NAME,
                payment.span.id if payment.span else payment.call.span_id,
                payment.call.path,
                now_ns(),
                now_ns(),
                attributes={
                    "agl.reward.value": payment.value,
                    "agl.reward.target": f"call:{payment.call.id}",
                    "agl.reward.form": form,
                    "agl.reward.score": payment.score,
                    "agl.reward.why": payment.why,
                    "agl.reward.potential": [payment.before, payment.after],
                },
            )
        )
    return spans
