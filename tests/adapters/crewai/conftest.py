"""CrewAI without its telemetry, traces and questions, and with its files in a folder of the session's."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

_FOLDER = tempfile.TemporaryDirectory(prefix="agl-crewai-")
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TESTING": "true",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "CREWAI_STORAGE_DIR": _FOLDER.name,
}

os.environ.update(QUIET)  # CrewAI reads them when it is imported

WARNINGS = (
    "ignore:function_calling_llm is deprecated",
    "ignore:deprecated$:DeprecationWarning",
    "ignore:.* callbacks cannot be serialized",
)
"""What CrewAI says of its own code, and of callbacks that are not saved in checkpoints, which nobody asked for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        assert local, f"CrewAI wants to speak to {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
