"""Methods and recipes of the registry as the training runs have them, and peers in Optax.

Each keeps its own defaults but for ranks, a quarter of the width, and for periods that fit the
length of a run: those of subspaces are a tenth of it. `optax.contrib.muon` and
`optax.contrib.galore` take every array of two axes for a matrix, embeddings too, and no other: they
get the axes of each kernel, as a user would have to write them down, and leave the rest to AdamW.
In 4 bits factors are kept as the storage's own paper has it best for Shampoo, and as plain codes
(VQ) for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from tests.registry import LEADERS, METHODS

from . import _methods
from ._methods import CODED, PEER, RECIPES, STORAGES, of_rank
from ._tasks import Task
from ._training import Method

FAMILIES = {
    **{
        family: tuple(x for name in names for x in (*PEER.get(name, ())[:1], name))
        for family, names in (_methods.FAMILIES | RECIPES).items()
    },
    "factors in 4 bits": tuple(f"{name}_4bit" for name in CODED),
}
NAMES = ("optax.adamw", *(name for names in FAMILIES.values() for name in names))


def adamw(
    rate: Any, *, weight_decay: float, adam_learning_rate: Any
) -> optax.GradientTransformation:
    """AdamW for all parameters."""
    del adam_learning_rate
    return optax.adamw(rate, weight_decay=weight_decay)


ADAMW = Method(adamw)


def kernel_axes(path: Sequence[Any], leaf: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A kernel's axes of rows and of columns; None if it is not a kernel."""
    place = jax.tree_util.keystr(tuple(path), simple=True, separator="/").removesuffix("/value")
    axes = tuple(range(leaf.ndim))
    if not place.endswith("kernel"):
        return None
    if place.endswith(("query/kernel", "key/kernel", "value/kernel")):  # (width, heads, head width)
        return axes[:1], axes[1:]
    return axes[:-1], axes[-1:]


def numbers_of(kind: Any, params: Any) -> Any:
    """The dimension numbers of a tree, of the class that a peer has for them."""

    def numbers(path: Any, leaf: Any) -> Any:
        axes = kernel_axes(path, leaf)
        return axes and kind(*axes)

    return jax.tree_util.tree_map_with_path(numbers, params)


def optax_muon(
    rate: Any, *, weight_decay: float, adam_learning_rate: Any
) -> optax.GradientTransformation:
    """Optax's Muon, told the axes of all kernels."""
    numbers = functools.partial(numbers_of, optax.contrib.MuonDimensionNumbers)
    return optax.contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
        muon_weight_dimension_numbers=numbers,
    )


def optax_galore(
    rate: Any, *, weight_decay: float, adam_learning_rate: Any, rank: int, refresh: int
) -> optax.GradientTransformation:
    """Optax's GaLore, told the axes of all kernels; the rest in `optax.partition`."""
    kind = optax.contrib.GaLoreDimensionNumbers
    galore = optax.contrib.galore(
        rate,
        rank,
        refresh,
        weight_decay=weight_decay,
        weight_dimension_numbers=functools.partial(numbers_of, kind),
    )
    rest = optax.adamw(adam_learning_rate, weight_decay=weight_decay)

    def labels(params: Any) -> Any:
        label = lambda path, leaf: "rest" if kernel_axes(path, leaf) is None else "kernels"  # noqa: E731
        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"kernels": galore, "rest": rest}, labels)


def on_adamw(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose direction AdamW takes for its gradient."""

    def made(
        rate: Any, *, weight_decay: float, adam_learning_rate: Any, **options: Any
    ) -> optax.GradientTransformation:
        base = functools.partial(optax.adamw, weight_decay=weight_decay)
        return optimizer(rate, base=base, others=base(adam_learning_rate), **options)

    made.__name__ = f"{optimizer.__name__}_on_adamw"
    return made


PEERS = {"optax.contrib.muon": optax_muon, "optax.contrib.galore": optax_galore}


def methods_for(task: Task) -> dict[str, Method]:
    """All of them, by name, with rank and periods for a task."""
    rank, period = max(1, task.width // 4), max(2, task.steps // 10)
    low_rank = {"rank": rank, "refresh": period}
    found = {"optax.adamw": ADAMW}
    for row in (*METHODS, *LEADERS):
        options = {**low_rank} if row.keeps == "subspaces" else {}
        options |= of_rank(row.name, rank)
        if row.name == "shampoo":
            options |= {"statistics_every": 1, "refresh": period // 2}
        found[row.name] = Method(on_adamw(row.optimizer) if row.base else row.optimizer, options)
        if row.name in PEER:
            name = PEER[row.name][0]
            found[name] = Method(PEERS[name], low_rank if row.ranked else {})
        if row.name in CODED:
            options = {**options, "storage": STORAGES[CODED[row.name]]}
            found[f"{row.name}_4bit"] = Method(found[row.name].make, options)
    return found
