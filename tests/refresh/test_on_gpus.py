"""Refreshes in programs for GPUs: several matrices at once, and states laid out by rows."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.linalg import _loops, _qr
from curvax.transforms.storage import _quantized
from tests.cells import cells
from tests.helpers import assert_close
from tests.tpu_forms import loops_of

NUMBER, SHAPE = 6, (8, 12)
LEAST = _loops.REFRESHED.least
ADAM = optax.scale_by_adam()
EVERY: dict[str, Any] = {"refresh": curvax.every(2)}
EIGH = EVERY | {"method": "eigh"}  # by default nothing is decomposed on GPUs
STORED = EVERY | {"method": curvax.eigenbases.stored_roots()}
TRANSFORMATIONS = {
    "precondition": curvax.precondition(**EIGH),
    "precondition, 4 bits": curvax.precondition(
        storage=curvax.quantized(block=4, min_elements=1), **EIGH
    ),
    "in_eigenbasis": curvax.in_eigenbasis(ADAM, **EIGH),
    "stored roots": curvax.precondition(**STORED),
    "in_subspace": curvax.in_subspace(ADAM, 3, basis=curvax.subspaces.svd(), **EVERY),
}
STAGGERED = curvax.every(2, stagger=2)
IN_GROUPS = {  # by QR on one side: a statistic of less than full rank has more than one basis
    "QR": curvax.in_eigenbasis(ADAM, refresh=curvax.every(2), method="qr", side="left"),
    "QR, staggered": curvax.in_eigenbasis(ADAM, refresh=STAGGERED, method="qr", side="left"),
    "precondition, staggered": curvax.precondition(refresh=STAGGERED),
    "in_eigenbasis, staggered": curvax.in_eigenbasis(ADAM, refresh=STAGGERED),
    "rotations": curvax.in_eigenbasis(ADAM, method="rotations", side="left", **EVERY),
    "iterated": curvax.in_subspace(
        ADAM, 3, basis=curvax.subspaces.complement(2), refresh=curvax.every(2)
    ),
}
FOAM = curvax.policies.foam(4, 0.4, 1.0)
CHOOSING = {"FOAM": curvax.precondition(refresh=FOAM, method="eigh")}


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


@pytest.mark.parametrize("name", cells(TRANSFORMATIONS, of=3))
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


@pytest.mark.parametrize(("stagger", "at_once"), [(True, 16), (8, 8), (1, 1)])
@pytest.mark.parametrize("name", ["precondition", "in_eigenbasis", "in_subspace"])
def test_what_takes_turns_together_is_decomposed_at_once(
    name: str, stagger: bool | int, at_once: int
) -> None:
    policy = curvax.every(5, stagger=stagger)
    transformation = {
        "precondition": lambda: curvax.precondition(refresh=policy, method="eigh"),
        "in_eigenbasis": lambda: curvax.in_eigenbasis(ADAM, refresh=policy, method="eigh"),
        "in_subspace": lambda: curvax.in_subspace(
            ADAM, 3, basis=curvax.subspaces.svd(), refresh=policy
        ),
    }[name]()
    stack = {"kernel": jax.ShapeDtypeStruct((16, *SHAPE), jnp.float32)}
    assert max(decomposed(program(transformation, "cuda", stack))) == at_once


def test_rotations_take_groups_of_one_size_from_stacks_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each size is products that XLA compiles. The moments of wide matrices count, not squares."""
    monkeypatch.setattr(_loops, "ROTATED", _loops.Groups(4 * 8 * 20, large=1, enough=2))
    shapes = {"first": (4, 8, 12), "second": (2, 8, 20)}
    stacks = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
    transformation = curvax.in_eigenbasis(ADAM, side="left", **EVERY)
    product = r"dot_general .*: \(tensor<([\dx]*)8x8xf32>, tensor<\1?8x8xf32>\)"
    for platform, groups in (("cuda", {"2x"}), ("tpu", {""})):
        assert {*re.findall(product, program(transformation, platform, stacks))} == groups


@pytest.mark.parametrize("number", [LEAST - 1, LEAST])
def test_orthogonal_iterations_go_at_once_by_panels(number: int) -> None:
    """A batched QR of cuSOLVER takes longer than a loop of single ones."""
    stack = {"kernel": jax.ShapeDtypeStruct((number, *SHAPE), jnp.float32)}
    text = program(IN_GROUPS["QR"], "cuda", stack)
    panels = f"tensor<{number}x{SHAPE[0]}x{_qr.PANEL}xf32>"
    assert (panels in text) == (number >= LEAST)
    calls = re.findall(r"custom_call @\w*geqrf\w*.*: \(tensor<([\dx]+)xf32>\)", text)
    assert bool(calls) == (number < LEAST) and all(call.count("x") == 1 for call in calls)


def test_large_factors_in_few_bits_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quantized, "SINGLY_FROM", 8)
    assert decomposed(program(TRANSFORMATIONS["precondition, 4 bits"], "cuda")) == {1}


@pytest.mark.parametrize("name", CHOOSING)
def test_others_are_decomposed_one_by_one(name: str) -> None:
    """Where work may be saved, and where there is little of it."""
    assert decomposed(program(CHOOSING[name], "cuda")) == {1}


FORMS: dict[str, Any] = {"block": 4, "min_elements": 1}
STORAGES = {
    "VQ": curvax.quantized(**FORMS),
    "CQ+EF": curvax.cholesky(error_feedback=0.95, **FORMS),
    "packed": curvax.packed(**FORMS),
}
LEFT: dict[str, Any] = {"side": "left", **EVERY}
VISITED = {
    **{
        f"precondition, {x}": curvax.precondition(storage=STORAGES[x], **LEFT)
        for x in ("VQ", "CQ+EF")
    },
    **{
        f"in_eigenbasis, {x}": curvax.in_eigenbasis(ADAM, storage=STORAGES[x], **LEFT)
        for x in STORAGES
    },
}
"""Of which all matrices are decoded at every step."""

AT_ONCE = cells([("REFRESHED", *x) for x in itertools.product(TRANSFORMATIONS, [6, 2])], of=8)
AT_ONCE += cells([("REFRESHED", name, 6) for name in IN_GROUPS], of=4)
AT_ONCE += cells([("VISITED", *x) for x in itertools.product(VISITED, [3])], of=5)


@pytest.mark.parametrize(("loop", "name", "most"), AT_ONCE)
def test_matrices_visited_at_once_are_those_one_by_one(
    loop: str, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no gradient at the first refresh, and is tried again alone; one is not finite."""
    transformation = (TRANSFORMATIONS | IN_GROUPS | VISITED)[name]
    drawn = np.random.default_rng(0).standard_normal((5, NUMBER, *SHAPE)).astype(np.float32)
    drawn[0, 1] = 0
    drawn[3, 4, 0, 0] = np.nan
    gradients = [{"kernel": jnp.asarray(g)} for g in drawn]

    def run() -> tuple[list[Any], Any]:
        update = jax.jit(lambda g, s: transformation.update(g, s))
        state, found = jax.jit(transformation.init)(gradients[0]), []
        for g in gradients:
            directions, state = update(g, state)
            found.append(directions["kernel"])
        return found, state

    if loop == "VISITED":
        monkeypatch.setattr(_quantized, "SINGLY_FROM", 1)
    alone, state_alone = run()
    vmapped: list[Any] = []
    vmap = jax.vmap

    def noted(f: Any, *args: Any, **how: Any) -> Any:
        vmapped.append(f)
        return vmap(f, *args, **how)

    order = SHAPE[0] if loop == "VISITED" else max(SHAPE)
    for groups in (loop, "ROTATED"):
        monkeypatch.setattr(_loops, groups, _loops.Groups(most * order**2))
    monkeypatch.setattr(_qr, "MANY", 2)
    loops_of("gpu", monkeypatch)
    monkeypatch.setattr(_loops.jax, "vmap", noted)
    together, state_together = run()
    assert vmapped or loop == "VISITED"
    sound = np.arange(NUMBER) != 4
    assert_close([x[sound] for x in together], [x[sound] for x in alone], 512)
    states = state_alone, state_together
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in states]
    assert shapes[0] == shapes[1]
    counts = [[x for x in jax.tree.leaves(state) if x.dtype == jnp.int32] for state in states]
    assert_close(*counts, factor=0)


@pytest.mark.parametrize("name", cells([*TRANSFORMATIONS, *CHOOSING], of=3))
def test_loops_of_gpus_keep_states_by_rows(name: str) -> None:
    """XLA would transpose all that a loop may decompose, at every step."""
    transformation = (TRANSFORMATIONS | CHOOSING)[name]
    assert "LayoutConstraint" in program(transformation, "cuda")
    for platform in ("cpu", "tpu"):
        assert "LayoutConstraint" not in program(transformation, platform)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gradients_are_read_and_not_written(platform: str) -> None:
    """What a refresh returns as it was is not put back: XLA would copy it at every step."""
    text = program(TRANSFORMATIONS["in_subspace"], platform)
    written = re.findall(r"dynamic_update_slice .*-> tensor<([\dx]+)xf32>", text)
    assert f"{NUMBER}x8x3" in written  # the basis
    assert f"{NUMBER}x8x12" not in written


@pytest.mark.parametrize(("platform", "rounds"), [("cpu", 6), ("tpu", 6), ("cuda", 2), ("rocm", 2)])
def test_gpus_alone_take_several(
    platform: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loops, "VISITED", _loops.Groups(4 * math.prod(SHAPE)))
    stack = jax.ShapeDtypeStruct((NUMBER, *SHAPE), jnp.float32)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(
        lambda x, count: _loops.visit_all(
            lambda x, _: jnp.sin(x), x, (NUMBER,), count, numbers=math.prod(SHAPE)
        )
    )
    text = step.trace(stack, count).lower(lowering_platforms=(platform,)).as_text()
    entry = "8x12" if rounds == NUMBER else f"{NUMBER // rounds}x8x12"
    assert re.findall(r"stablehlo.sine .* : tensor<([\dx]+)xf32>", text) == [entry]
