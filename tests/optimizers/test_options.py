"""Every argument of every factory has an effect in some setting, and is refused where it has none.

What an argument changes is read off the program of three steps, without what no update needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

import curvax
from curvax import eigenbases, grafts, polar, policies, subspaces
from curvax.transforms.directions._graft import GRAFTS
from curvax.transforms.directions._orthogonalize import POLAR_METHODS
from curvax.transforms.kronecker._basis import METHODS as BASIS_METHODS
from curvax.transforms.subspace._bases import SWITCHING
from curvax.transforms.subspace._compensation import COMPENSATIONS
from tests.cases import in_turns
from tests.helpers import share
from tests.registry import METHODS, Row

PARAMS = {
    "first": {"kernel": jnp.ones((5, 4)), "bias": jnp.ones(4)},
    "second": {"kernel": jnp.ones((4, 6))},
}
ONE = {"first": {"kernel": PARAMS["first"]["kernel"]}}
"""Enough for what is of matrices alone, but for the choice of a side."""


def program(optimizer: optax.GradientTransformation, params: Any = PARAMS) -> str:
    """What computes the updates of three steps from their gradients, with its constants."""

    def step(state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return state, updates

    def run(gradients: Any) -> Any:
        return jax.lax.scan(step, optimizer.init(params), gradients)[1]

    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params)
    closed = jax.make_jaxpr(run)(like)
    needed, inputs = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    del inputs
    return f"{needed}\n{[np.asarray(x).tolist() for x in closed.consts]}"


class Other(NamedTuple):
    """Another value of an argument, and settings in which it changes something."""

    value: Any
    settings: Mapping[str, Any] = {}


RANDOM = subspaces.randomized(1)
MESH = {"mesh": jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)}
FIRST = {"first/kernel": None}
SHARED = {
    "matrices": Other("second/kernel"),
    "weight_dimension_numbers": Other(FIRST),
    "mesh": Other(MESH["mesh"]),
    "mesh_axis": Other("x", MESH),
    "weight_decay": Other(0.1),
    "weight_decay_mask": Other({"first": False, "second": True}, {"weight_decay": 0.1}),
    "adam_learning_rate": Other(0.5),
    "others": Other(optax.sgd(0.1)),
}
OTHERS = {
    "learning_rate": Other(0.2),
    **dict.fromkeys(("b1", "b2", "b3", "eps", "scale", "consistent_rms", "initial"), Other(0.5)),
    "gamma": Other(2.0),
    "rank": Other(1),
    "root": Other(4),
    "iterations": Other(2),
    "max_order": Other(4),
    "check_every": Other(1),
    "threshold": Other(0.25),
    "max_damping": Other(1e-3),
    "statistics_every": Other(3),
    "warmup_steps": Other(1),
    "nesterov": Other(False),
    "adaptive": Other(True),
    "bias_correction": Other(True),
    "skip_first": Other(True),
    "update_eigenvalues": Other(False),
    "whole": Other(True),
    "stagger": Other(True),
    "accumulate": Other("ema"),
    "method": Other("qdwh"),
    "compensation": Other("fira+"),
    "basis": Other(RANDOM),
    "carry": Other(subspaces.reset()),
    "side": Other("left"),
    "seed": Other(7, {"basis": RANDOM}),
    "refresh": Other(3),
    "storage": Other(curvax.dense("bfloat16")),
    "dtype": Other("bfloat16"),
    "limit": Other(True),
    "graft": Other(None),
    "base": Other(functools.partial(optax.sgd, momentum=0.8)),
    "statistics": Other("kl", {"root": 2}),
    "damping_mode": Other("absolute"),
    "solver": Other("tracked"),
    "variant": Other("from_momentum"),
}
OF_METHODS = {
    "muon": {"accumulate": Other("sum")},
    "foam": {"eps": Other(1e-8)},
    "shampoo": {"root": Other(2)},
    "soap": {
        "limit": Other(0.25),
        "method": Other("qr"),
        "statistics": Other("kl"),
    },
    "eigen_adam": {"limit": Other(0.25), "method": Other("qr"), "side": Other("right")},
    "kl_shampoo": {"limit": Other(0.25), "method": Other("eigh")},
    "alice": {"seed": Other(7), "switching": Other(subspaces.gaussian_mix(1))},
    "apollo": {"seed": Other(7)},
    "sumo": {"carry": Other(subspaces.keep())},
}


def other(row: Row, name: str) -> Other:
    """Another value of this argument of a method; a new argument needs one here."""
    return {**OTHERS, **OF_METHODS.get(row.name, {})}[name]


@functools.cache
def _plain(make: Any, settings: tuple[Any, ...], one: bool) -> str:
    return program(make(**dict(settings)), ONE if one else PARAMS)


def changes(make: Callable[..., Any], name: str, case: Other) -> bool:
    """Whether this argument changes the program of the updates."""
    one = name not in SHARED and name != "side"
    plain = _plain(make, tuple(case.settings.items()), one)
    return program(make(**{**case.settings, name: case.value}), ONE if one else PARAMS) != plain


def arguments(factory: Any) -> list[str]:
    return list(inspect.signature(factory).parameters)


@functools.cache
def of_method(row: Row) -> Callable[..., Any]:
    """The optimizer at a small rank; without a base, which takes the weight decay itself."""
    own = {"rank": 2} if row.ranked else {"base": None} if row.base else {}
    return lambda learning_rate=0.1, **settings: row.optimizer(learning_rate, **{**own, **settings})


@functools.cache
def of_direction(row: Row) -> Callable[..., Any]:
    """The direction of matrices alone, as a full optimizer."""
    return lambda **settings: curvax.assemble(row.direction(**settings), 0.1)


@pytest.mark.parametrize("row", share(METHODS, of=6), ids=lambda row: row.name)
def test_every_argument_of_a_method_changes_something(row: Row) -> None:
    own = [name for name in arguments(row.optimizer) if name not in SHARED]
    without = [name for name in own if not changes(of_method(row), name, other(row, name))]
    assert not without
    more = [name for name in arguments(row.direction) if name not in own]
    without = [name for name in more if not changes(of_direction(row), name, other(row, name))]
    assert not without


@pytest.mark.parametrize("name", SHARED)
@in_turns(1, of=6)
def test_every_shared_argument_changes_something(row: Row, name: str) -> None:
    if row in METHODS:
        assert changes(of_method(row), name, SHARED[name])


def test_an_argument_that_changes_nothing_is_found() -> None:
    """The negative control."""

    def ignores(*, b1: float = 0.9, eps: float = 0.0) -> Any:
        del eps
        return curvax.assemble(curvax.momentum(b1), 0.1)

    assert changes(ignores, "b1", Other(0.5))
    assert not changes(ignores, "eps", Other(0.5))


REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a rate for AdamW beside others": (
        lambda: curvax.muon(0.1, others=optax.sgd(0.1), adam_learning_rate=0.1),
        ("adam_learning_rate", "others"),
    ),
    "a mask without decay": (
        lambda: curvax.muon(0.1, weight_decay_mask=lambda params: params),
        ("weight_decay_mask", "weight_decay"),
    ),
    "a mask without decay, of OSGDM": (
        lambda: curvax.osgdm(0.1, weight_decay_mask=lambda params: params),
        ("weight_decay_mask", "weight_decay"),
    ),
    "decay beside a base": (
        lambda: curvax.shampoo(0.1, weight_decay=0.1),
        ("weight_decay", "base"),
    ),
    "more rows than steps": (
        lambda: polar.newton_schulz(1, coefficients=((2.0, -1.5, 0.5),) * 2),
        ("coefficients", "steps"),
    ),
    "an average in Algorithm 1": (
        lambda: curvax.asgo(0.1, variant="theoretical", b1=0.9),
        ("variant", "b1"),
    ),
    "sums in Algorithm 1": (
        lambda: curvax.asgo(0.1, variant="theoretical", b2=0.9),
        ("variant", "b2"),
    ),
    "the dtype of no momentum": (
        lambda: curvax.asgo(0.1, variant="theoretical", dtype="bfloat16"),
        ("variant", "dtype"),
    ),
    "the bias of a sum": (
        lambda: curvax.scale_by_shampoo(b2=None, bias_correction=True),
        ("b2", "bias_correction"),
    ),
    "statistics of no momentum": (
        lambda: curvax.shampoo(0.1, statistics="momentum"),
        ("statistics", "b1"),
    ),
    "a solver that a policy does not use": (
        lambda: curvax.shampoo(
            0.1, refresh=policies.foam(), damping_mode="absolute", eps=1e-9, solver="coupled_newton"
        ),
        ("solver", "policy"),
    ),
    "a damping that a policy does not use": (
        lambda: curvax.shampoo(0.1, refresh=policies.foam(), eps=1e-9),
        ("damping_mode", "policy"),
    ),
    "steps that nobody asks for": (
        lambda: curvax.soap(0.1, method=curvax.eigenbases.qr(10)),
        ("method", "refresh"),
    ),
    "tracking for a drawn basis": (
        lambda: curvax.alice(0.1, switching="gaussian", b3=0.9),
        ("b3", "switching"),
    ),
    "a turn of a drawn basis": (
        lambda: curvax.galore(0.1, basis=subspaces.gaussian(kept=False), carry=subspaces.rotate()),
        ("basis", "carry"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_have_no_effect_is_refused(case: str) -> None:
    """The message names both arguments."""
    make, names = REFUSED[case]
    with pytest.raises(ValueError) as error:
        make()
    assert all(name in str(error.value) for name in names)


def test_a_mask_stays_while_a_decay_that_is_scheduled_is_zero() -> None:
    inject = curvax.inject_hyperparams(curvax.muon)
    optimizer = inject(0.1, weight_decay=lambda step: 0.1 * step, weight_decay_mask={"x": True})
    assert optimizer.init({"x": jnp.ones((2, 2))})


NAMED: tuple[tuple[Mapping[Any, Any], dict[Any, Any]], ...] = (
    (
        POLAR_METHODS,
        {
            "newton_schulz": polar.newton_schulz(),
            "svd": polar.svd(),
            "qr_svd": polar.qr_svd(),
            "qdwh": polar.qdwh(),
        },
    ),
    (BASIS_METHODS, {name: getattr(eigenbases, name)() for name in ("eigh", "qr", "tracked")}),
    (GRAFTS, {"norm": grafts.norm(), "adam": grafts.adam(), "limit": grafts.limit(), None: None}),
    (
        COMPENSATIONS,
        {
            None: None,
            "optimal": subspaces.optimal(),
            "fira": subspaces.fira(),
            "fira+": subspaces.fira_plus(),
        },
    ),
    (
        SWITCHING,
        {
            "complement": subspaces.complement(),
            "full_basis": subspaces.full_basis(),
            "gaussian_mix": subspaces.gaussian_mix(),
            "gaussian": subspaces.gaussian(normalized=True),
            "none": subspaces.iterated(),
            "evd": subspaces.svd(),
        },
    ),
)


@pytest.mark.parametrize(("names", "values"), NAMED, ids=lambda x: next(iter(x.keys())) or "")
def test_a_name_stands_for_the_value_without_arguments(
    names: Mapping[Any, Any], values: dict[Any, Any]
) -> None:
    assert names == values


def test_alices_compensation_is_the_same_by_name_and_by_value() -> None:
    params = {"kernel": jnp.ones((5, 4))}
    by_name, by_value = (
        program(curvax.scale_by_alice(rank=2, b1=0.7, compensation=x), params)
        for x in ("optimal", subspaces.optimal())
    )
    assert by_name == by_value


def test_the_numbers_of_a_value_are_hyperparameters() -> None:
    """Under both names, which take a schedule too."""
    values = {
        "compensation": subspaces.optimal(),
        "switching": subspaces.complement(1),
        "compensation_weight": lambda step: 0.5 / (1 + step),
    }
    optimizer = curvax.inject_hyperparams(curvax.alice)(0.1, rank=2, **values)
    state: Any = optimizer.init(PARAMS)
    assert {"compensation_gamma", "compensation_weight", "b3"} <= set(state.hyperparams)
    assert not {"compensation", "compensation_decay", "switching"} & set(state.hyperparams)
    after = jax.eval_shape(optimizer.update, PARAMS, state, PARAMS)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert float(state.hyperparams["compensation_weight"]) == 0.5
    muon = curvax.inject_hyperparams(curvax.muon)(0.1, method=polar.newton_schulz(eps=0.25))
    given = muon.init(PARAMS).hyperparams  # pyright: ignore[reportAttributeAccessIssue]
    assert float(given["method_eps"]) == 0.25
    later = {"refresh_threshold": lambda step: 0.5 / (1 + step)}
    values = {"refresh": policies.diagonal_residual(2), "storage": curvax.packed(min_elements=1)}
    soap = curvax.inject_hyperparams(curvax.soap)(0.1, **values, **later)
    state = soap.init(PARAMS)
    assert {"refresh_threshold", "storage_eps"} <= set(state.hyperparams)
    assert float(state.hyperparams["refresh_threshold"]) == 0.5
    after = jax.eval_shape(soap.update, PARAMS, state, PARAMS)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(TypeError, match="method_eps"):
        curvax.inject_hyperparams(curvax.muon)(0.1, method="svd", method_eps=0.25)
