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
from tests.shared.policies import stepped
from tests.shared.programs import text_for
from tests.tpu_forms import loops_of

NUMBER, SHAPE = 6, (8, 12)
LEAST, LARGEST = _loops.REFRESHED.least, max(SHAPE) ** 2
ADAM = optax.scale_by_adam()
EVERY: dict[str, Any] = {"refresh": curvax.every(2)}
EIGH = EVERY | {"method": "eigh"}  # by default nothing is decomposed on GPUs
FOUR_BITS = curvax.quantized(block=4, min_elements=1)
SVD: dict[str, Any] = {"basis": curvax.subspaces.svd()}
TRANSFORMATIONS = {
    "precondition": curvax.precondition(**EIGH),
    "precondition, 4 bits": curvax.precondition(storage=FOUR_BITS, **EIGH),
    "in_eigenbasis": curvax.in_eigenbasis(ADAM, **EIGH),
    "stored roots": curvax.precondition(method=curvax.eigenbases.stored_roots(), **EVERY),
    "in_subspace": curvax.in_subspace(ADAM, 3, **SVD, **EVERY),
}
STAGGERED = curvax.every(2, stagger=2)
IN_GROUPS = {  # by QR on one side: a statistic of less than full rank has more than one basis
    "QR": curvax.in_eigenbasis(ADAM, refresh=curvax.every(2), method="qr", side="left"),
    "QR, staggered": curvax.in_eigenbasis(ADAM, refresh=STAGGERED, method="qr", side="left"),
    "precondition, staggered": curvax.precondition(refresh=STAGGERED),
    "in_eigenbasis, staggered": curvax.in_eigenbasis(ADAM, refresh=STAGGERED),
    "rotations": curvax.in_eigenbasis(ADAM, method="rotations", side="left", **EVERY),
    "iterated": curvax.in_subspace(ADAM, 3, basis=curvax.subspaces.complement(2), **EVERY),
}
# Where work may be saved, and where there is little of it
CHOOSING = {"FOAM": curvax.precondition(refresh=curvax.policies.foam(4, 0.4, 1.0), method="eigh")}


def stack(number: int = NUMBER, shape: tuple[int, ...] = SHAPE) -> Any:
    return {"kernel": jax.ShapeDtypeStruct((number, *shape), jnp.float32)}


def program(transformation: Any, platform: str, stack: Any) -> str:
    """The StableHLO of a step."""
    state = jax.eval_shape(transformation.init, stack)
    return text_for(platform, transformation.update, stack, state)


def decomposed(text: str) -> set[int]:
    """How many matrices the eigendecompositions of a program for a GPU take at once."""
    calls = re.findall(r"custom_call @\w*syevd\w*.*: \(tensor<([\dx]+)xf32>\)", text)
    return {int(call.split("x")[0]) if call.count("x") == 2 else 1 for call in calls}


def staggered(stagger: bool | int) -> dict[str, Any]:
    every: dict[str, Any] = {"refresh": curvax.every(5, stagger=stagger)}
    return {
        f"precondition, {stagger}": curvax.precondition(method="eigh", **every),
        f"in_eigenbasis, {stagger}": curvax.in_eigenbasis(ADAM, method="eigh", **every),
        f"in_subspace, {stagger}": curvax.in_subspace(ADAM, 3, **SVD, **every),
    }


MADE = TRANSFORMATIONS | CHOOSING | staggered(True) | staggered(8) | staggered(1)
DUE = _loops.REFRESHED
AT_ONCE: list[tuple[str, int, Any, set[int]]] = [
    # what is due, within the numbers that a GPU has room for
    *(
        (name, NUMBER, _loops.Groups(numbers), allowed)
        for name in cells(TRANSFORMATIONS, of=3)
        for numbers, allowed in ((NUMBER * LARGEST, {NUMBER}), (2 * LARGEST, {2, 3}), (1, {1}))
    ),
    # A batched decomposition of two large factors takes longer than that of one does twice.
    ("in_eigenbasis", LEAST - 1, DUE._replace(large=LARGEST), {1}),
    ("in_eigenbasis", LEAST, DUE._replace(large=LARGEST), {LEAST}),
    # what takes turns together
    *(
        (name, 16, DUE, {most})
        for stagger, most in ((True, 16), (8, 8), (1, 1))
        for name in staggered(stagger)
    ),
    ("FOAM", NUMBER, DUE, {1}),
]


@pytest.mark.parametrize(("name", "number", "groups", "most"), AT_ONCE)
def test_gpus_decompose_several_matrices_at_once(
    name: str, number: int, groups: Any, most: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loops, "REFRESHED", groups)
    assert max(decomposed(program(MADE[name], "cuda", stack(number)))) in most


def test_large_factors_in_few_bits_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quantized, "SINGLY_FROM", 8)
    assert decomposed(program(TRANSFORMATIONS["precondition, 4 bits"], "cuda", stack())) == {1}


def test_rotations_take_groups_of_one_size_from_stacks_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each size is products that XLA compiles. The moments of wide matrices count, not squares."""
    monkeypatch.setattr(_loops, "ROTATED", _loops.Groups(4 * 8 * 20, large=1, enough=2))
    stacks = {"first": stack(4, (8, 12)), "second": stack(2, (8, 20))}
    transformation = curvax.in_eigenbasis(ADAM, side="left", **EVERY)
    product = r"dot_general .*: \(tensor<([\dx]*)8x8xf32>, tensor<\1?8x8xf32>\)"
    for platform, groups in (("cuda", {"2x"}), ("tpu", {""})):
        assert {*re.findall(product, program(transformation, platform, stacks))} == groups


@pytest.mark.parametrize("number", [LEAST - 1, LEAST])
def test_orthogonal_iterations_go_at_once_by_panels(number: int) -> None:
    """A batched QR of cuSOLVER takes longer than a loop of single ones."""
    text = program(IN_GROUPS["QR"], "cuda", stack(number))
    panels = f"tensor<{number}x{SHAPE[0]}x{_qr.PANEL}xf32>"
    assert (panels in text) == (number >= LEAST)
    calls = re.findall(r"custom_call @\w*geqrf\w*.*: \(tensor<([\dx]+)xf32>\)", text)
    assert bool(calls) == (number < LEAST) and all(call.count("x") == 1 for call in calls)


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

VISITS = cells([("REFRESHED", *x) for x in itertools.product(TRANSFORMATIONS, [6, 2])], of=16)
VISITS += cells([("REFRESHED", name, 6) for name in IN_GROUPS], of=8)
VISITS += cells([("VISITED", *x) for x in itertools.product(VISITED, [3])], of=10)


@pytest.mark.parametrize(("loop", "name", "most"), VISITS)
def test_matrices_visited_at_once_are_those_one_by_one(
    loop: str, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no gradient at the first refresh, and is tried again alone; one is not finite."""
    transformation = (TRANSFORMATIONS | IN_GROUPS | VISITED)[name]
    drawn = np.random.default_rng(0).standard_normal((5, NUMBER, *SHAPE)).astype(np.float32)
    drawn[0, 1] = 0
    drawn[3, 4, 0, 0] = np.nan

    def run() -> tuple[list[Any], Any]:
        found = list(stepped(transformation, {"kernel": drawn}))
        return [directions["kernel"] for directions, _ in found], found[-1][1]

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


@pytest.mark.parametrize("name", cells([*TRANSFORMATIONS, *CHOOSING], of=6))
def test_loops_of_gpus_keep_states_by_rows(name: str) -> None:
    """XLA would transpose all that a loop may decompose, at every step."""
    for platform in ("cuda", "cpu", "tpu"):
        text = program(MADE[name], platform, stack())
        assert ("LayoutConstraint" in text) == (platform == "cuda")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_gradients_are_read_and_not_written(platform: str) -> None:
    """What a refresh returns as it was is not put back: XLA would copy it at every step."""
    text = program(TRANSFORMATIONS["in_subspace"], platform, stack())
    written = re.findall(r"dynamic_update_slice .*-> tensor<([\dx]+)xf32>", text)
    assert f"{NUMBER}x8x3" in written  # the basis
    assert f"{NUMBER}x8x12" not in written


@pytest.mark.parametrize(("platform", "rounds"), [("cpu", 6), ("tpu", 6), ("cuda", 2), ("rocm", 2)])
def test_gpus_alone_take_several(
    platform: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loops, "VISITED", _loops.Groups(4 * math.prod(SHAPE)))
    sines = lambda x, count: _loops.visit_all(  # noqa: E731
        lambda x, _: jnp.sin(x), x, (NUMBER,), count, numbers=math.prod(SHAPE)
    )
    text = text_for(platform, sines, stack()["kernel"], jax.ShapeDtypeStruct((), jnp.int32))
    entry = "8x12" if rounds == NUMBER else f"{NUMBER // rounds}x8x12"
    assert re.findall(r"stablehlo.sine .* : tensor<([\dx]+)xf32>", text) == [entry]
