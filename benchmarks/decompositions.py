"""Decompositions one by one, in batches, by panels and by products: what `linalg` chooses between.

    python -m benchmarks decompositions                        # two minutes
    python -m benchmarks decompositions --orders 768 --only eigh

Milliseconds of all matrices together. *One by one*: in a loop. *Batched*: one call of JAX's, which
on GPUs is cuSOLVER's or cuBLAS's for a batch. *Ours*: the form that programs for TPUs have, and for
SVDs, polar factors and the QR of many matrices those for GPUs too (`transforms/linalg`). Matrices
are Gaussian, `d × 2d` for singular vectors and polar factors and `2d × d` for QR; of singular
vectors the left ones are asked for. The largest error is that of their orthogonality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from curvax.transforms.linalg._by_products import polar_of_range
from curvax.transforms.linalg._qr import _qr_by_panels
from curvax.transforms.linalg._svd import _svd_by_products

from . import _record
from ._timing import Program, compile_all, take_turns

# Orders, numbers of matrices.
PRESETS = {"cpu": ((64, 128, 256), (1, 8)), "gpu": ((256, 768, 1024, 2048, 3072), (1, 2, 8, 24))}

COLUMNS = {
    "order": ("order", "d"),
    "matrices": ("matrices", "d"),
    "alone": ("one by one, ms", ".2f"),
    "batched": ("batched, ms", ".2f"),
    "ours": ("ours, ms", ".2f"),
    "error": ("error of JAX's", ".0e"),
    "our_error": ("of ours", ".0e"),
}


def left_vectors(x: jax.Array) -> jax.Array:
    """JAX's."""
    return jnp.linalg.svd(x, full_matrices=False)[0]


def polar(x: jax.Array) -> jax.Array:
    """From JAX's singular vectors."""
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt


# Of a matrix: JAX's form and ours.
FORMS: dict[str, tuple[Callable[[jax.Array], Any], Callable[[jax.Array], Any] | None]] = {
    "eigh": (lambda x: jnp.linalg.eigh(x @ x.mT)[1], None),
    "qr": (lambda x: jnp.linalg.qr(x.mT)[0], lambda x: _qr_by_panels(x.mT)[0]),
    "svd": (left_vectors, lambda x: _svd_by_products(x)[0]),
    "polar": (polar, lambda x: polar_of_range(x, max(x.shape))),
}
TITLES = {
    "eigh": "Eigenvectors",
    "qr": "Bases of columns",
    "svd": "Left singular vectors",
    "polar": "Polar factors",
}


def orthogonality(q: jax.Array) -> float:
    """The largest entry of `qᵀq - I`, or of `q qᵀ - I`."""
    x = np.asarray(q, np.float64)
    gram = x.mT @ x if x.shape[-2] >= x.shape[-1] else x @ x.mT
    return float(np.abs(gram - np.eye(gram.shape[-1])).max())


def row_of(name: str, order: int, matrices: int, rounds: int, seed: int) -> dict[str, Any]:
    """The forms in turns."""
    x = jax.random.normal(jax.random.key(seed), (matrices, order, 2 * order))
    theirs, ours = FORMS[name]
    forms = {"alone": lambda x: jax.lax.map(theirs, x), "batched": jax.vmap(theirs)}
    if ours is not None:
        forms["ours"] = jax.vmap(ours)

    def program(form: Any) -> Program:
        return Program(lambda state, x: (state, form(x)), jnp.zeros(()), x)

    programs = {key: program(form) for key, form in forms.items()}
    compile_all(programs)
    take_turns(programs, rounds, f"{name}, {matrices} of order {order}")
    row: dict[str, Any] = {"order": order, "matrices": matrices}
    row |= {key: made.median for key, made in programs.items()}
    row["error"] = orthogonality(jax.jit(forms["batched"])(x))
    if ours is not None:
        row["our_error"] = orthogonality(jax.jit(forms["ours"])(x))
    return row


def draw(tables: list[_record.Table]) -> Figure:
    """Milliseconds of a matrix against the order: a line for each form and number of matrices."""
    figure = Figure(figsize=(4.2 * len(tables), 4), layout="constrained")
    styles = {"alone": ":", "batched": "--", "ours": "-"}
    for axis, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        for i, number in enumerate(sorted({row["matrices"] for row in table.rows})):
            rows = [row for row in table.rows if row["matrices"] == number]
            for key, style in styles.items():
                if key in rows[0]:
                    ms = [row[key] / number for row in rows]
                    label = f"{COLUMNS[key][0].partition(',')[0]}, {number}"
                    color = _record.COLORS[i]
                    axis.plot([r["order"] for r in rows], ms, style, color=color, label=label)
        axis.set(xscale="log", yscale="log", xlabel="order", ylabel="ms a matrix")
        orders = sorted({row["order"] for row in table.rows})
        axis.set_xticks(orders, map(str, orders))
        axis.minorticks_off()
        axis.set_title(table.title)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=7)
    return figure


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, tuple(FORMS))
    add = parser.add_argument
    add("--orders", type=int, nargs="+", help="in place of the preset's")
    add("--matrices", type=int, nargs="+", help="in place of the preset's")
    add("--rounds", type=int, default=5, help="of each form (%(default)s)")
    args = parser.parse_args()
    orders, matrices = PRESETS[args.preset]
    orders, matrices = args.orders or orders, args.matrices or matrices
    tables = []
    for name in args.only:
        rows = [row_of(name, d, n, args.rounds, args.seed) for d in orders for n in matrices]
        present = [key for key in COLUMNS if any(key in row for row in rows)]
        shown = {key: COLUMNS[key] for key in present}
        tables.append(_record.Table(TITLES[name], shown, rows))
    about = (
        "Medians of all matrices together, the forms in turns. *Ours* are products alone for polar "
        "factors, these and an eigendecomposition for singular vectors, panels for QR. *Error*: "
        "the largest entry of the Gram matrix of the vectors minus the identity."
    )
    settings = {"orders": list(orders), "matrices": list(matrices), "rounds": args.rounds}
    title = "Forms of decompositions"
    _record.write(args, "decompositions", title, about, tables, draw(tables), settings)


if __name__ == "__main__":
    main()
