"""One choice of one request, on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .torch_sampling import Uniforms


@dataclass(slots=True, eq=False)
class Job:
    """What to answer and how; the engine appends to `out` and `logps`, others only read them."""

    prompt: list[int]
    model: str
    """The served name that was asked for."""
    max_tokens: int
    uniforms: Uniforms
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Any of these ends the answer, and is part of it."""
    stopped: Callable[[list[int]], bool] | None = None
    """Whether the text of the ids so far holds a stop string; asked after every token."""
    streaming: bool = False
    """Whether `wake` is wanted after every token, and not only at the end."""
    wake: Callable[[], None] = lambda: None
    """Called on the thread that `Engine.notify` chooses."""
    out: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish: str | None = None
    """`stop` or `length` when complete, `error` or `cancelled` otherwise."""
    error: str = ""
    version: int = 0
    """The version of the weights that sampled all of `out`."""
    cancelled: bool = False
    reused: int = 0
    """Prompt tokens whose keys and values were there already."""
    awaits: tuple[Job, int] | None = None
    """Another job that is just reading the same prefix, and how much of it is worth waiting for."""

    def take(self, token: int, logp: float) -> bool:
        """Adds a token; True when the answer is complete."""
        self.logps.append(logp)  # first: a reader on another thread goes by the length of `out`
        self.out.append(token)
        if token in self.stop_ids or (self.stopped is not None and self.stopped(self.out)):
            self.finish = "stop"
        elif len(self.out) >= self.max_tokens:
            self.finish = "length"
        return self.finish is not None
