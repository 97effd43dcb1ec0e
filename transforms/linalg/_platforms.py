"""Which form of an operation a program has, by its platform; and arrays as each takes them.

| operation | on CPUs | on GPUs | on TPUs |
|---|---|---|---|
| `eigh` | LAPACK | cuSOLVER | Jacobi's method, polished |
| `qr`, `orthogonal_complement` | LAPACK | cuSOLVER | by panels |
| stacks of them, `bases_of`, `reflectors_of` | LAPACK, in a loop | panels, from 8 on | by panels |
| `lower_factor` | LAPACK | cuSOLVER | by panels |
| `leading_vectors` of at most half | LAPACK | from the Gram matrix | from the Gram matrix |
| `thin_svd`, `polar_svd`, `polar_qdwh` | LAPACK | by products | by products |
| `in_turn` of stacks | at once | at once | one after the other |
| `exact_product` above 1024 | at once | at once | in tiles |
| `HALVES` | float32 | three products in bfloat16 | the same |
| `norms` | one sum, or two | two sums at once | two sums |
| `diagonals` | a slice | a slice | masked sums |
| `over_tiles` | at once | at once | in bands |
| `split_stack` | equal calls | slices | slices |
| `materialized` | | | a barrier |
| `in_rows` | | a layout | |
| `one_layer_in_rows` | | | a layout |

and `_loops.py` has the loops over matrices. The reasons and measurements are in `docs/xla.md`.
Loops have a fixed number of rounds, or `while_at_most` of that file, so that all forms have
derivatives.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata

Form = Callable[..., Any]


def by_platform(
    *, default: Form, cpu: Form | None = None, gpu: Form | None = None, tpu: Form | None = None
) -> Form:
    """`cpu`, `gpu` or `tpu` in a program for it, elsewhere `default`: all are traced."""
    forms = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
    named = {name: form for name, form in forms.items() if form is not None}
    return functools.partial(jax.lax.platform_dependent, **named, default=default)


def gpus_have_bfloat16() -> bool:
    """Whether XLA takes products of bfloat16, for all GPUs but NVIDIA's before the A100."""
    # A process without a GPU compiles for one that does.
    capability = getattr(jax.devices()[0], "compute_capability", "")  # "9.0"; AMD's "gfx942"
    return re.match(r"[1-7]\.", capability) is None


def materialized(x: jax.Array) -> jax.Array:
    """`x`, written to memory: a TPU's products would decode it for every tile."""
    return by_platform(tpu=jax.lax.optimization_barrier, default=lambda x: x)(x)


def in_rows(arrays: Any) -> Any:
    """The arrays of a tree by rows; on GPUs decompositions would choose columns for all."""
    return by_platform(gpu=_row_major, default=lambda x: x)(arrays)


def one_layer_in_rows(x: jax.Array) -> jax.Array:
    """`x (..., m, n)`, if it is one matrix by rows: XLA:TPU would transpose those of all layers."""
    if math.prod(x.shape[:-2]) > 1:
        return x
    return by_platform(tpu=_row_major, default=lambda x: x)(x)


def _row_major(arrays: Any) -> Any:
    by_rows = lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim))))  # noqa: E731
    return jax.tree.map(lambda x: x if x.ndim < 2 else by_rows(x), arrays)


@jax.custom_jvp
def behind_barrier(tree: Any) -> Any:
    """`jax.lax.optimization_barrier`, which JAX transposes only if all arrays have tangents."""
    return jax.lax.optimization_barrier(tree)


@behind_barrier.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return behind_barrier(*primals), tangents[0]


def diagonals(x: jax.Array) -> jax.Array:
    """The diagonals `(..., d)` of `x (..., d, d)`, without the gather of `jnp.diagonal`."""
    order = x.shape[-1]
    return by_platform(
        tpu=lambda x: jnp.einsum("...ii->...i", x),
        default=lambda x: x.reshape(*x.shape[:-2], order * order)[..., :: order + 1],
    )(x)


def with_diagonal(x: jax.Array, diagonal: jax.Array) -> jax.Array:
    """`x (..., d, d)` with another diagonal `(..., d)`."""
    return jnp.where(jnp.eye(x.shape[-1], dtype=bool), diagonal[..., None], x)


def identity(order: int, dtype: Any) -> jax.Array:
    """Made by the program: XLA would take minutes to encode a constant while it compiles."""
    return jax.lax.optimization_barrier(jnp.eye(order, dtype=dtype))


def zeros_beside(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Zeros on the mesh of `x`, whose leading axes `shape` has too."""
    # Loops need them if axes are Explicit; `zeros_like` drops the mesh from JAX 0.11 on.
    return jnp.broadcast_to(jnp.where(False, x[..., :1, :1], 0), shape)


def split_stack(stack: jax.Array, sizes: Sequence[int]) -> Sequence[jax.Array]:
    """Slices of `sizes` matrices, in order, which add up to `stack`."""
    if len(sizes) == 1:
        return (stack,)

    def equal_calls(stack: jax.Array) -> Sequence[jax.Array]:
        """XLA compiles equal kernels once (`docs/xla.md`, "Compile time on CPUs")."""
        starts = itertools.accumulate(sizes[:-1], initial=0)
        with set_xla_metadata(inlineable="false"):
            return [
                _slice(stack, jax.lax.optimization_barrier(jnp.uint32(start)), size)
                for start, size in zip(starts, sizes, strict=True)
            ]

    slices = functools.partial(jax.lax.split, sizes=sizes)
    return by_platform(cpu=equal_calls, default=slices)(stack)


_slice = jax.jit(jax.lax.dynamic_slice_in_dim, static_argnums=2)
