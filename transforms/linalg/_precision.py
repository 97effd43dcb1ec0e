"""The precision of products, by operation.

An operation gives its products a level by the context `at` of `_products.py`.

| level | programs for GPUs | for TPUs |
|---|---|---|
| "float32" | float32, on ordinary units | six passes |
| "bf16x6" | six products of bfloat16 numbers | six passes |
| "bf16x3" | three | three passes |
| "bf16" | one | one pass |

These are presets of `jax.lax.DotAlgorithmPreset`. XLA for GPUs cuts the bits of a float32 number
into two or three numbers of bfloat16, and leaves out the products of the smallest of them. XLA for
CPUs accepts presets and multiplies in float32, which is as accurate as "bf16x6". The other levels
have the same errors in programs for CPUs as on a GPU, so that a method shows the effect of a level
there; "bf16x3" takes two products for that. `docs/xla.md` has XLA's programs for each preset.
"""

from __future__ import annotations

import dataclasses

from .._validate import Value, as_value, check_choice
from ._products import LEVELS


@dataclasses.dataclass(frozen=True)
class Products(Value):
    """See `products`."""

    step: str | None = None
    statistics: str = "float32"
    refresh: str = "float32"


def products(
    *, step: str | None = None, statistics: str = "float32", refresh: str = "float32"
) -> Products:
    """The precision of each operation's products, for `products=`.

    A level is "float32", "bf16x6" (six products of bfloat16 numbers in the place of one, as
    accurate as float32), "bf16x3" (three) or "bf16". The name of a level in the place of this value
    gives it to all operations. On an H100 six products take 0.45 of the time of one in float32 and
    three 0.23, if the product and not memory limits them. Parameters in float64 have no levels.

    Errors of a direction beside float64, for matrices of order 192 with eigenvalues from 1 down to
    1 / condition (`python -m benchmarks precision`, on CPUs in emulation):

    | | level | condition 1e2 | 1e4 | 1e6 |
    |---|---|---|---|---|
    | rotations of a step of `soap`, both sides | float32 | 1e-6 | 2e-5 | 8e-4 |
    | | bf16x6 | 5e-7 | 8e-6 | 3e-4 |
    | | bf16x3 | 5e-5 | 9e-4 | 0.04 |
    | | TF32, JAX's default on GPUs | 1e-3 | 0.03 | 0.8 |
    | | bf16, JAX's default on TPUs | 0.01 | 0.2 | 1.3 |
    | a tracked basis, refreshed at every step | float32 | 0.034 | 0.022 | 0.031 |
    | | bf16x3 | 0.034 | 0.023 | 0.032 |
    | | bf16x3, statistics in bf16 | 0.035 | 0.022 | 0.030 |
    | | bf16x3, refresh in bf16 | 0.034 | 0.033 | 0.054 |
    | | bf16 | 0.034 | 0.032 | 0.052 |
    | a root by products, `p = 2` | float32, bf16x6 | 3e-6 | 3e-5 | 9e-4 |
    | | bf16x3 | 9e-5 | 1e-3 | 0.06 |
    | the same, `p = 4` | float32, bf16x6 | 1e-6 | 8e-6 | 4e-4 |
    | | bf16x3 | 4e-5 | 5e-4 | 0.03 |

    Roots by products in bf16 diverge. At order 640 errors of steps and roots are up to
    1.8 times as large.

    Args:
      step: of gradients with bases or roots. `None` is JAX's default precision, which is TF32 on
        GPUs and bfloat16 on TPUs, but "float32" where the product feeds a statistic.
      statistics: of Gram products.
      refresh: of rotations, roots and the moments that turn along.

    Raises:
      ValueError: if a level is none of "float32", "bf16x6", "bf16x3" and "bf16".
    """
    check_choice("step", step, (None, *LEVELS))
    check_choice("statistics", statistics, (*LEVELS,))
    check_choice("refresh", refresh, (*LEVELS,))
    return Products(step, statistics, refresh)


NAMES = {None: Products()} | {level: Products(level, level, level) for level in LEVELS}
"""One level for all operations."""


def as_products(value: str | Products | None) -> Products:
    """The value of this name, or itself.

    Raises:
      ValueError: naming the allowed values.
    """
    return as_value("products", value, Products, 'curvax.products(step="bf16x3")', NAMES)
