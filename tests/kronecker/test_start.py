"""First factors in few bits: a step makes them, to start a damaged matrix anew."""

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
        inner = [getattr(x, "jaxpr", x) for x in jaxprs_in_params(equation.params)]
        for each in inner:  # what a loop or a branch is given counts as not constant
            found |= folded(each, given if name == "jit" else [True] * len(each.invars))
        if not (inner or any(given)):
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
    gradient = {"kernel": jnp.ones((2, ORDER, ORDER))}
    state = jax.eval_shape(transformation.init, gradient)
    for program, given in ((transformation.init, ()), (transformation.update, (state,))):
        jaxpr = jax.make_jaxpr(program)(gradient, *given).jaxpr
        assert not {x for x in folded(jaxpr, [True] * len(jaxpr.invars)) if "reduce" in x}
