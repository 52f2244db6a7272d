"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum, then the nearest orthogonal matrix.

On a small transformer it needs about half the examples that AdamW needs. This one is in float32 and takes all matrices
of a shape at once, which is what makes it cheap on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration: singular values end between about 0.7 and 1.2."""


class Muon:
    """For matrices only; embeddings and norms belong to AdamW."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], learning_rate: float, momentum: float = 0.95) -> None:
        self.learning_rate, self.momentum = learning_rate, momentum
        self._groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            self._groups.setdefault(_shape(matrix), []).append(matrix)
        self._momenta = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    def step(self, scale: float = 1.0) -> None:
        """One update, at `scale` times the learning rate; the size of a step is about that of AdamW's."""
        with torch.no_grad():
            for shape, group in self._groups.items():
                self._step(shape, group, scale * self.learning_rate * 0.2 * max(shape) ** 0.5)

    def _step(self, shape: tuple[int, int], group: list[torch.nn.Parameter], size: float) -> None:
        gradient = torch.stack([_lying(matrix, matrix.grad) for matrix in group])
        mean = self._momenta[shape].lerp_(gradient, 1 - self.momentum)
        update = orthogonal(gradient.lerp(mean, self.momentum))
        for matrix, change in zip(group, update, strict=True):
            matrix.sub_(_lying(matrix, change), alpha=size)


def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Roughly the nearest matrices with orthonormal rows. Shape [n, rows, columns], rows <= columns."""
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _shape(matrix: Tensor) -> tuple[int, int]:
    return min(matrix.shape), max(matrix.shape)


def _lying(matrix: Tensor, value: Tensor | None) -> Tensor:
    """`value`, turned so that it has no more rows than columns; turns back what it turned."""
    assert value is not None
    return value.mT if matrix.shape[0] > matrix.shape[1] else value
