"""Every optimizer as the training runs have it, and its peers in Optax, which need more words.

Each keeps its own defaults but for ranks, a quarter of the width, and for periods that fit the
length of a run: those of subspaces are a tenth of it. `optax.contrib.muon` and
`optax.contrib.galore` take every array of two axes for a matrix, embeddings too, and no other: they
get the axes of each kernel, as a user would have to write them down, and leave the rest to AdamW.
In 4 bits factors are kept as the storage's own paper has it best for Shampoo, and as plain codes
(VQ) for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import optax

import curvax

from ._tasks import Task
from ._training import Method

FAMILIES = {
    "orthogonalized": ("optax.contrib.muon", "muon", "osgdm", "swan"),
    "scaled, or one-sided": ("racs", "dasgo", "asgo"),
    "Kronecker factors": ("shampoo", "foam", "dr_shampoo"),
    "eigenbases": ("soap", "eigen_adam"),
    "low rank": ("optax.contrib.galore", "galore", "fira", "alice", "apollo", "sumo"),
    "factors in 4 bits": ("shampoo_4bit", "soap_4bit", "asgo_4bit"),
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
    """A kernel's axes of rows and of columns; None for what is no kernel."""
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


def shampoo_on_adamw(
    rate: Any, *, weight_decay: float, adam_learning_rate: Any, **options: Any
) -> optax.GradientTransformation:
    """Shampoo whose direction AdamW takes for its gradient."""
    base = functools.partial(optax.adamw, weight_decay=weight_decay)
    return curvax.shampoo(rate, base=base, others=base(adam_learning_rate), **options)


def shampoo_4bit(rate: Any, **options: Any) -> optax.GradientTransformation:
    """The same with Cholesky factors in codes, and error feedback."""
    return shampoo_on_adamw(rate, storage=curvax.cholesky(error_feedback=0.95), **options)


def soap_4bit(rate: Any, **options: Any) -> optax.GradientTransformation:
    """SOAP with factors and bases in codes."""
    return curvax.soap(rate, storage=curvax.quantized(), **options)


def asgo_4bit(rate: Any, **options: Any) -> optax.GradientTransformation:
    """ASGO with factor and root in codes."""
    return curvax.asgo(rate, storage=curvax.quantized(), **options)


def methods_for(task: Task) -> dict[str, Method]:
    """All of them, by name, with rank and periods for a task."""
    rank, period = max(1, task.width // 4), max(2, task.steps // 10)
    low_rank = {"rank": rank, "refresh": period}
    shampoo = {"statistics_every": 1, "refresh": period // 2}
    return {
        "optax.adamw": ADAMW,
        "optax.contrib.muon": Method(optax_muon),
        "muon": Method(curvax.muon),
        "osgdm": Method(curvax.osgdm),
        "swan": Method(curvax.swan),
        "racs": Method(curvax.racs),
        "dasgo": Method(curvax.dasgo),
        "asgo": Method(curvax.asgo),
        "shampoo": Method(shampoo_on_adamw, shampoo),
        "foam": Method(curvax.foam),
        "dr_shampoo": Method(curvax.dr_shampoo),
        "soap": Method(curvax.soap),
        "eigen_adam": Method(curvax.eigen_adam),
        "optax.contrib.galore": Method(optax_galore, low_rank),
        "galore": Method(curvax.galore, low_rank),
        "fira": Method(curvax.fira, low_rank),
        # 40 of 128 leading columns, as the paper has them at 60M.
        "alice": Method(curvax.alice, {**low_rank, "leading": max(1, rank * 40 // 128)}),
        "apollo": Method(curvax.apollo, low_rank),
        "sumo": Method(curvax.sumo, low_rank),
        "shampoo_4bit": Method(shampoo_4bit, shampoo),
        "soap_4bit": Method(soap_4bit),
        "asgo_4bit": Method(asgo_4bit),
    }
