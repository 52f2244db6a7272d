"""Checks from outside: sampled tokens are scored again by plain transformers, with the model folder of the start.

Before training that holds for every agent: the engine's log-probabilities are right. After it, it must still hold for the
agents that were not trained: had training touched what answers them, the log-probabilities would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.schema import Completion, selector_of

TOLERANCE = 1e-3
MOST = 64
"""Calls that are scored."""


def calls_of(store: Any, run_id: str, mode: str, without: Sequence[str] = ()) -> list[Completion]:
    """Some calls of an evaluation, leaving out those of the agents `without`."""
    rollouts = store.rollouts(run_id, mode=mode)
    episodes = store.episodes([rollout.id for rollout in rollouts])
    calls = [call for episode in episodes for call in episode.completions if call.defect is None]
    return [call for call in calls if selector_of(without, call.path) is None][:MOST]


def largest_error(model: Path | str, calls: list[Completion]) -> float | None:
    """The largest difference between a log-probability that was served and the start's; None without calls."""
    if not calls:
        return None
    import torch

    network = _load(Path(model))
    errors = []
    for call in calls:
        prompt, response = torch.tensor(call.prompt_ids), torch.tensor(call.response_ids)
        with torch.inference_mode():
            logits = network(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].float()
        scored = (logits / (call.sampling.get("temperature") or 1.0)).log_softmax(-1)
        again = scored.gather(1, response[:, None].long())[:, 0]
        errors.append(float((again - torch.tensor(call.logprobs)).abs().max()))
    return max(errors)


def _load(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if model.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
