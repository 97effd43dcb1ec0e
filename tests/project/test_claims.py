"""The verdicts on the papers' claims follow from the losses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOSSES = {
    "adamw": [2.0, 2.1, 1.9, 2.0, 2.05],
    "better": [1.8, 1.91, 1.69, 1.8, 1.86],
    "noisy": [1.5, 2.6, 2.0, 1.4, 2.5],
    "near": [1.995, 2.096, 1.894, 1.995, 2.046],  # below with every seed, by 0.005
    "worse": [2.3, 2.41, 2.19, 2.3, 2.36],
    "unfinished": [1.0, 1.0],
}


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module("benchmarks.evidence._claims")
    compare = importlib.import_module("benchmarks.evidence._compare")
    found = {
        name: compare.Result(None, [{"loss": x} for x in losses]) for name, losses in LOSSES.items()
    }
    monkeypatch.setattr(module, "results", lambda suite, runs: found)
    monkeypatch.setattr(module, "curve_of", lambda suite, runs: {250: 2.01, 500: 1.85, 1000: 1.75})
    yield module


def verdict(claims: Any, method: str, *others: str, **how: Any) -> str:
    claim = claims.Claim("c", "Table 1", ("recipe-250",), method, others or ("adamw",), **how)
    return claims.judged(claim, "recipe-250", {})[1]


def test_a_claim_holds_where_the_whole_interval_is_on_its_side(claims: Any) -> None:
    assert verdict(claims, "better") == "agrees"
    assert verdict(claims, "worse") == "disagrees"
    assert verdict(claims, "noisy") == "undecided: within the noise of seeds"
    assert verdict(claims, "worse", behind=True) == "agrees"
    assert verdict(claims, "better", behind=True) == "disagrees"
    several = verdict(claims, "near", "worse", "better", "noisy")
    assert several == (
        "agrees against `worse`; disagrees against `better`; undecided against `noisy`"
    )


def test_level_is_noise_or_next_to_no_difference(claims: Any) -> None:
    assert verdict(claims, "near") == "agrees"  # it is below
    assert verdict(claims, "near", level=True) == "agrees"
    assert verdict(claims, "noisy", level=True) == "agrees"
    assert verdict(claims, "better", level=True) == "disagrees"


def test_steps_are_read_off_adamws_curve(claims: Any) -> None:
    # 1.812 lies between 500 and 1000 steps of AdamW: 500 · 2^0.38 = 651, 2.6 times its own.
    assert verdict(claims, "better", steps=2.0) == "agrees"
    assert verdict(claims, "better", steps=3.0) == "disagrees"
    assert verdict(claims, "worse", steps=2.0) == "disagrees"
    claim = claims.Claim("c", "Table 1", ("recipe-250",), "better", steps=2.0)
    assert claims.judged(claim, "recipe-250", {})[0] == "2.60 times"


def test_what_has_not_run_is_open(claims: Any) -> None:
    assert verdict(claims, "unfinished").startswith("open")
    assert verdict(claims, "better", "unfinished").startswith("open")


def test_every_claim_names_suites_and_methods_that_are_declared(claims: Any) -> None:
    suites = importlib.import_module("benchmarks.evidence._suites").SUITES
    for claim in (claim for found in claims.CLAIMS.values() for claim in found):
        for suite in claim.suites:
            assert {claim.method, *claim.others} <= set(suites[suite].methods), claim
