"""Transformations in eigenbases: SOAP and Eigen-Adam against their transcription, and identities.

Where a statistic's rank is below its order, its null space has no basis of its own, and later
directions depend on the one that the decomposition happens to return. So trajectories are compared
on sides where statistics have full rank from the first step: for `(m, n)` with `m <= n` the left.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, program, share
from reference.soap import adadiag, eigen_adam, soap

import curvax
from curvax.transforms.directions._carry import find_moments, put_moments, take_moments
from curvax.transforms.linalg._eigh import eigenbasis, refined_basis, with_fixed_signs

STEPS = 30
SHAPES = {"wide": (6, 9), "tall": (9, 6), "square": (5, 5), "odd": (7, 11)}


def _gradients(shape, seed=0):
    """Noise about a mean of well separated directions."""
    generator = np.random.default_rng(seed)
    mean = np.outer(np.arange(shape[0]) - 2, np.ones(shape[1]))
    return [1.5 * mean + generator.standard_normal(shape) for _ in range(STEPS)]


@functools.cache
def _program(make):
    """From the gradients of all steps to directions and states; compiled once for all periods."""

    def run(gradients, period):
        transformation = make(curvax.every(period))

        def step(state, gradient):
            direction, state = transformation.update(gradient, state)
            return state, (direction, state)

        return jax.lax.scan(step, transformation.init(gradients[0]), gradients)[1]

    return jax.jit(run)


@functools.cache
def _always(transformation):
    return lambda refresh: transformation


def _trajectory(transformation, gradients, dtype="float64", period=1):
    """Directions and states of all steps, as arrays of NumPy.

    Of a transformation, or of what it makes of a refresh with this period.
    """
    make = transformation if callable(transformation) else _always(transformation)
    found = _program(make)(np.asarray(np.stack(gradients), dtype), period)
    return jax.tree.map(np.asarray, found)


@functools.cache
def _soap(variant, **options):
    """SOAP from its refresh policy."""
    ours, _ = VARIANTS[variant]
    return lambda refresh: curvax.scale_by_soap(refresh=refresh, **options, **ours)


@functools.cache
def _eigen_adam():
    """One optimizer for several tests on matrices of 6×9, so that it is compiled once."""
    return curvax.scale_by_eigen_adam(b3=0.95, refresh=4)


def _side_of_full_rank(shape) -> str:
    return "left" if shape[0] <= shape[1] else "right"


CORRECTED: dict[str, Any] = {"eps": 1e-8, "bias_correction": True}
RATES: dict[str, Any] = {"b1": 0.9, "b2": 0.99, "b3": 0.8}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "corrected": (CORRECTED, CORRECTED),
    "first step skipped": ({"skip_first": True}, {"skip_first": True}),
    "by QR": ({"method": "qr"}, {"refresh": "qr", "carry_v": "permute"}),
    "other decay rates": (RATES, RATES),
}


PERIODS = [1, 4, 7]


def _with_all_periods(cases):
    """Periods are data of a case's program, which runs in one worker."""
    marked = [(case, pytest.mark.xdist_group("SOAP: " + ", ".join(case))) for case in cases]
    return [pytest.param(*case, k, marks=mark) for case, mark in marked for k in PERIODS]


@pytest.mark.parametrize(
    ("name", "variant", "period"),
    _with_all_periods(share(itertools.product(SHAPES, VARIANTS), of=3)),
)
def test_one_side_follows_the_transcription(name, variant, period):
    shape, (_, theirs) = SHAPES[name], VARIANTS[variant]
    side, gradients = _side_of_full_rank(shape), _gradients(SHAPES[name])
    desired, _ = soap(gradients, K=period, side=side, **theirs)
    with jax.enable_x64(True):
        found, states = _trajectory(_soap(variant, side=side), gradients, period=period)
        kappa = float(np.linalg.cond(gradients[0])) ** 2
        assert_close(found, np.stack(desired), 64, condition=kappa)
    basis = states.left if side == "left" else states.right
    due = [t for t in range(1, STEPS + 1) if t == 1 or t % period == 0]
    assert basis.refreshes[-1] == len(due) and not basis.rejected.any()


@pytest.mark.parametrize(
    ("variant", "period"),
    _with_all_periods([("plain",), ("corrected",), ("first step skipped",)]),
)
def test_soap_follows_the_transcription(variant, period):
    """Both sides of a square matrix. Noise off the diagonal at step 1 is left out of account."""
    _, theirs = VARIANTS[variant]
    gradients = _gradients((5, 5))
    desired, expected = soap(gradients, K=period, side="both", **theirs)
    with jax.enable_x64(True):
        found, states = _trajectory(_soap(variant), gradients, period=period)
        kappa = float(np.linalg.cond(gradients[0])) ** 4
        assert_close(found[1:], np.stack(desired)[1:], 64, condition=kappa)
        assert_close(states.left.statistic[-1], expected[-1]["L"], 64)
        assert_close(states.right.statistic[-1], expected[-1]["R"], 64)
        assert_close(states.inner.nu[-1], expected[-1]["v"], 64, condition=kappa)


@pytest.mark.parametrize("method", ["eigen_adam", "adadiag"])
def test_eigen_adam_and_adadiag_follow_the_transcription(method):
    gradients = _gradients((6, 9))
    reference = {"eigen_adam": eigen_adam, "adadiag": adadiag}[method]
    desired, _ = reference(gradients, K=4)
    adadiag_of_ours = curvax.scale_by_eigen_adam(b3=0.0, refresh=4)
    direction = {"eigen_adam": _eigen_adam(), "adadiag": adadiag_of_ours}[method]
    with jax.enable_x64(True):
        found, _ = _trajectory(direction, gradients)
        kappa = max(float(np.linalg.cond(g)) for g in gradients) ** 2
        assert_close(found, np.stack(desired), 256, condition=kappa)


def test_float32_follows_the_transcription():
    gradients = [np.float64(np.float32(g)) for g in _gradients((6, 9))]
    desired, _ = soap(gradients, K=4, side="left")
    found, _ = _trajectory(curvax.scale_by_soap(refresh=4, side="left"), gradients, "float32")
    assert found.dtype == jnp.float32
    kappa = float(np.linalg.cond(gradients[0])) ** 2
    assert_close(found, np.stack(desired), 64, condition=kappa)


# Relations


def test_with_identity_bases_soap_is_adam_without_bias_correction():
    """Statistics of diagonal gradients with falling entries have them; and before any refresh."""
    gradients = _gradients((5, 8))
    never = curvax.every(10**6, first=False)
    found, _ = _trajectory(curvax.scale_by_soap(refresh=never), gradients, "float32")
    plain, _ = _trajectory(curvax.moment_ratio(), gradients, "float32")
    assert_close(found, plain, 4)


def test_soap_on_one_side_is_eigen_adam():
    gradient = jax.ShapeDtypeStruct((6, 9), "float32")
    one, other = curvax.scale_by_soap(side="left", refresh=3), curvax.scale_by_eigen_adam(refresh=3)
    state = jax.eval_shape(one.init, gradient)
    assert program(one.init, gradient) == program(other.init, gradient)
    assert program(one.update, gradient, state) == program(other.update, gradient, state)


@pytest.mark.xdist_group("SOAP: plain")
def test_transposing_the_gradient_transposes_the_direction_of_soap():
    gradients = _gradients((5, 5))
    with jax.enable_x64(True):
        one, _ = _trajectory(_soap("plain"), gradients, period=3)
        other, _ = _trajectory(_soap("plain"), [g.T for g in gradients], period=3)
        kappa = float(np.linalg.cond(gradients[0])) ** 4
        assert_close(np.swapaxes(other, 1, 2)[1:], one[1:], 64, condition=kappa)


def test_rotating_the_gradients_rotates_the_direction():
    gradients = _gradients((6, 9))
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((6, 6)))[0]
    with jax.enable_x64(True):
        one, _ = _trajectory(_eigen_adam(), gradients)
        other, _ = _trajectory(_eigen_adam(), [turn @ g for g in gradients])
        kappa = float(np.linalg.cond(gradients[0])) ** 2
        assert_close(other, turn @ one, 64, condition=kappa)


def test_second_moments_are_kept_between_refreshes():
    """A SOAP in circulation drops them: the second moment then is one gradient's square."""
    gradients = _gradients((6, 9))
    with jax.enable_x64(True):
        _, states = _trajectory(_eigen_adam(), gradients)
        u, expected = states.left.basis, np.zeros((6, 9))
        for t in range(STEPS):
            expected = 0.95 * expected + 0.05 * (u[t].T @ gradients[t]) ** 2
            assert_close(states.inner.nu[t], expected, 256)


@pytest.mark.parametrize("inner", [optax.trace(0.9), optax.trace(0.9, nesterov=True)])
def test_linear_transformations_do_not_notice_the_basis(inner):
    """Momentum in a turning basis is momentum: first moments follow it."""
    gradients = _gradients((6, 9))
    wrapped = curvax.in_eigenbasis(inner, refresh=curvax.every(4))
    with jax.enable_x64(True):
        found, states = _trajectory(wrapped, gradients)
        plain, _ = _trajectory(inner, gradients)
        assert_close(found, plain, 64)
    assert states.left.refreshes[-1] == 8
    assert float(np.abs(states.left.basis[4] - states.left.basis[0]).max()) > 1e-3


# Parts


@functools.cache
def _storage(name):
    """A storage in small blocks, and how its roots are decoded; compiled once."""
    options = {"block": 4, "min_elements": 1, "bits": 8} if name != "dense" else {}
    storage = getattr(curvax, name)(**options)
    return storage, jax.jit(lambda roots: [storage.decode_root(root) for root in roots])


@pytest.mark.parametrize(
    ("policy", "storage"),
    share(
        itertools.product(["every", "staggered", "residual"], ["dense", "quantized", "cholesky"]),
        of=2,
    ),
)
def test_bases_stay_orthonormal_and_states_advance(policy, storage):
    policies = {
        "every": curvax.every(4),
        "staggered": curvax.every(4, stagger=True),
        "residual": curvax.policies.diagonal_residual(2, 0.05),
    }
    kept, decode = _storage(storage)
    direction = curvax.scale_by_soap(refresh=policies[policy], storage=kept)
    gradients = [
        np.stack(pair) for pair in zip(*map(_gradients, ((6, 9),) * 2, (0, 1)), strict=True)
    ]
    found, states = _trajectory(direction, gradients, "float32")
    assert np.isfinite(found).all()
    sides = states.left, states.right
    ends = [jax.tree.map(lambda x: x[-1], side) for side in sides]
    bases = decode([last.basis for last in ends])
    for side, last, u, order in zip(sides, ends, map(np.float64, bases), (6, 9), strict=True):
        error = np.abs(np.swapaxes(u, 1, 2) @ u - np.eye(order)).max()
        assert error <= (1e-5 if storage == "dense" else 0.1)
        assert (np.diff(side.checks, axis=0) >= 0).all() and (last.refreshes >= 2).all()
        assert (last.checks >= last.refreshes).all() and not last.rejected.any()
    if policy == "residual":
        assert (states.left.refreshes[-1] < states.left.checks[-1]).any()
    assert (np.abs(np.diff(states.inner.nu, axis=0)).max(axis=(1, 2, 3)) > 0).all()


def test_a_bad_gradient_leaves_bases_and_later_steps_intact():
    gradients = _gradients((6, 9))
    bad = [g.copy() for g in gradients]
    bad[7][2, 3] = np.nan
    view = curvax.on_matrices(curvax.scale_by_soap(refresh=4), matrices="all")
    found, states = _trajectory(view, bad, "float32")
    assert np.isfinite(found).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(states))


def test_zero_and_rank_one_gradients_give_finite_directions():
    """Of each alone, and of ten steps that begin with one or five zeros; in one program."""
    rank_one = [np.outer(np.arange(4.0), np.ones(6)) * (t + 1) for t in range(10)]
    zero, direction = np.zeros((4, 6)), curvax.scale_by_soap(refresh=2)
    for zeros in (10, 0, 1, 5):
        gradients = [zero] * zeros + rank_one[: 10 - zeros]
        found, _ = _trajectory(direction, gradients, "float32")
        assert np.isfinite(found).all()
        # Of orthonormal parts no larger than Adam's, whose ratio is at most √((1-b1)²/(1-b2)).
        assert float(np.linalg.norm(found, axis=(1, 2)).max()) <= np.sqrt(24) * (1 + 1e-5)
        assert not found[:zeros].any()


def test_signs_and_order_of_bases():
    generator = np.random.default_rng(0)
    q = np.linalg.qr(generator.standard_normal((6, 6)))[0]
    a = np.float32((q * np.array([1, 9, 4, 25, 16, 36.0])) @ q.T)
    u = np.asarray(jax.jit(eigenbasis)(a))
    assert_close(np.diag(u.T @ a @ u), np.array([36, 25, 16, 9, 4, 1.0]), 64)
    fixed = jax.jit(with_fixed_signs)
    assert np.array_equal(fixed(-u), u)
    flipped, order = jax.jit(refined_basis)(a, u[:, ::-1])
    assert np.array_equal(order, np.arange(6)[::-1])
    assert_close(flipped, u, 64, condition=12)
    tie = np.float32([[-0.5, 0.5], [0.5, -0.5]])
    assert np.array_equal(fixed(tie), [[0.5, 0.5], [-0.5, -0.5]])


def test_moments_are_found_by_name():
    like = {"a": jnp.zeros((3, 4)), "b": jnp.zeros((3, 4))}
    state = optax.adam(0.1).init(like)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    found = [
        [[names[i] for i in places] for places in moments] for moments in find_moments(state, like)
    ]
    assert found == [[["0/mu/a"], ["0/nu/a"]], [["0/mu/b"], ["0/nu/b"]]]


def test_moments_are_those_of_the_longest_path() -> None:
    """The path of `a/kernel` ends with `kernel` as well."""
    like = {"a": {"kernel": jnp.zeros((3, 4))}, "kernel": jnp.zeros((3, 4))}
    state = optax.scale_by_adam().init(like)
    moments = take_moments(state, like)
    inner, outer = moments["a"]["kernel"], moments["kernel"]
    assert [len(x) for x in (*inner, *outer)] == [1, 1, 1, 1]
    numbered = jax.tree.unflatten(
        jax.tree.structure(moments), range(4)
    )  # mu, nu of one, then other
    new = put_moments(state, like, numbered)
    assert (new.mu, new.nu) == (
        {"a": {"kernel": 0}, "kernel": 2},
        {"a": {"kernel": 1}, "kernel": 3},
    )


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        (optax.scale_by_rss(), "sum_of_squares"),
        (curvax.in_eigenbasis(curvax.moment_ratio(), refresh=curvax.every(2)), "statistic"),
        (curvax.precondition(refresh=curvax.every(2)), "statistic"),
        (curvax.quantize_state(optax.scale_by_adam(), min_elements=1), "codes"),
        (curvax.scale_by_racs(), "rows"),
    ],
)
def test_states_that_nobody_could_turn_are_refused(inner, field):
    like = {"a": jax.ShapeDtypeStruct((2, 6, 8), "float32")}
    message = f"field '{field}' holds more than a number for every"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(curvax.in_eigenbasis(inner, refresh=curvax.every(2)).init, like)
    carry = curvax.subspaces.rotate()
    with pytest.raises(ValueError, match=message):
        wrapped = curvax.in_subspace(
            inner, 3, basis=curvax.subspaces.svd(), refresh=curvax.every(2), carry=carry
        )
        jax.eval_shape(wrapped.init, like)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"side": "top"}, "side must be one of"),
        ({"b1": 1.0}, "b1 must be a number in"),
        ({"b2": -0.1}, "b2 must be a number in"),
        ({"b3": 1.0}, "b3 must be a number in"),
        ({"eps": -1.0}, "eps must be a number in"),
        ({"method": "svd"}, "method must be one of 'eigh', 'qr'; got 'svd'"),
        ({"refresh": 0}, "refresh must be a period of at least 1"),
        ({"refresh": curvax.policies.foam()}, "refresh must be .*, which examines 'damping'"),
        ({"storage": 4}, "storage must be a storage"),
        ({"skip_first": 1}, "skip_first must be True or False, got 1"),
        ({"bias_correction": "no"}, "bias_correction must be True or False"),
    ],
)
def test_bad_arguments(arguments, message):
    for method in (curvax.soap, curvax.eigen_adam):
        with pytest.raises(ValueError, match=message):
            functools.partial(method, 0.1)(**arguments)
