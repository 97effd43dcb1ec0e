"""What users mistake for another argument is named, with what to give instead."""

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
from curvax.transforms._keywords import HINTS
from tests.helpers import assert_names, rejection

PARAMS = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
RUNS = curvax.published.RUNS
IDLE, ALICE = RUNS["shampoo/nanogpt"], RUNS["alice/llama-130M"]


def update(*given: Any) -> Any:
    return curvax.muon(0.1).update(*given)


def of_shape(shaped: Any) -> Any:
    """One update by a direction of another shape."""
    other = optax.stateless(lambda updates, _: jax.tree.map(shaped, updates))
    optimizer = curvax.assemble(other, 0.1)
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def decayed(mask: Any) -> Any:
    optimizer = curvax.muon(0.1, weight_decay=0.1, weight_decay_mask=mask)
    return optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


STATE = curvax.muon(0.1).init(PARAMS)
RATE = "learning_rate must be a number in [0, inf) or a schedule"
MISTAKES: dict[str, tuple[Any, str]] = {
    "a string as rate": (lambda: curvax.muon("0.1"), f"{RATE} | '0.1'"),
    "a tuple as rate": (lambda: curvax.muon((0.1,)), f"{RATE} | (0.1,)"),
    "True as rate": (lambda: curvax.muon(True), f"{RATE} | True"),
    "an array of True as rate": (lambda: curvax.muon(jnp.array(True)), f"{RATE} | True"),
    "a negative rate": (lambda: curvax.muon(-0.1), f"{RATE} | -0.1"),
    "a negative rate of AdamW": (
        lambda: curvax.muon(0.1, adam_learning_rate=-0.1),
        f"adam_{RATE} | -0.1",
    ),
    "a module of rules": (
        lambda: curvax.muon(0.1, matrices=curvax.rules),
        "matrices | curvax.rules | matrices=curvax.rules.linen",
    ),
    "an infinite rate": (lambda: curvax.muon(float("inf")), f"{RATE} | inf"),
    "a string as AdamW's rate": (
        lambda: curvax.muon(0.1, adam_learning_rate="0.1"),
        f"adam_{RATE} | '0.1'",
    ),
    "a schedule that was not called": (
        lambda: curvax.muon(optax.cosine_decay_schedule),
        f"{RATE} | cosine_decay_schedule | call it to make a schedule",
    ),
    "one that takes a single number": (
        lambda: curvax.soap(optax.constant_schedule),
        f"{RATE} | constant_schedule | call it to make a schedule",
    ),
    "True as a number": (lambda: curvax.muon(0.1, weight_decay=True), "weight_decay | True"),
    "a short name of a dtype": (
        lambda: curvax.galore(0.1, dtype="bf16"),
        "dtype | 'bfloat16' | got 'bf16'",
    ),
    "no state": (
        lambda: update(PARAMS, None, PARAMS),
        "state is None | optimizer.init(params)",
    ),
    "loss and gradients": (
        lambda: update((jnp.ones(()), PARAMS), STATE, PARAMS),
        "gradients | value_and_grad returns (loss, gradients)",
    ),
    "the loss": (
        lambda: update(jnp.ones(()), STATE, PARAMS),
        "gradients | got a number | value_and_grad returns (loss, gradients)",
    ),
    "complex parameters": (
        lambda: curvax.muon(0.1).init({"kernel": jnp.ones((4, 4), complex)}),
        "'kernel' | complex | optax.contrib.split_real_and_imaginary",
    ),
    "a mask with an entry that no parameter has": (
        lambda: decayed({"dense": {"kernel": True, "bias": False}, "dens": True}),
        "weight_decay_mask | 'dens' | dense/bias, dense/kernel",
    ),
    "a part of a mask with such an entry": (
        lambda: decayed({"dense": {"kernel": True, "bia": False}}),
        "weight_decay_mask | 'dense/bia' | dense/bias, dense/kernel",
    ),
    "a function to such a mask": (
        lambda: decayed(lambda params: {"dense": {"kernel": True, "bias": False}, "dens": True}),
        "weight_decay_mask | 'dens' | dense/bias, dense/kernel",
    ),
    "patterns for a mask": (lambda: decayed(["*kernel"]), "weight_decay_mask | '*kernel'"),
    "a function to words": (lambda: decayed(lambda params: "*"), "weight_decay_mask | '*'"),
    "a polar factor for a basis": (
        lambda: curvax.soap(0.1, method="svd"),
        "method | 'eigh', 'qr', 'rotations' | got 'svd'",
    ),
    "a basis for a polar factor": (lambda: curvax.muon(0.1, method="eigh"), "method | 'eigh'"),
    "no columns": (
        lambda: curvax.to_int8({"kernel": jnp.ones((4, 0))}),
        "'kernel' | (4, 0) | at least 1",
    ),
    "description and parameters": (
        lambda: curvax.check_state(
            curvax.muon(0.1), curvax.describe_state(curvax.muon(0.1), PARAMS), PARAMS
        ),
        "params, the second argument | (optimizer, params, description)",
    ),
    "a direction without axes": (
        lambda: of_shape(jnp.sum),
        "'dense/kernel' must have the shape of their gradient, (1, 4, 6); got ()",
    ),
    "a direction with one more": (
        lambda: of_shape(lambda x: x[None]),
        "'dense/kernel' must have the shape of their gradient, (1, 4, 6); got (1, 1, 4, 6)",
    ),
    "fewer steps than idle ones": (
        lambda: IDLE.optimizer(steps=100, learning_rate=0.1),
        "steps | 129 | 100",
    ),
    "a negative peak": (lambda: ALICE.optimizer(learning_rate=-1.0), "learning_rate | -1.0"),
    "True as a peak": (lambda: ALICE.optimizer(learning_rate=True), "learning_rate | True"),
    "half a step": (lambda: ALICE.optimizer(steps=2.5), "steps | 2.5"),  # pyright: ignore
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    make, message = MISTAKES[name]
    assert_names(rejection(make), message)


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


KEYWORDS = [
    ("shampoo", "block_size", "matrices=curvax.MatrixRule(block_size="),
    ("soap", "head_wise", "matrices=curvax.MatrixRule(head_wise="),
    ("muon", "ns_steps", "method=curvax.polar.newton_schulz("),
    ("scale_by_muon", "ns_coeffs", "method=curvax.polar.newton_schulz("),
    ("soap", "betas", "b1= and b2="),
    ("muon", "betas", "b1="),
    ("shampoo", "solver", "method="),
    ("galore", "lr", "the first argument"),
    ("soap", "max_precond_dim", "max_order="),
    ("shampoo", "max_precond_dim", "matrices=curvax.MatrixRule(block_size="),
    ("soap", "precondition_frequency", "refresh="),
    ("eigen_adam", "shampoo_beta", "b3="),
    ("racs", "mask", "weight_decay_mask="),
    ("muon", "adam_b1", "others=optax.adamw("),
    ("muon", "storage", "curvax.quantize_state("),
]


@pytest.mark.parametrize(("method", "keyword", "hint"), KEYWORDS)
def test_a_keyword_of_other_libraries_says_what_to_give(
    method: str, keyword: str, hint: str
) -> None:
    make = getattr(curvax, method)
    with pytest.raises(TypeError, match=rf"{method}\(\).*'{keyword}'") as error:
        make(**{keyword: 1})
    assert hint in str(error.value)


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


def test_an_old_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 6, 2))
    monkeypatch.setattr(jax, "__version__", "0.6.2")
    with pytest.raises(ImportError, match=r"0\.10 or later.* 0\.6\.2"):
        importlib.reload(curvax._requirements)
