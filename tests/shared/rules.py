"""Parameters by their paths and shapes, and what a rule makes of them.

A row of a table is `rules: parameters -> treatments`, such as

    MatrixRule linen: up/(kernel 32 8, bias 32) -> up/kernel 1.0

The rules may be ALL or FLAX; without any, it is the default. `a/(b, c)` is `a/b, a/c`, and
`{b,c}/d` stands for the same of both. A treatment is the axes of rows and columns, `01.2` (`0.1/3`:
with three column heads), several readings that are offered, or the reason why a parameter is not a
matrix. A row goes on in lines that begin with spaces.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

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


class Row(NamedTuple):
    """A line of a table."""

    rules: tuple[MatrixRule, ...]
    shapes: Shapes
    treatments: dict[str, list[Any]]


def rows(table: str) -> list[Any]:
    """The rows of a table, with their text as the ids of tests."""
    lines = re.sub(r"\n {2,}", " ", re.sub(r"\n#.*", "", f"\n{table}")).strip().split("\n")
    return [pytest.param(_row(line), id=line) for line in lines if line]


def _row(line: str) -> Row:
    before, _, after = line.partition(" -> ")
    *named, parameters = before.split(": ")
    shapes = {
        name: tuple(map(int, sizes.split()))
        for part in _parts(parameters)
        for name, _, sizes in [part.partition(" ")]
    }
    treatments = {
        name: [_treatment(x) for x in re.split(r"(?<=\d) (?=\d)", text)]
        for part in _parts(after)
        for name, _, text in [part.partition(" ")]
    }
    named = "".join(named or ["MatrixRule"]).replace("FLAX", "linen nnx hf_flax")
    return Row(tuple(map(_rule, named.replace("ALL", ALL).split())), shapes, treatments)


ALL = "MatrixRule linen nnx haiku keras hf_flax equinox torch_layout maxtext"


def _parts(text: str) -> Iterator[str]:
    """`a, b/(c, d)` as `a`, `b/c`, `b/d`, with all that braces stand for."""
    for part in re.findall(r"(?:[^,({]|\([^)]*\)|\{[^}]*\})+", text):
        scope, _, inside = part.strip().rstrip(")").partition("(")
        for one in _parts(inside) if inside else [""]:
            choices = (
                x.strip("{}").split(",") for x in re.findall(r"\{[^}]*\}|[^{]+", scope + one)
            )
            choices = (x if len(x) > 1 else ["".join(x)] for x in choices)
            yield from map("".join, itertools.product(*choices))


def _treatment(text: str) -> Any:
    found = re.fullmatch(r"(\d+)\.(\d+)(?:/(\d+))?", text)
    if found is None:
        return text
    rows, columns = (int(x) if len(x) == 1 else tuple(map(int, x)) for x in found.groups()[:2])
    return MatrixAxes(rows, columns, column_heads=int(found[3] or 1))


def _rule(name: str) -> MatrixRule:
    return MatrixRule() if name == "MatrixRule" else getattr(curvax.rules, name)
