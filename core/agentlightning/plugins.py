"""Finding plug-ins by entry point and loading one by name: what is not asked for is not imported and costs nothing."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Self, TypeVar

import pluggy

from agentlightning import hooks
from agentlightning.errors import ConfigError, PluginError
from agentlightning.recorder import CurrentRecorder

logger = logging.getLogger(__name__)

OURS = "lightning"
ADAPTERS = "agentlightning.adapters"
ALGORITHMS = "agentlightning.algorithms"
POLICIES = "agentlightning.policies"


def names(group: str) -> list[str]:
    """Names of the plug-ins that are installed in a group such as `agentlightning.adapters`; imports none of them."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """The object behind one entry point.

    Raises PluginError for an unknown name (with the known ones), a missing package (with the command that installs
    it) and a plug-in that cannot be imported.
    """
    found = list(metadata.entry_points(group=group, name=name))
    if not found:
        known = ", ".join(names(group)) or "none: install this project (`pip install .`), not only its files"
        raise PluginError(f"no plug-in {name!r} in {group}; known: {known}.")
    try:
        return found[0].load()
    except ModuleNotFoundError as error:
        raise PluginError(f"{name!r} needs {error.name}, which is not installed: {_cure(found[0], error)}.") from error
    except Exception as error:
        raise PluginError(
            f"plug-in {name!r} ({found[0].value}) cannot be loaded, {type(error).__name__}: {error}; "
            "install versions that its extra allows, or report this to its authors."
        ) from error


def _cure(entry: metadata.EntryPoint, error: ModuleNotFoundError) -> str:
    missing = (error.name or "").partition(".")[0]
    if missing == entry.module.partition(".")[0]:
        return "the entry point names a module that does not exist; report this to the plug-in's authors"
    extra = _extra(entry, missing)
    if extra is None or entry.dist is None:
        return f"run `pip install {missing}`"
    project = "." if entry.dist.name == OURS else entry.dist.name
    return f'run `pip install "{project}[{extra}]"`'


def _extra(entry: metadata.EntryPoint, missing: str) -> str | None:
    """The extra of the plug-in's distribution that brings the missing package."""
    if entry.dist is None:
        return None
    extras = entry.dist.metadata.get_all("Provides-Extra") or []
    if entry.name in extras:
        return entry.name
    for requirement in entry.dist.requires or []:
        wanted = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if wanted and extra and _normal(wanted.group()) == _normal(missing):
            return extra.group(1)
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def manager(*plugins: object) -> pluggy.PluginManager:
    """A manager that knows our hooks, with these plug-ins registered.

    Raises PluginError for a hook that does not exist or has wrong arguments.
    """
    made = pluggy.PluginManager(hooks.PROJECT)
    made.add_hookspecs(hooks)
    try:
        for plugin in plugins:
            made.register(plugin)
        made.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(name for name in vars(hooks) if name.startswith("agl_"))
        raise PluginError(f"{error}; the hooks and their arguments are in agentlightning.hooks: {known}.") from error
    return made


def notify(manager: pluggy.PluginManager, hook: str, **said: Any) -> None:
    """Tells every observer of a hook. One that fails is logged; the others hear it, and the run goes on."""
    for observer in getattr(manager.hook, hook).get_hookimpls():
        try:
            observer.function(*(said[name] for name in observer.argnames))
        except Exception:
            logger.exception("observer %s failed in %s; the run goes on without it", observer.plugin_name, hook)


def callback(name: str) -> Any:
    """The object to hand to a framework, such as `config={"callbacks": [agl.callback("langgraph")]}`.

    It may be made once and used in any number of rollouts; outside rollouts it does nothing.
    Raises PluginError as `load` does, and for adapters that listen globally only.
    """
    made = manager(load(ADAPTERS, name)).hook.agl_callback(recorder=CurrentRecorder())
    if made is None:
        raise PluginError(f"adapter {name!r} gives no callback: use `agl.install({name!r})`.")
    return made


class Installed:
    """What `install` returns: call it, or leave its `with` block, and nothing listens any more. Twice does no harm."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: list[Callable[[], None]] = [undo]

    def __call__(self) -> None:
        try:
            undo = self._undo.pop()  # atomic: two threads never undo together
        except IndexError:
            return
        undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self()


def install(name: str) -> Installed:
    """Listens to a framework globally, with no change to the program; returns the undo, which is a context manager too.

    Raises PluginError as `load` does, and for adapters that must be handed over.
    """
    undo = manager(load(ADAPTERS, name)).hook.agl_install(recorder=CurrentRecorder())
    if undo is None:
        raise PluginError(f"adapter {name!r} cannot listen globally: use `agl.callback({name!r})`.")
    _listening[name] += 1

    def stop() -> None:
        undo()
        _listening[name] -= 1

    return Installed(stop)


_listening: Counter[str] = Counter()


def listening() -> list[str]:
    """Adapters that listen now: programs in other processes need them too."""
    return sorted(name for name, count in _listening.items() if count > 0)


_declared: dict[str, Callable[..., Any]] = {}

MakerT = TypeVar("MakerT", bound=Callable[..., Any])


def algorithm_plugin(name: str) -> Callable[[MakerT], MakerT]:
    """Declares an algorithm of one's own, in this process: `agl.algorithm(name, **knobs)` then makes it.

        @agl.algorithm_plugin("best-of-n")
        class BestOfN:
            def run(self, loop): ...

    Of a function `f(loop, **knobs)` too. An entry point in the group `agentlightning.algorithms` does the same for everybody
    who installs a package. Raises PluginError for a name that is taken.
    """
    if not isinstance(name, str):
        raise PluginError(f"@agl.algorithm_plugin needs a name: write @agl.algorithm_plugin('my-name'), not {name!r}.")
    if name in names(ALGORITHMS):
        raise PluginError(f"an installed algorithm is called {name!r} already: choose another name.")

    def declare(maker: MakerT) -> MakerT:
        _declared[name] = maker if inspect.isclass(maker) else _maker(maker)
        return maker

    return declare


def _maker(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a loop and knobs, as the maker of algorithms that run it."""
    _, *knobs = inspect.signature(function).parameters.values()

    def make(**given: Any) -> FunctionAlgorithm:
        return FunctionAlgorithm(function, given)

    make.__signature__ = inspect.Signature([k.replace(kind=k.KEYWORD_ONLY) for k in knobs])  # type: ignore[attr-defined]
    return make


@dataclass(frozen=True)
class FunctionAlgorithm:
    """An algorithm that is a function."""

    function: Callable[..., Any]
    knobs: dict[str, Any]

    def run(self, loop: Any) -> None:
        self.function(loop, **self.knobs)


def algorithm(name: str, /, **knobs: Any) -> Any:
    """An algorithm by name, such as `agl.algorithm("grpo", model="path-or-name", agents=["writer"])`.

    Raises PluginError as `load` does, and ConfigError for a knob that the algorithm does not have.
    """
    make = _declared[name] if name in _declared else load(ALGORITHMS, name)
    signature = inspect.signature(make)
    known = ", ".join(signature.parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [] if takes_any else sorted(set(knobs) - set(signature.parameters))
    if unknown:
        raise ConfigError(f"algorithm {name!r} has no {', '.join(unknown)}; its knobs are: {known}.")
    try:
        signature.bind(**knobs)
    except TypeError as error:
        raise ConfigError(f"algorithm {name!r}: {error}; its knobs are: {known}.") from error
    return make(**knobs)
