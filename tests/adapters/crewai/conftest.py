"""CrewAI without its telemetry, traces and questions, and with its files in a folder of the session's."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

_FOLDER = tempfile.TemporaryDirectory(prefix="agl-crewai-")
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TESTING": "true",
    "OTEL_SDK_DISABLED": "true",
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
