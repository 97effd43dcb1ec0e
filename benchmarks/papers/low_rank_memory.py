"""Memory of low-rank methods, from shapes alone: Table 3 of RACS and Alice, Table 1 of SUMO.

    python -m benchmarks.papers.low_rank_memory        # a quarter of a minute

Table 3 of Gong et al., arXiv:2502.07752, estimates the memory of LLaMA models as section F.4 says:
2 bytes for each number of

- the weights,
- Adam's moments of the parameters that are not matrices (embedding, norms),
- the method's state of the kernels of attention and MLP, and of the last layer, which in the
  columns "Mem.*", and always for Adam, Apollo and RACS, has Adam instead.

Here the models are Flax modules with bfloat16 parameters and the states those of this library, all
of them abstract: `jax.eval_shape` computes and allocates nothing. The floating-point numbers of the
states are counted (counters and random keys are not) and taken at the paper's 2 bytes, but for the
tracked second moment Q̃ of Alice at 4: with that the printed figures come out, and with 2 they do
not. The bytes that the states take, counters and keys included, are shown too: with
`dtype="bfloat16"`, which stores all but Q̃ and a few vectors in two bytes, and by default.

The models have the widths of Table 10. At 1.3B it prints a width of 4096, 24 heads and 32 layers,
which would be 7 billion parameters; section F.4's 1273 million under Alice and 65 million under
Adam are those of a width of 2048, 32 heads and 24 layers.

Table 1 of Refael et al., arXiv:2505.24749, gives the numbers of the state per matrix as formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import curvax

from .. import _record

GIB = 2**30
BYTES = 2  # of a number in the paper's count
TRACKED_BYTES = 4  # of one of Q̃


# The models.

VOCABULARY = 32000
LAST_LAYER = "lm_head/kernel"


class Size(NamedTuple):
    """Tables 7, 10 and 11."""

    width: int
    inner: int
    heads: int
    layers: int
    rank: int
    leading: int


SIZES = {
    "60M": Size(512, 1376, 8, 8, 128, 40),
    "130M": Size(768, 2048, 12, 12, 256, 40),
    "350M": Size(1024, 2736, 16, 24, 256, 40),
    "1.3B": Size(2048, 5461, 32, 24, 512, 160),
}


class Block(nn.Module):
    """Attention and MLP of LLaMA."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Without mask and rotation of positions, which have no parameters."""
        options: Any = {"use_bias": False, "param_dtype": jnp.bfloat16}
        attention = nn.MultiHeadDotProductAttention(self.size.heads, name="attention", **options)
        x = x + attention(nn.RMSNorm(param_dtype=jnp.bfloat16, name="attention_norm")(x))
        y = nn.RMSNorm(param_dtype=jnp.bfloat16, name="mlp_norm")(x)
        gate = nn.silu(nn.Dense(self.size.inner, name="gate", **options)(y))
        up = nn.Dense(self.size.inner, name="up", **options)(y)
        return x + nn.Dense(self.size.width, name="down", **options)(gate * up)


class Llama(nn.Module):
    """Embedding, blocks, norm and last layer, of bfloat16 parameters."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits."""
        dtype = jnp.bfloat16
        embedding = nn.Embed(VOCABULARY, self.size.width, param_dtype=dtype, name="embedding")
        x = embedding(tokens)
        for i in range(self.size.layers):
            x = Block(self.size, name=f"block_{i}")(x)
        x = nn.RMSNorm(param_dtype=dtype, name="norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, param_dtype=dtype, name="lm_head")(x)


def model(size: Size) -> Any:
    """The abstract parameters."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    return jax.eval_shape(Llama(size).init, jax.random.key(0), tokens)["params"]


# The methods.


class Row(NamedTuple):
    """A row of Table 3 with one of its two columns for each size."""

    name: str
    adam_last: bool  # Mem.*
    published: tuple[float, float, float, float]  # GiB
    make: Callable[..., optax.GradientTransformation]
    options: Callable[[Size], dict[str, Any]] = lambda size: {"rank": size.rank}

    def __str__(self) -> str:
        last = "" if not self.adam_last or self.make in _ADAM_LAST else ", last layer Adam"
        return f"{self.name}{last}"

    def optimizer(self, size: Size, dtype: str | None = "bfloat16") -> Any:
        """The optimizer of a model of this size, with the dtype of what is of low rank."""
        options = self.options(size)
        if "rank" in options:
            options["dtype"] = dtype
        if self.adam_last and self.make not in _ADAM_LAST:
            options["weight_dimension_numbers"] = {LAST_LAYER: None}
        return self.make(1.0, **options)


_ADAM_LAST = (optax.adam, curvax.apollo, curvax.racs)  # by themselves


def _alice(size: Size) -> dict[str, Any]:
    return {"rank": size.rank, "switching": curvax.subspaces.complement(size.leading)}


def _alice_0(size: Size) -> dict[str, Any]:
    return {**_alice(size), "b3": None}


ROWS = (
    Row("Adam", True, (0.32, 0.75, 2.05, 7.48), optax.adam, lambda size: {}),
    Row("GaLore", False, (0.21, 0.51, 1.20, 4.25), curvax.galore),
    Row("GaLore", True, (0.26, 0.57, 1.29, 4.43), curvax.galore),
    Row("Fira", False, (0.21, 0.51, 1.20, 4.25), curvax.fira),
    Row("Fira", True, (0.26, 0.57, 1.29, 4.43), curvax.fira),
    Row(
        "Apollo-mini",
        True,
        (0.23, 0.43, 0.93, 2.98),
        curvax.apollo,
        lambda size: {"rank": 1, "whole": True},
    ),
    Row(
        "Apollo-svd",
        True,
        (0.26, 0.57, 1.29, 4.43),
        curvax.apollo,
        lambda size: {"basis": curvax.subspaces.svd(), "rank": size.rank},
    ),
    Row("RACS", True, (0.23, 0.43, 0.93, 2.98), curvax.racs, lambda size: {}),
    Row("Alice-0", False, (0.21, 0.51, 1.20, 4.25), curvax.alice, _alice_0),
    Row("Alice-0", True, (0.26, 0.57, 1.29, 4.44), curvax.alice, _alice_0),
    Row("Alice", False, (0.22, 0.53, 1.24, 4.42), curvax.alice, _alice),
    Row("Alice", True, (0.26, 0.59, 1.33, 4.60), curvax.alice, _alice),
)


class Count(NamedTuple):
    """What a model and its optimizer's state hold, in numbers, and the state's bytes as it is."""

    weights: int
    adam: int  # of the state: the moments of parameters that are not matrices
    method: int  # of the state: all other floating-point numbers, without Q̃
    tracked: int  # Q̃
    adam_weights: int  # of the weights: those of parameters that are not matrices
    state_bytes: int

    @property
    def gib(self) -> float:
        """As the paper counts."""
        numbers = self.weights + self.adam + self.method
        return (BYTES * numbers + TRACKED_BYTES * self.tracked) / GIB

    @property
    def taken_gib(self) -> float:
        """Weights in bfloat16 and the state's bytes."""
        return (BYTES * self.weights + self.state_bytes) / GIB


def numbers_of(state: Any) -> dict[str, int]:
    """The floating-point numbers of an abstract state."""
    found = {"adam": 0, "method": 0, "tracked": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            part = "adam" if "others" in keys else "tracked" if "tracked" in keys else "method"
            found[part] += leaf.size
    return found


def count(optimizer: Any, params: Any) -> Count:
    """Counts, from shapes alone."""
    state = jax.eval_shape(optimizer.init, params)
    numbers = numbers_of(state)
    return Count(
        weights=sum(x.size for x in jax.tree.leaves(params)),
        adam_weights=numbers["adam"] // 2,
        state_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        **numbers,
    )


def table_3(dtype: str | None = "bfloat16") -> dict[str, dict[str, Count]]:
    """By row and size."""
    models = {name: model(size) for name, size in SIZES.items()}
    return {
        str(row): {name: count(row.optimizer(SIZES[name], dtype), models[name]) for name in SIZES}
        for row in ROWS
    }


def memory_table(counts: dict[str, dict[str, Count]]) -> str:
    """Ours beside the published, and the difference."""
    rows = []
    for row in ROWS:
        cells = [str(row)]
        for found, printed in zip(counts[str(row)].values(), row.published, strict=True):
            difference = found.gib - printed
            cell = f"{found.gib:.4f} / {printed:.2f} / {difference:+.4f}"
            cells.append(cell if abs(difference) <= TOLERANCE else f"**{cell}**")
        rows.append(cells)
    return _record.table(["GiB: ours / published / difference", *SIZES], rows)


TOLERANCE = 0.01  # GiB


def two_bytes_table(counts: dict[str, dict[str, Count]]) -> str:
    """Alice with Q̃ at 2 bytes as everything else."""
    rows = []
    for row in ROWS:
        if row.name == "Alice":
            pairs = zip(counts[str(row)].values(), row.published, strict=True)
            less = [(x.gib - (TRACKED_BYTES - BYTES) * x.tracked / GIB, y) for x, y in pairs]
            rows.append([str(row), *(f"{x:.4f} / {y:.2f} / {x - y:+.4f}" for x, y in less)])
    return _record.table(["Q̃ at 2 bytes", *SIZES], rows)


def taken_table(counts: dict[str, dict[str, Count]]) -> str:
    """Bytes of weights and states, in bfloat16 and by default."""
    default = table_3(None)
    rows = [
        [name, *(f"{x.taken_gib:.3f} / {default[name][at].taken_gib:.3f}" for at, x in row.items())]
        for name, row in counts.items()
    ]
    return _record.table(["GiB: in bfloat16 / by default", *SIZES], rows)


# Table 1 of SUMO.

SHAPE = 384, 256  # m ≥ n, as its caption assumes
RANK = 16


class Formula(NamedTuple):
    """A method's numbers per m × n matrix as printed, and what ours has besides."""

    name: str
    printed: str
    numbers: Callable[[int, int, int], int]
    direction: optax.GradientTransformation
    besides: Callable[[int, int, int], int] = lambda m, n, r: 0
    remark: str = ""


FORMULAS = (
    Formula(
        "SUMO",
        "nr + mr",
        lambda m, n, r: n * r + m * r,
        curvax.scale_by_sumo(rank=RANK),
        lambda m, n, r: 1,
        "1: the last ‖O‖, of the limiter",
    ),
    Formula("Adam", "2mn", lambda m, n, r: 2 * m * n, optax.scale_by_adam()),
    Formula(
        "Shampoo",
        "m² + n²",
        lambda m, n, r: m * m + n * n,
        curvax.scale_by_shampoo(),
        lambda m, n, r: m * m + n * n + 2,
        "m² + n²: the roots, kept between refreshes; 2: the error of each",
    ),
    Formula(
        "SOAP",
        "2mn + 2m² + 2n²",
        lambda m, n, r: 2 * (m * n + m * m + n * n),
        curvax.scale_by_soap(),
    ),
    Formula(
        "GaLore, side='larger'",
        "2nr + mr",
        lambda m, n, r: 2 * n * r + m * r,
        curvax.scale_by_galore(rank=RANK, side="larger"),
    ),
    Formula(
        "GaLore",
        "2nr + mr",
        lambda m, n, r: 2 * n * r + m * r,
        curvax.scale_by_galore(rank=RANK),
        lambda m, n, r: (m - n) * r,
        "(m − n)r: the smaller side is projected, nr + 2mr",
    ),
)


def table_1() -> list[tuple[Formula, int, int, int]]:
    """The formulas with what is printed, what ours has besides, and what was counted."""
    matrix = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return [
        (
            formula,
            formula.numbers(*SHAPE, RANK),
            formula.besides(*SHAPE, RANK),
            sum(numbers_of(jax.eval_shape(formula.direction.init, matrix)).values()),
        )
        for formula in FORMULAS
    ]


def formula_table(found: list[tuple[Formula, int, int, int]]) -> str:
    """Table 1 beside what was counted."""
    rows = [
        [
            formula.name,
            formula.printed,
            f"{printed:,}",
            f"{counted:,}",
            f"{counted - printed:+,}" if counted != printed else "0",
            formula.remark if counted == printed + besides else "**unexplained**",
        ]
        for formula, printed, besides, counted in found
    ]
    titles = ["method", "published", "its number", "ours", "difference", "which is"]
    return _record.table(titles, rows)


# The figure.


def plot(counts: dict[str, dict[str, Count]]) -> Figure:
    """For every size the parts of each method's memory, the published total beside them."""
    parts = {
        "weights": ("weights", _record.SKY, BYTES),
        "adam": ("Adam's moments of other parameters", _record.ORANGE, BYTES),
        "method": ("the method's state", _record.BLUE, BYTES),
        "tracked": ("Q̃, float32", _record.VERMILION, TRACKED_BYTES),
    }
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    places = np.arange(len(ROWS))
    for i, (axis, name) in enumerate(zip(axes.flat, SIZES, strict=True)):
        left = np.zeros(len(ROWS))
        for field, (label, color, size) in parts.items():
            numbers = [getattr(counts[str(row)][name], field) for row in ROWS]
            width = size * np.array(numbers) / GIB
            axis.barh(places, width, left=left, color=color, label=label)
            left += width
        published = [row.published[i] for row in ROWS]
        axis.plot(published, places, "k|", markersize=16, markeredgewidth=2, label="published")
        axis.set(title=f"{name}, rank {SIZES[name].rank}", xlabel="GiB")
        axis.set_yticks(places, [str(row) for row in ROWS])
        axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
        axis.grid(alpha=0.3, axis="x")
        axis.set_axisbelow(True)
    axes[0, 0].invert_yaxis()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def main() -> None:
    """Counts and writes tables, numbers and figure."""
    args = _record.paper_arguments(__doc__)
    counts, formulas = table_3(), table_1()
    differences = [
        abs(found.gib - printed)
        for row in ROWS
        for found, printed in zip(counts[str(row)].values(), row.published, strict=True)
    ]
    alice = counts["Alice"]["1.3B"]
    under = (alice.weights - alice.adam_weights, alice.adam_weights)
    adam_gib = BYTES * (alice.adam_weights + alice.adam) / GIB
    body = "\n\n".join(
        [
            "Table 3: GiB of weights and optimizer states of LLaMA models, vocabulary "
            f"{VOCABULARY}. Numbers of our abstract states, floating-point ones alone, at the "
            f"paper's {BYTES} bytes (BF16), but {TRACKED_BYTES} for Alice's Q̃. Matrices are the "
            "kernels of attention, MLP and last layer; Adam, Apollo and RACS leave the last layer "
            'to Adam, as do the rows that say so (the columns "Mem.*"). Of '
            f"{len(differences)} figures {sum(d <= TOLERANCE for d in differences)} are within "
            f"{TOLERANCE} GiB of the printed one, {sum(d <= 0.005 for d in differences)} within "
            f"its rounding; the largest difference is {max(differences):.4f}.",
            memory_table(counts),
            "The paper says BF16 for all, but with Q̃ at 2 bytes Alice's figures are missed:",
            two_bytes_table(counts),
            f"Section F.4, Alice at 1.3B: {under[0] / 1e6:.1f}M parameters under Alice and "
            f"{under[1] / 1e6:.1f}M under Adam (published: 1273M and 65M), "
            f"{alice.gib - adam_gib:.2f} GiB and {adam_gib:.2f} GiB (published: 3.86 and 0.37), "
            f"together {alice.gib:.2f} (published: 4.42, which is not the sum of the two); the "
            f"former is {alice.gib - adam_gib - TRACKED_BYTES * alice.tracked / GIB:.2f} "
            "without Q̃.",
            "What weights and states really take, counters and random keys included: with "
            '`dtype="bfloat16"`, where Q̃ and vectors are in float32, and by default, where all '
            "that belongs to matrices is in float32. Weights and Adam's moments are in bfloat16.",
            taken_table(counts),
            f"Table 1 of SUMO: numbers per m × n matrix, m ≥ n, counted at m = {SHAPE[0]}, n = "
            f"{SHAPE[1]}, r = {RANK}. As printed GaLore too projects the larger side.",
            formula_table(formulas),
        ]
    )
    _record.write_paper(
        args,
        "low_rank_memory",
        "Memory of low-rank methods (RACS and Alice: Table 3; SUMO: Table 1)",
        body,
        plot(counts),
    )


if __name__ == "__main__":
    main()
