"""The rules of the house, as tests: sizes, walls, and words that a file must not hold."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "agentlightning": ROOT / "core",
    "agentlightning_adapters": ROOT / "adapters",
    "agentlightning_algorithms": ROOT / "algorithms",
}
MAX_FILE, MAX_FUNCTION = 400, 60
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

CODE = [
    path
    for folder in ("core", "adapters", "algorithms", "examples", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
SHIPPED = [path for path in CODE if path.relative_to(ROOT).parts[0] in ("core", "adapters", "algorithms")]
WORDS = [
    *CODE,
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "noxfile.py", ".ci/run")),
    *(path for folder in ("docs", "constraints", "examples") for path in sorted((ROOT / folder).rglob("*.[mt][dx]*"))),
]


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    """Top-level packages that these statements import, at any depth."""
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def for_types_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


# Sizes.


@pytest.mark.parametrize("path", CODE, ids=short)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE, f"{short(path)} has {lines} lines, over {MAX_FILE}: split it where its idea splits"


@pytest.mark.parametrize("path", CODE, ids=short)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: length for f in functions if (length := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION}
    assert not long, f"{short(path)}: over {MAX_FUNCTION} lines: {long}"


@pytest.mark.parametrize("path", [p for p in CODE if p.read_text(encoding="utf-8").strip()], ids=short)
def test_a_module_says_its_idea_first(path: Path) -> None:
    assert ast.get_docstring(tree(path)), f"{short(path)} has no module docstring"


# Nothing is swallowed.


def swallows(handler: ast.ExceptHandler) -> bool:
    broad = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
    return broad and all(isinstance(node, ast.Pass) or ast.unparse(node) == "..." for node in handler.body)


@pytest.mark.parametrize("path", CODE, ids=short)
def test_no_error_vanishes(path: Path) -> None:
    silent = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.ExceptHandler) and swallows(node)]
    hushed = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and re.fullmatch(r"(contextlib\.)?suppress\((Base)?Exception\)", ast.unparse(node))
    ]
    assert not silent + hushed, f"{short(path)} swallows every error at lines {silent + hushed}"


# Walls. import-linter checks the same between our packages; here the rule is what each may ask of the outside.


def may_import(package: str) -> set[str]:
    asked = list(PROJECT["project"]["dependencies"])
    if package != "agentlightning":
        asked += [name for extra in PROJECT["project"]["optional-dependencies"].values() for name in extra]
    names = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in asked}
    spelled = {module for module in sys.stdlib_module_names}
    return spelled | {IMPORTED_AS.get(name, name.lower().replace("-", "_")) for name in names}


IMPORTED_AS = {"openai-agents": "agents"}
"""Distributions whose module has another name."""


LAZY = {
    "agentlightning/prompts.py": {"jinja2"},
    "agentlightning/propagation.py": {"httpx2"},
    "agentlightning/results.py": {"matplotlib"},
    "agentlightning/store/otlp_wire.py": {"google", "opentelemetry"},
    "agentlightning/store/postgres.py": {"psycopg"},
}
"""Used where the user's environment has it; never needed."""


@pytest.mark.parametrize("path", SHIPPED, ids=short)
def test_a_room_imports_only_what_it_declares(path: Path) -> None:
    package = path.relative_to(ROOT).parts[1]
    ours = {package, "agentlightning"}
    extra = LAZY.get("/".join(path.relative_to(ROOT).parts[1:]), set())
    beyond = set(imported(tree(path).body)) - may_import(package) - ours - extra
    assert not beyond, f"{short(path)} imports {sorted(beyond)}, which {package} does not declare or may not know"


HEAVY = {"torch", "transformers", "peft", "matplotlib", "safetensors", "gguf", "accelerate"}


@pytest.mark.parametrize("path", [p for p in SHIPPED if "/policy/torch" not in p.as_posix()], ids=short)
def test_heavy_packages_are_loaded_by_what_needs_them(path: Path) -> None:
    at_import = [
        node
        for node in tree(path).body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.Try) and not for_types_only(node)
    ]
    heavy = set(imported(at_import)) & HEAVY
    if path.name in ("loss.py", "tensors.py"):
        heavy -= {"torch"}
    assert not heavy, f"{short(path)} loads {sorted(heavy)} when it is imported"


# What the project file promises is there.


@pytest.mark.parametrize(
    "entry",
    [value for group in PROJECT["project"]["entry-points"].values() for value in group.values()],
)
def test_each_entry_point_has_a_file(entry: str) -> None:
    module = entry.partition(":")[0]
    home = PACKAGES[module.partition(".")[0]] / module.replace(".", "/")
    assert home.with_suffix(".py").is_file() or (home / "__init__.py").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed_and_lies_where_its_import_says(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    assert (Path(spec.origin).parent / "py.typed").is_file()


# Words.


@pytest.mark.parametrize("path", WORDS, ids=short)
def test_no_file_names_a_folder_of_somebodys_machine(path: Path) -> None:
    folders = re.findall(r"(?<![\w.:/~*}\-])/(?:home|root|tmp|work|opt|mnt|srv|Users)/[\w.-]+", path.read_text("utf-8"))
    assert not folders, f"{short(path)} names {folders}"


HOSTS = {
    "0.0.0.0",
    "127.0.0.1",
    "localhost",
    "github.com",
    "kellerjordan.github.io",
    "arxiv.org",
    "docs.python.org",
    "www.w3.org",
    "opentelemetry.io",
}


@pytest.mark.parametrize("path", WORDS, ids=short)
def test_no_file_names_a_host_that_is_not_for_reading(path: Path) -> None:
    hosts = set(re.findall(r"https?://([A-Za-z][\w-]*(?:\.[\w-]+)+|\d+(?:\.\d+){3})", path.read_text("utf-8")))
    beyond = {host for host in hosts - HOSTS if not re.search(r"(^|\.)(example(\.\w+)?|test|invalid|local)$", host)}
    assert not beyond, f"{short(path)} names {sorted(beyond)}"


@pytest.mark.parametrize("path", WORDS, ids=short)
def test_nothing_is_left_for_later_in_the_code(path: Path) -> None:
    marks = [mark for mark in ("TO" + "DO", "FIX" + "ME", "XX" + "X") if mark in path.read_text("utf-8")]
    assert not marks, f"{short(path)} holds {marks}: do it, or file an issue"


def test_every_environment_variable_is_in_the_one_table() -> None:
    used = {name for path in CODE for name in re.findall(r"\bAGL_[A-Z][A-Z0-9_]*\b", path.read_text("utf-8"))}
    told = set(re.findall(r"^\| `(AGL_[A-Z0-9_]+)`", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE))
    assert used - {"AGL_"} == told


def test_readme_and_ci_agree_on_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert 'pip install -c constraints/cpu.txt ".[langgraph,train]" && python -m examples.sql_agent' in readme
    assert "pip install nox && nox" in readme
    assert (ROOT / ".ci/run").read_text("utf-8").splitlines()[-1] == "pip install nox && nox"
