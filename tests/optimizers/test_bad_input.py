"""Bad arguments and parameters: each is a `ValueError` that says what is wrong and what is allowed.

A case passes if the message holds all its fragments: the argument's name or the parameter's path,
the value, and (part of) what is allowed. What no method treats in its own way, a third of them each
go through, in turns.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import MatrixAxes
from tests.cases import every_optimizer, in_turns
from tests.registry import NAMED, REGISTRY, Row


def rejection(call: Callable[[], Any]) -> str:
    """The message of the `ValueError` that `call` raises."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def assert_names(message: str, fragments: tuple[str, ...]) -> None:
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in {message!r}"


class Argument(NamedTuple):
    """A bad argument of a method, and what else the message holds besides name and value."""

    method: str
    name: str
    value: Any
    allowed: str


def shared(name: str, value: Any, allowed: str) -> list[Argument]:
    return [Argument(row.name, name, value, allowed) for row in REGISTRY]


ARGUMENTS = [
    # Every optimizer.
    *shared("learning_rate", -0.1, "[0, inf)"),
    *shared("learning_rate", "0.1", "[0, inf)"),
    *shared("weight_decay", -0.1, "[0, inf)"),
    Argument("muon", "learning_rate", 10**400, "[0, inf)"),
    *shared("adam_learning_rate", -1, "[0, inf)"),
    *shared("others", 0.001, "optax.adamw"),
    *shared("others", optax.adamw, "optax.adamw"),
    *shared("matrices", 3, "pattern"),
    *shared("matrices", ["kernel", 3], "pattern"),
    # Muon.
    Argument("muon", "b1", 1.0, "[0, 1)"),
    Argument("muon", "b1", 1, "[0, 1)"),
    Argument("muon", "b1", -0.1, "[0, 1)"),
    Argument("muon", "b1", float("nan"), "[0, 1)"),
    Argument("muon", "b1", None, "[0, 1)"),
    Argument("muon", "b1", jnp.float32(1.5), "[0, 1)"),
    Argument("muon", "accumulate", "mean", "'ema', 'sum'"),
    Argument("muon", "method", "newton", "'newton_schulz', 'svd', 'qr_svd', 'qdwh'"),
    Argument("muon", "method", None, "curvax.polar.newton_schulz(steps=3)"),
    *(
        Argument(name, "consistent_rms", value, "(0, inf)")
        for name in ("muon", "osgdm", "swan", "sumo")
        for value in (0.0, -0.2)
    ),
    # RACS.
    Argument("racs", "b2", 1.0, "[0, 1)"),
    Argument("racs", "b2", -0.1, "[0, 1)"),
    Argument("racs", "gamma", 0.9, "[1, inf]"),
    Argument("racs", "scale", -1.0, "inf)"),
    Argument("racs", "scale", "0.05", "inf)"),
    Argument("racs", "iterations", 0, "at least 1"),
    Argument("racs", "iterations", -1, "at least 1"),
    # ASGO; the rest is in test_kronecker_bad_input.py.
    Argument("asgo", "variant", "practica", "'practical', 'theoretical', 'from_momentum'"),
    Argument("asgo", "side", "both", "'left', 'right', 'smaller'"),
    Argument("asgo", "side", "top", "'left', 'right', 'smaller'"),
]


@pytest.mark.parametrize("case", ARGUMENTS, ids=lambda c: f"{c.method}-{c.name}-{c.value!r:.20}")
def test_factories_reject_bad_arguments(case: Argument) -> None:
    factory = NAMED[case.method].optimizer
    if case.name == "learning_rate":
        message = rejection(lambda: factory(case.value))
    else:
        message = rejection(lambda: factory(0.1, **{case.name: case.value}))
    assert_names(message, (case.name, repr(case.value), case.allowed))


FOAM = curvax.policies.foam()
MASK = {f"block_{i}": {"kernel": True, "bias": False} for i in range(20)}

PARTS: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    (lambda: curvax.every(0), ("k must", "got 0", "at least 1")),
    (lambda: curvax.every(-3), ("k must", "got -3", "at least 1")),
    (lambda: curvax.every(2, offset=0.5), ("offset must", "0.5", "integer")),
    *(
        (functools.partial(f, 2**40), (name, str(2**40), f"{high}"))
        for f, name, high in (
            (curvax.every, "k must be an integer from 1 to", 2**31 - 1),
            (lambda n: curvax.every(2, offset=-n), "offset must", -(2**31) + 1),
            (lambda n: curvax.soap(0.1, refresh=n), "refresh must", 2**31 - 1),
            (lambda n: curvax.foam(0.1, check_every=n), "check_every must", 2**31 - 1),
            (lambda n: curvax.racs(0.1, iterations=n), "iterations must", 2**31 - 1),
            (curvax.eigenbases.qr, "steps must", 2**31 - 1),
            (lambda n: curvax.power_iteration(np.eye(2), n), "iterations must", 2**31 - 1),
            (curvax.polar.newton_schulz, "steps must", 1000),
            (lambda n: curvax.newton_schulz(np.eye(2), steps=n), "steps must", 1000),
        )
    ),
    *(
        (functools.partial(f, seed=seed), ("seed must", repr(seed), "integer"))
        for f, seed in (
            (functools.partial(curvax.alice, 0.1, rank=2), 1.5),
            (functools.partial(curvax.scale_by_dion, 2), -1),
            (functools.partial(curvax.stochastic_rounding, optax.sgd(0.1)), 2**63),
        )
    ),
    (lambda: curvax.momentum(1.0), ("b1", "1.0", "[0, 1)")),
    (lambda: curvax.momentum(accumulate="max"), ("accumulate", "'max'", "'ema', 'sum'")),
    (
        lambda: curvax.momentum(accumulate="sum", bias_correction=True),
        ("bias_correction=True", "accumulate='ema'"),
    ),
    (lambda: curvax.limit_norm_growth(0.5), ("gamma", "0.5", "[1, inf]")),
    (lambda: curvax.orthogonalize("qr"), ("method", "'qr'", "'svd'")),
    *(
        (functools.partial(curvax.polar.newton_schulz, **{name: value}), (name, repr(value), part))
        for name, value, part in (
            ("coefficients", "cubic", "'quintic', 'classical', 'polar_express', 'turbo_muon'"),
            ("coefficients", (1.0, 2.0), "three numbers"),
            ("coefficients", ((1.0, 2.0, 3.0), (1.0,)), "three numbers"),
            ("coefficients", (), "three numbers"),
            ("coefficients", 3.0, "three numbers"),
            ("coefficients", None, "three numbers"),
            ("coefficients", ((1.0, 2.0, 3.0),) * 6, "at most steps=5 rows"),
            ("steps", 0, "at least 1"),
            ("steps", -5, "at least 1"),
            ("steps", 2.5, "at least 1"),
            ("steps", True, "at least 1"),
            ("norm", "spectral", "'frobenius', 'gram', 'aol'"),
            ("eps", -1e-8, "[0, inf)"),
            ("dtype", "int8", "real floating"),
        )
    ),
    (
        lambda: curvax.muon(0.1, method=curvax.polar.svd),  # pyright: ignore
        ("method", "the function svd; call it: curvax.polar.svd()."),
    ),
    (
        lambda: curvax.muon(0.1, method=curvax.subspaces.svd()),  # pyright: ignore
        ("method", "'svd', 'qr_svd', 'qdwh', or a value such as", "got SvdBasis()"),
    ),
    (lambda: curvax.scale_by_rows_and_columns(1.0), ("b2 must", "1.0", "[0, 1)")),
    (lambda: curvax.scale_by_shape(-1.0), ("consistent_rms", "-1.0", "(0, inf)")),
    (lambda: curvax.MatrixAxes(0, 1, row_heads=0), ("row_heads", "0", "at least 1")),
    (lambda: curvax.MatrixAxes(0, 1, column_heads=1.5), ("column_heads", "1.5", "at least 1")),
    (lambda: curvax.MatrixAxes(column_parts=(4, 0)), ("column_parts", "(4, 0)", "positive")),
    (lambda: curvax.MatrixAxes(column_parts=8), ("column_parts", "8", "sequence")),
    (
        lambda: curvax.MatrixAxes(column_heads=2, column_parts=(4, 4)),
        ("column_heads=2", "(4, 4)", "must be 1"),
    ),
    (lambda: curvax.MatrixAxes(1.5, 1), ("rows", "1.5", "integer")),
    (lambda: curvax.MatrixAxes(0, "1"), ("columns", "'1'", "integer")),
    (lambda: curvax.MatrixRule(3), ("matrices", "3", "pattern")),
    (lambda: curvax.MatrixRule(curvax.MatrixRule()), ("matrices", "MatrixRule", "pattern")),
    (lambda: curvax.MatrixRule(output_layer=3), ("output_layer", "3", "pattern")),
    (lambda: curvax.MatrixRule(head_wise=2), ("head_wise", "2", "True or False")),
    (lambda: curvax.MatrixRule(block_size=0), ("block_size", "0", "at least 1")),
    (lambda: curvax.MatrixRule(block_size=-4), ("block_size", "-4", "at least 1")),
    (lambda: curvax.MatrixRule(block_size=2.0), ("block_size", "2.0", "at least 1")),
    (lambda: curvax.MatrixRule(block_size=True), ("block_size", "True", "at least 1")),
    (lambda: curvax.MatrixRule(stack="yes"), ("stack", "'yes'", "None, True, False")),
    (lambda: curvax.on_matrices(optax.identity(), stack=2), ("stack", "2", "None, True, False")),
    (lambda: curvax.asgo(0.1, variant="theoretical", b1=0.9), ("variant", "b1", "0.9")),
    (
        lambda: curvax.on_matrices(optax.identity(), curvax.MatrixRule(), matrices="all"),
        ("rule", "matrices", "not both"),
    ),
    (
        lambda: curvax.newton_schulz(jnp.eye(2), coefficients="none"),
        ("coefficients", "'none'", "'quintic'"),
    ),
    # Functions in place of their values, and the reverse.
    (
        lambda: curvax.soap(0.1, storage=curvax.quantized),  # pyright: ignore
        ("storage", "the function quantized; call it: curvax.quantized()."),
    ),
    (
        lambda: curvax.soap(0.1, refresh=curvax.policies.foam),  # pyright: ignore
        ("refresh", "the function foam; call it: curvax.policies.foam()."),
    ),
    (
        lambda: curvax.shampoo(0.1, refresh=curvax.foam),  # pyright: ignore
        ("refresh", "got <function foam"),  # an optimizer, which calling does not make a policy
    ),
    (
        lambda: curvax.galore(0.1, basis=curvax.subspaces.randomized),  # pyright: ignore
        ("basis", "the function randomized; call it: curvax.subspaces.randomized()."),
    ),
    (
        lambda: curvax.galore(0.1, carry=curvax.subspaces.rotate),  # pyright: ignore
        ("carry", "the function rotate; call it: curvax.subspaces.rotate()."),
    ),
    (
        lambda: curvax.shampoo(0.1, base=optax.adamw(0.1)),  # pyright: ignore
        ("base", "such as optax.adamw or functools.partial(optax.adamw, ", "got an optimizer."),
    ),
    (lambda: curvax.shampoo(0.1, base=lambda rate: 3), ("base", "got <function", "gives 3.")),
    (
        lambda: curvax.assemble(curvax.muon(0.1), 0.1),
        ("direction", "curvax.scale_by_muon()", "got a full optimizer."),
    ),
    (
        lambda: curvax.assemble(curvax.scale_by_muon, 0.1),  # pyright: ignore
        ("direction", "curvax.scale_by_muon()", "got <function scale_by_muon"),
    ),
    # What other libraries take.
    (
        lambda: curvax.muon(0.1, matrices=lambda leaf: leaf.ndim == 2),  # pyright: ignore
        ("matrices", "path and leaf", "lambda path, leaf: leaf.ndim == 2; got <function"),
    ),
    (
        lambda: curvax.muon(0.1, matrices=MASK),  # pyright: ignore
        ("matrices", "optax.partition", "lambda path, leaf", "got {'block_0': ", " ...."),
    ),
    # Arguments that have to fit each other are named together.
    (
        lambda: curvax.shampoo(0.1, refresh=FOAM),
        ("damping_mode", "'absolute'", "eps in (0, 3e-07), such as 1e-09; got", "eps=1e-06."),
    ),
]


@pytest.mark.parametrize(("factory", "fragments"), PARTS, ids=[" ".join(p[1][:2]) for p in PARTS])
def test_parts_reject_bad_arguments(factory: Callable[[], Any], fragments: tuple[str, ...]) -> None:
    assert_names(rejection(factory), fragments)


@every_optimizer
def test_what_contradicts_itself_is_rejected(row: Row) -> None:
    """A rate for AdamW where there is none, and axes in two places."""
    rate = functools.partial(row.make, others=optax.sgd(0.1), adam_learning_rate=0.25)
    assert_names(rejection(rate), ("adam_learning_rate", "0.25", "others=optax.adamw("))
    axes = {"dense/kernel": MatrixAxes(0, 1)}
    rule = curvax.MatrixRule(weight_dimension_numbers={"head/kernel": None})
    twice = functools.partial(row.make, matrices=rule, weight_dimension_numbers=axes)
    assert_names(rejection(twice), ("weight_dimension_numbers", "dense/kernel", "once"))


DENSE = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}


def of_kernel(leaf: Any) -> Any:
    return {"dense": {"kernel": leaf, "bias": jnp.ones(6)}}


@pytest.mark.parametrize(
    ("params", "fragments"),
    [
        (of_kernel(jnp.ones((4, 6), jnp.int32)), ("'dense/kernel'", "int32", "real floating")),
        (of_kernel(jnp.ones((4, 6), bool)), ("'dense/kernel'", "bool", "real floating")),
        (of_kernel(jnp.ones((4, 6), jnp.complex64)), ("'dense/kernel'", "complex64", "real")),
        (of_kernel(jax.random.key(0)), ("'dense/kernel'", "key", "real floating")),
        (of_kernel(jnp.ones((0, 6))), ("'dense/kernel'", "(0, 6)", "at least 1")),
        (of_kernel(jnp.ones((4, 0))), ("'dense/kernel'", "(4, 0)", "at least 1")),
        ({"bias": jnp.ones(0), **DENSE}, ("'bias'", "(0,)", "at least 1")),
        ({"step": jnp.int32(0), **DENSE}, ("'step'", "int32", "real floating")),
        (
            of_kernel(jnp.ones((2, 4, 6))),
            ("'dense/kernel'", "(2, 4, 6)", "weight_dimension_numbers", "MatrixAxes", "batch"),
        ),
        (
            {"dense": {"kernel": jnp.ones((2, 2, 4, 6))}},  # a bias would make it a convolution
            ("'dense/kernel'", "(2, 2, 4, 6)", "MatrixAxes"),
        ),
        ([{"kernel": jnp.ones((2, 4, 6))}], ("'0/kernel'", "(2, 4, 6)", "MatrixAxes")),
    ],
    ids=[
        *("integers", "booleans", "complex", "random key", "no rows", "no columns"),
        *("empty vector", "counter", "3-D", "4-D", "3-D in a list"),
    ],
)
@in_turns(0)
def test_init_rejects_bad_parameters(row: Row, params: Any, fragments: tuple[str, ...]) -> None:
    optimizer = row.make()
    assert_names(rejection(lambda: optimizer.init(params)), fragments)
    assert_names(rejection(lambda: jax.eval_shape(optimizer.init, params)), fragments)


@pytest.mark.parametrize(
    ("leaf", "fragments"),
    [
        (jnp.ones(3), ("'w'", "(3,)", "rows, columns")),
        (jnp.ones((3, 3), jnp.int32), ("'w'", "int32", "real floating")),
        (jnp.ones((0, 3)), ("'w'", "(0, 3)", "at least 1")),
    ],
    ids=["vector", "integers", "no rows"],
)
@every_optimizer
def test_directions_reject_what_is_no_matrix(
    row: Row, leaf: Any, fragments: tuple[str, ...]
) -> None:
    assert_names(rejection(lambda: row.make_direction().init({"w": leaf})), fragments)


@pytest.mark.parametrize(
    ("axes", "fragments"),
    [
        (MatrixAxes(0, 0), ("'dense/kernel'", "(2, 4, 6)", "rows=0", "columns=0", "twice")),
        (MatrixAxes((0, 1), (1, 2)), ("'dense/kernel'", "rows=(0, 1)", "columns=(1, 2)", "twice")),
        (MatrixAxes(1, -2), ("'dense/kernel'", "rows=1", "columns=-2", "twice")),
        (MatrixAxes((0, 0), 1), ("'dense/kernel'", "rows=(0, 0)", "twice")),
        (MatrixAxes(0, 3), ("'dense/kernel'", "no axis 3", "columns", "-3 to 2")),
        (MatrixAxes(-4, 1), ("'dense/kernel'", "no axis -4", "rows", "-3 to 2")),
        (MatrixAxes(1, 2, row_heads=3), ("'dense/kernel'", "3 row_heads", "4 rows")),
        (MatrixAxes(1, 2, column_heads=4), ("'dense/kernel'", "4 column_heads", "6 columns")),
        (MatrixAxes(1, 2, column_parts=(3, 2)), ("'dense/kernel'", "6 columns", "(3, 2)", "are 5")),
        (
            optax.contrib.MuonDimensionNumbers(reduction_axis=5, output_axis=0),
            ("'dense/kernel'", "no axis 5", "-3 to 2"),
        ),
    ],
    ids=[
        *("same axis", "one of several twice", "twice by sign", "twice in rows", "absent column"),
        *("absent row", "heads in rows", "heads in columns", "parts", "absent in Optax's entry"),
    ],
)
@in_turns(1)
def test_init_rejects_bad_axes(row: Row, axes: Any, fragments: tuple[str, ...]) -> None:
    params = of_kernel(jnp.ones((2, 4, 6)))
    optimizer = row.make(weight_dimension_numbers={"dense/kernel": axes})
    assert_names(rejection(lambda: optimizer.init(params)), fragments)


@pytest.mark.parametrize(
    ("spec", "fragments"),
    [
        ({"dens/*": MatrixAxes(0, 1)}, ("weight_dimension_numbers", "'dens/*'", "dense/kernel")),
        (
            {"dense/*": MatrixAxes(0, 1), "head/*": None},
            ("weight_dimension_numbers", "'head/*'", "dense/kernel"),
        ),
        (
            {"dense": {"kernel": MatrixAxes(0, 1)}},
            ("weight_dimension_numbers", "structure", "'dense/bias'"),
        ),
        (
            {"dense": {"kernel": MatrixAxes(0, 1), "bias": None, "scale": None}},
            ("weight_dimension_numbers", "structure", "'dense/scale'"),
        ),
        (
            [MatrixAxes(0, 1), None],
            ("weight_dimension_numbers", "structure", "dense/kernel"),
        ),
        (
            {"dense": {"kernel": (0, 1), "bias": None}},
            ("weight_dimension_numbers", "(0, 1) at 'dense/kernel'", "MatrixAxes(0, 1)"),
        ),
        (
            {"dense/kernel": ((0,), 1), "dense/bias": None},
            ("weight_dimension_numbers", "at 'dense/kernel'", "MatrixAxes((0,), 1)"),
        ),
        (
            {"dense/kernel": [0, 1, 2]},
            ("weight_dimension_numbers", "[0, 1, 2] at 'dense/kernel'", "or None."),
        ),
        ({"dense/kernel": "rows"}, ("weight_dimension_numbers", "'rows'", "MatrixAxes")),
        (3, ("weight_dimension_numbers", "3", "MatrixAxes")),
        (lambda params: 3, ("weight_dimension_numbers", "3", "MatrixAxes")),
        (
            lambda params: {"dense": {"kernel": MatrixAxes(0, 1)}},
            ("weight_dimension_numbers", "structure", "'dense/bias'"),
        ),
    ],
    ids=[
        *("pattern fits nothing", "second pattern fits nothing", "leaf lacks", "leaf too many"),
        *("another structure", "bare tuple", "bare tuples", "bare list", "text", "number"),
        *("callable number", "callable lacks"),
    ],
)
@in_turns(2)
def test_init_rejects_specifications_that_do_not_fit(
    row: Row, spec: Any, fragments: tuple[str, ...]
) -> None:
    def make_and_init() -> Any:
        return row.make(weight_dimension_numbers=spec).init(DENSE)

    assert_names(rejection(make_and_init), fragments)


@pytest.mark.parametrize("argument", ["matrices", "output_layer"])
def test_init_rejects_patterns_that_fit_nothing(argument: str) -> None:
    rule: dict[str, Any] = {argument: ["dense/*", "decoder/*"]}
    optimizer = curvax.racs(0.1, matrices=curvax.MatrixRule(**rule))
    message = rejection(lambda: optimizer.init(DENSE))
    assert_names(message, (argument, "'decoder/*'", "dense/kernel"))


def test_on_matrices_rejects_what_is_no_matrix() -> None:
    view = curvax.on_matrices(curvax.orthogonalize())
    message = rejection(lambda: view.init(DENSE))
    assert_names(message, ("'dense/bias'", "vector", "matrices=", "weight_dimension_numbers"))


def test_heads_are_not_cut_unevenly() -> None:
    axes = MatrixAxes(0, 1, column_heads=2)
    rule = curvax.MatrixRule(block_size=2, weight_dimension_numbers={"dense/kernel": axes})
    optimizer = curvax.asgo(0.1, matrices=rule)
    message = rejection(lambda: optimizer.init(DENSE))
    assert_names(message, ("'dense/kernel'", "block_size=2", "3 columns", "divides"))


def test_two_parameters_with_one_path_are_rejected() -> None:
    params = {"a": {"b": jnp.ones((2, 2))}, "a/b": jnp.ones((2, 2))}
    assert_names(rejection(lambda: curvax.muon(0.1).init(params)), ("'a/b'", "same path"))


@in_turns(0)
def test_update_rejects_gradients_of_another_shape(row: Row) -> None:
    optimizer = row.make()
    state = jax.eval_shape(optimizer.init, DENSE)
    gradient = of_kernel(jnp.ones((4, 8)))
    message = rejection(lambda: jax.eval_shape(optimizer.update, gradient, state, DENSE))
    assert_names(message, ("dense/kernel", "(4, 8)"))


@in_turns(0)
def test_update_says_that_weight_decay_needs_params(row: Row) -> None:
    optimizer = row.make(weight_decay=0.1)
    state = jax.eval_shape(optimizer.init, DENSE)
    message = rejection(lambda: jax.eval_shape(optimizer.update, DENSE, state))
    assert message == "update needs params: optimizer.update(gradients, state, params)."


@in_turns(1)
def test_tracers_are_not_validated(row: Row) -> None:
    """A factory may be called while tracing, as `optax.inject_hyperparams` does."""
    given = {**row.defaults, **row.settings}
    of_policies = {"threshold", "max_damping"}
    names = {name for name, x in given.items() if isinstance(x, float)} - of_policies
    names |= {"weight_decay", "adam_learning_rate"}
    hyperparameters = {name: 1.5 if name == "gamma" else 0.5 for name in names}
    gradient = optax.tree.ones_like(DENSE)

    def step(values: dict[str, Any]) -> Any:
        optimizer = row.make(0.1, **values)
        return optimizer.update(gradient, optimizer.init(DENSE), DENSE)[0]

    traced = jax.eval_shape(step, hyperparameters)
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, DENSE)
    bad = functools.partial(row.make, 0.1, **{**hyperparameters, "weight_decay": -1.5})
    assert_names(rejection(bad), ("weight_decay", "-1.5"))


@in_turns(2)
def test_injected_hyperparameters_are_validated_where_they_are_numbers(row: Row) -> None:
    inject = optax.inject_hyperparams(row.optimizer, static_args=row.static)
    optimizer = inject(0.1, weight_decay=-1.0, **row.settings)
    assert_names(rejection(lambda: optimizer.init(DENSE)), ("weight_decay", "-1"))
    valid = inject(0.1, weight_decay=0.1, **row.settings)
    updates, _ = jax.eval_shape(valid.update, DENSE, jax.eval_shape(valid.init, DENSE), DENSE)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, DENSE)


@pytest.mark.parametrize("name", ["rows=1.5", "value [0, 1)"])
def test_names_in_messages_are_compared_literally(name: str) -> None:
    """The negative control: a fragment that is not in the message is found out."""
    with pytest.raises(AssertionError, match=re.escape(repr(name))):
        assert_names("another message", (name,))


@pytest.mark.parametrize("decay", [0.5, np.float32(0.5), jnp.float32(0.5)])
def test_a_weight_decay_beside_a_base_is_refused_whatever_its_type(decay: Any) -> None:
    with pytest.raises(ValueError, match="weight_decay must be 0 with a base"):
        curvax.shampoo(0.1, weight_decay=decay)
    with pytest.raises(ValueError, match="weight_decay must be 0 with a base"):
        injected = curvax.inject_hyperparams(curvax.shampoo)(0.1, weight_decay=float(decay))
        injected.init({"kernel": jnp.ones((4, 3))})
