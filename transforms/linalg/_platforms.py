"""Which form of an operation a program has, by the platform that it is for.

| operation | on CPUs | on GPUs | on TPUs |
|---|---|---|---|
| `eigh` | LAPACK | cuSOLVER | Jacobi's method, polished |
| `qr`, `orthogonal_complement` | LAPACK | cuSOLVER | by panels |
| `bases_of`, `reflectors_of` | LAPACK, in a loop | by panels, from 8 matrices on | by panels |
| `lower_factor` | LAPACK | cuSOLVER | by panels |
| `thin_svd`, `polar_svd`, `polar_qdwh` | LAPACK | by products | by products |
| `product`, `gram` of stacks | at once | at once | one after the other |
| `exact_product` above 512 | at once | at once | in tiles |
| `norms` | one sum, or two | two sums at once | two sums |
| `diagonals` | a slice | a slice | masked sums |
| `over_tiles` | at once | at once | in bands |
| `split_stack` | equal calls | slices | slices |
| `materialized` | | | a barrier |
| `in_rows` | | a layout | |
| `one_layer_in_rows` | | | a layout |

and `_loops.py` has the loops over matrices. The reasons and measurements are in `docs/xla.md`.

*Numerics.* A TPU multiplies float32 matrices in bfloat16 by default: what decomposes multiplies in
`Precision.HIGHEST`. Loops have a fixed number of rounds, so that all forms have derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Form = Callable[..., Any]


def by_platform(
    *args: Any,
    default: Form,
    cpu: Form | None = None,
    gpu: Form | None = None,
    tpu: Form | None = None,
) -> Any:
    """`cpu(*args)`, `gpu(*args)` or `tpu(*args)` in a program for it; without one `default(*args)`.

    The platform of the program decides, not that of the process. All forms are traced, one is
    compiled.
    """
    forms = {"cpu": cpu, "cuda": gpu, "rocm": gpu, "tpu": tpu}
    given = {name: form for name, form in forms.items() if form is not None}
    return jax.lax.platform_dependent(*args, **given, default=default)
