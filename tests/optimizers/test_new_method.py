"""A new method is a recipe and a row: every suite, the benchmarks and the pages take it from there.

`CONTRIBUTING.md` says so; here it is done, with a method that nobody needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = "new_" + "method"  # put together, so that -k finds its tests and not these

RECIPE = '''
"""Momentum with normalized columns."""

import optax

import curvax


def scale_by_NAME(*, b1=0.9):
    return optax.chain(curvax.momentum(b1), curvax.normalize_columns())


def NAME(
    learning_rate,
    *,
    b1=0.9,
    matrices=None,
    weight_dimension_numbers=None,
    mesh=None,
    mesh_axis=None,
    weight_decay=0.0,
    weight_decay_mask=None,
    adam_learning_rate=None,
    others=None,
):
    return curvax.assemble(
        scale_by_NAME(b1=b1),
        learning_rate,
        matrices=matrices,
        weight_dimension_numbers=weight_dimension_numbers,
        mesh=mesh,
        mesh_axis=mesh_axis,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        adam_learning_rate=adam_learning_rate,
        others=others,
    )
'''

ROW = '''
"""A method that nobody needs."""

import recipe

from registry import Readme, Row

ROW = Row(
    name="NAME",
    family="scaled, or one-sided",
    optimizer=recipe.NAME,
    direction=recipe.scale_by_NAME,
    fields=frozenset({"mu"}),
    scale_free=True,
    growth=16.0,
    longest=lambda at: at.n**0.5,  # every column has norm 1
    numbers=lambda s: s.m * s.n,
    narrow=True,
    mind="made up",
    readme=Readme(
        direction="`M`, columns of norm 1", state="`mn`", work="`6mn`", refresh="", paper="none"
    ),
)
'''

UNTRUE = '''
"""The same method with a row that is wrong about it."""

import dataclasses

from registry.NAME import ROW as RIGHT

WRONG = {"numbers": lambda s: 1, "longest_repeated": lambda at: 0.0, "svd": True}
ROW = dataclasses.replace(RIGHT, name="untrue", **WRONG)
'''
NOTICE = {
    "test_bytes_of_a_small_model_are_those_of_its_state",
    "test_degenerate_gradients",
    "test_no_batch_is_decomposed",
    "test_the_formula_for_the_state_is_what_is_counted",
}
"""Tests that fail where numbers of the state, length and decompositions are not the row's."""

SUITES = {
    "optimizers/test_algebra.py",
    "optimizers/test_arguments.py",
    "optimizers/test_bad_input.py",
    "optimizers/test_contract.py",
    "optimizers/test_degenerate.py",
    "optimizers/test_faults.py",
    "optimizers/test_fuzz.py",
    "optimizers/test_optax_contracts.py",
    "project/test_benchmarks.py",
    "project/test_pages.py",
    "state/test_summary.py",
}


def test_a_recipe_and_a_row_are_all_that_the_suites_need(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    tmp_path.joinpath("recipe.py").write_text(RECIPE.replace("NAME", NAME))
    rows.joinpath(f"{NAME}.py").write_text(ROW.replace("NAME", NAME))
    rows.joinpath("untrue.py").write_text(UNTRUE.replace("NAME", NAME))
    chosen = f"{NAME} or untrue and not times and ({' or '.join(sorted(NOTICE))})"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-k", chosen, "--numprocesses=0"]
    command += ["-p", "no:cacheprovider", *(f"tests/{suite}" for suite in sorted(SUITES))]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "CURVAX_ROWS": str(rows), "CURVAX_ALL_CELLS": "1"}
    environment["PYTHONPATH"] = path
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = re.findall(r"^tests/(\S+)::(\w+)\[(.*)\] (\w+)", done.stdout, re.MULTILINE)
    wrong = [test for _, test, case, outcome in found if NAME in case and outcome != "PASSED"]
    assert not wrong, done.stdout[-10_000:] + done.stderr
    assert {file for file, _, case, _ in found if NAME in case} == SUITES
    assert len({test for _, test, case, _ in found if NAME in case}) > 60
    untrue = {test for _, test, case, outcome in found if "untrue" in case and outcome == "FAILED"}
    assert untrue == NOTICE, done.stdout[-10_000:] + done.stderr
