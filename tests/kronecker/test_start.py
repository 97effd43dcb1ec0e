"""Initial states in few bits: a step makes them, to start a damaged matrix anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import curvax

ORDER = 128


def folded(jaxpr: Any, inputs: list[bool]) -> set[str]:
    """What reads matrices that depend on no input: XLA computes it while it compiles."""
    found: set[str] = set()
    depends = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        given = [not hasattr(x, "val") and depends.get(x, False) for x in equation.invars]
        if name == "jit":
            (inner,) = jaxprs_in_params(equation.params)
            found |= folded(inner, given)
        elif name != "optimization_barrier" and not any(given):
            found |= {name for x in equation.invars if x.aval.size >= ORDER**2}
        made = any(given) or name == "optimization_barrier"
        depends |= dict.fromkeys(equation.outvars, made)
    return found


@pytest.mark.parametrize("form", ["precondition", "in_eigenbasis"])
def test_no_compiler_encodes_the_first_factors_itself(form: str) -> None:
    """XLA's evaluator of constants took 30 s for the codes of an identity of order 3072."""
    inner = () if form == "precondition" else (optax.scale_by_adam(),)
    own = {"refresh": curvax.every(2), "storage": curvax.quantized()}
    transformation = getattr(curvax, form)(*inner, **own)
    jaxpr = jax.make_jaxpr(lambda: transformation.init({"kernel": jnp.zeros((ORDER, ORDER))}))()
    assert folded(jaxpr.jaxpr, []) <= {"add", "eq", "convert_element_type"}  # of the identity
