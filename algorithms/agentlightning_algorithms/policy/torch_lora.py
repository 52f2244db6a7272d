"""Many adapters on one base, all in one batch.

peft owns the structure, the initial values and the files. Only the forward pass is ours: peft's own mixed batch walks
through the adapters in Python at every layer. Here the adapters of a layer are laid side by side,
`y += ((x A^T) * mask) B` with A [sum of ranks, in], B [sum of ranks, out] and a mask that leaves each row the columns
of its own adapter: two products however many agents speak.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
import torch.nn.functional as F
from torch import Tensor

from agentlightning.errors import PolicyError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def folder_name(selector: str) -> str:
    """A selector as the name of a folder."""
    return quote(selector, safe="").replace(".", "%2E") if set(selector) <= {"."} else quote(selector, safe="")


def selector_of(folder: Path) -> str:
    return unquote(folder.name)


class Layer:
    """The forward pass of one layer that has adapters; put in the place of peft's."""

    def __init__(self, module: Any, adapters: Adapters) -> None:
        self.module, self.adapters = module, adapters
        self.initial: dict[str, tuple[Tensor, Tensor]] = {}
        self.a = self.b = torch.zeros(0)
        self.owners: tuple[tuple[str, int, float], ...] = ()

    def pack(self) -> None:
        """Lays the adapters side by side, after a change of their values."""
        names = list(self.module.lora_A.keys())
        parts = [(self.module.lora_A[n].weight, self.module.lora_B[n].weight) for n in names]
        self.a = torch.cat([a.detach() for a, _ in parts])
        self.b = torch.cat([b.detach() for _, b in parts], dim=1).T.contiguous()
        self.owners = tuple((n, a.shape[0], self.module.scaling[n]) for n, (a, _) in zip(names, parts, strict=True))

    def remember(self, name: str) -> None:
        """Keeps today's values of an adapter as its initial ones."""
        if name in self.module.lora_A:
            a, b = self.module.lora_A[name].weight, self.module.lora_B[name].weight
            self.initial[name] = (a.detach().clone(), b.detach().clone())

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.module.base_layer(x, *args, **kwargs)
        adapters = self.adapters
        if adapters.mask_rows is not None:
            low = F.linear(x.to(self.a.dtype), self.a) * adapters.mask(self.owners)
            # In place and in one call: at small batches the number of calls is what costs.
            flat = result.flatten(0, -2)
            flat.addmm_(low.flatten(0, -2).to(result.dtype), self.b.to(result.dtype))
            return result
        pair = self._pair()
        if pair is None:
            return result
        a, b = pair
        delta = F.linear(F.linear(x.to(a.dtype), a), b) * self.module.scaling[adapters.active]
        return result + delta.to(result.dtype)

    def _pair(self) -> tuple[Tensor, Tensor] | None:
        name = self.adapters.active
        if name is None or name not in self.module.lora_A:
            return None
        if self.adapters.use_initial:
            return self.initial.get(name)
        return self.module.lora_A[name].weight, self.module.lora_B[name].weight


class Adapters:
    """The adapters of one base model, by selector."""

    def __init__(self, base: Any, base_name: str) -> None:
        self.base, self.base_name = base, base_name
        self.peft: Any = None
        self.names: dict[str, str] = {}
        """Selector -> the name of its peft adapter: module names allow neither dots nor slashes."""
        self.sources: dict[str, Path] = {}
        self.layers: list[Layer] = []
        self.active: str | None = None
        self.use_initial = False
        self.mask_rows: Tensor | None = None
        self._masks: dict[tuple[tuple[str, int, float], ...], Tensor] = {}
        self._stale = True

    def create(self, selector: str, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
        """A new adapter; it changes nothing yet, since B is 0. Its A depends on seed and selector alone."""
        from peft import LoraConfig

        config = LoraConfig(
            r=rank,
            lora_alpha=alpha or 2 * rank,
            target_modules=list(targets) or "all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base_name,
        )
        digest = hashlib.blake2s(f"{seed}/{selector}".encode()).digest()
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            self._inject(selector, config)

    def load(self, selector: str, folder: Path) -> None:
        """Adds the adapter of a peft folder, or puts its values into the one that is there."""
        from peft import LoraConfig, set_peft_model_state_dict
        from safetensors.torch import load_file

        config = LoraConfig.from_pretrained(str(folder))
        _refuse_variants(config, folder)
        if selector not in self.names:
            self._inject(selector, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = set_peft_model_state_dict(self.peft, load_file(folder / WEIGHTS), self.names[selector])
        name = self.names[selector]
        missing = [key for key in report.missing_keys if f".{name}." in key]
        if missing or report.unexpected_keys:
            raise PolicyError(
                f"the adapter in {folder} does not fit the model {self.base_name}: "
                f"{[*missing, *report.unexpected_keys][:3]}. Give the model that it was trained on."
            )
        self.sources[selector] = folder
        self.changed()

    def _inject(self, selector: str, config: Any) -> None:
        from peft import get_peft_model

        config.inference_mode = False
        config.base_model_name_or_path = self.base_name
        name = f"agl{len(self.names)}"
        with warnings.catch_warnings():  # peft asks transformers for a name that it is renaming
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            if self.peft is None:
                self.peft = get_peft_model(self.base, config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self.names[selector] = name
        self.peft.requires_grad_(False)
        self.peft.eval()
        known = {id(layer.module): layer for layer in self.layers}
        self.layers = [known.get(id(m)) or self._adopt(m) for m in self.base.modules() if hasattr(m, "lora_A")]
        self.changed()

    def _adopt(self, module: Any) -> Layer:
        layer = Layer(module, self)
        module.forward = layer
        return layer

    def changed(self) -> None:
        """To be called when values have changed."""
        self._stale = True

    def remember(self, selector: str) -> None:
        """Today's values are the initial policy of this selector; without it, the base is."""
        for layer in self.layers:
            layer.remember(self.names[selector])

    def rank(self, selector: str) -> int:
        return int(self.peft.peft_config[self.names[selector]].r)

    def parameters(self, selector: str) -> dict[str, torch.nn.Parameter]:
        """What is trained for a selector, by names that hold across processes."""
        name = self.names[selector]
        found = {}
        for key, value in self.peft.named_parameters():
            if f".{name}." in key:
                found[key.replace(f".{name}.", ".")] = value
        return found

    @contextmanager
    def one(self, selector: str | None, *, initial: bool = False) -> Iterator[None]:
        """Forward passes inside use this adapter (None: the base) in all rows; gradients flow into it."""
        self.active, self.use_initial = self.names[selector] if selector is not None else None, initial
        try:
            yield
        finally:
            self.active, self.use_initial = None, False

    @contextmanager
    def each(self, selectors: Sequence[str | None], device: torch.device) -> Iterator[None]:
        """Forward passes inside use `selectors[i]` in row i; no gradients."""
        if len(set(selectors)) == 1:
            with self.one(selectors[0]):
                yield
            return
        if self._stale:
            for layer in self.layers:
                layer.pack()
            self._stale = False
        numbers = {name: number for number, name in enumerate(self.names.values())}
        rows = [numbers[self.names[s]] if s is not None else -1 for s in selectors]
        self.mask_rows, self._masks = torch.tensor(rows, device=device), {}
        try:
            yield
        finally:
            self.mask_rows, self._masks = None, {}

    def mask(self, owners: tuple[tuple[str, int, float], ...]) -> Tensor:
        """[rows, 1, sum of ranks]: the scale of a row's own adapter in its columns, 0 elsewhere."""
        found = self._masks.get(owners)
        if found is None:
            assert self.mask_rows is not None
            numbers = {name: number for number, name in enumerate(self.names.values())}
            device = self.mask_rows.device
            owner = torch.tensor([numbers[n] for n, rank, _ in owners for _ in range(rank)], device=device)
            scale = torch.tensor([scale for _, rank, scale in owners for _ in range(rank)], device=device)
            found = ((self.mask_rows[:, None] == owner) * scale)[:, None]
            self._masks[owners] = found
        return found

    def save(self, selector: str, folder: Path) -> None:
        """Writes a peft folder. The same values give the same bytes."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        folder.mkdir(parents=True)
        name = self.names[selector]
        state = get_peft_model_state_dict(self.peft, adapter_name=name, save_embedding_layers=False)
        tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = self.peft.peft_config[name].to_dict()
        config["inference_mode"] = True
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True, default=_plain) + "\n")


def _plain(value: object) -> object:
    """Sets in a fixed order: the order in memory differs between processes."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


def _refuse_variants(config: Any, folder: Path) -> None:
    """Only plain LoRA is computed here; anything else would be served wrongly without a word."""
    for feature in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias"):
        if getattr(config, feature, None):
            raise PolicyError(f"the adapter in {folder} uses {feature}; the torch back end knows plain LoRA only.")
    if getattr(config, "bias", "none") != "none":
        raise PolicyError(f"the adapter in {folder} trains biases; the torch back end knows plain LoRA only.")
