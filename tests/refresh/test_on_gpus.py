"""Refreshes in programs for GPUs: several matrices at once, and states laid out by rows."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.linalg import _loops, _platforms
from curvax.transforms.storage import _quantized
from tests.helpers import assert_close, share
from tests.tpu_forms import loops_of

NUMBER, SHAPE = 6, (8, 12)
LEAST = _loops.REFRESHED.least
ADAM = optax.scale_by_adam()
TRANSFORMATIONS = {
    "precondition": curvax.precondition(refresh=curvax.every(2)),
    "precondition, 4 bits": curvax.precondition(
        refresh=curvax.every(2), storage=curvax.quantized(block=4, min_elements=1)
    ),
    "in_eigenbasis": curvax.in_eigenbasis(ADAM, refresh=curvax.every(2)),
    "in_subspace": curvax.in_subspace(
        ADAM, 3, basis=curvax.subspaces.svd(), refresh=curvax.every(2)
    ),
}
CHOOSING = {
    "FOAM": curvax.precondition(refresh=curvax.policies.foam(4, 0.4, 1.0)),
    "QR": curvax.in_eigenbasis(ADAM, refresh=curvax.every(2), method="qr"),
}


STACK = {"kernel": jax.ShapeDtypeStruct((NUMBER, *SHAPE), jnp.float32)}


def program(transformation: Any, platform: str, stack: Any = STACK) -> str:
    """The StableHLO of a step."""
    state = jax.eval_shape(transformation.init, stack)
    update = lambda g, s: transformation.update(g, s)  # noqa: E731  # traced anew
    traced = jax.jit(update).trace(stack, state)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def decomposed(text: str) -> set[int]:
    """How many matrices the eigendecompositions of a program for a GPU take at once."""
    calls = re.findall(r"custom_call @\w*syevd\w*.*: \(tensor<([\dx]+)xf32>\)", text)
    return {int(call.split("x")[0]) if call.count("x") == 2 else 1 for call in calls}


@pytest.mark.parametrize("name", share(TRANSFORMATIONS, of=3))
def test_gpus_decompose_what_is_due_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(SHAPE) ** 2
    for numbers, allowed in ((NUMBER * largest, {NUMBER}), (2 * largest, {2, 3}), (1, {1})):
        monkeypatch.setattr(_loops, "REFRESHED", _loops.Groups(numbers))
        assert max(decomposed(program(TRANSFORMATIONS[name], "cuda"))) in allowed


@pytest.mark.parametrize(("number", "at_once"), [(LEAST - 1, 1), (LEAST, LEAST)])
def test_a_few_large_factors_go_one_by_one(
    number: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batched decomposition of two takes longer than that of one does twice."""
    groups = _loops.REFRESHED._replace(large=max(SHAPE) ** 2)
    monkeypatch.setattr(_loops, "REFRESHED", groups)
    stack = {"kernel": jax.ShapeDtypeStruct((number, *SHAPE), jnp.float32)}
    assert max(decomposed(program(TRANSFORMATIONS["in_eigenbasis"], "cuda", stack))) == at_once


def test_large_factors_in_few_bits_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quantized, "SINGLY_FROM", 8)
    assert decomposed(program(TRANSFORMATIONS["precondition, 4 bits"], "cuda")) == {1}


@pytest.mark.parametrize("name", CHOOSING)
def test_others_are_decomposed_one_by_one(name: str) -> None:
    """Where work may be saved, and where there is little of it."""
    assert decomposed(program(CHOOSING[name], "cuda")) == {1}


@pytest.mark.parametrize(("name", "most"), share(itertools.product(TRANSFORMATIONS, [6, 2]), of=5))
def test_matrices_refreshed_at_once_are_those_one_by_one(
    name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no gradient at the first refresh, and is tried again alone; one is not finite."""
    transformation = TRANSFORMATIONS[name]
    drawn = np.random.default_rng(0).standard_normal((5, NUMBER, *SHAPE)).astype(np.float32)
    drawn[0, 1] = 0
    drawn[3, 4, 0, 0] = np.nan
    gradients = [{"kernel": jnp.asarray(g)} for g in drawn]

    def run() -> tuple[list[Any], Any]:
        update = jax.jit(lambda g, s: transformation.update(g, s))
        state, found = transformation.init(gradients[0]), []
        for g in gradients:
            directions, state = update(g, state)
            found.append(directions["kernel"])
        return found, state

    alone, state_alone = run()
    vmapped: list[Any] = []
    vmap = jax.vmap

    def noted(f: Any, *args: Any, **how: Any) -> Any:
        vmapped.append(f)
        return vmap(f, *args, **how)

    monkeypatch.setattr(_loops, "REFRESHED", _loops.Groups(most * max(SHAPE) ** 2))
    loops_of("gpu", monkeypatch)
    monkeypatch.setattr(_loops.jax, "vmap", noted)
    together, state_together = run()
    assert vmapped
    sound = np.arange(NUMBER) != 4
    assert_close([x[sound] for x in together], [x[sound] for x in alone], 512)
    counts = [
        [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
        for state in (state_alone, state_together)
    ]
    for ours, theirs in zip(*counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", share([*TRANSFORMATIONS, *CHOOSING], of=3))
def test_loops_of_gpus_keep_states_by_rows(name: str) -> None:
    """XLA would transpose all that a loop may decompose, at every step."""
    transformation = (TRANSFORMATIONS | CHOOSING)[name]
    assert "LayoutConstraint" in program(transformation, "cuda")
    for platform in ("cpu", "tpu"):
        assert "LayoutConstraint" not in program(transformation, platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gradients_are_read_and_not_written(platform: str) -> None:
    """What a refresh returns as it was is not put back: XLA would copy it at every step."""
    transformation = curvax.in_subspace(
        ADAM, 3, basis=curvax.subspaces.svd(), refresh=curvax.every(2)
    )
    written = re.findall(
        r"dynamic_update_slice .*-> tensor<([\dx]+)xf32>", program(transformation, platform)
    )
    assert f"{NUMBER}x8x3" in written  # the basis
    assert f"{NUMBER}x8x12" not in written


def test_a_layout_changes_no_numbers() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    of_one = lambda x: _platforms.in_rows([x])[0]  # noqa: E731
    assert np.array_equal(of_one(x), x)
    text = jax.jit(jax.vmap(of_one)).trace(x).lower(lowering_platforms=("cuda",))
    assert "LayoutConstraint" not in text.as_text()  # of vectors
