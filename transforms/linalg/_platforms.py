"""Which form of a decomposition a program has: another one for TPUs than for CPUs and GPUs.

XLA writes QR, Cholesky and triangular solves for a TPU out block by block, and JAX's `eigh` and
`svd` halving by halving: with the order grow the program and the time that its compilation takes,
to more than 400 s for an `eigh` of order 1024. The forms for TPUs here are loops over panels,
iterations by products, and Jacobi's method, whose programs do not grow. `python -m benchmarks
refreshes` measures what the compilation of a refresh takes. Products of stacks have programs that
grow with the stack, so they are loops over matrices (`in_turn`).

*Numerics.* A TPU multiplies float32 matrices in bfloat16 by default: all products here are in
`Precision.HIGHEST`. Loops have a fixed number of rounds, so that both forms have derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from ._spread import is_shared


def by_platform(tpu: Callable[..., Any], others: Callable[..., Any], *args: jax.Array) -> Any:
    """`tpu(*args)` in a program for a TPU, `others(*args)` in any other program.

    The platform of the program decides, not that of the process; the other form is traced, but not
    compiled.
    """
    return jax.lax.platform_dependent(*args, tpu=tpu, default=others)


def in_turn(f: Callable[..., jax.Array], *stacks: jax.Array) -> jax.Array:
    """`f(*stacks)` of stacks `(..., m, n)`; in a program for a TPU, of one matrix after the other.

    A product of 24 matrices takes XLA three to ten times as long to compile for a TPU as a loop
    over them. In a loop each matrix would be sent to all devices, if these have different matrices:
    so no loop where that may be, which is with several devices outside `shard_map`.

    Args:
      f: maps matrices, and stacks of them, to an array with the same leading axes.
      *stacks: with the same leading axes.
    """
    batch = stacks[0].shape[:-2]
    if math.prod(batch) < 2 or not _on_one_device():
        return f(*stacks)

    def turns(*stacks: jax.Array) -> jax.Array:
        flat = tuple(x.reshape(-1, *x.shape[-2:]) for x in stacks)
        found = jax.lax.map(lambda matrices: f(*matrices), flat)
        return found.reshape(*batch, *found.shape[1:])

    return by_platform(turns, f, *stacks)


def _on_one_device() -> bool:
    """Whether the matrices of a stack certainly lie on the same device."""
    if is_shared():
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else bool(mesh.manual_axes)
