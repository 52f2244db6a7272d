"""What the suite asks of a framework: programs as its users write them, one method for each thing that programs do.

Every method runs its program to the end, in the attempt that is current, against the world's engine, and returns the
agent paths of the requests that it makes, in order of arrival. The program knows nothing of the library under test: what it
takes to be traced is `listen`, or at most one object that is handed to the framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, TypeAlias

import agentlightning as agl
from tests.adapters.world import World

Paths: TypeAlias = Sequence[str]


class Driver:
    """Subclass it for a framework. What is left out raises, unless `cannot` says why the framework has no such thing."""

    name: ClassVar[str] = ""
    """The adapter: `agl.install(name)`."""
    cannot: ClassVar[Mapping[str, str]] = {}
    """Method name -> why no program of this framework can do that. The test is skipped with these words."""
    listens_globally: ClassVar[bool] = True
    """False where `listen` does nothing, for the programs hand `agl.callback(name)` to the framework."""
    names_itself: ClassVar[bool] = False
    """True where programs name their agents with `agl.agent`, for no framework does."""
    odd_name: ClassVar[str] = "作家 Ünï 50%,;="
    """An agent's name with characters that need care on the wire, as far as the framework allows them."""
    operations: ClassVar[frozenset[str]] = frozenset({"chat", "text_completion", "generate_content"})
    """What `gen_ai.operation.name` of a model call may be."""

    def listen(self) -> AbstractContextManager[object]:
        """Our one line."""
        return agl.install(self.name) if self.listens_globally else nullcontext()

    def touched(self) -> Iterable[object]:
        """Classes, modules and lists that `listen` changes. What they hold is compared before and after."""
        return ()

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        """One agent of this name, which asks once; the prompt is somewhere in the request."""
        raise NotImplementedError

    async def single_async(self, world: World, prompt: str) -> Paths:
        """The same as `single`, in a loop that others share. Ends with all its HTTP clients closed."""
        raise NotImplementedError

    def nested(self, world: World, prompt: str) -> Paths:
        """An agent or team inside another: at least one path has two levels."""
        raise NotImplementedError

    def handoff(self, world: World, prompt: str) -> Paths:
        """One agent hands over to another. The path of the first request is the giver's, of the last the taker's."""
        raise NotImplementedError

    def parallel(self, world: World, prompt: str) -> Paths:
        """At least two agents, or calls of one agent, at once. The order of the paths does not matter."""
        raise NotImplementedError

    def tool_ok(self, world: World, prompt: str) -> Paths:
        """An agent that uses a tool named `look_up` with the argument `word`, `x`; the tool says `x means x`."""
        raise NotImplementedError

    def tool_error(self, world: World, prompt: str) -> Paths:
        """The same, but the tool raises LookupError("no x"); what the framework then raises is caught here."""
        raise NotImplementedError

    def stream(self, world: World, prompt: str) -> Paths:
        """One agent whose answer is streamed, read to its end. Requests have `stream: true`."""
        raise NotImplementedError

    def stream_break(self, world: World, prompt: str) -> Paths:
        """A stream that is left after its first piece, by `break`; then `raw` in the same task. The last path is ""."""
        raise NotImplementedError

    def retry(self, world: World, prompt: str) -> Paths:
        """One agent whose client tries again (three times) after errors of the server. The engine fails twice."""
        raise NotImplementedError

    def cancel(self, world: World, prompt: str) -> Paths:
        """A run that is cancelled while the engine hangs: wait until `world.engine.requests`, cancel, swallow that."""
        raise NotImplementedError

    def raw_client(self, world: World, prompt: str) -> Paths:
        """A tool, node or step of an agent calls `world.raw()` (or `await world.raw_async()`) itself."""
        raise NotImplementedError

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        """The user's own code inside the program (node, tool, guardrail...) raises `error`. Let out what comes out."""
        raise NotImplementedError

    def duplicates(self, world: World, prompt: str) -> Paths:
        """Two different agents bear one name and ask once each: two requests of one leaf name."""
        raise NotImplementedError

    def tiny(self, world: World) -> Callable[[], object]:
        """A function that runs one agent with a scripted model inside the process: only we could hold on to anything."""
        raise NotImplementedError
