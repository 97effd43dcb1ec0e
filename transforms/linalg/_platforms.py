"""Which form of a decomposition a program has: another one for TPUs than for CPUs and GPUs.

XLA writes QR, Cholesky and triangular solves for a TPU out block by block, and JAX's `eigh` and
`svd` halving by halving: with the order grow the program and the time that its compilation takes,
to more than 400 s for an `eigh` of order 1024. The forms for TPUs here are loops over panels,
iterations by products, and Jacobi's method, whose programs do not grow. `python -m benchmarks
refreshes` measures what the compilation of a refresh takes.

*Numerics.* A TPU multiplies float32 matrices in bfloat16 by default: all products here are in
`Precision.HIGHEST`. Loops have a fixed number of rounds, so that both forms have derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def by_platform(tpu: Callable[..., Any], others: Callable[..., Any], *args: jax.Array) -> Any:
    """`tpu(*args)` in a program for a TPU, `others(*args)` in any other program.

    The platform of the program decides, not that of the process; the other form is traced, but not
    compiled.
    """
    return jax.lax.platform_dependent(*args, tpu=tpu, default=others)
