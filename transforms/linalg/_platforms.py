"""Which form of a decomposition a program has, by the platform that it is for.

XLA writes QR, Cholesky and triangular solves for a TPU out block by block, and JAX's `eigh` and
`svd` halving by halving: with the order grow the program and the time that its compilation takes,
to more than 400 s for an `eigh` of order 1024. The forms for TPUs here are loops over panels,
iterations by products, and Jacobi's method, whose programs do not grow. `python -m benchmarks
refreshes` measures what the compilation of a refresh takes. Products of stacks have programs that
grow with the stack, so they are loops over matrices (`in_turn`).

cuSOLVER decomposes for GPUs, where what counts is how many matrices there are: a batched `eigh` of
72 takes hardly longer than of two, a batched QR longer than a loop of single ones (`_visits.py`,
`_qr.py`), and SVDs go one after the other. So SVDs and polar factors have the forms of TPUs there,
by products (`on_accelerators`). Milliseconds on an H100 (JAX 0.11.2), with the largest error in the
orthogonality of the vectors:

| | SVD by cuSOLVER | by products |
|---|---|---|
| polar factors of 96 of 256×768 | 860, of which QR 185 | 8 |
| left vectors of 768×3072 | 56 to 88 | 12 |
| error, 256×1024 | 9e-5, 2e-4 | 1e-6 |

*Numerics.* A TPU multiplies float32 matrices in bfloat16 by default: all products here are in
`Precision.HIGHEST`. Loops have a fixed number of rounds, so that both forms have derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from ._spread import is_shared


def by_platform(tpu: Callable[..., Any], others: Callable[..., Any], *args: Any) -> Any:
    """`tpu(*args)` in a program for a TPU, `others(*args)` in any other program.

    The platform of the program decides, not that of the process; the other form is traced, but not
    compiled.
    """
    return jax.lax.platform_dependent(*args, tpu=tpu, default=others)


def on_gpus(gpus: Callable[..., Any], others: Callable[..., Any], *args: Any) -> Any:
    """`gpus(*args)` in a program for a GPU, `others(*args)` in any other program."""
    return jax.lax.platform_dependent(*args, cuda=gpus, rocm=gpus, default=others)


def on_accelerators(products: Callable[..., Any], others: Callable[..., Any], *args: Any) -> Any:
    """`products(*args)` in a program for a TPU or a GPU, `others(*args)` in any other program."""
    forms = dict.fromkeys(("tpu", "cuda", "rocm"), products)
    return jax.lax.platform_dependent(*args, **forms, default=others)


def apart(x: jax.Array) -> jax.Array:
    """`x`, which a program for a TPU computes apart from what uses it.

    XLA for TPUs also decodes an operand of a product within the product's kernel, in every such
    kernel and for every tile. Those kernels are long and take it long to compile.
    """
    return by_platform(jax.lax.optimization_barrier, lambda x: x, x)


def by_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, laid out by rows in a program for a GPU.

    XLA for GPUs chooses layouts by what decompositions take, which is columns. It does so through
    loops: without this a step transposes all that a loop over matrices may decompose, to and fro,
    even if the loop has no rounds. (Devices that share matrices decompose little.)
    """
    if is_shared():
        return list(arrays)

    def laid_out(x: jax.Array) -> jax.Array:
        return x if x.ndim < 2 else with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return on_gpus(lambda xs: [laid_out(x) for x in xs], list, list(arrays))


def in_turn(f: Callable[..., jax.Array], stack: jax.Array, *others: Any) -> jax.Array:
    """`f(stack, *others)`; in a program for a TPU, of one matrix after the other.

    A product of 24 matrices takes XLA three to ten times as long to compile for a TPU as a loop
    over them. In a loop each matrix would be sent to all devices, if these have different matrices:
    so no loop where that may be, which is with several devices outside `shard_map`.

    Args:
      f: maps matrices, and stacks of them, to an array with the same leading axes.
      stack: `(..., m, n)`.
      *others: pytrees of arrays with the leading axes of `stack`.
    """
    batch = stack.shape[:-2]
    if not may_take_turns(batch):
        return f(stack, *others)

    def turns(*given: Any) -> jax.Array:
        flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), given)
        found = jax.lax.map(lambda entry: f(*entry), flat)
        return found.reshape(*batch, *found.shape[1:])

    return by_platform(turns, f, stack, *others)


def may_take_turns(batch: tuple[int, ...]) -> bool:
    """Whether a stack has several matrices, which certainly lie on the same device."""
    if math.prod(batch) < 2 or is_shared():
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else bool(mesh.manual_axes)
