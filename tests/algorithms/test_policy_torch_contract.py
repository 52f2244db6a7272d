"""The torch back end passes the suite of all back ends, with full weights and with adapters."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from agentlightning_algorithms.policy.base import PolicySettings
from agentlightning_algorithms.policy.torch import TorchPolicy
from tests.conformance.policy import Make, PolicyContract
from tests.fakes.tiny import save_tiny


def maker(folder: Path, **defaults: Any) -> Make:
    def make(**settings: Any) -> TorchPolicy:
        options = {"threads": 1, **settings.pop("options", {})}
        return TorchPolicy(PolicySettings(model=str(folder), options=options, **{**defaults, **settings}))

    return make


class TestFullWeights(PolicyContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory: pytest.TempPathFactory) -> Make:
        return maker(save_tiny(tmp_path_factory.mktemp("tiny")))


class TestAdapters(PolicyContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make(cls, tmp_path_factory: pytest.TempPathFactory) -> Make:
        return maker(save_tiny(tmp_path_factory.mktemp("tiny")), lora=4)
