"""Every argument of every factory has an effect in some setting.

What an argument changes is read off the program of three steps, without what no update needs. Other
values follow from the argument's rule (`RULES`); what has none, or acts only beside another
argument, has them in `OTHERS` or with its part.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import partial_eval

import curvax
from curvax import eigenbases, grafts, polar, policies, subspaces, weights
from curvax.transforms._validate import MODULES, Flag, Integer, Number, OneOf, Rule, rules_of
from curvax.transforms.directions._graft import GRAFTS
from curvax.transforms.directions._orthogonalize import POLAR_METHODS
from curvax.transforms.linalg._products import LEVELS
from curvax.transforms.linalg._products import NAMES as PRODUCTS
from curvax.transforms.refresh._methods import ROOT_METHODS
from curvax.transforms.subspace._bases import SWITCHING
from curvax.transforms.subspace._compensation import COMPENSATIONS
from curvax.transforms.weights._weights_side import on_weights
from curvax.transforms.weights._weights_values import WEIGHTS
from tests.cells import cells
from tests.registry import METHODS, REGISTRY, Row

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


RANDOM, FIRST, SECOND = subspaces.randomized(1), curvax.momentum(), curvax.scale_by_muon()
MESH = {"mesh": jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)}
SHARED: dict[str, Any] = {
    "matrices": "second/kernel",
    "weight_dimension_numbers": {"first/kernel": None},
    "mesh": MESH["mesh"],
    "mesh_axis": Other("x", MESH),
    "weight_decay": 0.1,
    "weight_decay_mask": Other({"first": False, "second": True}, {"weight_decay": 0.1}),
    "weights": weights.decay(0.1),
    "adam_learning_rate": 0.5,
    "others": optax.sgd(0.1),
}
OTHERS: dict[str, Any] = {  # a list has values of which no method takes all
    "method": ["qdwh", "rotations"],
    "switching": subspaces.gaussian_mix(1),
    "compensation": "fira+",
    "basis": RANDOM,
    "carry": [subspaces.reset(), subspaces.keep()],
    "seed": [Other(7, {"basis": RANDOM}), 7],
    "refresh": 3,
    "storage": curvax.dense("bfloat16"),
    "products": "bf16x3",
    "graft": None,
    "base": functools.partial(optax.sgd, momentum=0.8),
    "statistics": [Other("kl", {"root": 2}), "kl"],
    "stagger": True,
    **dict.fromkeys(("inner", "momentum", "direction"), curvax.momentum(0.25)),
}


def candidates(rule: Rule) -> list[Any]:
    """Some values that a rule allows."""
    if isinstance(rule, OneOf):
        return list(rule.values)
    values = {Number: (0.5, 2.0, 1e-8), Integer: (4, 3, 1), Flag: (True, False)}
    return [x for x in values.get(type(rule), ("bfloat16",)) if x in rule]


def others(make: Any, name: str, known: Mapping[str, Any], now: Any) -> list[Other]:
    """Values of an argument unlike `now`, from what is known or from its rule."""
    if name in known:
        found = known[name] if isinstance(known[name], list) else [known[name]]
    else:
        found = candidates(rules_of(make)[name][0])
    return [x if isinstance(x, Other) else Other(x) for x in found if x is None or x != now]


@functools.cache
def _plain(make: Any, settings: tuple[Any, ...], one: bool) -> str:
    return program(make(**dict(settings)), ONE if one else PARAMS)


def changes(make: Callable[..., Any], name: str, cases: list[Other]) -> bool:
    """Whether a value of this argument changes the program of the updates, of those it takes."""
    one = name not in SHARED and name != "side"
    for case in cases:
        settings = {**case.settings, name: case.value}
        try:
            make(**settings)
        except (TypeError, ValueError):
            continue
        plain = _plain(make, tuple(case.settings.items()), one)
        if program(make(**settings), ONE if one else PARAMS) != plain:
            return True
    return False


def without_effect(factory: Any, make: Any, names: Iterable[str], **known: Any) -> list[str]:
    """The arguments of a factory that change nothing of what `make` makes with it."""
    given, parameters = known.pop("given", {}), inspect.signature(factory).parameters
    now = {name: given.get(name, parameters[name].default) for name in names}
    of = {name: others(factory, name, {**OTHERS, **known}, now[name]) for name in names}
    return [name for name in names if not changes(make, name, of[name])]


@functools.cache
def of_method(row: Row) -> Callable[..., Any]:
    """The optimizer at a small rank; without a base, which takes the weight decay itself."""
    own = {"rank": 2} if row.ranked else {"base": None} if row.base else {}
    return lambda learning_rate=0.1, **settings: row.optimizer(learning_rate, **{**own, **settings})


@functools.cache
def of_direction(row: Row) -> Callable[..., Any]:
    """The direction of matrices alone, as a full optimizer."""
    return lambda **settings: curvax.assemble(row.direction(**settings), 0.1)


@pytest.mark.parametrize("row", cells(METHODS, of=17), ids=lambda row: row.name)
def test_every_argument_of_a_method_changes_something(row: Row) -> None:
    own = [name for name in inspect.signature(row.optimizer).parameters if name not in SHARED]
    assert not without_effect(row.optimizer, of_method(row), own)
    more = [name for name in inspect.signature(row.direction).parameters if name not in own]
    assert not without_effect(row.direction, of_direction(row), more)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_every_shared_argument_changes_something(row: Row, name: str) -> None:
    if row in METHODS:
        assert not without_effect(row.optimizer, of_method(row), [name], **SHARED)


def _in(make: Any, name: str, **settings: Any) -> Any:
    """A function from a value to a direction that has it as this argument."""
    return lambda value: make(**settings, **{name: value})


def _beside(side: Any) -> Any:
    return optax.chain(curvax.momentum(), on_weights(side, 0.1))


def _stored(storage: Any) -> Any:
    rooted = curvax.scale_by_shampoo(storage=storage, method=eigenbases.stored_roots())
    return optax.chain(curvax.scale_by_soap(storage=storage), rooted)


SHAMPOO, SOAP = curvax.scale_by_shampoo, curvax.scale_by_soap
TESTED_BY: dict[Any, Any] = {  # by the kind of a value: the direction that shows what it does
    polar.PolarMethod: curvax.orthogonalize,
    eigenbases.BasisMethod: _in(SOAP, "method"),
    eigenbases.RefreshMethod: _in(SHAMPOO, "method", root=2),
    grafts.Graft: _in(SHAMPOO, "graft"),
    weights.Weights: _beside,
    policies.RefreshPolicy: _in(SHAMPOO, "refresh", damping_mode="absolute", eps=1e-9),
    subspaces.BasisFinder: _in(curvax.scale_by_galore, "basis", rank=2),
    subspaces.Compensation: _in(curvax.scale_by_alice, "compensation", rank=2),
    curvax.Storage: _stored,
    type(curvax.products()): _in(SOAP, "products"),
    type(curvax.trust_gate()): _in(curvax.blend, "weights", first=FIRST, second=SECOND),
    optax.GradientTransformation: lambda direction: direction,
    "eigenbases.qr": _in(SOAP, "method", refresh=policies.diagonal_residual(2)),
    "policies.below_norm": _in(curvax.scale_by_sumo, "refresh", rank=2),
}
NO_PARTS = {"policies.damping_proxy", "policies.residual_and_diagonal", "weights.chain"}
"""Functions of arrays, and what has values alone."""

PARTS = [
    *(
        f"{module}.{name}"
        for module in MODULES
        for name, factory in vars(getattr(curvax, module)).items()
        if inspect.isfunction(factory) and inspect.signature(factory).parameters
    ),
    *("products", "dense", "quantized", "cholesky", "packed", "blend", "trust_gate", "momentum"),
    *("moment_ratio", "precondition_diagonal", "normalize_neurons", "normalize_matrices"),
    *("cautious_updates", "scale_by_dion", "in_eigenbasis", "precondition", "in_subspace"),
]
"""Whatever is made of options: the values, and the directions that more than one method has."""

NEEDED: dict[str, Any] = {
    **{"weight_decay": 0.1, "share": 0.25, "k": 2, "threshold": 1.0, "rank": 2, "basis": RANDOM},
    **{"first": FIRST, "second": SECOND, "weights": (0.5, 0.5), "refresh": curvax.every(2)},
    **dict.fromkeys(("inner", "direction"), curvax.moment_ratio()),
    "min_elements": 1,  # which lets the arguments of storages act
}
"""What parts need."""

LONGER, CODED = {"refresh": curvax.every(3)}, {"bits": 8, "map": "linear", "min_elements": 4096}
SWITCHED, PRESET = {"finder": subspaces.svd()}, {"coefficients": "classical"}
OF_PARTS: dict[str, dict[str, Any]] = {
    "polar.newton_schulz": PRESET,
    "polar.balanced": {"method": "svd"},
    "eigenbases.stored_roots": {"method": "products"},
    "eigenbases.saturated_roots": PRESET,
    "policies.every": {"first": False},
    "subspaces.iterated": {"start": RANDOM},
    **{f"subspaces.{x}": SWITCHED for x in ("complement", "full_basis", "gaussian_mix")},
    "products": {"step": "float32", "statistics": "bf16x6", "refresh": "bf16x3"},
    **dict.fromkeys(("quantized", "cholesky"), CODED),
    "packed": {**CODED, "bits": 6, "bases": curvax.dense()},
    "blend": {"first": SECOND, "second": FIRST, "weights": (0.5, 1.0), "shared": FIRST},
    "in_eigenbasis": {**LONGER, "divide": Other(True, {"statistics": "kl"}), "method": "rotations"},
    "precondition": {**LONGER, "method": "rotations"},
    "in_subspace": {**LONGER, "basis": subspaces.svd(), "compensation": "fira", "seed": 7},
}
"""Values unlike those of `OTHERS`."""

REFUSES = {"in_subspace": {"clamp_rank"}}
"""Arguments that only refuse: without it, ranks that are too large."""


@pytest.mark.parametrize("name", cells((x for x in PARTS if x not in NO_PARTS), of=10))
def test_every_argument_of_a_part_changes_something(name: str) -> None:
    factory = operator.attrgetter(name)(curvax)
    parameters = inspect.signature(factory).parameters
    needed = {n for n, x in parameters.items() if x.default is x.empty or n == "min_elements"}
    given = {n: NEEDED[n] for n in needed}
    kinds = (x for x in TESTED_BY if isinstance(x, type) and isinstance(factory(**given), x))
    within = TESTED_BY.get(name) or TESTED_BY[next(kinds)]

    def make(**settings: Any) -> Any:
        return curvax.assemble(within(factory(**{**given, **settings})), 0.1)

    own = [x for x in parameters if x not in REFUSES.get(name, ())]
    assert not without_effect(factory, make, own, given=given, **OF_PARTS.get(name, {}))


def test_an_argument_that_changes_nothing_is_found() -> None:
    """The negative control."""

    def ignores(*, b1: float = 0.9, eps: float = 0.0) -> Any:
        del eps
        return curvax.assemble(curvax.momentum(b1), 0.1)

    assert without_effect(ignores, ignores, ("b1", "eps")) == ["eps"]


def test_a_mask_stays_while_a_decay_that_is_scheduled_is_zero() -> None:
    inject = curvax.inject_hyperparams(curvax.muon)
    optimizer = inject(0.1, weight_decay=lambda step: 0.1 * step, weight_decay_mask={"x": True})
    assert optimizer.init({"x": jnp.ones((2, 2))})


def values_of(module: Any, names: str) -> dict[Any, Any]:
    """What functions of a module give without arguments, by their names."""
    return {name: getattr(module, name)() for name in names.split()}


NAMED: dict[str, tuple[Any, dict[Any, Any]]] = {
    "method": (POLAR_METHODS, values_of(polar, " ".join(polar.__all__[1:]))),
    "basis method": (
        ROOT_METHODS,
        values_of(eigenbases, "eigh qr rotations")
        | {x: eigenbases.stored_roots(x) for x in ("products", "coupled_newton", "newton_schulz")}
        | {None: ROOT_METHODS[None]},
    ),
    "products": (
        PRODUCTS,
        {x: curvax.products(step=x, statistics=x, refresh=x) for x in LEVELS}
        | {None: curvax.products()},
    ),
    "graft": (GRAFTS, values_of(grafts, " ".join(grafts.__all__[1:])) | {None: None}),
    "weights": (WEIGHTS, values_of(weights, "hyperball brake") | {None: None}),
    "compensation": (
        COMPENSATIONS,
        values_of(subspaces, "optimal fira") | {"fira+": subspaces.fira_plus(), None: None},
    ),
    "switching": (
        SWITCHING,
        values_of(subspaces, "complement full_basis gaussian_mix")
        | {"none": subspaces.iterated(), "evd": subspaces.svd()}
        | {"gaussian": subspaces.gaussian(normalized=True)},
    ),
}


@pytest.mark.parametrize("kind", NAMED)
def test_a_name_stands_for_the_value_without_arguments(kind: str) -> None:
    names, values = NAMED[kind]
    assert names == values


def test_the_numbers_of_a_value_are_hyperparameters() -> None:
    """Under both names, which take a schedule too; the first one is 0.5."""
    later = lambda step: 0.5 / (1 + step)  # noqa: E731
    optimal, switching = subspaces.optimal(), subspaces.complement(1)
    residual, packed = policies.diagonal_residual(2), curvax.packed(min_elements=1)
    alice = {"compensation": optimal, "switching": switching, "compensation_weight": later}
    soap = {"refresh": residual, "storage": packed, "refresh_threshold": later}
    for make, settings, names in (
        (functools.partial(curvax.alice, rank=2), alice, "compensation_weight compensation_gamma"),
        (curvax.soap, soap, "refresh_threshold storage_eps"),
        (curvax.muon, {"method": polar.newton_schulz(eps=0.5)}, "method_eps"),
        (curvax.muon, {"weights": weights.hyperball(0.5)}, "weights_rms"),
        (curvax.muon, {"weights": weights.brake()}, "weights_outward weights_inward"),
        (curvax.muon, {"weights": weights.floor(0.5)}, "weights_share"),
    ):
        optimizer = curvax.inject_hyperparams(make)(0.1, **settings)
        state: Any = jax.jit(optimizer.init)(ONE)
        numbers = {k: float(x) for k, x in state.hyperparams.items()}
        assert {*names.split()} == {k for k in numbers if k.partition("_")[0] in settings}
        assert numbers[names.split()[0]] == 0.5
        after = jax.eval_shape(optimizer.update, ONE, state, ONE)[1]
        assert jax.tree.structure(after) == jax.tree.structure(state)
    with pytest.raises(TypeError, match="method_eps"):
        curvax.inject_hyperparams(curvax.muon)(0.1, method="svd", method_eps=0.25)
