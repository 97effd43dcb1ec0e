"""Identities that transcriptions must meet: a wrong transcription would be a wrong measure."""

import numpy as np
import pytest

from .. import helpers
from . import (
    ademamix,
    aurora,
    averages,
    blends,
    brakes,
    decay,
    floors,
    hyperball,
    hyperball_methods,
    kl_soap_h,
    mars,
    muon,
    muon_eq,
    muown,
    namo,
    polar_express,
    record_46,
    saturated_muon,
    soap,
    spectral,
    track3_schedules,
)
from .cautious_updates import cautious_update
from .ema_nesterov import ema_nesterov, lookahead_rates
from .head_groups import on_head_groups
from .lengths import frobenius, schatten_4

RATES = np.linspace(0.3, 0.05, 6)
SHAPES = [(5, 8), (8, 5), (6, 6)]


def assert_close(actual, desired, factor=16.0, condition=1.0):
    """`helpers.assert_close` for arrays, and for lists of arrays of one shape."""
    left, right = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    helpers.assert_close(left, right, factor, condition=condition)


def normals(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def run_of(seed, m, n):
    """Weights and updates."""
    return normals(seed, m, n), list(normals(seed + 100, len(RATES), m, n))


@pytest.mark.parametrize("shape", SHAPES)
def test_hyperball_methods_keep_the_norm(shape) -> None:
    W, updates = run_of(1, *shape)
    runs = [
        hyperball.hyperball(updates, W, learning_rates=RATES),
        hyperball_methods.muon_h(updates, W, learning_rates=RATES),
        hyperball_methods.adam_h(updates, W, learning_rates=RATES),
        kl_soap_h.kl_soap_h(updates, W, learning_rates=RATES)[0],
    ]
    for weights in runs:
        assert_close([frobenius(x) for x in weights], [frobenius(W)] * len(RATES))
        assert frobenius(weights[-1] - W) > 0.1


def test_zero_weights_on_hyperballs() -> None:
    _, updates = run_of(2, 4, 3)
    zero = np.zeros((4, 3))
    assert not np.any(hyperball.hyperball(updates, zero, learning_rates=RATES))
    first = hyperball.hyperball(updates, zero, learning_rates=RATES, radius=2.0)[0]
    assert_close(first, -2.0 * updates[0] / frobenius(updates[0]))


@pytest.mark.parametrize("by", ["rate", "schedule", "step", "corrected"])
def test_decay_alone_is_a_product(by) -> None:
    W, updates = run_of(3, 4, 3)
    factors = {
        "rate": RATES,
        "schedule": RATES / 0.3,
        "step": np.ones(6),
        "corrected": RATES**2 / 0.3,
    }
    still = [np.zeros_like(u) for u in updates]
    options = {"learning_rates": RATES, "weight_decay": 0.1, "by": by}
    decayed = W * np.prod(1 - 0.1 * factors[by])
    assert_close(decay.decay(still, W, **options)[-1], decayed)
    assert_close(decay.decay(still, W, **options, cautious="at_least_zero")[-1], decayed)
    assert_close(decay.decay(still, W, **options, cautious="positive")[-1], W)


def test_nvidia_brake_halves_growth_and_keeps_shrinking() -> None:
    W, updates = run_of(4, 5, 4)
    for u, s in (
        (-W, 0.5),
        (W, 1.0),
        (updates[0] - np.vdot(updates[0], W) / np.vdot(W, W) * W, 0.5),
    ):
        V = W - 0.1 * u
        (braked,) = brakes.nvidia_brake([u], W, learning_rates=0.1)
        assert_close(frobenius(braked), (1 - s) * frobenius(W) + s * frobenius(V))
        assert_close(braked / frobenius(braked), V / frobenius(V))
    free = brakes.nvidia_brake(updates, W, learning_rates=RATES, outward=1.0)
    assert_close(free, decay.decay(updates, W, learning_rates=RATES, weight_decay=0.0))


def test_record_brake_moves_the_norm_by_the_braked_radial_part() -> None:
    W, updates = run_of(5, 5, 4)
    for u in updates:
        radial = np.sum(u * W) / frobenius(W)
        (braked,) = brakes.record_brake([u], W, learning_rates=0.1)
        change = -0.1 * radial * (0.5 if radial < 0 else 1.0)
        assert_close(frobenius(braked), frobenius(W) + change)
    pinned = brakes.record_brake(updates, W, learning_rates=RATES, outward=0.0, inward=0.0)
    assert_close([frobenius(x) for x in pinned], [frobenius(W)] * len(RATES))


def test_floored_updates_reach_the_share_of_the_weights() -> None:
    W, (u, *_) = run_of(6, 5, 4)
    u = u * np.geomspace(0.01, 2, 5)[:, None]
    for unit, axis in (("matrix", None), ("row", 1), ("column", 0)):
        length = lambda x: np.sqrt(np.sum(x**2, axis=axis))  # noqa: B023, E731
        long = floors.floored(u, W, 0.3825, unit)
        assert_close(length(long), np.maximum(length(u), 0.3825 * length(W)))
    assert np.array_equal(floors.floored(u, 0 * W), u)
    assert not np.any(floors.floored(0 * u, W))


def test_blends_have_the_length_of_the_first() -> None:
    _, (A, S, G, *_) = run_of(7, 5, 8)
    assert_close(schatten_4(A), np.sum(np.linalg.svd(A, compute_uv=False) ** 4) ** 0.25)
    for norm, measure in (("schatten_4", schatten_4), ("frobenius", frobenius)):
        assert_close(measure(blends.blend(A, S, (0.3, 0.7), norm=norm)), measure(A))
    assert_close(blends.blend(A, 2 * A, (0.5, 0.5)), A)
    assert_close(blends.blend(A, S, (1.0, 0.5), length="sum"), A + S / 2)
    assert_close(blends.trust_gate(G, 3 * G, G), 1.0)
    assert blends.trust_gate(G, -G, G) == 0
    steps = (0, 1374, 1500, 1625)
    bounds = [[float(blends.bounded_gate(g, t)) for g in (0.0, 1.0)] for t in steps]
    assert_close(bounds, [[0.45, 0.85], [0.45, 0.85], [0.225, 0.85], [0.0, 1.0]])


def test_spectrally_normalized_directions_have_spectral_norm_1() -> None:
    D = normals(23, 5, 8)
    assert_close(np.linalg.svd(spectral.spectrally_normalized(D), compute_uv=False)[0], 1.0)
    assert not np.any(spectral.spectrally_normalized(0 * D))
    assert spectral.decay_for_width(0.1, 512, 128) == 0.025


def test_cautious_updates_never_oppose_the_gradient() -> None:
    _, (u, g, *_) = run_of(8, 5, 4)
    for scale in ("count", "mean", None):
        assert np.all(cautious_update(u, g, scale=scale) * g >= 0)
    assert_close(cautious_update(u, 2 * u), u * 20 / 21)
    assert not np.any(cautious_update(u, -u))


def test_mars_corrects_changes_alone() -> None:
    _, (g, h, *_) = run_of(9, 5, 4)
    corrected = mars.corrected_gradients([g, g, h], factor=mars.mars_factor())
    assert_close(corrected, [1.475 * g, g, h + 0.475 * (h - g)])
    first, *_ = mars.corrected_gradients([g, h], factor=0.475, first="same", clip=1.0)
    assert_close(first, g / frobenius(g))


@pytest.mark.parametrize("shape", SHAPES)
def test_ademamix_in_a_basis_without_slow_moment_is_soap(shape) -> None:
    _, gradients = run_of(10, *shape)
    gradients = [G[: min(shape), : min(shape)] for G in gradients]  # statistics of full rank
    mixed, states = ademamix.soap_ademamix(gradients, b1=0.9, alpha=0.0, K=2, eps=0.0)
    plain, _ = soap.soap(gradients, b1=0.9, b2=0.95, b3=0.95, K=2, bias_correction=True)
    assert_close(mixed[1:], plain[1:], 1e4)  # t = 1 is noise over noise off the diagonal
    slow = np.zeros_like(gradients[0])
    for G, state in zip(gradients, states, strict=True):
        slow = 0.999 * slow + 0.001 * G
        assert_close(state["Q_L"] @ state["m2"] @ state["Q_R"].T, slow, 1e3)


def test_warm_ups_of_ademamix_end_at_their_values() -> None:
    half_lives = [1 / np.log2(ademamix.warm_b3(t, 0.9, 0.9999, 100)) for t in (0, 50, 100, 200)]
    first, middle, last, after = half_lives
    assert_close([first, last, after], [1 / np.log2(0.9), *[1 / np.log2(0.9999)] * 2], 1e5)
    assert_close(2 * middle, first + last, 1e5)
    assert ademamix.warm_alpha(50, 5.0, 100) == 2.5


def test_ema_nesterov_looks_ahead_along_its_average() -> None:
    W, gradients = run_of(11, 5, 4)
    step = lambda point, t: 0.9 * point - 0.1 * gradients[t]  # noqa: E731
    weights, states = ema_nesterov(W, step, betas=[0.5] * 6, gamma=0.8)
    path = [W, *weights]
    for t in range(1, 6):
        m = sum(0.2 * 0.8 ** (t - 1 - s) * (path[s + 1] - path[s]) for s in range(t))
        assert_close(states[t]["point"], path[t] + 0.5 * m)
        assert_close(weights[t], step(states[t]["point"], t))
    plain = W
    for t, after in enumerate(ema_nesterov(W, step, betas=[0.0] * 6)[0]):
        plain = step(plain, t)
        assert_close(after, plain)
    shares = [1.0, 0.8, 0.6, 0.4]
    assert_close(lookahead_rates(shares, beta=0.3, prefill=1, rest=3), [0.0, 0.3, 0.24, 0.0])


def test_averages_of_weights() -> None:
    W, gradients = run_of(12, 5, 4)
    step = lambda Z, Y, t: Z - 0.1 * (gradients[t] + Y)  # noqa: E731
    uniform = averages.schedule_free_weights(6)
    evaluated, states = averages.primal_averaging(W, step, 6, mu_x=uniform)
    assert_close(evaluated[-1], np.mean([state["Z"] for state in states], axis=0))
    evaluated, states = averages.primal_averaging(W, step, 6, mu_x=0.0, mu_y=0.5)
    assert_close(evaluated, [state["Z"] for state in states])
    still, _ = averages.tail_ema([W] * 6, start=2)
    assert_close(still, [W] * 6)
    moving, means = averages.tail_ema(gradients, tau=2.0, share=0.5, start=2, end=4)
    assert means[0] is None and np.array_equal(moving[1], gradients[1])
    tail = (gradients[1] + gradients[2]) / 2
    assert_close(moving[2:], [(gradients[t] + tail) / 2 for t in (2, 3, 4, 5)])


def test_equilibrated_momentum_has_unit_rows_or_columns() -> None:
    M = normals(13, 5, 8)
    assert_close(np.sum(muon_eq.equilibrated(M, "R", 0.0) ** 2, axis=1), np.ones(5))
    assert_close(np.sum(muon_eq.equilibrated(M, "C", 0.0) ** 2, axis=0), np.ones(8))
    rows = muon_eq.equilibrated(M, "RC", 0.0) / muon_eq.equilibrated(M, "R", 0.0)
    assert_close(rows, np.broadcast_to(1 / np.sqrt(np.sum(M**2, axis=0)), M.shape))


def test_balanced_polar_factors_have_equal_rows_in_the_limit() -> None:
    X = normals(14, 9, 4) * np.geomspace(0.1, 3, 9)[:, None]
    spread = []
    for rounds in (1, 2, 2000):
        U = aurora.balanced_polar(X, rounds=rounds)
        assert_close(U.T @ U, np.eye(4))
        spread.append(np.ptp(np.sum(U**2, axis=1)))
        assert_close(aurora.balanced_polar(X.T, rounds=rounds), U.T)
    assert spread[1] < spread[0] and spread[1] > 0.03
    assert_close(np.sum(U**2, axis=1), np.full(9, 4 / 9), 1e3)
    one = muon.orthogonal_factor(muon_eq.equilibrated(X, "R", 0.0))
    assert_close(aurora.balanced_polar(X, rounds=1), one)
    assert_close(aurora.balanced_polar(X, polar="newton_schulz"), aurora.balanced_polar(X), 1e6)
    square = normals(15, 4, 4)
    assert_close(aurora.balanced_polar(square), muon.orthogonal_factor(square))


def test_saturated_roots_are_the_factors_of_the_coupled_iteration() -> None:
    G = normals(16, 6, 9) * np.geomspace(1e-3, 1, 6)[:, None]
    H, I = G @ G.T, np.eye(6)
    a, b, c = muon.COEFFICIENTS
    P, X = H / np.linalg.eigvalsh(H)[-1], I
    for _ in range(5):
        factor = a * I + b * P + c * P @ P
        P, X = factor @ P @ factor, factor @ X
    # the smallest eigenvalues grow by a^2 in each iteration, and so does their rounding
    assert_close(saturated_muon.saturated_inverse_root(H), X, condition=a**10)
    assert_close(saturated_muon.saturated_inverse_root(1e6 * H), X, condition=a**10)
    w = np.array([1e-4, 0.3, 1.0])
    assert_close(saturated_muon.saturated(w, (1.5, -0.5, 0.0), 60), w**-0.5)
    assert_close(saturated_muon.saturated(np.zeros(1)), [a**5])


def test_groups_of_all_heads_are_the_method_itself() -> None:
    _, gradients = run_of(17, 8, 5)
    whole, _ = muon.muon(gradients)
    assert_close(on_head_groups(muon.muon, gradients, heads=4, group=4), whole)
    pairs = on_head_groups(muon.muon, gradients, heads=4, exact=True)
    for D in pairs:
        assert_close(D[:4] @ D[:4].T, np.eye(4))
    turned = on_head_groups(muon.muon, [G.T for G in gradients], heads=4, axis=1, exact=True)
    assert_close(turned, [D.T for D in pairs])


def test_polar_express_reproduces_its_published_tables() -> None:
    printed = [  # NVIDIA's table, four digits
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ]
    table = polar_express.polar_express_table(10)
    assert np.max(np.abs(np.subtract(table[:8], printed))) < 1e-4
    assert table[8:] == [table[7]] * 2 and polar_express.polar_express_table(3) == table[:3]
    speedrun = [  # modded-nanogpt's five
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ]
    assert_close(polar_express.polar_express_for(5), speedrun, 1e3)
    assert polar_express.deepseek_v4(12)[7:] == [muon.COEFFICIENTS, *[(2.0, -1.5, 0.5)] * 4]


def test_each_step_of_polar_express_brings_its_interval_closer_to_1() -> None:
    x = np.geomspace(1e-3, 1, 1001)
    width = 1.0
    for a, b, c in polar_express.composition(8):
        x = a * x + b * x**3 + c * x**5
        assert np.max(np.abs(x - 1)) < width
        width = np.max(np.abs(x - 1))
    assert_close(x, np.ones_like(x), 64)


@pytest.mark.parametrize("shape", SHAPES)
def test_signs_of_bases_do_not_matter(shape) -> None:
    W, gradients = run_of(18, *shape)
    kl, states = kl_soap_h.kl_soap_h(gradients, W, learning_rates=RATES)
    flipped = {t + 1: (-s["Q_L"], s["Q_R"]) for t, s in enumerate(states)}
    again, _ = kl_soap_h.kl_soap_h(gradients, W, learning_rates=RATES, bases=flipped)
    assert_close(again, kl, 1e3)
    settings = record_46.published_settings(6)
    weights, _, states = record_46.record(gradients, W, settings)
    flipped = {0: (states[0]["Q_r"], -states[0]["Q_c"])}
    again, _, _ = record_46.record(gradients, W, settings, flipped)
    assert_close(again[:2], weights[:2], 1e3)


@pytest.mark.parametrize("role", ["mlp", "attention", "attention_output"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_record_pins_norms_and_floors_rows(shape, role) -> None:
    W, gradients = run_of(19, *shape)
    settings = record_46.published_settings(6, cautious_decay=0.0, role=role)
    weights, evaluated, states = record_46.record(gradients, W, settings)
    for W, eta, state in zip(weights, settings.rates, states, strict=True):
        point, u = state["point"], state["u"]
        radius = frobenius(point) - eta * np.sum(u * point) / frobenius(point)
        assert_close(frobenius(W), radius)
        rows = np.sum(u**2, axis=1) / np.sum(point**2, axis=1)
        assert np.all(rows >= 0.3825**2 * (1 - 1e-12))
        assert_close(schatten_4(state["S"]), schatten_4(state["A"]), 1e2)
    assert np.array_equal(evaluated[3], weights[3]) and not np.array_equal(
        evaluated[-1], weights[-1]
    )


def test_the_record_takes_gradients_at_the_lookahead_and_leaves_zero() -> None:
    _, gradients = run_of(20, 5, 5)
    settings = record_46.published_settings(6)
    assert np.array_equal(settings.lookaheads > 0, [False, True, True, True, True, False])
    seen = []
    functions = [lambda x, g=g: (seen.append(x), g)[1] for g in gradients]
    zero = np.zeros((5, 5))
    weights, _, states = record_46.record(functions, zero, settings)
    assert_close(seen, [state["point"] for state in states])
    assert 0 < frobenius(weights[0]) < 2e-8 and frobenius(weights[3]) > 1e-3


def test_schedules_of_track_3() -> None:
    rate, factor = track3_schedules.POWER_FACTORS["matrices"]
    assert_close(track3_schedules.power_cool([0, 2900, 3000], rate, factor), [rate, 0.0, 0.0])
    momenta = track3_schedules.momentum_schedule([0, 150, 300, 2700, 2800, 2900])
    assert_close(momenta, [0.85, 0.9, 0.95, 0.95, 0.9, 0.85])
    rates = track3_schedules.cooldown([0, 50, 75, 100], 2.0, steps=100, fraction=0.5, floor=0.1)
    assert_close(rates, [2.0, 2.0, 1.1, 0.2])


@pytest.mark.parametrize("shape", SHAPES)
def test_muown_moves_directions_and_lengths_of_rows_apart(shape) -> None:
    W, gradients = run_of(21, *shape)
    W[1] = 0
    for norms in (None, (2.0, 6)):
        weights, states = muown.muown(gradients, W, learning_rates=RATES / 10, norms=norms)
        for before, after, state in zip([W, *weights], weights, states, strict=False):
            assert_close(muown.row_norms(after), np.abs(state["g"]))
            assert frobenius(after - before) > 1e-3
        M = states[0]["M"]  # at the first step, orthogonal to W row by row
        assert_close(M - W * np.sum(M * W, axis=1, keepdims=True), M)


def test_namo_ignores_the_scale_of_gradients_and_is_muon_at_its_length() -> None:
    W, gradients = run_of(22, 5, 8)
    for columns in (False, True):
        options = {"learning_rates": 0.01, "weight_decay": 0.1, "columns": columns, "eps": 0.0}
        weights, states = namo.namo(gradients, W, **options)
        scaled, _ = namo.namo([8 * G for G in gradients], W, **options, ns_eps=8e-8)
        assert_close(scaled, weights, 1e3)
        D = muon.newton_schulz(gradients[0], saturated_muon.QUINTIC, eps=1e-8)
        step = states[0]["a"] * (0.1 * W + 0.2 * np.sqrt(8) * D)
        assert_close(weights[0], W - step, 1e9)  # eps of Newton-Schulz beside 0.0975 of the norm
