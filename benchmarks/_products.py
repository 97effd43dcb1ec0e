"""The cost of products of matrices on a device, and of the products in refreshes.

Each measurement compiles its programs one by one and says of each the median time of a call and its
FLOP/s; a program that the device does not have leaves its error. Matrices are stacks of one order,
such as the 120 factors of order 768 and the 24 of order 3072 of GPT-2-small's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvax.transforms.linalg import _turns
from curvax.transforms.linalg._inverse_root import SOLVERS
from curvax.transforms.linalg._products import at

from ._timing import Program

CALLS, SECONDS = 5, 3.0  # calls of a program, and after how long no other begins
SPREAD = 1e-6  # the smallest eigenvalue over the largest
ROOTS = (2, 4)
Made = tuple[Callable[..., Any], tuple[jax.Array, ...], float]  # a function, arrays, FLOPs

PRECISIONS: dict[str, Any] = {
    "float32": jax.lax.Precision.HIGHEST,
    "TF32": jax.lax.Precision.HIGH,
    "X3": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "X6": jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}
LEVELS = {"": None, " in X6": "bf16x6", " in X3": "bf16x3"}  # of refreshes


def matrices(number: int, order: int) -> jax.Array:
    """Gaussian, `(number, order, order)`."""
    return jax.random.normal(jax.random.key(order), (number, order, order))


def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers whose sum has 16 bits of each."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)


def in_one(a: jax.Array, b: jax.Array) -> jax.Array:
    """The three products of X3 as one, along a summed axis three times as long."""
    (high, low), (other, rest) = halves(a), halves(b)
    left = jnp.concatenate([high, high, low], axis=-1)
    right = jnp.concatenate([other, rest, other], axis=-2)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def in_bfloat16(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of bfloat16 numbers, which stay so."""
    return jnp.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))


def products(number: int, order: int) -> Iterator[tuple[str, Made]]:
    """`A B` in every precision."""
    given = matrices(number, order), matrices(number, order).mT + 1
    flops = 2.0 * number * order**3
    for name, precision in PRECISIONS.items():
        yield name, (lambda a, b, p=precision: jnp.matmul(a, b, precision=p), given, flops)
    yield "X3 in one", (in_one, given, flops)
    yield "bfloat16", (in_bfloat16, given, flops)


def statistics(number: int, order: int) -> jax.Array:
    """Positive definite, with eigenvalues from 1 down to `SPREAD`."""
    q, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(order), (order, order)))
    eigenvalues = jnp.geomspace(1.0, SPREAD, order)
    return jnp.broadcast_to((q * eigenvalues) @ q.T, (number, order, order))


def rotations(number: int, order: int) -> Iterator[tuple[str, Made]]:
    """A refresh by one rotation, or by one turn that makes bases orthonormal."""
    noise = 1e-3 * matrices(number, order) / order**0.5
    eigenvalues = jnp.geomspace(1.0, 1e-3, order)
    scale = jnp.sqrt(eigenvalues[:, None] * eigenvalues)
    h = jnp.diag(eigenvalues) + scale * (noise + noise.mT)
    basis = jnp.broadcast_to(jnp.eye(order), h.shape)
    moved = basis + 4 * noise  # a defect of about 6e-3
    for name, level in LEVELS.items():

        def refresh(basis: jax.Array, h: jax.Array, level: str | None = level) -> Any:
            with at(level):
                return jax.vmap(lambda u, h: _turns.by_rotations(u, h, 1))(basis, h)

        yield f"orthonormal{name}", (refresh, (basis, h), 12.0 * number * order**3)
        yield f"made orthonormal{name}", (refresh, (moved, h), 12.0 * number * order**3)


def roots(number: int, order: int) -> Iterator[tuple[str, Made]]:
    """Inverse roots with each method that there is, at a condition number of 10⁶."""
    given = (statistics(number, order),)
    for root in ROOTS:
        for method in SOLVERS:
            if method == "newton_schulz" and root != 2:
                continue

            def solved(a: jax.Array, level: Any, root: int = root, method: str = method) -> Any:
                how: Any = {"damping_mode": "relative", "method": method}
                with at(level):
                    return curvax.inverse_root(a, root, SPREAD, **how)

            for name, level in LEVELS.items() if method == "products" else [("", None)]:
                made = functools.partial(solved, level=level)
                yield f"p = {root}, {method}{name}", (made, given, float("nan"))


def decompositions(number: int, order: int) -> Iterator[tuple[str, Made]]:
    """A Gram matrix of gradients four times as wide, and its eigenvectors, all in one batch."""
    wide = jax.random.normal(jax.random.key(1), (number, order, 4 * order))
    gram = lambda x: jnp.matmul(x, x.mT, precision="highest")  # noqa: E731
    flops = 8.0 * number * order**3
    yield "Gram matrix", (gram, (wide,), flops)
    yield "Gram matrix and eigh", (lambda x: jnp.linalg.eigh(gram(x))[1], (wide,), float("nan"))


KINDS: Mapping[str, Callable[[int, int], Iterator[tuple[str, Made]]]] = {
    "products": products,
    "rotations": rotations,
    "roots": roots,
    "eigh": decompositions,
}


def measured(kind: str, number: int, order: int) -> list[dict[str, Any]]:
    """A row for every program of a kind."""
    rows = []
    for name, (function, given, flops) in KINDS[kind](number, order):
        row: dict[str, Any] = {"kind": kind, "stack": f"{number} × {order}²", "program": name}
        try:
            row |= timed(function, given, flops)
        except Exception as error:  # what one device cannot do must not cost the rest
            row["error"] = str(error).strip().partition("\n")[0][:150]
        rows.append(row)
    return rows


def timed(function: Any, given: tuple[jax.Array, ...], flops: float) -> dict[str, float]:
    """The median of some calls, after one that does not count."""
    program = Program(lambda state, *given: (state, function(*given)), (), *given)
    program.run()
    while len(program.times) <= CALLS and sum(program.times[1:]) < 1e3 * SECONDS:
        program.run()
    ms = float(np.median(program.times[1:]))
    return {"ms": ms} if np.isnan(flops) else {"ms": ms, "tflops": flops / ms / 1e9}
