"""Every public function refuses bad arguments: the message names argument, value, what is allowed.

A table has bad values for each argument's name, and every function that has the argument is tried.
A new argument needs an entry in the table, or is among those whose errors other tests read.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import eigenbases, grafts, polar, policies, subspaces, weights
from tests.helpers import assert_names, rejection

NAN, INF = float("nan"), float("inf")


def no_optimizer(learning_rate: Any) -> Any:
    return learning_rate


def one_of_two(learning_rate: Any) -> Any:
    return (optax.sgd(learning_rate),)


class NoSchedule:
    """Only like a policy: it lacks when."""

    examines = None


NO_NUMBERS = (-1.0, NAN, "0.5")
DECAYS = (*NO_NUMBERS, 1, 1.0, 1.5, jnp.float32(1.5)), r"\[0, 1\)"
NOT_NEGATIVE = (*NO_NUMBERS, -1e-9), r"[\[(]0, (inf|3e-07)[\])]"
RATES = (*NO_NUMBERS, 10**400), r"\[0, inf\)"
POSITIVE = (*NO_NUMBERS, 0, 0.0), r"[\[(]0, inf[\])]"
COUNTS = (
    (0, -1, 2.5, True, "2", 2**40, np.array([3])),
    r"integer (of at least 1|from 1 to)|at least 1",
)
NUMBER_OR_FLAG = ("false", 0, None, -1, 2.5), "True or False.*integer of at least 1"
CHOICES: Any = ("top", "", 0.5), "one of .*'.*', '"
VALUES = ("top", 0.5, NoSchedule())
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("b1", "b2", "b3", "decay"), DECAYS),
    **dict.fromkeys(
        ("eps", "initial", "min_norm", "rounding_floor", "scale", "weight"), NOT_NEGATIVE
    ),
    **dict.fromkeys(("residual", "coefficient"), NOT_NEGATIVE),
    **dict.fromkeys(("learning_rate", "weight_decay", "adam_learning_rate"), RATES),
    **dict.fromkeys(("threshold", "max_damping", "consistent_rms", "rms", "max_norm"), POSITIVE),
    **dict.fromkeys(("outward", "share"), POSITIVE),
    "inward": NOT_NEGATIVE,
    **dict.fromkeys(("lowest", "highest"), ((*NO_NUMBERS, 1.5), r"\[0, 1\]")),
    "min_agree": ((-1.5, NAN, "0.5", 1.0), r"\[-1, 1\)"),
    "gamma": ((*NO_NUMBERS, 0.9), r"\[1, inf\]"),
    **dict.fromkeys(("curvax.ema_nesterov.gamma", "mu_x"), DECAYS),
    "mu_y": ((*NO_NUMBERS, 0.0, 1.5), r"\(0, 1\]"),
    "tau": ((*NO_NUMBERS, 0.5), r"\[1, inf\)"),
    "curvax.ema_nesterov.beta": (NO_NUMBERS, r"\[0, inf\)"),
    "beta": POSITIVE,
    "curvax.tail_average.share": ((*NO_NUMBERS, 1.5), r"\[0, 1\]"),
    **dict.fromkeys(("curvax.tail_average.start", "end"), ((0, 2.5, True), "integer")),
    "rounds": COUNTS,
    "ratio": ((*NO_NUMBERS, 1.0), r"\(1, inf"),
    "error_feedback": ((-0.1, 1.5, "0.9"), r"\["),
    **dict.fromkeys(("check_every", "k", "steps", "iterations", "rank", "most", "rounds"), COUNTS),
    **dict.fromkeys(("statistics_every", "root", "max_order", "row_heads"), COUNTS),
    **dict.fromkeys(("column_heads", "block", "block_size", "min_elements"), COUNTS),
    **dict.fromkeys(("warmup_steps", "oversampling", "leading"), ((-1, 2.5, True), "integer")),
    **dict.fromkeys(("rows", "columns"), ((1.5, "1"), "integer")),
    "offset": ((0.5, "1", None, -(2**40)), "integer"),
    "seed": ((-1, 0.5, True, None, 2**63), "integer of at least 0|from 0"),
    "bits": ((0, 5, 2.5, "4", None), "4"),
    **dict.fromkeys(("side", "variant", "damping_mode", "statistics", "accumulate"), CHOICES),
    **dict.fromkeys(("unit", "solver", "norm", "map"), CHOICES),
    **dict.fromkeys(
        ("method", "graft", "switching", "compensation", "weights"), (VALUES, "'.*', .* such as")
    ),
    **dict.fromkeys(("curvax.every.stagger", "curvax.policies.every.stagger"), NUMBER_OR_FLAG),
    **dict.fromkeys(("products", "weights"), (VALUES, "'.*', .* such as")),
    **dict.fromkeys(("curvax.products.step", "curvax.products.refresh"), CHOICES),
    "refresh": ((0, -1, True, 2.5, None, *VALUES, no_optimizer), r"such as curvax\.every\("),
    "storage": (VALUES, r"curvax\.quantized\(\), curvax\.cholesky\(\), curvax\.packed\(\)"),
    "basis": (VALUES, "a basis such as"),
    "carry": (VALUES, "a value"),
    "base": ((3, "adamw", no_optimizer, one_of_two), "learning rate to an Optax transformation"),
    "others": ((0.001, optax.adamw), r"optax\.adamw"),
    "inner": ((3, optax.sgd), "an Optax transformation"),
    "matrices": ((3, ["kernel", 3]), "pattern"),
    "output_layer": ((3,), "pattern"),
    "stack": (("yes", 2), "None, True, False"),
    "dtype": (("int8", bool, "float8_e4m3fn"), "of at least 16 bits|'bfloat16', 'float32' or None"),
    "column_parts": (((4, 0), 8), "positive"),
    "coefficients": (
        ("cubic", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0,)), (), 3.0, None),
        "'quintic', 'classical', 'polar_express', 'turbo_muon'|three numbers",
    ),
}
FLAGS = ("false", 0, None), "True or False"
ELSEWHERE = {
    *(
        "a",
        "axis",
        "axis_name",
        "bases",
        "coefficient",
        "description",
        "direction",
        "end",
        "family",
    ),
    *("finder", "hyperparam_dtype", "layers", "length", "limit", "mask", "memory_kind", "mesh"),
    *("mesh_axis", "momentum", "optimizer", "params", "path", "power", "rule"),
    *("rule_arguments", "said_by", "size", "start", "state", "static_args", "unsigned"),
    *("weight_decay_mask", "weight_dimension_numbers", "where", "xs"),
}
"""Arguments whose errors other tests read."""

GIVEN: dict[str, Any] = {  # for arguments without a default
    "learning_rate": 0.1,
    "rank": 4,
    "k": 2,
    "threshold": 0.5,
    "max_norm": 1.0,
    "weight_decay": 0.1,
    "share": 0.5,
    "refresh": curvax.every(2),
    "basis": subspaces.svd(),
    "optimizer": curvax.muon(0.1),
    "direction": curvax.momentum(),
    "inner": curvax.momentum(),
    "a": np.eye(2, dtype=np.float32),
    "params": {"kernel": np.ones((4, 4), np.float32)},
    "layers": {"kernel": np.ones((2, 4, 4), np.float32)},
    "description": {},
    "state": None,
}


def public() -> dict[str, Any]:
    """Functions that can be called with what is given, and the classes of rules."""
    found = {}
    for module in (curvax, policies, subspaces, polar, grafts, eigenbases, weights):
        for name in module.__all__:
            f = getattr(module, name)
            if inspect.isfunction(f) or f in (curvax.MatrixAxes, curvax.MatrixRule):
                arguments = inspect.signature(f).parameters.values()
                if all(x.default is not x.empty or x.name in GIVEN for x in arguments):
                    found[f"{module.__name__}.{name}"] = f
    return found


PUBLIC = public()
TAKEN = {("curvax.policies.below_norm", "threshold"): (0, 0.0)}  # by a function, not by others


def said(value: Any) -> str:
    """How a message says a value: functions by their names, long ones by their beginnings."""
    return re.escape(getattr(value, "__name__", repr(value)[:60]))


@pytest.mark.parametrize("name", PUBLIC)
def test_bad_arguments_are_refused(name: str) -> None:
    f = PUBLIC[name]
    arguments = inspect.signature(f).parameters
    given = {n: GIVEN[n] for n, x in arguments.items() if x.default is x.empty}
    for argument in arguments.keys() - ELSEWHERE:
        default = arguments[argument].default
        known = BAD.get(f"{name}.{argument}") or BAD.get(argument)
        values, allowed = known or (FLAGS if isinstance(default, bool) else ((), ""))
        assert values, f"{argument} needs an entry in BAD"
        for value in values:
            if value is default or ((name, argument) in TAKEN and value in TAKEN[name, argument]):
                continue
            message = rejection(functools.partial(f, **{**given, argument: value}))
            assert re.match(rf"{argument}\b.*{said(value)}", message, re.DOTALL), message
            assert re.search(allowed, message), message


def test_the_table_refuses_no_argument_at_the_end_of_what_is_allowed() -> None:
    """The negative control: rejecting everything is not enough."""
    assert curvax.shampoo(0.1, eps=0.0, b2=0.0, b1=0.0, refresh=1)
    assert curvax.shampoo(0.1, matrices=curvax.MatrixRule(block_size=1))
    assert curvax.shampoo(0.1, root=8, method="coupled_newton", graft=None, initial=0.0, base=None)
    assert curvax.foam(0.1, check_every=1, threshold=INF, max_damping=INF, b2=0.0)
    assert curvax.foam(0.1, eps=2.9e-7) and curvax.dr_shampoo(0.1, eps=1e3, threshold=INF)
    assert curvax.dasgo(0.1, b1=0.0, b2=0.0, eps=0.0)
    assert polar.newton_schulz(np.int32(3)) and polar.newton_schulz(np.array(3))


# What has no effect, or does not fit what is beside it.


FOAM, TINY = policies.foam(), policies.foam(max_damping=1e-8)
QR, SUM = eigenbases.qr(10), {"statistics": "kl", "root": 2}
ADAPTIVE: dict[str, Any] = {"damping_mode": "absolute", "eps": 1e-9}  # which FOAM's policy needs
EVERY: dict[str, Any] = {"refresh": curvax.every(1)}
MASK = {f"block_{i}": {"kernel": True, "bias": False} for i in range(20)}
PARTS = {"column_heads": 2, "column_parts": (4, 4)}
TWO_ROWS = ((2.0, -1.5, 0.5),) * 2
EYE = np.eye(2, dtype=np.float32)


def drawn_anew() -> Any:
    return subspaces.gaussian(kept=False)


UNFIT: list[tuple[Callable[[], Any], str]] = [
    # What is not a learning rate, nor a function of the step to one.
    *(
        (functools.partial(curvax.muon, rate), f"learning_rate | schedule | {shown}")
        for rate, shown in (
            ((0.1, 0.01), "(0.1, 0.01)"),
            ("0.01", "'0.01'"),
            (optax.cosine_decay_schedule, "cosine_decay_schedule | decay_steps"),
            (lambda step: jnp.ones(2), "(2,)"),
        )
    ),
    (lambda: curvax.galore(0.1, dtype="bf16"), "dtype | 'bf16' | write 'bfloat16'"),
    # What has no effect.
    (
        lambda: curvax.muon(0.1, others=optax.sgd(0.1), adam_learning_rate=0.1),
        "adam_learning_rate | others",
    ),
    (lambda: curvax.muon(0.1, weight_decay_mask=no_optimizer), "weight_decay_mask | weight_decay"),
    (lambda: curvax.osgdm(0.1, weight_decay_mask=no_optimizer), "weight_decay_mask"),
    (lambda: curvax.shampoo(0.1, weight_decay=0.1), "weight_decay must be 0 with a base"),
    (lambda: curvax.shampoo(0.1, weight_decay=jnp.float32(0.5)), "weight_decay must be 0"),
    (lambda: polar.newton_schulz(1, coefficients=TWO_ROWS), "coefficients | at most steps=1"),
    (lambda: curvax.asgo(0.1, variant="theoretical", b1=0.9), "variant | b1 | 0.9"),
    (lambda: curvax.asgo(0.1, variant="theoretical", b2=0.9), "variant | b2"),
    (lambda: curvax.asgo(0.1, variant="theoretical", dtype="bfloat16"), "variant | dtype"),
    (lambda: curvax.scale_by_shampoo(b2=None, bias_correction=True), "b2 | bias_correction"),
    (lambda: curvax.scale_by_shampoo(initial=0.5, bias_correction=True), "initial | 0.5 | bias_"),
    (lambda: curvax.galore(0.1, seed=7), "seed must be 0 | seed=7 | SvdBasis"),
    (lambda: curvax.fira(0.1, seed=7), "seed must be 0 | seed=7 | SvdBasis"),
    (lambda: curvax.alice(0.1, seed=7, switching="none"), "seed must be 0 | seed=7 | Iterated"),
    (lambda: curvax.alice(0.1, seed=7, switching="evd"), "seed must be 0 | seed=7 | SvdBasis"),
    (
        lambda: curvax.momentum(accumulate="sum", bias_correction=True),
        "bias_correction=True | accumulate='ema'",
    ),
    (lambda: curvax.shampoo(0.1, statistics="momentum"), "statistics | b1"),
    (lambda: curvax.soap(0.1, method=QR), "method takes | Qr(steps=10) | refresh=Every"),
    (lambda: curvax.alice(0.1, switching="gaussian", b3=0.9), "b3 | switching"),
    (
        lambda: curvax.galore(0.1, basis=drawn_anew(), carry=subspaces.rotate()),
        "basis is drawn anew at each step | carry",
    ),
    (
        lambda: policies.foam(adaptive_damping=False, refreshes=False),
        "adaptive_damping and refreshes cannot both be False",
    ),
    # What FOAM's policy needs.
    (lambda: curvax.shampoo(0.1, refresh=FOAM), "damping_mode | 'absolute' | eps=1e-06."),
    (
        lambda: curvax.shampoo(0.1, refresh=FOAM, eps=1e-9),
        "damping_mode | eps in (0, 3e-07), such as 1e-09 | policy",
    ),
    (
        lambda: curvax.shampoo(0.1, refresh=TINY, damping_mode="floor"),
        "damping_mode | 'floor' | eps in (0, 1e-08), such as 1e-10",
    ),
    (
        lambda: curvax.shampoo(0.1, refresh=TINY, damping_mode="absolute", eps=1e-8),
        "eps | (0, 1e-08) | 1e-08",
    ),
    (
        lambda: curvax.shampoo(0.1, refresh=TINY, method="coupled_newton", **ADAPTIVE),
        "method | 'eigh', 'qr' or 'rotations' | policy | solver='coupled_newton'",
    ),
    (lambda: curvax.foam(0.1, method="products"), "method | 'rotations' | solver='products'"),
    (lambda: curvax.asgo(0.1, refresh=TINY), "eps | (0, 1e-08) | 1e-06"),
    (lambda: curvax.foam(0.1, eps=1e-8, max_damping=1e-8), "eps | (0, 1e-08)"),
    (lambda: curvax.foam(0.1, eps=0.0), "eps | (0, 3e-07) | 0.0"),
    (lambda: curvax.dr_shampoo(0.1, eps=0.0), "eps | (0, inf) | 0.0"),
    # Roots, dampings and solvers.
    *(
        (
            functools.partial(curvax.shampoo, 0.1, method=solver, root=root),
            f"root | {allowed} | {root}",
        )
        for solver, root, allowed in (
            ("coupled_newton", 3, "power of 2"),
            ("coupled_newton", 12, "power of 2"),
            ("newton_schulz", 4, "must be 2"),
            ("products", 1, "must be 2, 4, 8"),
            ("products", 6, "must be 2, 4, 8"),
        )
    ),
    *(
        (
            functools.partial(curvax.shampoo, 0.1, method=solver, damping_mode=mode, root=2),
            f"damping_mode | {mode} | method='eigh', got '{solver}'",
        )
        for solver in ("coupled_newton", "newton_schulz")
        for mode in ("floor", "outside")
    ),
    (lambda: curvax.precondition(statistics="kl", root=4, **EVERY), "root | kl | one of 2"),
    (
        lambda: curvax.precondition(b2=None, **SUM, **EVERY),
        "b2 must be a decay rate with statistics='kl', got None",
    ),
    (
        lambda: curvax.in_eigenbasis(curvax.momentum(), divide=True, **EVERY),
        "statistics must be 'kl' with divide=True",
    ),
    (
        lambda: curvax.scale_by_shampoo(root=2, graft="limit"),
        "root must be 4 for side='both' with limit, got 2",
    ),
    (lambda: curvax.scale_by_soap(limit=0.0), "limit must be"),
    (lambda: subspaces.complement(2, subspaces.gaussian()), "finder must give an orthonormal"),
    (
        lambda: curvax.scale_by_sumo(dtype="float16"),
        "dtype must be 'bfloat16', 'float32' or None, got 'float16'",
    ),
    *(
        (functools.partial(curvax.inverse_root, jnp.zeros(shape)), f"a must be square | {shape}")
        for shape in ((3,), (2, 3), (2, 3, 2))
    ),
    (lambda: curvax.newton_schulz(EYE, coefficients="none"), "coefficients | 'none' | 'quintic'"),
    (lambda: curvax.newton_schulz(EYE, steps=2**40), "steps | 1000"),
    # Which matrices.
    (lambda: curvax.MatrixAxes(0, 1, **PARTS), "column_heads=2 | (4, 4) | must be 1"),
    (lambda: curvax.MatrixRule(curvax.MatrixRule()), "matrices | MatrixRule | pattern"),
    (
        lambda: curvax.on_matrices(optax.identity(), curvax.MatrixRule(), matrices="all"),
        "rule | matrices | not both",
    ),
    (
        lambda: curvax.muon(0.1, matrices=lambda leaf: leaf.ndim == 2),
        "matrices | path and leaf | lambda path, leaf: leaf.ndim == 2; got <function",
    ),
    (
        lambda: curvax.muon(0.1, matrices=MASK),
        "matrices | optax.partition | lambda path, leaf | got {'block_0':  |  ....",
    ),
    # Functions in place of their values, optimizers in place of their factories, and the reverse.
    *(
        (functools.partial(f, 0.1, **{name: value}), f"{name} | call it: curvax.{call}.")
        for f, name, value, call in (
            (curvax.muon, "method", polar.svd, "polar.svd()"),
            (curvax.soap, "method", eigenbases.qr, "eigenbases.qr()"),
            (curvax.soap, "storage", curvax.quantized, "quantized()"),
            (curvax.soap, "refresh", policies.foam, "policies.foam()"),
            (curvax.soap, "refresh", curvax.every, "every(k)"),
            (curvax.shampoo, "products", curvax.products, "products()"),
            (curvax.galore, "basis", subspaces.randomized, "subspaces.randomized()"),
            (curvax.galore, "carry", subspaces.rotate, "subspaces.rotate()"),
            (curvax.galore, "weights", weights.decay, "weights.decay(weight_decay)"),
            (curvax.shampoo, "method", eigenbases.rotations, "eigenbases.rotations()"),
        )
    ),
    (
        lambda: curvax.muon(0.1, method=subspaces.svd()),
        "method | 'balanced', or a value | SvdBasis()",
    ),
    (
        lambda: curvax.soap(0.1, method=eigenbases.stored_roots()),
        "method | 'rotations', or a value such as | got StoredRoots(solver='eigh')",
    ),
    (lambda: curvax.muon(0.1, matrices=curvax.MatrixRule), "matrices | MatrixRule | pattern"),
    (lambda: curvax.shampoo(0.1, refresh=curvax.foam), "refresh | got <function foam"),
    (lambda: curvax.shampoo(0.1, base=optax.adamw(0.1)), "base | optax.adamw | an optimizer."),
    (lambda: curvax.shampoo(0.1, base=lambda rate: 3), "base | got <function | gives 3."),
    (
        lambda: curvax.assemble(curvax.muon(0.1), 0.1),
        "direction | curvax.scale_by_muon() | got a full optimizer.",
    ),
    (
        lambda: curvax.assemble(curvax.scale_by_muon, 0.1),
        "direction | curvax.scale_by_muon() | got <function scale_by_muon",
    ),
]


@pytest.mark.parametrize(("make", "fragments"), UNFIT, ids=[x[1][:60] for x in UNFIT])
def test_what_does_not_fit_is_refused(make: Callable[[], Any], fragments: str) -> None:
    """The message names what does not fit together, and what would."""
    assert_names(rejection(make), fragments)


@pytest.mark.parametrize("name", ["threshold", "max_damping", "eps", "graft", "b2"])
def test_traced_arguments_pass_unchecked(name: str) -> None:
    """As `optax.inject_hyperparams` and searches over hyper-parameters hand them over."""
    values = {"threshold": 0.4, "max_damping": 1.0, "eps": 1e-3, "graft": 0.9, "b2": 0.9}
    gradient = jnp.eye(2, 3)

    def direction(value: Any) -> Any:
        given = {**values, name: value}
        foam = curvax.scale_by_foam(**{**given, "graft": grafts.adam(given["graft"])})
        return foam.update(gradient, foam.init(gradient))[0]

    assert jax.eval_shape(direction, values[name]).shape == gradient.shape


def test_an_array_for_an_integer_names_our_inject_hyperparams() -> None:
    for name, make in {
        "steps": polar.newton_schulz,
        "refresh": lambda x: curvax.soap(0.1, refresh=x),
        "warmup_steps": lambda x: curvax.scale_by_shampoo(warmup_steps=x),
    }.items():
        for call in (lambda make=make: make(jnp.int32(3)), lambda make=make: jax.jit(make)(3)):
            assert re.match(rf"{name} must be .*curvax\.inject_hyperparams", rejection(call))
