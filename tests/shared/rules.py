"""Parameters by their paths and shapes, and what a rule makes of them."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule

Shapes = dict[str, tuple[int, ...]]


def abstract(shapes: Shapes) -> Any:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def treated(shapes: Shapes, rule: MatrixRule | None = None, **settings: Any) -> dict[str, Any]:
    return (rule or MatrixRule(**settings))(abstract(shapes))


def offered(shapes: Shapes, rule: MatrixRule | None = None) -> dict[str, list[MatrixAxes]]:
    """The readings that the error offers, by path or pattern, as a user would paste them."""
    with pytest.raises(ValueError, match="or write another if none is") as error:
        treated(shapes, rule)
    pasted = str(error.value)
    pasted = pasted[pasted.index("{\n") :]
    eval(pasted, {"curvax": curvax})  # as it is, it is a dict
    found: dict[str, list[MatrixAxes]] = {}
    for name, axes in re.findall(r"(?:'(.+?)':|# or) (curvax\.MatrixAxes\(.+\)),  #", pasted):
        found.setdefault(name or list(found)[-1], []).append(eval(axes, {"curvax": curvax}))
    return found
