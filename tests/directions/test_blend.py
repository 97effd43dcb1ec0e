"""Sums of two directions: the transcription, shared parts, and lengths of any size."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import (
    assert_close,
    gradients_like,
    normal,
    run,
    run_scanned,
)
from tests.reference import lengths
from tests.reference.blends import blend, bounded_gate, trust_gate
from tests.reference.muon import momenta, newton_schulz
from tests.shared.meshes import mesh_of, on, steps
from tests.shared.transcriptions import HARD, Case, assert_follows

MUON = curvax.scale_by_muon(b1=0.9, nesterov=False, method=curvax.polar.newton_schulz(3, eps=0.0))
AMPLIFIED = 3.4445**3  # by three iterations
ONE = {"wide": HARD["wide"]}  # two matrices, of which one has rows of zeros


def blended(gradients: Any, weights: Any, **options: Any) -> Any:
    """The momentum, and its approximate polar factor."""
    found = momenta(gradients, 0.9, nesterov=False, bias_correction=False)
    return [
        blend(m, newton_schulz(m, steps=3, eps=0.0), weights, **options) for m, _ in found
    ], None


FORMS: dict[str, Any] = {
    "first": (curvax.blend, {}),
    "sum": (functools.partial(curvax.blend, length="sum"), {"length": "sum"}),
    "frobenius": (
        lambda a, s, w: curvax.graft(curvax.blend(a, s, w, length="sum"), a),
        {"norm": "frobenius"},
    ),
}


@pytest.mark.parametrize(
    ("form", "weights"), cells(FORMS, [(0.3, 0.7), (0.0, 1.0), (1.0, -0.25)], of=3)
)
def test_trajectories_equal_the_transcription(form: str, weights: tuple[float, float]) -> None:
    ours, options = FORMS[form]
    momentum = curvax.momentum(0.9)
    theirs = functools.partial(blended, weights=weights, **options)
    assert_follows(Case(ours(momentum, MUON, weights), theirs, HARD, 2 * AMPLIFIED))


POLAR = curvax.orthogonalize(curvax.polar.newton_schulz(3, eps=0.0))


def test_what_both_share_is_kept_once() -> None:
    momentum = curvax.momentum(0.9)
    shared = curvax.blend(optax.identity(), POLAR, (0.3, 0.7), shared=momentum)
    theirs = functools.partial(blended, weights=(0.3, 0.7))
    assert_follows(Case(shared, theirs, ONE, 2 * AMPLIFIED))
    sizes = [
        sum(x.size * (x.ndim > 0) for x in jax.tree.leaves(part.init(jnp.ones((4, 6)))))
        for part in (shared, momentum)
    ]
    assert sizes[0] == sizes[1]


def scheduled(values: np.ndarray) -> Any:
    return lambda count: jnp.asarray(values)[count]


def gated(gradients: Any, floor_end: int, fade_end: int) -> Any:
    """As in the record, with other marks."""
    found = []
    pairs = momenta(gradients, 0.9, nesterov=False, bias_correction=False)
    for t, (g, (m, _)) in enumerate(zip(gradients, pairs, strict=True)):
        s = newton_schulz(m, steps=3, eps=0.0)
        gate = bounded_gate(trust_gate(m, s, g), t, floor_end=floor_end, fade_end=fade_end)
        found.append(blend(m, s, (1 - gate, gate)))
    return found, None


@pytest.mark.parametrize(("floor_end", "fade_end"), [(6, 14), (-2, -1)])
def test_the_trust_gate_follows_the_transcription(floor_end: int, fade_end: int) -> None:
    """Within bounds that are scheduled; and without bounds, from the first step on."""

    t = np.arange(24)
    lowest = 0.45 * np.clip((fade_end - t) / (fade_end - floor_end), 0, 1)
    highest = np.where(t < fade_end, 0.85, 1.0)
    bounds = {"lowest": lowest, "highest": highest} if fade_end > 0 else {}
    bounds = {name: scheduled(values) for name, values in bounds.items()}
    gate, momentum = curvax.trust_gate(**bounds), curvax.momentum(0.9)
    ours = curvax.blend(momentum, MUON, gate)
    if not bounds:  # with the momentum once; the gate compares with the gradient all the same
        ours = curvax.blend(optax.identity(), POLAR, gate, shared=momentum)
    theirs = functools.partial(gated, floor_end=floor_end, fade_end=fade_end)
    assert_follows(Case(ours, theirs, ONE, 4 * AMPLIFIED))


def test_weights_may_be_schedules() -> None:
    shares = 1 / np.arange(1.0, 25)
    weights = scheduled(shares), scheduled(1 - shares)
    ours = curvax.blend(curvax.momentum(0.9), MUON, weights, length="sum")

    def theirs(gradients: Any) -> Any:
        found = momenta(gradients, 0.9, nesterov=False, bias_correction=False)
        polar = [(m, newton_schulz(m, steps=3, eps=0.0)) for m, _ in found]
        each = zip(polar, shares, strict=True)
        return [blend(m, s, (w, 1 - w), length="sum") for (m, s), w in each], None

    assert_follows(Case(ours, theirs, ONE, 2 * AMPLIFIED))


def test_devices_share_the_matrices_of_both_directions() -> None:
    both = curvax.blend(curvax.scale_by_muon(), curvax.scale_by_muon(b2=0.9), (0.5, 0.5))
    params = normal(jax.random.key(0), {f"{i}/kernel": (4, 6) for i in range(5)})
    gradients = gradients_like(params, 3)
    mesh = mesh_of("auto")
    alone, _ = run(curvax.assemble(both, 0.1), gradients, params)
    on_mesh = curvax.assemble(both, 0.1, mesh=mesh)
    shared, _ = steps(on_mesh, [on(mesh, g) for g in gradients], on(mesh, params), mesh)
    assert_close(jax.tree.map(np.asarray, shared), alone, 64, condition=100)


def test_a_blend_within_an_eigenbasis_is_one_outside_it() -> None:
    """Rotations change neither sums nor Schatten norms."""
    nesterov, ratio = curvax.momentum(0.9, nesterov=True), curvax.moment_ratio(0.0, 0.9)
    in_basis = functools.partial(curvax.in_eigenbasis, refresh=curvax.every(3), method="eigh")
    inside = in_basis(curvax.blend(optax.identity(), ratio, (0.3, 0.7), shared=nesterov))
    outside = curvax.blend(nesterov, in_basis(optax.chain(nesterov, ratio)), (0.3, 0.7))
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        gradients = [draw.standard_normal((2, 4, 9)) + 1 for _ in range(20)]
        found, expected = (run_scanned(part, gradients)[0] for part in (inside, outside))
        assert_close(found, expected, 16, condition=1e4)
        plain, _ = run_scanned(nesterov, gradients)
    last = [[lengths.schatten_4(x) for x in side[-1]] for side in (found, plain)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)


def test_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    double = optax.scale(2.0)
    part = curvax.blend(optax.identity(), double, (0.5, 0.5))
    x = jnp.zeros((3, 2, 2)).at[1].set(1.0).at[2, 0, 0].set(jnp.nan)
    found, _ = part.update(x, part.init(x))
    assert not np.asarray(found[0]).any() and np.isfinite(found[1]).all()
    assert not np.isfinite(found[2]).all()
    opposed = curvax.blend(optax.identity(), double, (1.0, -0.5))
    assert not np.asarray(opposed.update(x, opposed.init(x))[0][1]).any()
