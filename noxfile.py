"""nox -l lists the sessions; plain nox runs what a pull request must pass."""

import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
# Python 3.11 is what we need; other versions are tested where they are at hand, else skipped with a word.
nox.options.error_on_missing_interpreters = False
if root := os.environ.get("PYENV_ROOT"):  # its shims answer for the active version alone
    os.environ.setdefault("PYENV_VERSION", ":".join(sorted(v.name for v in Path(root, "versions").glob("3.1[1-9]*"))))
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")

PROJECT = nox.project.load_toml("pyproject.toml")
TEST = nox.project.dependency_groups(PROJECT, "test")
LINT = nox.project.dependency_groups(PROJECT, "lint")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "Agg"}

# The oldest release that we promise, and today's: (extra, folder of tests, what to tell pip, what to tell pytest).
MATRIX = {
    "openai-oldest": ("openai", "openai", ["-c", "constraints/openai-oldest.txt"], []),
    "openai-newest": ("openai", "openai", [], []),
    "langgraph-oldest": (
        "langgraph",
        "langgraph",
        ["-c", "constraints/langgraph-oldest.txt"],
        ["-W", "ignore:AgentStatePydantic has been moved"],  # langgraph 1.0.0 warns about its own import
    ),
    "langgraph-newest": ("langgraph", "langgraph", [], []),
    "openai-agents-oldest": ("openai-agents", "openai_agents", ["-c", "constraints/openai-agents-oldest.txt"], []),
    "openai-agents-newest": ("openai-agents", "openai_agents", [], []),
    "autogen-oldest": ("autogen", "autogen", ["-c", "constraints/autogen-oldest.txt"], []),
    "autogen-newest": ("autogen", "autogen", [], []),
    "crewai-oldest": ("crewai", "crewai", ["-c", "constraints/crewai-oldest.txt"], []),
    "crewai-newest": ("crewai", "crewai", [], []),
}


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types and walls."""
    session.install("-e", ".", *LINT)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")


@nox.session(python=["3.11", "3.12", "3.13"])
def core(session: nox.Session) -> None:
    """No framework and no torch is installed here: the core must stand alone."""
    session.install("-e", ".")
    session.run("python", "-c", "import agentlightning as agl; [getattr(agl, name) for name in agl.__all__]")
    session.run("agl", "--help", silent=True)
    session.install(*TEST)
    session.run("pytest", "tests/core", *session.posargs, env=OFFLINE)


@nox.session
def store(session: nox.Session) -> None:
    """The store on every database: also on a PostgreSQL server that the tests start themselves."""
    session.install("-e", ".[postgres,otel]", *TEST)
    session.run("pytest", "tests/core", "-k", "store or worker", *session.posargs, env=OFFLINE)


@nox.session
@nox.parametrize("name", list(MATRIX), ids=list(MATRIX))
def adapters(session: nox.Session, name: str) -> None:
    """Each framework alone, at the oldest release that we promise and at today's."""
    extra, folder, pip, pytest = MATRIX[name]
    session.install("-e", f".[{extra}]", *TEST, *pip)
    session.run("pytest", f"tests/adapters/{folder}", *pytest, *session.posargs, env=OFFLINE)


# pip, not uv: torch for the CPU may lie in a folder of wheels that only pip is told of.
@nox.session(venv_backend="virtualenv")
def train(session: nox.Session) -> None:
    """The policy back end, the algorithms, and the whole way from a graph to new weights."""
    session.install("-c", "constraints/cpu.txt", "-e", ".[langgraph,train,gguf]", *TEST)
    session.run("pytest", "tests/algorithms", *session.posargs, env=OFFLINE)


@nox.session(venv_backend="virtualenv")
def examples(session: nox.Session) -> None:
    """Installed as a user would: README command 1."""
    session.install("-c", "constraints/cpu.txt", ".[langgraph,train]")
    session.install("-c", "constraints/cpu.txt", ".[autogen]", *TEST)
    session.run("pytest", "tests/examples", *session.posargs, env=OFFLINE)
