"""Parameters of public code bases, by paths and shapes: how the rule treats each of them.

A table in `clients/trees` has a line per kind of parameter: its path, its shape, and its matrices,
or why it is none. "Asked" stands before what the rule asks for, with the first reading it offers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixRule
from curvax.transforms._paths import matches

TREES = sorted(Path(__file__).parents[2].glob("clients/trees/*.md"))
Shapes = dict[str, tuple[int, ...]]


def treated(shapes: Shapes, rule: MatrixRule) -> dict[str, str]:
    """What `summarize` says of each parameter, without where it is stored."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
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


def read(table: Path) -> tuple[str, Shapes, dict[str, str]]:
    """The rule's name, the shapes and the treatments."""
    title, _, _, _, *lines = table.read_text().splitlines()
    rule = title.rpartition("`")[0].rpartition(".")[2]
    cells = [line.strip("| ").split(" | ") for line in lines]
    shapes = {name: tuple(map(int, shape.split("×"))) for name, shape, _ in cells}
    return rule, shapes, {name: treatment for name, _, treatment in cells}


@pytest.mark.parametrize("table", TREES, ids=lambda path: path.stem)
def test_every_parameter_is_treated_as_meant(table: Path) -> None:
    rule, shapes, treatments = read(table)
    rule = MatrixRule() if rule == "MatrixRule" else getattr(curvax.rules, rule)
    assert treated(shapes, rule) == treatments


def test_there_are_tables() -> None:
    assert len(TREES) >= 8
