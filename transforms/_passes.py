"""How often a program passes over arrays of a size.

What works element by element is fused with what comes before or after it. A product, a reduction,
a cumulative operation or a sort has to read its operand, or to write its result, on its own: with
operands beyond a processor's caches each is a pass over memory.

Of branches the longest counts, and nothing of a `while` loop, which may have no round, as those
over due refreshes.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import jaxprs_in_params

ALONE, ALONE_BY_PREFIX = ("dot_general", "sort"), ("reduce_", "arg", "cum")


def passes(jaxpr: Any, size: int) -> int:
    """The passes over arrays of at least `size` elements."""
    return sum(_passes_of(equation, size) for equation in jaxpr.eqns)


def _passes_of(equation: Any, size: int) -> int:
    name = equation.primitive.name
    if name in ALONE or name.startswith(ALONE_BY_PREFIX):
        largest = max(x.aval.size for x in (*equation.invars, *equation.outvars))
        return int(largest >= size)
    if name == "while":
        return 0
    inner = [passes(jaxpr, size) for jaxpr in jaxprs_in_params(equation.params)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (equation.params["length"] if name == "scan" else 1)
