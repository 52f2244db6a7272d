"""The one public door: few names, loaded when used, and nothing else happens at import."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl

HEAVY = {
    "torch", "transformers", "peft", "langchain_core", "langgraph", "langchain_openai", "openai", "crewai", "autogen_core",
    "agents", "httpx", "httpx2", "sqlalchemy", "starlette", "uvicorn", "numpy", "msgspec", "pluggy", "rich", "typer",
}  # fmt: skip
FOREIGN = HEAVY - {
    "httpx",
    "httpx2",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "numpy",
    "msgspec",
    "pluggy",
    "rich",
    "typer",
}


def fresh(code: str) -> dict[str, list[str]]:
    """Runs code in a new interpreter; gives the modules it loaded and the sockets it touched."""
    watch = "import sys, json; seen = []; sys.addaudithook(lambda e, a: seen.append(e) if e.startswith('socket.') else None)"
    tell = "print(json.dumps({'modules': sorted(sys.modules), 'sockets': seen}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}\n{code}\n{tell}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded(modules: list[str], names: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules} & names


def test_the_facade_is_small_and_each_name_is_there() -> None:
    assert len(agl.__all__) <= 25
    assert agl.__all__ == sorted(set(agl.__all__))
    for name in agl.__all__:
        assert getattr(agl, name) is not None
        assert name in dir(agl)


def test_every_listed_name_has_one_home_and_every_home_is_listed() -> None:
    homes = [name for names in agl._HOMES.values() for name in names]
    assert sorted(homes) == agl.__all__


def test_type_checkers_see_what_users_get() -> None:
    tree = ast.parse(Path(agl.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {node.module: tuple(a.name for a in node.names) for node in block.body if isinstance(node, ast.ImportFrom)}
    assert told == {f"agentlightning.{home}": names for home, names in agl._HOMES.items()}


def test_no_public_name_hides_a_module() -> None:
    modules = {info.name for info in pkgutil.iter_modules(agl.__path__)}
    assert not modules & set(agl.__all__)


def test_a_name_is_the_same_object_as_at_home() -> None:
    for home, names in agl._HOMES.items():
        module = importlib.import_module(f"agentlightning.{home}")
        for name in names:
            assert getattr(agl, name) is getattr(module, name)


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no 'Trainr'; it offers .*Trainer"):
        _ = agl.Trainr  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="Trainr"):
        from agentlightning import Trainr  # type: ignore[attr-defined]  # noqa: F401


def test_import_loads_nothing_and_touches_no_socket() -> None:
    seen = fresh("import agentlightning")
    assert [m for m in seen["modules"] if m.startswith("agentlightning")] == ["agentlightning"]
    assert not loaded(seen["modules"], HEAVY)
    assert not seen["sockets"]


def test_all_public_names_together_need_no_framework_and_no_torch() -> None:
    seen = fresh("import agentlightning as agl\nfor name in agl.__all__: getattr(agl, name)")
    assert not loaded(seen["modules"], FOREIGN)
    assert not [event for event in seen["sockets"] if event in ("socket.connect", "socket.bind", "socket.getaddrinfo")]


def test_a_rollout_function_is_declared_without_the_store_or_a_server() -> None:
    seen = fresh("import agentlightning as agl\n@agl.rollout\ndef solve(task, policy): return 1.0")
    assert not loaded(seen["modules"], FOREIGN | {"sqlalchemy", "starlette", "uvicorn"})
