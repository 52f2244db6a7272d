"""A saved policy: a folder that is there complete or not at all.

Full weights: a Hugging Face folder. Adapters: `adapters/<selector>` as peft folders, and the name of the base. In both:
the tokenizer, `optimizer.safetensors`, and `policy.json`, which is `State`.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from agentlightning.errors import PolicyError

from .torch_lora import folder_name, selector_of

if TYPE_CHECKING:
    from .torch_weights import Weights

STATE, OPTIMISER = "policy.json", "optimizer.safetensors"
_JOIN = "\x1f"


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself."""

    version: int
    base: str
    """The model that training began with: frozen agents and the KL term keep referring to it."""
    lora: int
    selectors: tuple[str, ...]
    format: int = 1


def read_state(folder: Path) -> State:
    """Raises PolicyError where `folder` is no checkpoint of ours."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise PolicyError(f"{folder} is not a saved policy: {error}. Give a folder that `save` wrote.") from error


def save(weights: Weights, folder: Path) -> None:
    """See `Policy.save`."""
    with _atomic(folder) as made:
        adapters, settings = weights.adapters, weights.settings
        if adapters is None or weights.options.save_base:
            _save_model(weights, made)
        weights.tokenizer.save_pretrained(made)
        for selector in adapters.names if adapters else ():
            target = made / "adapters" / folder_name(selector)
            if adapters and selector in settings.selectors:
                adapters.save(selector, target)
            elif adapters:
                shutil.copytree(adapters.sources[selector], target)
        _save_optimisers(weights, made / OPTIMISER)
        state = State(weights.version, str(weights.initial_path), settings.lora, settings.selectors)
        (made / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))


def load(weights: Weights, folder: Path) -> None:
    """See `Policy.load`. Raises PolicyError before anything is changed where the folder does not fit."""
    state = read_state(folder)
    if state.lora != weights.settings.lora:
        raise PolicyError(f"{folder} was trained with lora={state.lora}, this policy has lora={weights.settings.lora}.")
    if weights.adapters:
        _load_adapters(weights, folder)
    else:
        _load_full(weights, folder)
        weights.initial_path = Path(state.base)
    _load_optimisers(weights, folder / OPTIMISER)
    weights.version = state.version
    weights.changed()
    weights.lane.forget()


def _load_adapters(weights: Weights, folder: Path) -> None:
    assert weights.adapters is not None
    found = {selector_of(path): path for path in (folder / "adapters").iterdir()}
    known = set(weights.adapters.names)
    if set(found) != known:
        raise PolicyError(
            f"{folder} holds adapters of {sorted(found)}, this policy has {sorted(known)}: start it with "
            f"model={str(folder)!r} to take up what is there."
        )
    for selector, path in found.items():
        if selector in weights.settings.selectors:
            weights.adapters.load(selector, path)


def _load_full(weights: Weights, folder: Path) -> None:
    from .torch_model import load_network

    loaded = load_network(folder, weights.options).model.state_dict()
    own = weights.network.model.state_dict()
    wrong = [name for name in own if name not in loaded or loaded[name].shape != own[name].shape]
    if wrong:
        raise PolicyError(f"{folder} does not fit this model: {wrong[:3]} differ. Start from the model it came from.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(loaded[name])


def _save_optimisers(weights: Weights, file: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for key, optimiser in weights.learner.optimisers.items():
        for name, parameter in weights.parameters(key).items():
            for slot, value in optimiser.state.get(parameter, {}).items():
                tensors[_JOIN.join((key, name, slot))] = value.detach().cpu().contiguous()
    save_file(tensors, file)


def _load_optimisers(weights: Weights, file: Path) -> None:
    from safetensors.torch import load_file

    states: dict[str, dict[str, dict[str, Tensor]]] = {}
    for joined, value in load_file(file).items():
        key, name, slot = joined.split(_JOIN)
        states.setdefault(key, {}).setdefault(name, {})[slot] = value
    weights.learner.optimisers.clear()
    for key, by_name in states.items():
        optimiser = weights.learner.optimiser(key)
        full: dict[str, Any] = optimiser.state_dict()
        names = list(weights.parameters(key))
        full["state"] = {names.index(name): slots for name, slots in by_name.items()}
        optimiser.load_state_dict(full)


def _save_model(weights: Weights, folder: Path) -> None:
    """The model under its own names, as if it had never had adapters."""
    state = weights.network.model.state_dict()
    bare = {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}
    weights.network.model.save_pretrained(folder, state_dict=bare)


@contextmanager
def _atomic(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the name `folder` when the block has succeeded."""
    made = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir(parents=True)
        yield made
        _sync(made)
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
        for left in _leftovers(folder):
            shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise PolicyError(f"cannot save the policy to {folder}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _leftovers(folder: Path) -> list[Path]:
    """What was there before, and what savers of the same folder left that were killed."""
    name = glob.escape(f".{folder.name}.")
    return [path for end in ("part", "old") for path in folder.parent.glob(f"{name}*.{end}")]


def _sync(folder: Path) -> None:
    """To the disk, so that a finished step survives a power cut."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
