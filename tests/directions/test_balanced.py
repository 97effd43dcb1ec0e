"""Scaled rows before the polar factor: MuonEq by a part in front, Aurora's balanced factor."""

import functools
from typing import Any

import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.reference.aurora import aurora, balanced_polar
from tests.reference.muon_eq import muon_eq
from tests.shared.transcriptions import FULL_RANK, HARD, Case, assert_follows, spread

MUON, CONVERGING = 3.4445**5, 2.0**12
NESTEROV = curvax.momentum(0.95, accumulate="sum", nesterov=True)
QUINTIC = curvax.orthogonalize(curvax.polar.newton_schulz(eps=0.0))


def in_our_layout(reference: Any, **options: Any) -> Any:
    """A transcription with weights outputs by inputs, for kernels inputs by outputs."""

    def run(gradients: list[np.ndarray]) -> Any:
        found, _ = reference([g.T for g in gradients], **options)
        return [d.T for d in found], None

    return run


def of_scales(gradients: list[np.ndarray], states: Any) -> float:
    """Normalized rows of very different lengths: their rounding, and Newton-Schulz'."""
    del states
    return MUON * max(spread(np.linalg.norm(g, axis=axis)) for g in gradients for axis in (0, 1))


PARTS = {"R": curvax.normalize_columns(), "C": curvax.normalize_rows()}


@pytest.mark.parametrize("form", PARTS)
def test_muon_eq_normalizes_outputs_or_inputs_before_the_polar_factor(form: str) -> None:
    """The line of `docs/combinations.md`; outputs are columns of our kernels."""
    ours = optax.chain(NESTEROV, PARTS[form], QUINTIC)
    theirs = in_our_layout(muon_eq, form=form, eps=0.0, ns_eps=0.0)
    assert_follows(Case(ours, theirs, HARD, of_scales))


@pytest.mark.parametrize("rounds", cells([1, 2, 3], of=3))
def test_aurora_follows_the_transcription(rounds: int) -> None:
    ours = optax.chain(
        curvax.momentum(0.95, nesterov=True),
        curvax.orthogonalize(curvax.polar.balanced(rounds=rounds)),
    )
    # The transcription's ε of 1e-7 beside norms of all sizes; rows of zeros stay zero in both.
    theirs = in_our_layout(aurora, rounds=rounds)
    assert_follows(Case(ours, theirs, HARD, CONVERGING))


@pytest.mark.parametrize("beta", cells([0.5, 1.0], of=2))
def test_exact_factors_may_be_balanced_too(beta: float) -> None:
    ours = curvax.orthogonalize(curvax.polar.balanced("svd", beta=beta))
    theirs = functools.partial(balanced_polar, beta=beta)
    case = Case(ours, lambda g: ([theirs(x) for x in g], None), FULL_RANK, 1e4)
    assert_follows(case._replace(state_of=lambda states, name: None))
