"""Trees of parameters with the shapes of well-known models."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Shapes(NamedTuple):
    """A transformer's sizes: GPT-2's MLP has two kernels, LLaMA's three."""

    width: int
    inner: int
    layers: int
    vocabulary: int
    gated: bool = True

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The kernels of one layer."""
        d = self.width
        shapes = dict.fromkeys(("query", "key", "value", "out"), (d, d))
        shapes |= {"gate": (d, self.inner)} if self.gated else {}
        return shapes | {"up": (d, self.inner), "down": (self.inner, d)}

    def scaled(self, width: int, layers: int) -> Shapes:
        """The same at another width."""
        return self._replace(width=width, inner=self.inner * width // self.width, layers=layers)

    @property
    def parameters(self) -> int:
        """How many, with embedding and last layer."""
        layer = sum(m * n for m, n in self.matrices().values())
        return self.layers * layer + (1 + self.gated) * self.vocabulary * self.width


GPT2_SMALL = Shapes(768, 3072, 12, 50257, gated=False)
# Table 10 of arXiv:2502.07752 (`tests/project/test_papers.py`); then Touvron et al.,
# arXiv:2302.13971 (7B).
LLAMA_130M = Shapes(768, 2048, 12, 32000)
LLAMA = {"1.3B": Shapes(2048, 5461, 24, 32000), "7B": Shapes(4096, 11008, 32, 32000)}


def kernels(model: Shapes, seed: int) -> Any:
    """Gaussian kernels of attention and MLP, the only parameters that every method treats."""
    key = jax.random.key(seed)
    return {
        f"layer_{i:02}": {
            name: {"kernel": jax.random.normal(jax.random.fold_in(key, 10 * i + j), shape)}
            for j, (name, shape) in enumerate(model.matrices().items())
        }
        for i in range(model.layers)
    }


def abstract_kernels(model: Shapes, dtype: Any, scanned: bool = False) -> dict[str, Any]:
    """Shapes of the kernels of attention and MLP: of each layer, or of all on a leading axis."""

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": jax.ShapeDtypeStruct(shape, dtype)}

    shapes = model.matrices().items()
    if scanned:
        return {name: kernel(model.layers, *shape) for name, shape in shapes}
    return {
        f"{i:02}": {name: kernel(*shape) for name, shape in shapes} for i in range(model.layers)
    }
