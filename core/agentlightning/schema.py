"""The vocabulary: every record that the rooms of the house hand to each other, with its invariants.

Records are msgspec Structs: cheap to make, strict to decode (unknown keys are refused), plain to read. Token arrays are
NumPy arrays and travel as raw little-endian bytes, never as lists in validated models.
"""

from __future__ import annotations

import fnmatch
import math
import time
import uuid
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

# "as" tells type checkers that these are part of this vocabulary.
from agentlightning.endpoints import Budget as Budget  # noqa: PLC0414
from agentlightning.endpoints import Endpoint as Endpoint  # noqa: PLC0414
from agentlightning.endpoints import Route as Route  # noqa: PLC0414
from agentlightning.errors import RewardError

SCHEMA_VERSION = 2
"""Stored in every database; a store with another version refuses to open and says how to migrate."""

DEFAULT_AGENT = "agent"
"""The path of a call whose agent nobody named."""

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Json: TypeAlias = Any


def new_id() -> str:
    """32 lower-case hex digits: the form of a W3C trace id, so that an attempt id *is* its trace id."""
    return uuid.uuid4().hex


def new_span_id() -> str:
    """16 lower-case hex digits: the form of a W3C span id."""
    return uuid.uuid4().hex[:16]


def now_ns() -> int:
    """Unix time in nanoseconds. For people to read; order is always the store's sequence number."""
    return time.time_ns()


class Outcome(StrEnum):
    """How an attempt ended."""

    OK = "ok"
    TRUNCATED = "truncated"
    MODEL_ERROR = "model_error"
    AGENT_ERROR = "agent_error"
    TOOL_ERROR = "tool_error"
    INFRA_ERROR = "infra_error"
    GRADER_ERROR = "grader_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class RolloutState(StrEnum):
    """Where a rollout stands. `TRANSITIONS` in `store/base.py` holds the allowed moves."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL_STATES = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED})


class SpanKind(StrEnum):
    """What happened. Attribute names follow the OpenTelemetry GenAI conventions."""

    AGENT = "agent"
    LLM = "llm"
    TOOL = "tool"
    REWARD = "reward"
    ANNOTATION = "annotation"
    MESSAGE = "message"
    OBJECT = "object"
    EXCEPTION = "exception"
    OPERATION = "operation"


class Resource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A versioned, named thing that rollouts read and training writes."""

    name: str
    version: int
    """Grows by one with every publication of this name in a run; policy versions are these numbers."""
    kind: str
    """`policy`, `llm` (a fixed endpoint), `prompt`, or a plug-in's own."""
    value: dict[str, Json]


class Rollout(msgspec.Struct, forbid_unknown_fields=True):
    """One execution of the user's program on one task."""

    id: str
    """Chosen by the creator; creating the same id twice is one rollout."""
    run_id: str
    task: Json
    task_id: str
    """The same task has the same id in every step."""
    group_id: str
    """Ties the rollouts of one task in one step."""
    step: int = 0
    mode: str = "train"
    """`train`, `val` or any name of an evaluation; only `train` rollouts are trained on."""
    resources: dict[str, int] = {}
    """Pinned: resource name -> version."""
    sampling: dict[str, Json] = {}
    """Overrides the sampling parameters of the calls that trained agents make in this rollout; others keep theirs."""
    seed: int = 0
    timeout_s: float | None = None
    max_attempts: int = 1
    retry: dict[str, int] = {}
    """Outcome -> how many attempts may be tried again after it, within `max_attempts`. Outcomes that are not named are
    tried again if they are in `RETRIED` of `store/base.py`."""
    priority: int = 0
    state: RolloutState = RolloutState.QUEUED
    outcome: Outcome | None = None
    attempts: int = 0
    """Attempts begun so far; the number of the latest one."""
    created_ns: int = 0
    ended_ns: int | None = None


class Attempt(msgspec.Struct, forbid_unknown_fields=True):
    """One try of a rollout. Only the attempt with the highest number can decide the rollout (fencing)."""

    id: str
    """32 hex digits; also the W3C trace id of everything that happens in it."""
    rollout_id: str
    number: int
    """1, 2, 3, ..."""
    worker: str
    outcome: Outcome | None = None
    error: str | None = None
    lease_until: float = 0.0
    """Unix seconds. Past it, another worker may begin the next attempt."""
    started_ns: int = 0
    ended_ns: int | None = None


class Span(msgspec.Struct, forbid_unknown_fields=True):
    """Something that happened in an attempt."""

    id: str
    attempt_id: str
    kind: SpanKind
    name: str
    parent_id: str | None = None
    path: str = ""
    """Agent path, root to leaf: `team/writer`; empty where no agent is known."""
    start_ns: int = 0
    end_ns: int | None = None
    """None: never closed; `status` then says `open`."""
    status: str = "ok"
    """`ok`, `error` or `open`."""
    error: str | None = None
    attributes: dict[str, Json] = {}
    seq: int = 0
    """Set by the store: the order of arrival."""

    @property
    def agent(self) -> str:
        return leaf(self.path)


class Completion(msgspec.Struct, forbid_unknown_fields=True):
    """What the gateway recorded of one choice of one model call."""

    id: str
    """Chosen by the gateway; adding the same id twice is one completion."""
    attempt_id: str | None
    """None: unattributed; served and counted, never trained."""
    path: str
    """Agent path."""
    span_id: str | None
    """The adapter's span that the call came from."""
    model: str
    """The name that the engine served."""
    policy: str | None
    """The policy resource that served the call; None for endpoints that are not policies."""
    version: int | None
    """The policy version that sampled the tokens, as the engine stamped it."""
    prompt_ids: Ids
    response_ids: Ids
    logprobs: Floats
    """One per response id: log-probability under the distribution that was sampled from."""
    finish_reason: str
    request: dict[str, Json]
    response: dict[str, Json]
    sampling: dict[str, Json] = {}
    """The parameters that the engine was asked for, overrides applied."""
    choice: int = 0
    defect: str | None = None
    """Why this call cannot be trained (`no_token_ids`, `length_mismatch`, ...); None: it can."""
    start_ns: int = 0
    end_ns: int = 0
    seq: int = 0
    """Set by the store: the order of arrival. Calls of one attempt are ordered by it."""

    @property
    def agent(self) -> str:
        return leaf(self.path)


class Reward(msgspec.Struct, forbid_unknown_fields=True):
    """A number with a target, a name and a source. Final and intermediate rewards are the same kind of record."""

    id: str
    attempt_id: str
    value: float
    name: str = "reward"
    target: str = "rollout"
    """`rollout`, `agent:<path>` or `call:<completion id or span id>`."""
    source: str = "emit"
    """`return`, `emit`, or the name of the plug-in that gave it."""
    seq: int = 0
    """Set by the store: the order of arrival."""


class Run(msgspec.Struct, forbid_unknown_fields=True):
    """One `fit` or `evaluate` from its first step to its last, across restarts."""

    id: str
    name: str
    config: dict[str, Json]
    config_hash: str
    """Equal configuration, equal hash: an unfinished run with this hash is resumed."""
    state: str = "running"
    """`running`, `finished` or `failed`."""
    owner: str = ""
    """`host:pid:nonce` of the process that holds the run."""
    lease_until: float = 0.0
    created_ns: int = 0
    ended_ns: int | None = None


class Step(msgspec.Struct, forbid_unknown_fields=True):
    """A finished training step. It exists exactly when the step's update and its checkpoint are complete."""

    run_id: str
    number: int
    """1, 2, 3, ..."""
    metrics: dict[str, float]
    ledger: dict[str, Json]
    checkpoint: str | None
    """Folder that holds the policy after this step."""
    ended_ns: int = 0


class Transition(msgspec.Struct):
    """One completion of one selected agent with its reward and advantage."""

    completion: Completion
    selector: str
    """The entry of `agents=` that chose it; the policy's adapters bear these names."""
    reward: float
    """What was given to this call alone; 0 where nothing was."""
    advantage: float = math.nan
    """NaN until an algorithm sets it; NaN never reaches an update."""


class Trajectory(msgspec.Struct):
    """The transitions of one agent in one attempt, in order."""

    rollout_id: str
    attempt_id: str
    path: str
    reward: float
    """Return: the rollout's reward, plus this agent's own, plus those of its calls."""
    transitions: list[Transition]


class Group(msgspec.Struct):
    """Trajectories that are compared with each other; never mixed with those of another key."""

    key: tuple[str, ...]
    """`(group_id, selector)`, and more where asked."""
    trajectories: list[Trajectory]


class Episode(msgspec.Struct):
    """All that is known of one rollout: what `loop.sample` returns."""

    rollout: Rollout
    attempt: Attempt | None
    """The attempt that decided; None when none did."""
    spans: list[Span]
    completions: list[Completion]
    rewards: list[Reward]
    superseded: int = 0
    """Calls of attempts that did not decide; kept, never used."""


def leaf(path: str) -> str:
    """Last part of an agent path."""
    return path.rpartition("/")[2]


def selector_of(selectors: Sequence[str], path: str) -> str | None:
    """The first selector that means this agent: its name, its whole path, or a glob over the path; else None."""
    name = leaf(path)
    return next((s for s in selectors if s in (name, path) or fnmatch.fnmatchcase(path, s)), None)


def finite(value: object, what: str = "reward") -> float:
    """`value` as a float. Raises RewardError for anything that is not a finite number: never turned into 0.

    Accepts int, float, bool, Decimal, Fraction and NumPy or torch scalars; refuses str, None, NaN, infinities.
    """
    cure = "return or emit a finite number, or None when there is no reward"
    if isinstance(value, (str, bytes)) or value is None:
        raise RewardError(f"{what} is {value!r}, not a number: {cure}.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(f"{what} of type {type(value).__name__} is not a number: {cure}.") from error
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}: {cure}.")
    return number


def ids(values: Any) -> Ids:
    """Token ids as a contiguous int32 array, shape [tokens]."""
    return np.ascontiguousarray(values, dtype=np.int32)


def floats(values: Any) -> Floats:
    """Log-probabilities as a contiguous float32 array, shape [tokens]."""
    return np.ascontiguousarray(values, dtype=np.float32)


_EXT_DTYPES = {1: "<i4", 2: "<f4"}


def _encode_extra(value: object) -> object:
    if isinstance(value, np.ndarray):
        code = 1 if value.dtype.kind == "i" else 2
        return msgspec.msgpack.Ext(code, value.astype(_EXT_DTYPES[code]).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be stored")


def _decode_extra(kind: Any, value: object) -> object:
    if isinstance(value, np.ndarray):
        return value
    raise NotImplementedError(f"{kind} cannot be read from {type(value).__name__}")


def _decode_array(code: int, data: memoryview) -> Ids | Floats:
    return np.frombuffer(bytes(data), dtype=_EXT_DTYPES[code])


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_extra).encode
"""Any record of this file as MessagePack."""


def decode(data: bytes, kind: Any) -> Any:
    """The inverse of `encode`; refuses unknown keys and wrong types."""
    return decoder(kind)(data)


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """`decode` for one kind of value, prepared for many."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra, ext_hook=_decode_array).decode
