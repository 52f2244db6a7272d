"""What the back end trains and serves: the network, its adapters or its frozen copy, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from agentlightning.errors import PolicyError
from agentlightning.schema import Floats, Route

from .base import PolicySettings, Row, Update
from .torch_checkpoint import STATE, read_state
from .torch_engine import Served
from .torch_lane import Lane
from .torch_learner import Learner
from .torch_lora import Adapters, selector_of
from .torch_model import Network, load_network, load_tokenizer
from .torch_options import TorchOptions

FULL = "policy"


class Weights:
    """See the module. Fulfils `Trainable`; all methods run on the engine's thread once that has started."""

    def __init__(self, settings: PolicySettings, options: TorchOptions, path: Path) -> None:
        self.settings, self.options = settings, options
        self.version = 0
        self.base_path = _base_path(path)
        """Where the unadapted weights come from."""
        self.initial_path = self.base_path
        self.tokenizer = load_tokenizer(self.base_path, options)
        self.network = load_network(self.base_path, options)
        self.network.check()
        self._frozen: Network | None = None
        self.adapters = self._load_adapters(path / "adapters")
        self.learner = Learner(self, settings.learning_rate, options.micro_tokens, self.network.context)
        self.lane = Lane(self.network, options)
        self._base_lane: Lane | None = None
        self.base_name = _unused("base", {*settings.selectors, FULL, *self.frozen_adapters})

    # ---- names

    def _load_adapters(self, folder: Path) -> Adapters | None:
        """The adapters in the model's folder, and new ones for selectors that have none."""
        settings, options = self.settings, self.options
        found = sorted(p for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        if not settings.lora:
            if found:
                raise PolicyError(f"{folder} holds adapters: set lora to their rank, or give a model without adapters.")
            return None
        adapters = Adapters(self.network.model, str(self.base_path))
        for sub in found:
            selector = selector_of(sub)
            adapters.load(selector, sub)
            if selector in settings.selectors:
                self._check_rank(adapters, selector)
                adapters.remember(selector)
        for selector in settings.selectors:
            if selector not in adapters.names:
                adapters.create(selector, settings.lora, options.lora_alpha, options.lora_targets, settings.seed)
        self.network.adapters = adapters
        return adapters

    def _check_rank(self, adapters: Adapters, selector: str) -> None:
        rank = adapters.rank(selector)
        if rank != self.settings.lora:
            raise PolicyError(
                f"the adapter of {selector!r} has rank {rank}, lora is {self.settings.lora}: set lora={rank}."
            )

    @property
    def frozen_adapters(self) -> list[str]:
        """Adapters that came with the model and are served, not trained."""
        names = self.adapters.names if self.adapters else {}
        return [name for name in names if name not in self.settings.selectors]

    def routes(self) -> tuple[Route, ...]:
        """Who is answered by what; `*` comes last."""
        named = [s for s in self.settings.selectors if s != "*"]
        routes = [Route(s, s if self.adapters else FULL, True) for s in named]
        routes += [Route(s, s, False) for s in self.frozen_adapters if s != "*"]
        if "*" in self.settings.selectors:
            return (*routes, Route("*", "*" if self.adapters else FULL, True))
        if "*" in self.frozen_adapters:
            return (*routes, Route("*", "*", False))
        return (*routes, Route("*", self.base_name, False))

    def served(self) -> dict[str, Served]:
        """Every name that may be asked for."""
        main: Callable[[], Lane] = lambda: self.lane
        if self.adapters:
            return {name: Served(main, name) for name in self.adapters.names} | {self.base_name: Served(main, None)}
        return {FULL: Served(main, None), self.base_name: Served(self.base_lane, None)}

    def base_lane(self) -> Lane:
        """Full weights: the initial weights as a model of their own, made when somebody first asks for them."""
        if self._base_lane is None:
            self._base_lane = Lane(self.frozen(), self.options)
        return self._base_lane

    def frozen(self) -> Network:
        """Full weights: the network at the initial weights. Never a view of what is trained."""
        if self._frozen is None:
            self._frozen = load_network(self.initial_path, self.options)
            self._frozen.token_bytes = self.network.token_bytes
        return self._frozen

    # ---- learning

    def key(self, selector: str) -> str:
        if selector not in self.settings.selectors:
            raise PolicyError(f"agent {selector!r} is not trained here; trained: {', '.join(self.settings.selectors)}.")
        return selector if self.adapters else FULL

    def current(self, selector: str) -> tuple[Network, AbstractContextManager[None]]:
        self.key(selector)
        return self.network, self.adapters.one(selector) if self.adapters else nullcontext()

    def initial(self, selector: str) -> tuple[Network, AbstractContextManager[None]]:
        if self.adapters:
            return self.network, self.adapters.one(selector, initial=True)
        return self.frozen(), nullcontext()

    def parameters(self, key: str) -> dict[str, torch.nn.Parameter]:
        return self.adapters.parameters(key) if self.adapters else dict(self.network.model.named_parameters())

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Inside, all cores work: nobody is being answered."""
        torch.set_num_threads(self.options.learning_threads())
        try:
            yield
        finally:
            self.serve()

    def serve(self) -> None:
        """As many threads as answering is worth; to be called on the thread that answers."""
        torch.set_num_threads(self.options.serving_threads(self.network.model.num_parameters()))

    def changed(self) -> None:
        if self.adapters:
            self.adapters.changed()

    def update(self, update: Update) -> dict[str, float]:
        """See `Policy.update`."""
        with self.learning():
            metrics = self.learner.update(update)
        self.version += 1
        self.lane.forget({self.key(row.selector) for row in update.rows} if self.adapters else None)
        return metrics

    def logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        """See `Policy.logprobs`."""
        with self.learning():
            return self.learner.logprobs(rows)


def _base_path(path: Path) -> Path:
    """The model itself, or where a checkpoint of adapters says that its base is."""
    if path.is_file() or (path / "config.json").exists():
        return path
    if not (path / STATE).exists():
        raise PolicyError(f"{path} is no model: there is neither config.json nor {STATE} in it.")
    base = Path(read_state(path).base)
    if not base.exists():
        raise PolicyError(f"the adapters in {path} belong to the model {base}, which is not there: put it back.")
    return base


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
