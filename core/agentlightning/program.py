"""The user's program as the runner sees it: a function of a task and of resources that it asks for by parameter name.

    @agl.rollout
    def solve(task, policy, prompt): ...

Like a pytest fixture, `policy` and `prompt` are filled from the resources that the rollout has pinned: an endpoint as a
`PolicyHandle`, a prompt as a `PromptTemplate`. Everything that can be wrong with a signature is found before the first task
runs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote

from agentlightning.errors import ConfigError, RewardError, RolloutError
from agentlightning.prompts import KIND as PROMPT
from agentlightning.prompts import template_of
from agentlightning.schema import Attempt, Resource, Reward, Rollout, finite, new_id

RESERVED = frozenset({"rollout", "attempt"})
"""Parameters that get the records of that name rather than a resource."""

ENDPOINT_KINDS = frozenset({"policy", "llm"})
"""Resources of these kinds reach the program as a `PolicyHandle`."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class PolicyHandle:
    """An OpenAI-compatible endpoint that belongs to one attempt: every call made through it is that attempt's."""

    base_url: str
    """Ends in `/v1`."""
    api_key: str
    model: str
    """What to ask for as `model`: the name of the resource."""
    version: int
    """The pinned version of the resource."""
    name: str
    """Of the resource."""

    def agent(self, path: str) -> PolicyHandle:
        """The same endpoint for one agent (`"writer"`, `"team/writer"`), for programs without an adapter."""
        if not path.strip("/"):
            raise ConfigError("policy.agent() needs an agent name, such as policy.agent('writer').")
        root = self.base_url.removesuffix("/v1").partition("/agents/")[0]
        return replace(self, base_url=f"{root}/agents/{quote(path.strip('/'), safe='/')}/v1")


def policy_handle(resource: Resource, gateway_url: str, attempt_id: str) -> PolicyHandle:
    """`resource` (of an endpoint kind) as `attempt_id` calls it."""
    base_url = f"{gateway_url.rstrip('/')}/attempts/{attempt_id}/v1"
    return PolicyHandle(base_url, f"agl-{attempt_id}", resource.name, resource.version, resource.name)


def rollout(function: F) -> F:
    """Declares `function(task, *resources)`, sync or async, as a program. It stays callable (and picklable) as it was.

    It returns a number, a dict of named numbers, or None when it emitted its rewards or has none.
    Raises RolloutError at once when the signature cannot be run.
    """
    Program(function, skip_self=True)
    return function


class Program:
    """A function, method or callable object with its signature checked. Raises RolloutError when it cannot be run."""

    def __init__(self, function: Callable[..., Any], *, skip_self: bool = False) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.is_async = _is_async(function)
        parameters = _parameters(function, self.name)
        if skip_self and parameters and parameters[0].name == "self":
            parameters = parameters[1:]
        _check_shape(function, self.name, parameters)
        self.optional = frozenset(p.name for p in parameters[1:] if p.default is not p.empty)
        self.wants = tuple(p.name for p in parameters[1:])
        """Parameters after the task, in order."""

    def check(self, known: Collection[str]) -> None:
        """Raises ConfigError when a required parameter is neither one of the `known` resources nor reserved."""
        unknown = [w for w in self.wants if w not in known and w not in RESERVED and w not in self.optional]
        if unknown:
            raise ConfigError(
                f"{self.name} asks for {', '.join(map(repr, unknown))}, but the resources of this run are "
                f"{_names(known)}: rename the parameter, publish a resource of that name, or give it a default "
                f"(the names {_names(RESERVED)} give the records of the rollout)."
            )

    def bind(
        self, rollout: Rollout, attempt: Attempt, resource: Callable[[str], Resource], gateway_url: str
    ) -> dict[str, Any]:
        """The keyword arguments for one attempt; a parameter with a default and no resource keeps its default.

        `resource` gives a pinned resource by name; only those that the program asks for are asked for.
        """
        self.check(rollout.resources)
        given: dict[str, Any] = {}
        for name in self.wants:
            if name in rollout.resources:
                given[name] = _injected(resource(name), gateway_url, attempt.id)
            elif name in RESERVED:
                given[name] = rollout if name == "rollout" else attempt
        return given


def program_of(function: Callable[..., Any] | Program) -> Program:
    """`function` as a Program, decorated or not."""
    return function if isinstance(function, Program) else Program(function)


def returned_rewards(value: object, attempt_id: str, name: str = "the program") -> list[Reward]:
    """What a program returned, as rewards of the whole rollout with source `return`.

    A number is the reward named `reward`; a dict gives one per entry; None gives none. Raises RewardError, and thus
    gives no reward at all, for anything else: a list, a string, NaN, an infinity, a dict with one such entry.
    """
    if value is None:
        return []
    if not isinstance(value, Mapping):
        return [_reward("reward", value, attempt_id, f"what {name} returned")]
    for key in value:
        if not isinstance(key, str) or not key:
            raise RewardError(f"{name} returned a dict with the key {key!r}: name each reward with a string.")
    return [_reward(key, entry, attempt_id, f"reward {key!r} of {name}") for key, entry in value.items()]


def _reward(name: str, value: object, attempt_id: str, what: str) -> Reward:
    if _has_length(value) and not isinstance(value, (str, bytes)):
        raise RewardError(
            f"{what} is a {type(value).__name__}, not a number: return a finite number, a dict of named numbers, "
            "or None when there is no reward."
        )
    return Reward(id=new_id(), attempt_id=attempt_id, value=finite(value, what), name=name, source="return")


def _has_length(value: object) -> bool:
    """Containers have one; scalars of NumPy and torch own `__len__` too, but raise from it."""
    try:
        len(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _injected(resource: Resource, gateway_url: str, attempt_id: str) -> Any:
    if resource.kind in ENDPOINT_KINDS:
        return policy_handle(resource, gateway_url, attempt_id)
    if resource.kind == PROMPT:
        return template_of(resource)
    return copy.deepcopy(resource.value)  # the resource is shared by concurrent programs; one may edit what it got


def _is_async(function: Callable[..., Any]) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RolloutError(f"{name} has no signature to read ({error}): wrap it in a def that takes a task.") from error


def _check_shape(function: Callable[..., Any], name: str, parameters: list[inspect.Parameter]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise RolloutError(f"{name} is a generator: return the reward instead of yielding.")
    kinds = inspect.Parameter
    if not parameters or parameters[0].kind not in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
        raise RolloutError(f"{name} takes no task: give it a first parameter, as in def {name}(task, policy).")
    for parameter in parameters[1:]:
        if parameter.kind not in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            raise RolloutError(
                f"{name} has the parameter {str(parameter)!r}, which cannot be filled by name: "
                "write one plain parameter for each resource it needs."
            )


def _names(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
