"""What functions refuse: a `ValueError` that names the argument, its value and what is allowed.

Bad values follow from the rule of each argument (`RULES`), for every public function that has it.
What has no rule has its values in `BAD`, and what is wrong beside another argument is a call in
`CALLS`. `test_bad_input.py` has parameters, axes and specifications.
"""

import functools
import importlib
import inspect
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import eigenbases, grafts, polar, policies, subspaces, weights
from curvax.transforms._keywords import HINTS
from curvax.transforms._validate import RULES, Dtype, Flag, Integer, Number, Rule, rules_of
from tests.helpers import rejection
from tests.shared.wrong_calls import assert_refused, wrong_calls

NAN, INF = float("nan"), float("inf")
RANGES = {
    "[0, 1)": "b1 b2 b3 cushion decay error_feedback primal_average.mu_x tolerance "
    "ema_nesterov.gamma",
    "[0, 1]": "highest lowest tail_average.share",
    "(0, 1]": "mu_y",
    "(0, 1)": "lower",
    "[-1, 1)": "min_agree",
    "[0, inf)": "eps initial inward min_rms residual rounding_floor scale weight learning_rate "
    "adam_learning_rate weight_decay decay.weight_decay add_cautious_decay.weight_decay "
    "below_norm.threshold ema_nesterov.beta",
    "(0, inf)": "beta coefficient consistent_rms max_norm outward rms share cholesky.eps "
    "packed.eps clip_logits.threshold normalize_matrices.length",
    "(0, inf]": "limit max_damping threshold",
    "[1, inf]": "gamma",
    "[1, inf)": "safety tau",
    "(1, inf)": "ratio",
}
"""What the papers and docstrings allow, written a second time, so that no bound moves unseen."""

INTEGERS = {0: "leading warmup_steps seed", 1 - 2**31: "offset"}
"""Those that may be less than 1."""


def no_optimizer(learning_rate: Any) -> Any:
    return learning_rate


class NoSchedule:
    """Only like a policy: it lacks when."""

    examines = None


VALUES = ("top", 0.5, NoSchedule())
NONE: Any = (), ""
PRESETS = ("cubic", (1.0, 2.0), ((1.0, 2.0, 3.0), (1.0,)), (), 3.0, None)
BAD: dict[str, tuple[tuple[Any, ...], str]] = {  # by arguments: bad values, part of the message
    "blend.weights": (VALUES, "two numbers"),
    "method graft switching compensation weights products": (VALUES, "'.*', .* such as"),
    "refresh": ((0, -1, True, 2.5, None, *VALUES, no_optimizer), r"such as curvax\.every\("),
    "storage": (VALUES, r"curvax\.quantized\(\), curvax\.cholesky\(\), curvax\.packed\(\)"),
    "basis finder": (VALUES, "a basis such as"),
    "carry": (VALUES, "a value"),
    "base": ((3, "adamw", no_optimizer, lambda rate: ()), "learning rate to an Optax transf"),
    "others": ((0.001, optax.adamw), r"optax\.adamw"),
    "inner": ((3, optax.sgd), "an Optax transformation"),
    "matrices": ((3, ["kernel", 3]), "pattern"),
    "output_layer": ((3,), "pattern"),
    "rows columns": ((1.5, "1"), "integer"),
    "column_parts": (((4, 0), 8), "positive"),
    "bits": ((0, 5, 2.5, "4", None), "4"),
    "inverse_root.method stored_roots.method": (("top", "", 0.5), "one of"),
    "map products.step products.statistics products.refresh": (("top", "", 0.5), "one of"),
    "every.first": (("false", 0, None), "'doubling' or 'growing'.* True or False"),
    "stagger": (("false", 0, None, -1, 2.5), "True or False.*integer of at least 1"),
    "coefficients": (PRESETS, "'quintic', 'classical', 'polar_express', 'turbo_muon'|three"),
    "power": ((-1.0, NAN, "0.5"), r"\[0, inf\)"),
    # Their errors are in other tests.
    "a after axis axis_name bases before description direction family first hyperparam_dtype": NONE,
    "layers length mask memory_kind mesh mesh_axis momentum optimizer params path rule": NONE,
    "rule_arguments said_by second shared size start state static_args unsigned": NONE,
    "weight_decay_mask weight_dimension_numbers where xs": NONE,
}
TREE = {"kernel": np.ones((4, 4), np.float32)}
NEEDED: dict[str, Any] = {  # arguments without a default
    **{"learning_rate": 0.1, "rank": 4, "k": 2, "threshold": 0.5, "max_norm": 1.0, "share": 0.5},
    **{"weight_decay": 0.1, "steps": 4, "start": 3, "weights": (0.5, 0.5), "state": None},
    **{"refresh": curvax.every(2), "basis": subspaces.svd(), "optimizer": curvax.muon(0.1)},
    **dict.fromkeys(("direction", "first", "inner", "second"), curvax.momentum()),
    **dict.fromkeys(("after", "before", "params"), TREE),
    **{"a": np.eye(2, dtype=np.float32), "description": {}},
    "layers": {"kernel": np.ones((2, 4, 4), np.float32)},
}


def public() -> dict[str, Any]:
    """Functions that can be called with what is needed, and the classes of rules."""
    found = {}
    for module in (curvax, policies, subspaces, polar, grafts, eigenbases, weights):
        for name in module.__all__:
            f = getattr(module, name)
            if inspect.isfunction(f) or f in (curvax.MatrixAxes, curvax.MatrixRule):
                arguments = inspect.signature(f).parameters.values()
                if all(x.default is not x.empty or x.name in NEEDED for x in arguments):
                    found[f"{module.__name__}.{name}"] = f
    return found


PUBLIC = public()


def outside(rule: Rule, optional: bool) -> list[Any]:
    """Values that a rule does not allow."""
    missing: list[Any] = [] if optional else [None]
    if isinstance(rule, Number):
        low, high = map(float, rule.interval[1:-1].split(","))
        ends = [low] * (rule.interval[0] == "(") + [high] * (rule.interval[-1] == ")")
        below: list[Any] = [low - 1, low - 1e-9, jnp.float32(low - 1)]
        no_numbers = [NAN, "0.5", 10**400, True, jnp.array(True), np.ones(2)]
        return [*missing, *no_numbers, *ends, *below, *([high + 1] if high < INF else [])]
    if isinstance(rule, Integer):
        numbers = [rule.low - 1, rule.low + 0.5, rule.high + 1, 2**64]
        return [*missing, *numbers, True, "2", np.array([rule.low]), jnp.int32(3)]
    if isinstance(rule, Dtype):
        return ["int8", bool, "float8_e4m3fn", "bf16", 3]
    return [*missing, "top", "", 0, 0.5, *([] if isinstance(rule, Flag) else [jnp.ones(2)])]


def said(value: Any) -> str:
    """How a message says a value: functions by their names, long ones by their beginnings."""
    return re.escape(getattr(value, "__name__", repr(value)[:60]))


@pytest.mark.parametrize("name", PUBLIC)
def test_bad_arguments_are_refused(name: str) -> None:
    f = PUBLIC[name]
    arguments, rules = inspect.signature(f).parameters, rules_of(f)
    needed = {n: NEEDED[n] for n, x in arguments.items() if x.default is x.empty}
    known = {own: case for names, case in BAD.items() for own in names.split()}
    for argument, parameter in arguments.items():
        if argument in rules:
            values, allowed = outside(*rules[argument]), re.escape(str(rules[argument][0]))
        else:
            case = known.get(f"{f.__name__}.{argument}") or known.get(argument)
            assert case, f"{argument} needs a rule in RULES, or an entry in BAD"
            values, allowed = case
        for value in values:
            if value is not parameter.default:
                message = rejection(functools.partial(f, **{**needed, argument: value}))
                assert re.match(rf"{argument}\b.*{said(value)}", message, re.DOTALL), message
                assert re.search(allowed, message), message


def test_ranges_are_those_of_papers_and_docstrings() -> None:
    by_name = {name: interval for interval, names in RANGES.items() for name in names.split()}
    assert by_name == {name: x.interval for name, x in RULES.items() if isinstance(x, Number)}
    low = {name: least for least, names in INTEGERS.items() for name in names.split()}
    integers = {name: x for name, x in RULES.items() if isinstance(x, Integer)}
    assert {name: low.get(name, 1) for name in integers} == {n: x.low for n, x in integers.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_defaults_and_ends_are_allowed(name: str) -> None:
    """The negative control: rejecting everything is not enough."""
    for argument, (rule, optional) in rules_of(PUBLIC[name]).items():
        default = inspect.signature(PUBLIC[name]).parameters[argument].default
        left_out = default is inspect.Parameter.empty or repr(default) == "<the method's own>"
        assert left_out or default in rule or (optional and default is None), (argument, default)


def test_what_is_just_allowed_is_taken() -> None:
    assert curvax.shampoo(0.1, eps=0.0, b2=0.0, b1=0.0, refresh=1)
    assert curvax.shampoo(0.1, matrices=curvax.MatrixRule(block_size=1))
    assert curvax.shampoo(0.1, root=8, method="coupled_newton", graft=None, initial=0.0, base=None)
    assert curvax.foam(0.1, check_every=1, threshold=INF, max_damping=INF, b2=0.0)
    assert curvax.foam(0.1, eps=2.9e-7) and curvax.dr_shampoo(0.1, eps=1e3, threshold=INF)
    assert curvax.dasgo(0.1, b1=0.0, b2=0.0, eps=0.0) and policies.below_norm(0.0)
    assert polar.newton_schulz(np.int32(3)) and polar.newton_schulz(np.array(3))
    assert weights.chain(weights.floor(0.5, unit="row"), weights.hyperball())


# What has no effect, or does not fit what is beside it.


PARAMS = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
STATE = curvax.muon(0.1).init(PARAMS)
TINY = policies.foam(max_damping=1e-8)
MASK = {f"block_{i}": {"kernel": True, "bias": False} for i in range(20)}
EYE = np.eye(2, dtype=np.float32)
BOTH = {"dense": {"kernel": True, "bias": False}}
RUNS = curvax.published.RUNS


def of_shape(shaped: Any) -> Any:
    """One update by a direction of another shape."""
    other = optax.stateless(lambda updates, _: jax.tree.map(shaped, updates))
    optimizer = curvax.assemble(other, 0.1)
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def decayed(mask: Any) -> Any:
    optimizer = curvax.muon(0.1, weight_decay=0.1, weight_decay_mask=mask)
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def update(*given: Any) -> Any:
    return curvax.muon(0.1).update(*given)


@wrong_calls(r"""
# What is not a learning rate, nor a function of the step to one.
muon((0.1, 0.01)) -> learning_rate | schedule | (0.1, 0.01)
muon(optax.cosine_decay_schedule) ->
    learning_rate | schedule | cosine_decay_schedule | decay_steps | call it to make a schedule
muon(lambda step: jnp.ones(2)) -> learning_rate | schedule | (2,)
RUNS['alice/llama-130M'].optimizer(learning_rate=-1.0) -> learning_rate | -1.0
RUNS['alice/llama-130M'].optimizer(steps=2.5) -> steps | 2.5
RUNS['shampoo/nanogpt'].optimizer(steps=100, learning_rate=0.1) -> steps | 129 | 100
RUNS['sumo/llama-60M'].optimizer(steps=100) ->
    learning_rate must be given: Refael et al., Table 3
RUNS['asgo/gpt2-large-clm'].optimizer() -> steps must be given
# Nor other schedules; and an array for an integer, which Optax's `inject_hyperparams` makes.
muon(0.1, b1=lambda _: jnp.ones(2)) -> b1 must be | [0, 1) | schedule
scale_by_soap(b3=lambda: 0.5) -> b3 must be | schedule | raises
muon(0.1, weight_decay=lambda _: jnp.ones(2)) -> weight_decay must be
jax.jit(polar.newton_schulz)(3) -> steps must be | curvax.inject_hyperparams
soap(0.1, refresh=jnp.int32(3)) -> refresh must be | curvax.inject_hyperparams
inject_hyperparams(soap)(0.1, refresh=optax.linear_schedule(1, 9, 9)).init(PARAMS) ->
    refresh must be | Python integer, which no schedule gives
inject_hyperparams(muon(0.1)) -> factory must be | such as curvax.soap
galore(0.1, dtype='bf16') -> dtype | 'bf16' | rite 'bfloat16'
# What has no effect.
muon(0.1, weight_decay_mask=no_optimizer) -> weight_decay_mask | weight_decay
osgdm(0.1, weight_decay_mask=no_optimizer) -> weight_decay_mask
shampoo(0.1, weight_decay=0.1) -> weight_decay must be 0 with a base
shampoo(0.1, weight_decay=lambda step: 0.4 / (1 + step)) -> weight_decay must be 0 with a base
polar.newton_schulz(1, coefficients=((2.0, -1.5, 0.5),) * 2) -> coefficients | at most steps=1
asgo(0.1, variant='theoretical', b1=0.9) -> variant | b1 | 0.9
asgo(0.1, variant='theoretical', dtype='bfloat16') -> variant | dtype
scale_by_shampoo(b2=None, bias_correction=True) -> b2 | bias_correction
scale_by_shampoo(initial=0.5, bias_correction=True) -> initial | 0.5 | bias_
galore(0.1, seed=7) -> seed must be 0 | seed=7 | SvdBasis
alice(0.1, seed=7, switching='none') -> seed must be 0 | seed=7 | Iterated
momentum(accumulate='sum', bias_correction=True) -> bias_correction=True | accumulate='ema'
shampoo(0.1, statistics='momentum') -> statistics | b1
soap(0.1, method=eigenbases.qr(10)) -> method takes | Qr(steps=10) | refresh=Every
alice(0.1, switching='gaussian', b3=0.9) -> b3 | switching
galore(0.1, basis=subspaces.gaussian(kept=False), carry=subspaces.rotate()) ->
    basis is drawn anew at each step | carry
policies.foam(adaptive_damping=False, refreshes=False) ->
    adaptive_damping and refreshes cannot both be False
# What FOAM's policy needs.
shampoo(0.1, refresh=policies.foam()) -> damping_mode | 'absolute' | eps=1e-06.
shampoo(0.1, refresh=TINY, damping_mode='floor') ->
    damping_mode | 'floor' | eps in (0, 1e-08), such as 1e-10
shampoo(0.1, refresh=TINY, method='coupled_newton', damping_mode='absolute', eps=1e-9) ->
    method | 'eigh', 'qr' or 'rotations' | policy | method='coupled_newton'
foam(0.1, method='products') -> method | 'rotations' | method='products'
asgo(0.1, refresh=TINY) -> eps | (0, 1e-08) | 1e-06
foam(0.1, eps=0.0) -> eps | (0, 3e-07) | 0.0
dr_shampoo(0.1, eps=0.0) -> eps | (0, inf) | 0.0
# Roots, dampings and solvers.
shampoo(0.1, method='coupled_newton', root=3) -> root | power of 2 | 3
shampoo(0.1, method='newton_schulz', root=4) -> root | must be 2 | 4
shampoo(0.1, method='products', root=6) -> root | must be 2, 4, 8 | 6
shampoo(0.1, method='coupled_newton', damping_mode='floor', root=2) ->
    damping_mode | floor | method='eigh', got 'coupled_newton'
precondition(refresh=every(1), method=eigenbases.saturated_roots(), root=4) ->
    root must be 2 | method | 4
precondition(refresh=every(1), statistics='kl', root=4) -> root | kl | one of 2
precondition(refresh=every(1), statistics='kl', root=2, b2=None) ->
    b2 must be a decay rate with statistics='kl', got None
in_eigenbasis(momentum(), refresh=every(1), divide=True) -> statistics must be 'kl' with divide=True
scale_by_shampoo(root=2, graft='limit') -> root must be 4 for side='both' with limit, got 2
subspaces.complement(2, subspaces.gaussian()) -> finder must give an orthonormal
muon(0.1, weights='brake', weight_decay=0.5) ->
    weight_decay must be 0 with weights | weight_decay=0.5 | 'brake'
osgdm(0.1, weights='brake', weight_decay=0.5) ->
    weight_decay must be 0 with weights | weight_decay=0.5 | 'brake'
weights.chain() -> parts | curvax.weights.hyperball() | ()
weights.chain(weights.decay) -> parts[0] | call it: curvax.weights.decay(
weights.chain(weights.hyperball(), weights.brake()) ->
    parts: Brake(outward=0.5 | Hyperball(rms=None)
weights.chain(weights.floor(0.5), weights.hyperball()) ->
    parts: Floor(share=0.5 | Hyperball(rms=None)
tail_average(optax.sgd(0.1), 5, end=5) -> end | start=5
scale_by_sumo(dtype='float16') -> dtype must be 'bfloat16', 'float32' or None, got 'float16'
inverse_root(jnp.zeros((3,))) -> a must be square | (3,)
inverse_root(jnp.zeros((2, 3, 2))) -> a must be square | (2, 3, 2)
newton_schulz(EYE, coefficients='none') -> coefficients | 'none' | 'quintic'
newton_schulz(EYE, steps=2**40) -> steps | 1000
quantized(block=63) -> block | 63 | even
quantize_state(optax.adam(0.1), block=5) -> block | 5 | even
packed(bases='bfloat16') -> bases | 'bfloat16' | curvax.dense()
cautious_updates('muon') -> direction | 'muon'
blend('muon', momentum(), (1, 1)) -> first | 'muon'
blend(momentum(), momentum(), (1, 1), shared='muon') -> shared | 'muon'
blend(momentum(), momentum(), (0.5, jnp.inf)) -> weights[1] | inf
blend(momentum(), momentum(), trust_gate) ->
    weights | the function trust_gate; call it: curvax.trust_gate()
# Which matrices, and which of them decay.
MatrixAxes(0, 1, column_heads=2, column_parts=(4, 4)) -> column_heads=2 | (4, 4) | must be 1
MatrixRule(MatrixRule()) -> matrices | a rule | matrices=curvax.rules.linen
on_matrices(optax.identity(), MatrixRule(), matrices='all') -> rule | matrices | not both
muon(0.1, matrices=lambda leaf: leaf.ndim == 2) ->
    matrices | path and leaf | lambda path, leaf: leaf.ndim == 2; got <function
muon(0.1, matrices=MASK) -> matrices | optax.partition | lambda path, leaf | {'block_0':  |  ....
muon(0.1, matrices=MatrixRule) -> matrices | MatrixRule | pattern
muon(0.1, matrices=rules) -> matrices | curvax.rules | matrices=curvax.rules.linen
decayed(BOTH | {'dens': True}) -> weight_decay_mask | 'dens' | dense/bias, dense/kernel
decayed(lambda params: BOTH | {'dens': True}) -> weight_decay_mask | 'dens' | dense/bias
decayed(['*kernel']) -> weight_decay_mask | '*kernel'
# Functions in place of their values, optimizers in place of their factories, and the reverse.
muon(0.1, method=polar.svd) -> method | call it: curvax.polar.svd().
soap(0.1, refresh=every) -> refresh | call it: curvax.every(k).
galore(0.1, weights=weights.decay) -> weights | call it: curvax.weights.decay(weight_decay).
muon(0.1, method=subspaces.svd()) -> method | 'balanced', or a value | SvdBasis()
soap(0.1, method=eigenbases.stored_roots()) ->
    method | 'rotations', or a value such as | got StoredRoots(method='eigh')
soap(0.1, method='svd') -> method | 'eigh', 'qr', 'rotations' | got 'svd'
shampoo(0.1, refresh=curvax.foam) -> refresh | got <function foam
shampoo(0.1, base=optax.adamw(0.1)) -> base | optax.adamw | an optimizer.
shampoo(0.1, base=lambda rate: 3) -> base | got <function | gives 3.
assemble(muon(0.1), 0.1) -> direction | curvax.scale_by_muon() | got a full optimizer.
assemble(scale_by_muon, 0.1) -> direction | scale_by_muon() | got <function scale_by_muon
# States, gradients and directions.
update(PARAMS, None, PARAMS) -> state is None | optimizer.init(params)
momentum().update(PARAMS, None) -> state is None
scale_by_soap().update(PARAMS['dense']['kernel'], None) -> state is None
tail_average(muon(0.1), 3).update(PARAMS, None, PARAMS) -> state is None
quantize_state(muon(0.1)).update(PARAMS, None, PARAMS) -> state is None
skip_spikes(muon(0.1)).update(PARAMS, None, PARAMS) -> state is None
update((jnp.ones(()), PARAMS), STATE, PARAMS) ->
    gradients | value_and_grad returns (loss, gradients)
update(jnp.ones(()), STATE, PARAMS) ->
    gradients | got a number | value_and_grad returns (loss, gradients)
muon(0.1, weights='hyperball').update(PARAMS, muon(0.1, weights='hyperball').init(PARAMS)) ->
    params must be given to update
update(jax.tree.map(lambda x: x.astype('float8_e5m2'), PARAMS), STATE, PARAMS) ->
    'dense/bias', or its gradient, has dtype float8_e5m2 | bfloat16 or float32
to_int8({'kernel': jnp.ones((4, 0))}) -> 'kernel' | (4, 0) | at least 1
on_matrices(optax.identity(), matrices='all').init({'a': jnp.ones((0, 4))}) ->
    'a' | (0, 4) | Leave it out of the optimizer
place_state(muon(0.1), PARAMS, STATE) -> portable has | description=
check_state(muon(0.1), describe_state(muon(0.1), PARAMS), PARAMS) ->
    params, the second argument | (optimizer, params, description)
of_shape(jnp.sum) -> 'dense/kernel' must have the shape of their gradient, (1, 4, 6); got ()
""")
def test_a_wrong_call_is_named(call: str, fragments: str) -> None:
    """The message names what does not fit together or is mistaken, and what would fit."""
    assert_refused(call, fragments, {**vars(curvax), **globals()})


@pytest.mark.parametrize(
    "rate",
    [
        optax.constant_schedule(0.1),
        optax.linear_schedule(0.1, 0.0, 3),
        lambda step: 0.1,
        lambda step, scale=1.0: 0.1 * scale,
        np.float32(0.1),
        jnp.float32(0.1),
    ],
)
def test_schedules_and_numbers_of_all_kinds_are_rates(rate: Any) -> None:
    optimizer = curvax.muon(rate)
    updates, _ = optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)
    assert jax.tree.leaves(updates)[0].any()


# Keywords of other libraries.


@wrong_calls("""
shampoo(block_size=1) -> matrices=curvax.MatrixRule(block_size=
soap(head_wise=1) -> matrices=curvax.MatrixRule(head_wise=
muon(ns_steps=1) -> method=curvax.polar.newton_schulz(
soap(betas=1) -> b1= and b2=
muon(betas=1) -> b1=
galore(lr=1) -> the first argument
soap(max_precond_dim=1) -> max_order=
shampoo(max_precond_dim=1) -> matrices=curvax.MatrixRule(block_size=
soap(precondition_frequency=1) -> refresh=
racs(mask=1) -> weight_decay_mask=
muon(adam_b1=1) -> others=optax.adamw(
muon(storage=1) -> curvax.quantize_state(
orthogonalize(ns_steps=1) -> newton_schulz(
precondition(solver=1) -> method=
eigenbases.stored_roots(solver=1) -> method=
scale_by_shampoo(block_size=1) -> MatrixRule(block_size
inject_hyperparams(soap)(betas=1) -> b1= and b2=
recipes.lars(betas=1) -> b1=
""")
def test_a_keyword_of_other_libraries_says_what_to_give(call: str, fragments: str) -> None:
    ((method, keyword),) = re.findall(r"(\w+)\)?\((\w+)=", call)
    with pytest.raises(TypeError, match=rf"{method}\(\).*'{keyword}'") as error:
        eval(call, vars(curvax).copy())
    assert fragments in str(error.value)


@pytest.mark.parametrize("method", curvax.optimizers.__all__)
def test_hints_give_arguments_that_the_method_has(method: str) -> None:
    make = getattr(curvax, method)
    known = inspect.signature(make).parameters
    for keyword in HINTS.keys() - known.keys():
        with pytest.raises(TypeError) as error:
            make(**{keyword: 1})
        _, _, hint = str(error.value).partition("; give ")
        written = re.findall(r"(?<![\w(])(\w+)=", hint.replace("curvax.MatrixRule(", "("))
        assert {*written} <= {*known}, hint


def test_factories_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(curvax.soap)) is curvax.soap
    assert pickle.loads(pickle.dumps(curvax.momentum)) is curvax.momentum


def test_an_old_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    monkeypatch.setattr(jax, "__version__", "0.6.2")
    with pytest.raises(ImportError, match=r"0\.10 or later.* 0\.6\.2"):
        importlib.reload(curvax._requirements)
