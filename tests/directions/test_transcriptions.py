"""Parts and their combinations against the transcriptions of their papers."""

import functools
from typing import Any

import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.reference.aurora import aurora, balanced_polar
from tests.reference.blends import blend, bounded_gate, trust_gate
from tests.reference.cautious_updates import cautious_updates
from tests.reference.mars import corrected_gradients, mars_factor
from tests.reference.muon import momenta, newton_schulz
from tests.reference.muon_eq import muon_eq
from tests.shared.transcriptions import FULL_RANK, HARD, Case, assert_follows, scheduled, spread

AMPLIFIED = 3.4445  # what an iteration makes of a rounding error at most
ONE = {"wide": HARD["wide"]}  # two matrices, of which one has rows of zeros
average = functools.partial(momenta, b1=0.9, nesterov=False, bias_correction=False)


def in_our_layout(reference: Any, **options: Any) -> Any:
    """A transcription with weights outputs by inputs, for kernels inputs by outputs."""

    def run(gradients: list[np.ndarray]) -> Any:
        found, _ = reference([g.T for g in gradients], **options)
        return [d.T for d in found], None

    return run


def of_scales(gradients: list[np.ndarray], states: Any) -> float:
    """Normalized rows of very different lengths: their rounding, and Newton-Schulz'."""
    lengths = (np.linalg.norm(g, axis=axis) for g in gradients for axis in (0, 1))
    return AMPLIFIED**5 * max(map(spread, lengths))


def muon_eq_with(part: Any, form: str) -> Case:
    """The line of `docs/combinations.md`; outputs are columns of our kernels."""
    nesterov = curvax.momentum(0.95, accumulate="sum", nesterov=True)
    quintic = curvax.orthogonalize(curvax.polar.newton_schulz(eps=0.0))
    theirs = in_our_layout(muon_eq, form=form, eps=0.0, ns_eps=0.0)
    return Case(optax.chain(nesterov, part, quintic), theirs, HARD, of_scales)


def aurora_of(rounds: int) -> Case:
    """With the transcription's ε of 1e-7 beside norms of all sizes; rows of zeros stay zero."""
    balanced = curvax.orthogonalize(curvax.polar.balanced(rounds=rounds))
    ours = optax.chain(curvax.momentum(0.95, nesterov=True), balanced)
    return Case(ours, in_our_layout(aurora, rounds=rounds), HARD, 2.0**12)


def exactly_balanced(beta: float) -> Case:
    ours = curvax.orthogonalize(curvax.polar.balanced("svd", beta=beta))
    theirs = lambda gs: ([balanced_polar(g, beta=beta) for g in gs], None)  # noqa: E731
    return Case(ours, theirs, FULL_RANK, 1e4)


POLAR = curvax.orthogonalize(curvax.polar.newton_schulz(3, eps=0.0))
MUON = curvax.scale_by_muon(b1=0.9, nesterov=False, method=curvax.polar.newton_schulz(3, eps=0.0))
MOMENTUM = curvax.momentum(0.9)
FORMS: dict[str, Any] = {
    "first": (curvax.blend, {}),
    "sum": (functools.partial(curvax.blend, length="sum"), {"length": "sum"}),
    "frobenius": (
        lambda a, s, w: curvax.graft(curvax.blend(a, s, w, length="sum"), a),
        {"norm": "frobenius"},
    ),
}


def blended(gradients: Any, weights: Any, **options: Any) -> Any:
    """With weights for all steps, or a function to weights from m, s, g and the step."""
    found = []
    for t, (g, (m, _)) in enumerate(zip(gradients, average(gradients), strict=True)):
        s = newton_schulz(m, steps=3, eps=0.0)
        w = weights(m, s, g, t) if callable(weights) else weights
        found.append(blend(m, s, w, **options))
    return found, None


def blend_of(form: str, weights: Any) -> Case:
    ours, options = FORMS[form]
    theirs = functools.partial(blended, weights=weights, **options)
    return Case(ours(MOMENTUM, MUON, weights), theirs, HARD, 2 * AMPLIFIED**3)


def scheduled_blend() -> Case:
    shares = 1 / np.arange(1.0, 25)
    weights = scheduled(shares), scheduled(1 - shares)
    ours = curvax.blend(MOMENTUM, MUON, weights, length="sum")
    own = lambda m, s, g, t: (shares[t], 1 - shares[t])  # noqa: E731
    theirs = functools.partial(blended, weights=own, length="sum")
    return Case(ours, theirs, ONE, 2 * AMPLIFIED**3)


def shared_blend() -> Case:
    """With the momentum once."""
    ours = curvax.blend(optax.identity(), POLAR, (0.3, 0.7), shared=MOMENTUM)
    return Case(ours, functools.partial(blended, weights=(0.3, 0.7)), ONE, 2 * AMPLIFIED**3)


def gated(floor_end: int, fade_end: int) -> Case:
    """As in the record, with other marks: within bounds that are scheduled, or without bounds.

    Then with the momentum once; the gate compares with the gradient all the same.
    """
    t = np.arange(24)
    lowest = 0.45 * np.clip((fade_end - t) / (fade_end - floor_end), 0, 1)
    highest = np.where(t < fade_end, 0.85, 1.0)
    gate = curvax.trust_gate(lowest=scheduled(lowest), highest=scheduled(highest))
    ours = curvax.blend(MOMENTUM, MUON, gate)
    if fade_end < 0:
        ours = curvax.blend(optax.identity(), POLAR, curvax.trust_gate(), shared=MOMENTUM)

    def weights(m: Any, s: Any, g: Any, t: int) -> Any:
        share = bounded_gate(trust_gate(m, s, g), t, floor_end=floor_end, fade_end=fade_end)
        return 1 - share, share

    return Case(ours, functools.partial(blended, weights=weights), ONE, 4 * AMPLIFIED**3)


def cautious(rescale: bool, scale: Any) -> Case:
    def theirs(gradients: Any) -> Any:
        return cautious_updates([m for m, _ in average(gradients)], gradients, scale=scale), None

    return Case(curvax.cautious_updates(MOMENTUM, rescale=rescale), theirs, HARD)


def mars(clip: float | None) -> Case:
    """The line of `docs/combinations.md`; of one array the global norm is its own."""
    factor = mars_factor(0.025, 0.95)
    ours = optax.scale_by_optimistic_gradient(1.0, factor)
    ours = ours if clip is None else optax.chain(ours, optax.clip_by_global_norm(clip))
    options: dict[str, Any] = {"factor": factor, "first": "same", "clip": clip}
    alone = {"square": HARD["square"]}
    return Case(ours, lambda g: (corrected_gradients(g, **options), None), alone)


BLENDS = cells(FORMS, [(0.3, 0.7), (0.0, 1.0), (1.0, -0.25)], of=6)
CASES = {
    "MuonEq-R": muon_eq_with(curvax.normalize_columns(), "R"),
    "MuonEq-C": muon_eq_with(curvax.normalize_rows(), "C"),
    **{f"Aurora, {rounds} rounds": aurora_of(rounds) for rounds in cells([1, 2, 3], of=3)},
    **{f"exactly balanced, β = {x}": exactly_balanced(x) for x in cells([0.5, 1.0], of=2)},
    **{f"blend, {form}, {weights}": blend_of(form, weights) for form, weights in BLENDS},
    "blend, scheduled": scheduled_blend(),
    "blend, shared": shared_blend(),
    "gate": gated(6, 14),
    "gate without bounds": gated(-2, -1),
    "cautious": cautious(True, "count"),
    "cautious without a scale": cautious(False, None),
    "MARS": mars(None),
    "MARS, clipped": mars(1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_trajectories_follow_the_transcription(name: str) -> None:
    assert_follows(CASES[name]._replace(state_of=lambda states, name: None))
