"""Parameters of public code bases, by paths and shapes: how the rule treats each of them.

A table in `clients/trees` has a line per kind of parameter: its path, its shape, and its matrices,
or why it is none. "Asked" stands before what the rule asks for, with the first reading it offers.
Where arrays know their axes, the shape says so: `32×4×8 ioo` with Simply's letters, or with Haliax'
names, `mlp 64×embed 32`, and for a `weight` the inputs and outputs of its layer,
`mlp 64×embed 32; embed; mlp`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixRule
from curvax.transforms._paths import matches
from tests.matrices.test_annotated import AnnotatedArray, Axis, Linear, NamedArray

TREES = sorted(Path(__file__).parents[2].glob("clients/trees/*.md"))
assert len(TREES) >= 8


def parameter(shape: str) -> Any:
    """An abstract array, in the box of its code base."""
    sizes, _, letters = shape.partition(";")[0].partition(" ")
    if not sizes.isalpha() and "_" not in sizes:
        array = jax.ShapeDtypeStruct(tuple(map(int, sizes.split("×"))), jnp.float32)
        return AnnotatedArray(array, letters) if letters else array
    named = [axis.split(" ") for axis in shape.partition(";")[0].split("×")]
    axes = tuple(Axis(name, int(size)) for name, size in named)
    return NamedArray(jax.ShapeDtypeStruct(tuple(a.size for a in axes), jnp.float32), axes)


def tree(shapes: dict[str, str]) -> dict[str, Any]:
    """The parameters, with layers that know their inputs and outputs."""
    params = {name: parameter(shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        _, *ends = shape.split("; ")
        if ends:
            layer, weight = name.removesuffix("/weight"), params.pop(name)
            axes = {axis.name: axis for axis in weight.axes}
            inputs, outputs = (tuple(axes[x] for x in end.split(" ")) for end in ends)
            inputs = inputs[0] if len(inputs) == 1 else inputs
            params[layer] = Linear(weight, params.pop(f"{layer}/bias", None), inputs, outputs)
    return params


def treated(shapes: dict[str, str], rule: MatrixRule) -> dict[str, str]:
    """What `summarize` says of each parameter, without where it is stored."""
    params = tree(shapes)
    asked: dict[str, Any] = {}
    try:
        rule(params)
    except ValueError as error:
        text = str(error)
        asked = eval(text[text.index("{\n") :], {"curvax": curvax})
        rule = dataclasses.replace(rule, weight_dimension_numbers=asked)
    found = {}
    for line in curvax.summarize(curvax.muon(0.1, matrices=rule), params).splitlines():
        name, _, treatment, *_ = [*(cell.strip() for cell in line.strip("| ").split(" | ")), "", ""]
        if name in shapes:
            matrices, _, rest = treatment.partition(" in stack ")
            matrices = matrices.partition(" in an entry of its own")[0]
            why = "".join(f"; {x}" for x in rest.split("; ")[1:])
            prefix = "asked: " if any(matches(name, pattern) for pattern in asked) else ""
            found[name] = f"{prefix}{matrices}{why}"
    return found


def read(table: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """The rule's name, the shapes and the treatments."""
    title, _, _, _, *lines = table.read_text().splitlines()
    rule = title.rpartition("`")[0].rpartition(".")[2]
    cells = [line.strip("| ").split(" | ") for line in lines]
    shapes = {name: shape for name, shape, _ in cells}
    return rule, shapes, {name: treatment for name, _, treatment in cells}


@pytest.mark.parametrize("table", TREES, ids=lambda path: path.stem)
def test_every_parameter_is_treated_as_meant(table: Path) -> None:
    rule, shapes, treatments = read(table)
    rule = MatrixRule() if rule == "MatrixRule" else getattr(curvax.rules, rule)
    assert treated(shapes, rule) == treatments
