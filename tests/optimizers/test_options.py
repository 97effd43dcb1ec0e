"""Every argument of every factory has an effect in some setting.

What an argument changes is read off the program of three steps, without what no update needs.
"""

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
from curvax import eigenbases, grafts, polar, policies, subspaces, weights
from curvax.transforms.directions._graft import GRAFTS
from curvax.transforms.directions._orthogonalize import POLAR_METHODS
from curvax.transforms.directions._weights_side import on_weights
from curvax.transforms.directions._weights_values import WEIGHTS
from curvax.transforms.kronecker._methods import ROOT_METHODS
from curvax.transforms.linalg._products import LEVELS
from curvax.transforms.linalg._products import NAMES as PRODUCTS
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


class OneOf(tuple):
    """Values of an argument, of which no method takes all."""


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
    "weights": Other(weights.decay(0.1)),
    "adam_learning_rate": Other(0.5),
    "others": Other(optax.sgd(0.1)),
}
OTHERS = {
    "learning_rate": Other(0.2),
    **dict.fromkeys(("b1", "b2", "b3", "scale", "consistent_rms", "initial"), Other(0.5)),
    "eps": OneOf((Other(0.5), Other(1e-8))),
    "gamma": Other(2.0),
    "rank": Other(1),
    "root": OneOf((Other(4), Other(2))),
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
    "lagged": Other(True),
    "update_eigenvalues": Other(False),
    "whole": Other(True),
    "stagger": Other(True),
    "accumulate": OneOf((Other("ema"), Other("sum"))),
    "method": OneOf((Other("qdwh"), Other("rotations"))),
    "switching": Other(subspaces.gaussian_mix(1)),
    "compensation": Other("fira+"),
    "basis": Other(RANDOM),
    "carry": OneOf((Other(subspaces.reset()), Other(subspaces.keep()))),
    "side": OneOf((Other("left"), Other("right"))),
    "seed": OneOf((Other(7, {"basis": RANDOM}), Other(7))),
    "refresh": Other(3),
    "storage": Other(curvax.dense("bfloat16")),
    "products": Other("bf16x3"),
    "dtype": Other("bfloat16"),
    "limit": OneOf((Other(True), Other(0.25))),
    "graft": Other(None),
    "base": Other(functools.partial(optax.sgd, momentum=0.8)),
    "statistics": OneOf((Other("kl", {"root": 2}), Other("kl"))),
    "damping_mode": Other("absolute"),
    "variant": Other("from_momentum"),
}


@functools.cache
def _plain(make: Any, settings: tuple[Any, ...], one: bool) -> str:
    return program(make(**dict(settings)), ONE if one else PARAMS)


def changes(make: Callable[..., Any], name: str, case: Other | OneOf) -> bool:
    """Whether this argument changes the program of the updates."""
    if isinstance(case, OneOf):
        return any(changes(make, name, x) for x in case if is_taken(make, name, x))
    one = name not in SHARED and name != "side"
    plain = _plain(make, tuple(case.settings.items()), one)
    return program(make(**{**case.settings, name: case.value}), ONE if one else PARAMS) != plain


def is_taken(make: Callable[..., Any], name: str, case: Other) -> bool:
    """Whether the method takes this value in these settings."""
    try:
        make(**{**case.settings, name: case.value})
    except (TypeError, ValueError):
        return False
    return True


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


@pytest.mark.parametrize("row", share(METHODS, of=12), ids=lambda row: row.name)
def test_every_argument_of_a_method_changes_something(row: Row) -> None:
    own = [name for name in arguments(row.optimizer) if name not in SHARED]
    without = [name for name in own if not changes(of_method(row), name, OTHERS[name])]
    assert not without
    more = [name for name in arguments(row.direction) if name not in own]
    without = [name for name in more if not changes(of_direction(row), name, OTHERS[name])]
    assert not without


@pytest.mark.parametrize("name", SHARED)
@in_turns(1, of=12)
def test_every_shared_argument_changes_something(row: Row, name: str) -> None:
    if row in METHODS:
        assert changes(of_method(row), name, SHARED[name])


class Part(NamedTuple):
    """A factory of a value or a direction, the direction with it, and values unlike `OTHERS`."""

    make: Callable[..., Any]
    within: Callable[[Any], Any]
    others: Mapping[str, Any] = {}
    given: Mapping[str, Any] = {}


def _itself(direction: Any) -> Any:
    return direction


def _shampoo(**settings: Any) -> Any:
    return curvax.scale_by_shampoo(refresh=2, **settings)


def _examined(refresh: Any) -> Any:
    return curvax.scale_by_shampoo(refresh=refresh, damping_mode="absolute", eps=1e-9)


def _of_alice(switching: Any) -> Any:
    return curvax.scale_by_alice(rank=2, switching=switching)


def _of_fira(compensation: Any) -> Any:
    return curvax.scale_by_fira(rank=2, compensation=compensation)


def _of_galore(basis: Any) -> Any:
    return curvax.scale_by_galore(rank=2, basis=basis)


def _stored(storage: Any) -> Any:
    return _shampoo(storage=storage)


def _rooted(storage: Any) -> Any:
    return _shampoo(storage=storage, method=eigenbases.stored_roots())


def _beside(side: Any) -> Any:
    return optax.chain(curvax.momentum(), on_weights(side, 0.1))


SWITCHED = {"leading": 1, "finder": subspaces.svd()}
CODES = {"block": 2, "map": "linear", "min_elements": 4096}
ALL_CODED = {"min_elements": 1}
SHORT, LONGER = {"refresh": curvax.every(2)}, {"refresh": curvax.every(3)}
ON_RANDOM = {"rank": 2, "basis": RANDOM, **SHORT}
PARTS = {
    "polar.newton_schulz": Part(
        polar.newton_schulz,
        curvax.orthogonalize,
        {"steps": 3, "coefficients": "classical", "norm": "gram"},
    ),
    "polar.balanced": Part(
        polar.balanced, curvax.orthogonalize, {"method": "svd", "rounds": 3, "beta": 0.25}
    ),
    "eigenbases.qr": Part(
        eigenbases.qr,
        lambda x: curvax.scale_by_soap(method=x, refresh=policies.diagonal_residual(2)),
        {"steps": 3},
    ),
    "eigenbases.rotations": Part(
        eigenbases.rotations, lambda x: curvax.scale_by_soap(method=x), {"most": 3}
    ),
    "eigenbases.stored_roots": Part(
        eigenbases.stored_roots,
        lambda x: _shampoo(method=x),
        {"solver": "products"},
    ),
    "eigenbases.saturated_roots": Part(
        eigenbases.saturated_roots,
        lambda x: _shampoo(root=2, method=x),
        {"steps": 3, "coefficients": "classical"},
    ),
    "grafts.adam": Part(grafts.adam, lambda x: _shampoo(graft=x)),
    "weights.hyperball": Part(weights.hyperball, _beside, {"rms": 0.5}),
    "weights.decay": Part(
        weights.decay,
        _beside,
        {"weight_decay": 0.2, "cautious": True, "independent": True, "moved": True},
        {"weight_decay": 0.1},
    ),
    "weights.brake": Part(weights.brake, _beside, {"outward": 0.25, "inward": 0.5, "pin": True}),
    "weights.floor": Part(weights.floor, _beside, {"share": 0.25, "unit": "row"}, {"share": 0.5}),
    "policies.every": Part(
        policies.every,
        lambda x: curvax.scale_by_soap(refresh=x),
        {"k": 3, "offset": 1, "first": False},
        {"k": 2},
    ),
    "policies.foam": Part(
        policies.foam,
        _examined,
        {"check_every": 3, "adaptive_damping": False, "refreshes": False, "rounding_floor": 0.0},
    ),
    "policies.diagonal_residual": Part(policies.diagonal_residual, _examined, {"check_every": 3}),
    "policies.below_norm": Part(
        policies.below_norm,
        lambda x: curvax.scale_by_sumo(rank=2, refresh=x),
        {"check_every": 3},
        {"threshold": 1.0},
    ),
    "subspaces.randomized": Part(
        subspaces.randomized, _of_galore, {"oversampling": 1, "iterations": 3}
    ),
    "subspaces.iterated": Part(subspaces.iterated, _of_galore, {"rotate": False, "start": RANDOM}),
    "subspaces.gaussian": Part(
        subspaces.gaussian,
        lambda x: curvax.scale_by_apollo(rank=2, basis=x),
        {"normalized": True, "kept": False},
    ),
    "subspaces.complement": Part(subspaces.complement, _of_alice, SWITCHED),
    "subspaces.full_basis": Part(subspaces.full_basis, _of_alice, SWITCHED),
    "subspaces.gaussian_mix": Part(subspaces.gaussian_mix, _of_alice, SWITCHED),
    "subspaces.optimal": Part(
        subspaces.optimal,
        lambda x: curvax.scale_by_alice(rank=2, compensation=x),
        {"decay": 0.5, "weight": 0.5},
    ),
    "subspaces.fira": Part(
        subspaces.fira, _of_fira, {"weight": 0.5, "residual": 0.5, "limit": 0.5}
    ),
    "subspaces.fira_plus": Part(subspaces.fira_plus, _of_fira, {"weight": 0.5}),
    "subspaces.channel_scaling": Part(subspaces.channel_scaling, _of_fira, {"limit": 0.5}),
    "products": Part(
        curvax.products,
        lambda x: curvax.scale_by_soap(products=x),
        {"step": "float32", "statistics": "bf16x6", "refresh": "bf16x3"},
    ),
    "dense": Part(curvax.dense, _stored),
    "quantized": Part(
        curvax.quantized, _stored, {**CODES, "bits": 8, "keep_diagonal": False}, ALL_CODED
    ),
    "cholesky": Part(
        curvax.cholesky, _stored, {**CODES, "bits": 8, "error_feedback": 0.5}, ALL_CODED
    ),
    "packed": Part(
        curvax.packed,
        lambda x: optax.chain(curvax.scale_by_soap(storage=x), _rooted(x)),
        {**CODES, "bits": 6, "bases": curvax.dense()},
        ALL_CODED,
    ),
    "blend": Part(
        curvax.blend,
        _itself,
        {"first": curvax.scale_by_muon(), "second": optax.scale_by_rms(), "weights": (0.5, 1.0)}
        | {"length": "sum"},
        {"first": optax.identity(), "second": curvax.momentum(), "weights": (0.5, 0.5)},
    ),
    "trust_gate": Part(
        curvax.trust_gate,
        lambda x: curvax.blend(curvax.momentum(), curvax.scale_by_muon(), x),
        {"min_agree": 0.5, "lowest": 0.25, "highest": 0.75},
    ),
    "momentum": Part(curvax.momentum, _itself, {"accumulate": "sum", "nesterov": True}),
    "moment_ratio": Part(curvax.moment_ratio, _itself),
    "precondition_diagonal": Part(
        curvax.precondition_diagonal, _itself, {"momentum": curvax.momentum(), "side": "right"}
    ),
    "normalize_neurons": Part(curvax.normalize_neurons, _itself),
    "normalize_matrices": Part(
        curvax.normalize_matrices, _itself, {"length": 0.5, "norm": "spectral"}
    ),
    "cautious_updates": Part(
        curvax.cautious_updates,
        _itself,
        {"direction": curvax.momentum(), "rescale": False},
        {"direction": curvax.moment_ratio()},
    ),
    "scale_by_dion": Part(curvax.scale_by_dion, _itself, {"side": "right", "seed": 7}, {"rank": 2}),
    "in_eigenbasis": Part(
        functools.partial(curvax.in_eigenbasis, curvax.moment_ratio()),
        _itself,
        {
            **LONGER,
            "statistics": "kl",
            "divide": Other(True, {"statistics": "kl"}),
            "method": "rotations",
            "limit": 0.5,
        },
        SHORT,
    ),
    "precondition": Part(
        curvax.precondition,
        _itself,
        {
            **LONGER,
            "momentum": curvax.momentum(),
            "method": "rotations",
            "root": 2,
            "damping_mode": "relative",
        },
        SHORT,
    ),
    "in_subspace": Part(
        functools.partial(curvax.in_subspace, curvax.moment_ratio()),
        _itself,
        {**LONGER, "basis": subspaces.svd(), "compensation": "fira", "side": "larger", "seed": 7},
        ON_RANDOM,
    ),
}
"""Whatever is made of options: the values, and the directions that more than one method has."""

REFUSES = {"in_subspace": {"clamp_rank"}}
"""Arguments that only refuse: without it, ranks that are too large."""


@pytest.mark.parametrize("name", share(PARTS, of=5))
def test_every_argument_of_a_part_changes_something(name: str) -> None:
    part = PARTS[name]

    def make(**settings: Any) -> Any:
        return curvax.assemble(part.within(part.make(**{**part.given, **settings})), 0.1)

    def as_other(value: Any) -> Other | OneOf:
        return value if isinstance(value, (Other, OneOf)) else Other(value)

    own = [x for x in arguments(part.make) if x not in REFUSES.get(name, ())]
    others = {**OTHERS, **part.others}
    assert not [x for x in own if not changes(make, x, as_other(others[x]))]


def test_every_value_with_arguments_is_a_part() -> None:
    modules = {"eigenbases": eigenbases, "grafts": grafts, "polar": polar, "subspaces": subspaces}
    found = {
        f"{module}.{name}"
        for module, functions in {**modules, "policies": policies, "weights": weights}.items()
        for name, factory in vars(functions).items()
        if inspect.isfunction(factory) and arguments(factory)
    }
    measures = {"policies.damping_proxy", "policies.residual_and_diagonal"}  # functions of arrays
    assert found - measures - {"weights.chain"} <= set(PARTS)  # which has values alone


def test_an_argument_that_changes_nothing_is_found() -> None:
    """The negative control."""

    def ignores(*, b1: float = 0.9, eps: float = 0.0) -> Any:
        del eps
        return curvax.assemble(curvax.momentum(b1), 0.1)

    assert changes(ignores, "b1", Other(0.5))
    assert not changes(ignores, "eps", Other(0.5))


def test_a_mask_stays_while_a_decay_that_is_scheduled_is_zero() -> None:
    inject = curvax.inject_hyperparams(curvax.muon)
    optimizer = inject(0.1, weight_decay=lambda step: 0.1 * step, weight_decay_mask={"x": True})
    assert optimizer.init({"x": jnp.ones((2, 2))})


OF_SWITCHING = {"complement", "full_basis", "gaussian_mix"}
NAMED: dict[str, tuple[Any, dict[Any, Any]]] = {
    "method": (POLAR_METHODS, {x: getattr(polar, x)() for x in polar.__all__[1:]}),
    "basis method": (
        ROOT_METHODS,
        {x: getattr(eigenbases, x)() for x in ("eigh", "qr", "rotations")}
        | {x: eigenbases.stored_roots(x) for x in ("products", "coupled_newton", "newton_schulz")}
        | {None: ROOT_METHODS[None]},
    ),
    "products": (
        PRODUCTS,
        {x: curvax.products(step=x, statistics=x, refresh=x) for x in LEVELS}
        | {None: curvax.products()},
    ),
    "graft": (GRAFTS, {x: getattr(grafts, x)() for x in grafts.__all__[1:]} | {None: None}),
    "weights": (WEIGHTS, {x: getattr(weights, x)() for x in ("hyperball", "brake")} | {None: None}),
    "compensation": (
        COMPENSATIONS,
        {"optimal": subspaces.optimal(), "fira": subspaces.fira(), "fira+": subspaces.fira_plus()}
        | {None: None},
    ),
    "switching": (
        SWITCHING,
        {x: getattr(subspaces, x)() for x in OF_SWITCHING}
        | {"none": subspaces.iterated(), "evd": subspaces.svd()}
        | {"gaussian": subspaces.gaussian(normalized=True)},
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_name_stands_for_the_value_without_arguments(kind: str) -> None:
    names, values = NAMED[kind]
    assert names == values


def test_the_numbers_of_a_value_are_hyperparameters() -> None:
    """Under both names, which take a schedule too."""
    values = {
        "compensation": subspaces.optimal(),
        "switching": subspaces.complement(1),
        "compensation_weight": lambda step: 0.5 / (1 + step),
    }
    optimizer = curvax.inject_hyperparams(curvax.alice)(0.1, rank=2, **values)
    state: Any = jax.jit(optimizer.init)(ONE)
    assert {"compensation_gamma", "compensation_weight", "b3"} <= set(state.hyperparams)
    assert not {"compensation", "compensation_decay", "switching"} & set(state.hyperparams)
    after = jax.eval_shape(optimizer.update, ONE, state, ONE)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert float(state.hyperparams["compensation_weight"]) == 0.5
    muon = curvax.inject_hyperparams(curvax.muon)(0.1, method=polar.newton_schulz(eps=0.25))
    given = muon.init(ONE).hyperparams  # pyright: ignore[reportAttributeAccessIssue]
    assert float(given["method_eps"]) == 0.25
    later = {"refresh_threshold": lambda step: 0.5 / (1 + step)}
    values = {"refresh": policies.diagonal_residual(2), "storage": curvax.packed(min_elements=1)}
    soap = curvax.inject_hyperparams(curvax.soap)(0.1, **values, **later)
    state = jax.jit(soap.init)(ONE)
    assert {"refresh_threshold", "storage_eps"} <= set(state.hyperparams)
    assert float(state.hyperparams["refresh_threshold"]) == 0.5
    after = jax.eval_shape(soap.update, ONE, state, ONE)[1]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(TypeError, match="method_eps"):
        curvax.inject_hyperparams(curvax.muon)(0.1, method="svd", method_eps=0.25)
