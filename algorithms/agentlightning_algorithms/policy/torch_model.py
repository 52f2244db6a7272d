"""One model as two functions, `hidden` and `logits`, that the engine and the learner share: the same numerics in both."""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentlightning.errors import PolicyError

from .torch_cache import PlainCache, SlotCache
from .torch_lora import Adapters
from .torch_options import TorchOptions

log = logging.getLogger(__name__)


class Network:
    """A causal language model in evaluation mode: without dropout, always."""

    def __init__(self, model: Any, context: int, adapters: Adapters | None = None) -> None:
        self.model, self.context, self.adapters = model, context, adapters
        self.decoder = model.get_decoder()
        self.head = model.get_output_embeddings()
        self.device: torch.device = self.head.weight.device
        self.vocabulary = int(self.head.weight.shape[0])
        self.token_bytes = 1.0
        """Memory for the keys and values of one token; measured by `check`."""
        config = model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        names = inspect.signature(self.decoder.forward).parameters
        self._cache_word = "cache" if "cache" in names else "past_key_values"
        self._last_position = int(getattr(config, "max_position_embeddings", None) or context) - 1

    def hidden(
        self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache: PlainCache | None = None
    ) -> Tensor:
        """Last hidden states [rows, tokens, width] for `ids` [rows, tokens].

        Without a mask rows start at position 0 and are causal; padding at the right is never seen.
        """
        if positions is not None:
            positions = positions.clamp(max=self._last_position)
        words = {self._cache_word: cache, "use_cache": cache is not None}
        out = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, **words)
        return out[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] in float32."""
        logits = self.head(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def each(self, adapters: list[str | None]) -> AbstractContextManager[None]:
        """Inside, row i of a batch is answered by adapter i."""
        return self.adapters.each(adapters, self.device) if self.adapters else nullcontext()

    def check(self) -> None:
        """Compares what is computed here with the model's own forward pass. Raises PolicyError where they differ.

        Before adapters are added: the cache must not know them.
        """
        ids = torch.arange(6, device=self.device)[None] % self.vocabulary
        with torch.inference_mode():
            wanted = self.model(input_ids=ids).logits.float()
            cache = SlotCache()
            got = []
            for start, stop in ((0, 4), (4, 6)):
                positions = cache.begin([0], [start], stop - start, self.device)
                mask = torch.arange(cache.width, device=self.device) <= positions[:, None, :, None]
                got.append(self.logits(self.hidden(ids[:, start:stop], positions, mask, cache)))
        self.token_bytes = cache.token_bytes()
        error = float((torch.cat(got, 1) - wanted).abs().max())
        limit = 1e-3 if self.head.weight.dtype == torch.float32 else 0.5
        if not error <= limit * max(1.0, float(wanted.abs().max())):
            raise PolicyError(
                f"{type(self.model).__name__} computes differently from what the torch back end assumes (logits differ "
                f"by {error:.2g}): it serves decoder-only models with full attention. Use another back end or model."
            )


def load_network(path: Path, options: TorchOptions) -> Network:
    """Loads a Hugging Face folder or a `.gguf` file. Raises PolicyError with the cause."""
    from transformers import AutoModelForCausalLM

    words: dict[str, Any] = {"dtype": getattr(torch, options.dtype)}
    if path.is_file():
        from transformers import GgufConfig

        # Dequantised, so that it can be trained and saved again.
        words |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    folder = path.parent if path.is_file() else path
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **words)
        model = model.to(options.device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, AssertionError) as error:
        raise PolicyError(f"cannot load the model at {path}: {error}") from error
    return Network(model, _context(model.config.get_text_config(), options.max_context))


def load_tokenizer(path: Path, options: TorchOptions) -> Any:
    """The tokenizer beside the weights (or inside a `.gguf`), with the chat template that the options name."""
    from transformers import AutoTokenizer

    words: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **words)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise PolicyError(f"cannot load the tokenizer at {path}: {error}") from error
    if options.chat_template:
        template = options.chat_template
        tokenizer.chat_template = template if "{" in template else Path(template).read_text()
    return tokenizer


def _context(config: Any, wanted: int) -> int:
    """Tokens that a sequence may have. Inside its window, sliding attention is full attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise PolicyError(f"layers of kind {sorted(kinds)} are not served by the torch back end: use another model.")
    limits = [int(getattr(config, "max_position_embeddings", None) or 2048)]
    window = getattr(config, "sliding_window", None)
    if window and ("sliding_attention" in kinds or not getattr(config, "layer_types", None)):
        limits.append(int(window))
    if wanted > min(limits):
        raise PolicyError(f"max_context {wanted} is more than the {min(limits)} tokens that the model allows.")
    return wanted or min(limits)
