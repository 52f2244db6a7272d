"""Finding plug-ins without importing them, loading one, and saying what is wrong with those that do not load."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning import hooks, plugins
from agentlightning.errors import ConfigError, PluginError
from agentlightning.recorder import CurrentRecorder

MODULES = {
    "good": """
        import agentlightning as agl
        seen = []
        @agl.hookimpl
        def agl_callback(recorder):
            return ("callback", recorder)
        @agl.hookimpl
        def agl_install(recorder):
            seen.append(recorder)
            return seen.clear
    """,
    "silent": "import agentlightning as agl",
    "misspelt": """
        import agentlightning as agl
        @agl.hookimpl
        def agl_calback(recorder): ...
    """,
    "wrong_arguments": """
        import agentlightning as agl
        @agl.hookimpl
        def agl_callback(recorder, colour): ...
    """,
    "needs_framework": "import some_framework.core",
    "needs_other": "import something_else",
    "broken": "1 / 0",
    "maker": """
        class Maker:
            def __init__(self, model, agents=("*",)):
                self.model, self.agents = model, agents
    """,
}

METADATA = """\
Metadata-Version: 2.3
Name: foreign-plugins
Version: 1.0
Provides-Extra: framework
Requires-Dist: some-framework>=1 ; extra == "framework"
"""

ENTRIES = """\
[agentlightning.adapters]
good = foreign_good
silent = foreign_silent
misspelt = foreign_misspelt
wrong_arguments = foreign_wrong_arguments
needs_framework = foreign_needs_framework
needs_other = foreign_needs_other
broken = foreign_broken
absent = foreign_absent
no_attribute = foreign_good:nothing

[agentlightning.algorithms]
maker = foreign_maker:Maker
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another distribution with plug-ins of its own, installed for the length of a test."""
    import textwrap

    for name, code in MODULES.items():
        (tmp_path / f"foreign_{name}.py").write_text(textwrap.dedent(code))
    info = tmp_path / "foreign_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(f"foreign_{name}", None)


def test_names_are_listed_without_importing(foreign):
    assert {"good", "broken", "absent"} <= set(plugins.names(plugins.ADAPTERS))
    assert plugins.names("agentlightning.nothing") == []
    assert not [name for name in sys.modules if name.startswith("foreign_")]


def test_only_the_one_asked_for_is_imported(foreign):
    assert plugins.load(plugins.ADAPTERS, "good").__name__ == "foreign_good"
    assert [name for name in sys.modules if name.startswith("foreign_")] == ["foreign_good"]


def test_callback_and_install_of_a_foreign_plugin(foreign):
    """A plug-in from outside can do what ours do."""
    kind, recorder = agl.callback("good")
    assert kind == "callback" and isinstance(recorder, CurrentRecorder)
    undo = agl.install("good")
    seen = sys.modules["foreign_good"].seen
    assert len(seen) == 1
    undo()
    assert seen == []


def test_install_is_a_context_manager_and_undoes_once(foreign):
    with agl.install("good") as undo:
        seen = sys.modules["foreign_good"].seen
        assert len(seen) == 1
    assert seen == []
    seen.append("of another")
    undo()
    assert seen == ["of another"], "a second undo takes nothing from others"


def test_the_block_is_left_by_an_error_too(foreign):
    with pytest.raises(KeyError), agl.install("good"):
        raise KeyError
    assert sys.modules["foreign_good"].seen == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unheard", "no plug-in 'unheard' in agentlightning.adapters; known: .*good"),
        ("silent", r"gives no callback: use `agl.install\('silent'\)`"),
        ("misspelt", "unknown hook 'agl_calback'.*agl_callback"),
        ("wrong_arguments", "colour"),
        ("needs_framework", r'needs some_framework.*pip install "foreign-plugins\[framework\]"'),
        ("needs_other", "needs something_else.*pip install something_else"),
        ("broken", "ZeroDivisionError"),
        ("absent", "module that does not exist"),
        ("no_attribute", "AttributeError"),
    ],
)
def test_every_error_names_the_cure(foreign, name, said):
    with pytest.raises(PluginError, match=f"(?s){said}"):
        agl.callback(name)


def test_install_of_an_adapter_that_cannot_listen(foreign):
    with pytest.raises(PluginError, match=r"use `agl.callback\('silent'\)`"):
        agl.install("silent")


def test_ours_without_its_framework_names_the_extra():
    """In an interpreter where LangChain cannot be imported."""
    if not plugins.names(plugins.ADAPTERS):
        pytest.skip("this project is not installed, so it has no entry points")
    code = """
import sys
for name in ("langchain_core", "langgraph"):
    sys.modules[name] = None
import agentlightning as agl
try:
    agl.callback(sys.argv[1])
except agl.AgentLightningError as error:
    print(error)
"""
    for name in ("langchain", "langgraph"):
        out = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
        assert 'pip install ".[langgraph]"' in out.stdout, out.stdout + out.stderr


def test_without_any_plugin_the_message_says_how_to_install(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    with pytest.raises(PluginError, match="pip install"):
        plugins.load(plugins.ADAPTERS, "langgraph")


def test_algorithms_and_their_knobs(foreign):
    made = plugins.algorithm("maker", model="m", agents=["a"])
    assert (made.model, made.agents) == ("m", ["a"])
    with pytest.raises(ConfigError, match="modle.*knobs are: model, agents"):
        plugins.algorithm("maker", modle="m")
    with pytest.raises(ConfigError, match="model"):
        plugins.algorithm("maker")
    with pytest.raises(PluginError, match="known: .*maker"):
        plugins.algorithm("unheard")


def observer(name: str, hook: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.agl_step_finished = hooks.hookimpl(hook)  # type: ignore[attr-defined]
    return module


def test_observers_are_guarded(caplog):
    """One that fails does not silence the others, nor the run; each gets the arguments that it asks for."""
    seen = []
    manager = plugins.manager(
        observer("first", lambda step, metrics, ledger: seen.append((step, metrics, ledger))),
        observer("second", lambda step: 1 / 0),
        observer("third", lambda metrics: seen.append(metrics)),
    )
    with caplog.at_level(logging.ERROR):
        plugins.notify(manager, "agl_step_finished", step=3, metrics={"a": 1.0}, ledger={})
    assert sorted(map(str, seen)) == ["(3, {'a': 1.0}, {})", "{'a': 1.0}"]
    assert "second failed in agl_step_finished" in caplog.text


def test_the_manager_knows_every_hook():
    manager = plugins.manager()
    specified = {name for name, value in vars(hooks).items() if hasattr(value, "agentlightning_spec")}
    assert specified and specified <= set(vars(manager.hook))
    assert manager.hook.agl_callback(recorder=CurrentRecorder()) is None
