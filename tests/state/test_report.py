"""`report` says of every parameter what its entries in the state say."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import run_scanned, zeros_like
from tests.shared.reports import table


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def reported(optimizer: Any, gradients: list[Any]) -> dict[str, dict[str, str]]:
    _, states = run_scanned(optimizer, gradients)
    return table(curvax.report(optimizer, gradients[0], states[-1]))


def test_a_parameter_of_several_matrices_shows_least_and_greatest() -> None:
    axes = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    good = {"layers": {"kernel": ones(3, 4, 6)}, "bias": ones(4), "kernel": ones(4, 6)}
    bad = {**good, "layers": {"kernel": ones(3, 4, 6)}}
    bad["layers"]["kernel"][1, 0, 0] = np.inf
    stored = curvax.eigenbases.stored_roots()
    refreshes = {"refresh": 2, "statistics_every": 1, "side": "left", "method": stored}
    optimizer = curvax.shampoo(0.1, **refreshes, weight_dimension_numbers=axes)
    rows = reported(optimizer, [good, bad, bad, good])
    assert list(rows) == ["bias", "kernel", "layers/kernel"]
    assert rows["layers/kernel"]["skipped"] == "0 to 2"
    assert rows["kernel"]["skipped"] == rows["bias"]["skipped"] == "0"
    assert rows["kernel"]["checks"] == rows["kernel"]["refreshes"] == "2"
    assert 0 < float(rows["kernel"]["error"]) < 1e-5
    assert rows["bias"]["checks"] == ""  # AdamW's


def test_a_column_is_shown_if_any_parameter_has_it() -> None:
    good = {"kernel": ones(4, 6), "bias": ones(4)}
    assert list(reported(curvax.muon(0.1), [good])["bias"]) == ["skipped", "restarted"]
    good = {"kernel": good["kernel"]}
    storage = curvax.cholesky(min_elements=1)
    coded = curvax.shampoo(0.1, refresh=1, side="left", storage=storage)
    row = table(curvax.report(coded, good, zeros_like(jax.eval_shape(coded.init, good))))["kernel"]
    assert row["failures"] == row["refreshes"] == "0"
    policy = {"refresh": curvax.policies.foam(1), "damping_mode": "absolute", "eps": 1e-8}
    adaptive = reported(curvax.shampoo(0.1, side="left", base=None, **policy), [good])["kernel"]
    assert adaptive["damping"] == "1e-08" and adaptive["proxy"] == "0" and "error" not in adaptive
    low_rank = reported(curvax.galore(0.1, rank=2), [jax.tree.map(np.zeros_like, good), good])
    counted = {"skipped": "0", "restarted": "0", "refreshes": "1", "rejected": "1"}
    assert low_rank["kernel"] == counted


def test_a_divided_state_is_reported_as_on_one_device() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    good = {f"{name}/kernel": ones(4, 6) for name in "abcdef"}
    bad = {**good, "e/kernel": np.nan * ones(4, 6)}
    alone, divided = (
        reported(curvax.muon(0.1, **given), [good, bad]) for given in ({}, {"mesh": mesh})
    )
    assert alone == divided
    assert [row["skipped"] for row in divided.values()] == list("000010")


@pytest.mark.parametrize("optimizer", [optax.adamw(0.1), optax.sgd(0.1), curvax.momentum()])
def test_a_state_without_counters_is_said_to_have_none(optimizer: Any) -> None:
    params = {"kernel": ones(4, 6)}
    text = curvax.report(optimizer, params, optimizer.init(params))
    assert text.startswith("Nothing to report") and "|" not in text
    assert "skipped" in text and "curvax.summarize" in text
