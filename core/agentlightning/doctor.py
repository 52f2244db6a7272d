"""What keeps a program from being trained: each fault with a code of its own and its cure.

The checks follow the way of a call: it reaches the gateway, names its attempt and its agent, is answered by the policy,
with ids and log-probabilities that agree, and a reward reaches it. `agl doctor` looks at one rollout with them, and `fit`
at its first rollout and its first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from agentlightning.errors import AgentLightningError, NothingToTrain, UnknownAgent
from agentlightning.forks import CAUSES
from agentlightning.schema import DEFAULT_AGENT, Episode, selector_of
from agentlightning.trajectory import Ledger, collect

Level = Literal["ok", "warning", "fault"]


class Finding(msgspec.Struct, frozen=True):
    """One check of one program."""

    code: str
    level: Level
    what: str
    """What was found; of a fault: what is wrong."""
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.what}" + (f" {self.cure}" if self.cure else "")


CODES: dict[str, str] = {
    "AGL-D01": "the program can be imported",
    "AGL-D02": "the program can be called with a task and the resources that it asks for",
    "AGL-D03": "the model answers",
    "AGL-D04": "the program ends without an error",
    "AGL-D05": "the program ends in time",
    "AGL-D06": "its rewards are numbers",
    "AGL-D10": "its model calls reach the gateway",
    "AGL-D11": "its calls name their attempt",
    "AGL-D12": "its agents have names",
    "AGL-D13": "the selected agents make calls",
    "AGL-D20": "the policy answers the selected agents",
    "AGL-D21": "the answers have token ids",
    "AGL-D22": "the answers have log-probabilities",
    "AGL-D23": "ids, log-probabilities, usage and the end of each answer agree",
    "AGL-D24": "the calls are answered to their end",
    "AGL-D25": "the calls fit in the budget and the context",
    "AGL-D26": "the answers come from the current policy version",
    "AGL-D27": "the turns of a conversation continue each other",
    "AGL-D30": "a reward reaches the calls",
    "AGL-D40": "rollouts of a task differ in their rewards",
}
"""What each check makes sure of, in the order in which they are looked at."""

_CURES: dict[str, tuple[str, str]] = {
    "unattributed": ("AGL-D11", "Calls name no attempt: use `policy.base_url`, or pass the callback to the framework."),
    "superseded": ("AGL-D04", "Attempts were tried again: see their errors with `agl show`."),
    "not_selected": ("AGL-D13", "Name agents that make calls in `agents=`."),
    "not_policy": (
        "AGL-D20",
        "The selected agents call an endpoint that is not the policy: use `policy.base_url` and its `model` for them.",
    ),
    "no_token_ids": (
        "AGL-D21",
        "The engine sends no token ids: use a policy back end, or an engine with `return_token_ids` (vLLM, SGLang).",
    ),
    "empty": (
        "AGL-D21",
        "The engine sampled nothing: see its log, and whether `max_tokens` leaves room for an answer.",
    ),
    "no_logprobs": ("AGL-D22", "The engine sends no log-probabilities: start it so that `logprobs` is allowed."),
    "upstream_unreachable": ("AGL-D03", "Start the engine, or correct the address of the endpoint."),
    "over_budget": ("AGL-D25", "Shorten what agents are told, raise the budget, or use a model with a longer context."),
    "stale": ("AGL-D26", "Calls were answered by another policy version: let rollouts end before an update."),
    "mixed_versions": ("AGL-D26", "Weights changed during an answer: hold the policy's calls with `Gateway.paused()`."),
    "reward_missing": ("AGL-D30", "Return a number from the program, or call `agl.emit_reward` in it."),
    "single": ("AGL-D40", "Only one rollout of each task reached the agent: raise `rollouts_per_task`."),
    "zero_variance": (
        "AGL-D40",
        "All rollouts of each task got the same reward: use tasks that are sometimes solved, a finer reward, more rollouts"
        + " per task, or a higher temperature.",
    ),
}
_DOUBT = (
    "The engine contradicts itself: see the gateway's log for the numbers, and update the engine or its tool parser."
)
_BROKEN = "See the engine's log, and `agl show` for what it answered."
_DOUBTFUL = ("length_mismatch", "bad_token_ids", "bad_logprobs", "bad_ending", "bad_response")
ENGINE = frozenset({"no_token_ids", "no_logprobs", *_DOUBTFUL} - {"bad_response"})
"""Reasons that lie in the engine's way of answering: they will not go away by sampling more."""


def code_of(reason: str) -> tuple[str, str]:
    """The code and the cure of a ledger's reason."""
    if reason in _CURES:
        return _CURES[reason]
    if reason in _DOUBTFUL:
        return "AGL-D23", _DOUBT
    if reason == "outcome_grader_error":
        return "AGL-D06", "Return or emit finite numbers, or None when there is no reward."
    if reason == "outcome_timeout":
        return "AGL-D05", "Raise `timeout_s`, or make the program faster."
    if reason.startswith("outcome_"):
        return "AGL-D04", "See the rollout's error with `agl show`."
    return "AGL-D24", _BROKEN


def cure(ledger: Ledger) -> str:
    """What to do about the commonest reason of a ledger; agents that nobody selected are none where others were."""
    reasons = [r for r, _ in ledger.dropped.most_common() if r != "not_selected" or not ledger.selected]
    reason = reasons[0] if reasons else ""
    if reason not in _CURES and reason not in _DOUBTFUL:
        return "Look at one rollout with `agl show`."
    code, words = code_of(reason)
    return f"{words} ({code})"


def examine(ledger: Ledger, agents: Mapping[str, int], selectors: Sequence[str]) -> list[Finding]:
    """The checks that a ledger can answer. `agents`: path -> calls of all that were ever seen."""
    if not ledger.seen:
        return [
            Finding(
                "AGL-D10",
                "fault",
                "the first rollouts made no model call that reached the gateway.",
                "Build the client with `base_url=policy.base_url` (inside the rollout) or `base_url=trainer.base_url` "
                "(outside).",
            )
        ]
    found = [_fine("AGL-D10", f"{ledger.seen} calls"), *_attributed(ledger), *_agents(agents, selectors)]
    if any(finding.level == "fault" for finding in found):
        return found
    return [*found, *_trainable(ledger)]


def _attributed(ledger: Ledger) -> Iterable[Finding]:
    strays = ledger.dropped["unattributed"]
    if not strays:
        return [_fine("AGL-D11", f"{ledger.attributed} calls")]
    level: Level = "warning" if ledger.attributed else "fault"
    return [Finding("AGL-D11", level, f"{strays} of {ledger.seen} calls name no attempt.", _CURES["unattributed"][1])]


def _agents(agents: Mapping[str, int], selectors: Sequence[str]) -> Iterable[Finding]:
    seen = told(agents)
    if set(agents) == {DEFAULT_AGENT} and DEFAULT_AGENT not in selectors:
        yield Finding(
            "AGL-D12",
            "warning",
            f"no call says which agent made it: all go by the default name {DEFAULT_AGENT!r}.",
            "Hand the framework `agl.callback(...)`, use `policy.agent('name')`, or `with agl.agent('name'):`.",
        )
    else:
        yield _fine("AGL-D12", seen)
    unmatched = [s for s in selectors if not any(selector_of((s,), path) for path in agents)]
    if unmatched:
        yield Finding(
            "AGL-D13",
            "fault",
            f"no call came from {', '.join(map(repr, unmatched))}. Agents seen: {seen or 'none'}.",
            "Correct the names in `agents=` (exact name, path, or glob), or hand the framework `agl.callback(...)` so that "
            "agents have names.",
        )
    else:
        yield _fine("AGL-D13", ", ".join(selectors))


def _trainable(ledger: Ledger) -> Iterable[Finding]:
    """One finding for each code that a selected call could have."""
    lost: dict[str, list[str]] = {}
    for reason, calls in ledger.dropped.items():
        code, _ = code_of(reason)
        if reason not in ("not_selected", "unattributed", "superseded", "single", "zero_variance") and calls:
            lost.setdefault(code, []).append(reason)
    order = [code for code in CODES if code >= "AGL-D20" and code != "AGL-D40"]
    for code in [*(code for code in CODES if code in lost and code not in order), *order]:
        if code == "AGL-D27":
            yield continued(ledger)
        elif code not in lost:
            yield _fine(code, f"{ledger.selected} calls of selected agents")
        else:
            yield _lost(code, lost[code], ledger)


def _lost(code: str, reasons: Sequence[str], ledger: Ledger) -> Finding:
    calls = sum(ledger.dropped[reason] for reason in reasons)
    level: Level = "warning" if ledger.complete else "fault"
    what = f"{calls} of {ledger.selected} calls of selected agents were left out: {', '.join(reasons)}."
    return Finding(code, level, what, code_of(reasons[0])[1])


def continued(ledger: Ledger) -> Finding:
    """Each call is trained all the same: a fork costs time, and the context that the sequences do not share."""
    if not ledger.broken:
        return _fine("AGL-D27", f"{ledger.complete} calls in {ledger.sequences} sequences")
    cause, calls = ledger.broken.most_common(1)[0]
    happened, remedy = CAUSES[cause]
    what = (
        f"{sum(ledger.broken.values())} of {ledger.complete} calls began a sequence of their own: {happened} ({calls})."
    )
    return Finding("AGL-D27", "warning", what, remedy)


def _fine(code: str, detail: str) -> Finding:
    return Finding(code, "ok", f"{CODES[code]} ({detail}).")


def told(agents: Mapping[str, int]) -> str:
    """Agents with their calls, those with most first."""
    ranked = sorted(agents.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{path} ({calls} {'call' if calls == 1 else 'calls'})" for path, calls in ranked)


def refuse(ledger: Ledger, agents: Mapping[str, int], selectors: Sequence[str]) -> None:
    """Raises UnknownAgent or NothingToTrain, with code and cure, when nothing of a first step can be trained."""
    for finding in examine(ledger, agents, selectors):
        if finding.level == "fault":
            raise _error(finding, ledger)
    if not ledger.complete:
        raise NothingToTrain(f"the first step has no trainable call. {ledger}. {cure(ledger)}")


def first_look(episode: Episode, strays: int) -> None:
    """Raises NothingToTrain when one rollout shows already that none can be trained: every call of the policy has the
    same fault of its engine, or no call names its attempt."""
    calls = [call for call in episode.completions if call.policy is not None]
    reasons = {call.defect or "" for call in calls}
    wrong = reasons <= ENGINE if calls else bool(strays) and not episode.completions
    if wrong:
        ledger = collect([episode], ("*",)).ledger
        ledger.complete = 0
        ledger.seen += strays
        ledger.drop("unattributed", strays)
        refuse(ledger, ledger.agents, ("*",))


def _error(finding: Finding, ledger: Ledger) -> AgentLightningError:
    if finding.code == "AGL-D13":
        return UnknownAgent(str(finding))
    if not ledger.seen:
        return NothingToTrain(str(finding))
    return NothingToTrain(
        f"{finding.code}: the first step has no trainable call. {ledger}. {finding.what} {finding.cure}"
    )
