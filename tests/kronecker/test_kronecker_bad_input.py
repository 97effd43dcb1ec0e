"""Bad arguments of the Kronecker-factored methods and their parts.

Each is a `ValueError` whose message begins with the argument's name and holds the value and what is
allowed. What all optimizers share is in test_bad_input.py.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from curvax import policies

NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """A bad argument, what is allowed instead, and what else is given."""

    method: Callable[..., Any]
    name: str
    value: Any
    allowed: str
    others: dict[str, Any]


def of(
    *methods: Callable[..., Any], name: str, values: list[Any], allowed: str, **others: Any
) -> list[Case]:
    return [Case(m, name, value, allowed, others) for m in methods for value in values]


def label(case: Case) -> str:
    value = getattr(case.value, "__name__", None) or repr(case.value)
    given = "-".join(f"{x:.12}" for x in map(str, case.others.values()))
    return f"{case.method.__name__}-{case.name}-{value:.24}{given and '-with-' + given}"


def no_optimizer(learning_rate: Any) -> Any:
    return learning_rate


def one_of_two(learning_rate: Any) -> Any:
    return (optax.sgd(learning_rate),)


SHAMPOO, FOAM, DR = curvax.shampoo, curvax.foam, curvax.dr_shampoo
ASGO, DASGO = curvax.asgo, curvax.dasgo
AT_LEAST_1, NOT_NEGATIVE, DECAY = "at least 1", "[0, inf)", "[0, 1)"
TINY = policies.foam(max_damping=1e-8)
ADAPTIVE = {"damping_mode": "absolute", "eps": 1e-9}  # what FOAM's policy needs

CASES = [
    # The inverse root.
    *of(SHAMPOO, FOAM, DR, name="root", values=[0, -2, 2.5, True, "2"], allowed=AT_LEAST_1),
    *of(SHAMPOO, name="root", values=[3, 6, 12], allowed="power of 2", solver="coupled_newton"),
    *of(SHAMPOO, name="root", values=[1, 4], allowed="must be 2", solver="newton_schulz"),
    *of(SHAMPOO, name="root", values=[1, 6], allowed="must be 2, 4, 8", solver="products"),
    *of(
        SHAMPOO,
        name="solver",
        values=["svd", "Eigh", None],
        allowed="'eigh', 'coupled_newton', 'newton_schulz'",
    ),
    *of(
        SHAMPOO,
        name="damping_mode",
        values=["rel", None, 1e-6],
        allowed="'absolute', 'relative', 'floor', 'outside'",
    ),
    *of(
        SHAMPOO,
        name="damping_mode",
        values=["floor", "outside"],
        allowed="solver='eigh', got 'coupled_newton'",
        solver="coupled_newton",
    ),
    *of(
        SHAMPOO,
        name="damping_mode",
        values=["floor", "outside"],
        allowed="solver='eigh', got 'newton_schulz'",
        solver="newton_schulz",
        root=2,
    ),
    *of(
        *(SHAMPOO, FOAM, DR, ASGO, DASGO),
        name="eps",
        values=[-1e-9, -1, NAN, INF, "1e-6", None],
        allowed=NOT_NEGATIVE,
    ),
    *of(FOAM, name="eps", values=[0.0], allowed="(0, 3e-07)"),
    *of(DR, name="eps", values=[0.0], allowed="(0, inf)"),
    # The statistics.
    *of(SHAMPOO, ASGO, name="b2", values=[1, 1.0, 1.5, -0.1, NAN, "0.9"], allowed=DECAY),
    *of(FOAM, DR, DASGO, name="b2", values=[1, 1.0, 1.5, -0.1, NAN, "0.9"], allowed=DECAY),
    *of(SHAMPOO, ASGO, DASGO, name="b1", values=[1.0, -0.1, NAN, "0.9"], allowed=DECAY),
    *of(SHAMPOO, name="initial", values=[-1.0, NAN, "I"], allowed=NOT_NEGATIVE),
    *of(SHAMPOO, name="statistics_every", values=[0, -1, 1.5, True], allowed=AT_LEAST_1),
    *of(
        SHAMPOO,
        name="side",
        values=["top", "Left", None, 0],
        allowed="'both', 'left', 'right', 'smaller'",
    ),
    *of(
        *(SHAMPOO, FOAM, DR),
        name="storage",
        values=["dense", jnp.bfloat16, curvax.dense, 4],
        allowed="curvax.quantized(), curvax.cholesky(), curvax.packed() or curvax.dense(), or None",
    ),
    # When roots are refreshed.
    *of(
        *(SHAMPOO, ASGO),
        name="refresh",
        values=[0, -1, True, 2.5, None, "10", no_optimizer, curvax.every, policies.foam],
        allowed="policy such as curvax.every(10)",
    ),
    *of(FOAM, DR, name="check_every", values=[0, -1, 2.5, True, None], allowed=AT_LEAST_1),
    *of(FOAM, DR, name="threshold", values=[0, 0.0, -1.0, NAN, "0.5", None], allowed="(0, inf]"),
    *of(FOAM, name="max_damping", values=[0, 0.0, -1e-9, NAN, None], allowed="(0, inf]"),
    *of(FOAM, name="eps", values=[1e-8, 1e-6], allowed="(0, 1e-08)", max_damping=1e-8),
    *of(SHAMPOO, name="eps", values=[1e-8], allowed="1e-08", refresh=TINY, damping_mode="absolute"),
    *of(ASGO, name="eps", values=[1e-6], allowed="(0, 1e-08)", refresh=TINY),
    *of(
        SHAMPOO,
        name="damping_mode",
        values=["relative", "floor"],
        allowed="'absolute' with this refresh policy, and eps in (0, 1e-08), such as 1e-10",
        refresh=TINY,
    ),
    *of(
        SHAMPOO,
        name="solver",
        values=["coupled_newton"],
        allowed="'eigh'",
        **{"refresh": TINY, **ADAPTIVE},
    ),
    # What becomes of the direction.
    *of(
        *(SHAMPOO, FOAM, DR),
        name="graft",
        values=["sgd", True, 1],
        allowed="'norm', 'adam', 'limit', None",
    ),
    *of(
        *(SHAMPOO, FOAM, DR),
        name="base",
        values=[3, "adamw", no_optimizer, one_of_two],
        allowed="a callable from a learning rate to an Optax transformation",
    ),
    # The policies and parts themselves.
    *of(
        *(policies.foam, policies.diagonal_residual),
        name="check_every",
        values=[0, 1.5],
        allowed=AT_LEAST_1,
    ),
    *of(
        *(policies.foam, policies.diagonal_residual),
        name="threshold",
        values=[0.0, -0.1],
        allowed="(0, inf]",
    ),
    *of(policies.foam, name="max_damping", values=[0.0, -1.0], allowed="(0, inf]"),
    *of(policies.foam, name="rounding_floor", values=[-1.0, INF], allowed=NOT_NEGATIVE),
    *of(curvax.dense, name="dtype", values=["int32", bool], allowed="real floating"),
]


def rejection(case: Case) -> str:
    arguments = {case.name: case.value, **case.others}
    with pytest.raises(ValueError) as error:
        if "learning_rate" in case.method.__code__.co_varnames:
            case.method(0.1, **arguments)
        else:
            case.method(**arguments)
    return str(error.value)


def said(value):
    """How a message says a value: functions by their names."""
    return re.escape(getattr(value, "__name__", repr(value)))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_bad_arguments_are_rejected(case):
    message = rejection(case)
    assert re.match(rf"{case.name}\b.*{said(case.value)}", message), message
    assert case.allowed in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("side", "top", "'both', 'left', 'right', 'smaller'"),
        ("statistics", "momenta", "'gradient', 'momentum'"),
        ("refresh", 5, "policy such as curvax.every(10)"),
        ("refresh", curvax.every, "call it: curvax.every(k)"),
    ],
)
def test_precondition_rejects_bad_arguments(name, value, allowed):
    arguments = {"refresh": curvax.every(2), name: value}
    with pytest.raises(ValueError, match=rf"^{name}\b.*{said(value)}") as error:
        curvax.precondition(**arguments)
    assert allowed in str(error.value)


@pytest.mark.parametrize("value", [1.0, -0.1, NAN, "0.9"])
def test_grafted_adam_rejects_bad_decay_rates(value):
    with pytest.raises(ValueError, match=r"b1 must be a number in \[0, 1\)"):
        curvax.grafts.adam(value)


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_bad_warmups_are_rejected(value):
    with pytest.raises(ValueError, match="warmup_steps must be an integer of at least 0"):
        curvax.scale_by_shampoo(warmup_steps=value)


def test_foam_is_not_left_without_anything_to_adapt():
    with pytest.raises(ValueError, match="adaptive_damping and refreshes cannot both be False"):
        policies.foam(adaptive_damping=False, refreshes=False)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2)], ids=str)
def test_inverse_roots_are_of_square_matrices(shape):
    with pytest.raises(ValueError, match=rf"^a must be square.*{re.escape(str(shape))}"):
        curvax.inverse_root(jnp.zeros(shape))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("root", 0, AT_LEAST_1),
        ("eps", -1.0, NOT_NEGATIVE),
        ("damping_mode", "none", "'absolute'"),
        ("solver", "qr", "'eigh'"),
    ],
)
def test_inverse_roots_reject_bad_arguments(name, value, allowed):
    with pytest.raises(ValueError, match=rf"^{name}\b.*{re.escape(repr(value))}") as error:
        curvax.inverse_root(jnp.eye(2), **{name: value})
    assert allowed in str(error.value)


class NoSchedule:
    """A policy that lacks when."""

    examines = None

    def examine(self, check: policies.Check) -> policies.Verdict:
        raise AssertionError


def test_what_is_only_like_a_policy_or_storage_is_rejected():
    with pytest.raises(ValueError, match=r"^refresh\b.*NoSchedule"):
        curvax.shampoo(0.1, refresh=NoSchedule())
    with pytest.raises(ValueError, match=r"^storage\b.*NoSchedule"):
        curvax.shampoo(0.1, storage=NoSchedule())


@pytest.mark.parametrize("name", ["threshold", "max_damping", "eps", "graft", "b2"])
def test_traced_arguments_pass_unchecked(name):
    """As `optax.inject_hyperparams` and searches over hyper-parameters hand them over."""
    values = {"threshold": 0.4, "max_damping": 1.0, "eps": 1e-3, "graft": 0.9, "b2": 0.9}
    gradient = jnp.eye(2, 3)

    def direction(value: Any) -> Any:
        given = {**values, name: value}
        given["graft"] = curvax.grafts.adam(given["graft"])
        foam = curvax.scale_by_foam(**given)
        return foam.update(gradient, foam.init(gradient))[0]

    traced = jax.eval_shape(jax.jit(direction), values[name])
    assert traced.shape == gradient.shape


def test_arguments_at_the_end_of_what_is_allowed_are_accepted():
    """The negative control: rejecting everything is not enough."""
    assert curvax.shampoo(0.1, eps=0.0, b2=0.0, b1=0.0, refresh=1)
    assert curvax.shampoo(0.1, matrices=curvax.MatrixRule(block_size=1))
    assert curvax.shampoo(0.1, root=8, solver="coupled_newton", graft=None, initial=0.0, base=None)
    assert curvax.foam(0.1, check_every=1, threshold=INF, max_damping=INF, b2=0.0)
    assert curvax.foam(0.1, eps=2.9e-7) and curvax.dr_shampoo(0.1, eps=1e3, threshold=INF)
    assert curvax.dasgo(0.1, b1=0.0, b2=0.0, eps=0.0)
