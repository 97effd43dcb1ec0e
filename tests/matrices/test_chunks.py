"""Large stacks in chunks: the same numbers and states, in the memory of one chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.matrices import _chunks
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, run_scanned
from tests.shared.programs import temporaries_per_gradient

SHAPES = {f"a{i}": (4, 6) for i in range(7)} | {"scanned": (5, 6, 4), "alone": (3, 3)}
AXES = {"*": curvax.MatrixAxes(rows=-2, columns=-1)}

asgo = functools.partial(curvax.scale_by_asgo, refresh=2, eps=0.1)
SUBSPACE = {"rank": 2, "basis": curvax.subspaces.svd(), "refresh": curvax.every(2)}
ALICE = {"rank": 2, "refresh": 2, "switching": curvax.subspaces.complement(1)}
DIRECTIONS = {
    "momentum": curvax.momentum,
    "racs": curvax.scale_by_racs,
    "asgo": asgo,
    "alice": lambda: curvax.scale_by_alice(**ALICE),
    "galore": lambda: curvax.in_subspace(optax.scale_by_adam(), **SUBSPACE),
    "4 bits": lambda: asgo(storage=curvax.quantized(block=4, min_elements=1)),
    "staggered": lambda: asgo(refresh=curvax.every(3, stagger=True)),
    "soap": lambda: curvax.scale_by_soap(refresh=2),
}


def gradients(steps: int = 4) -> list[dict[str, np.ndarray]]:
    """Random gradients; one matrix is not finite in the step before last."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    found = jax.device_get(gradients_like(zeros, steps))
    found[-1]["a3"] = np.where(np.arange(24).reshape(4, 6) == 8, np.nan, found[-1]["a3"])
    return [*found, found[0]]


def view_of(name: str) -> optax.GradientTransformation:
    only = name == "galore"  # which has a guard of its own
    return curvax.on_matrices(
        DIRECTIONS[name](), weight_dimension_numbers=AXES, guard=not only, projects=only
    )


def loops(name: str, view: optax.GradientTransformation | None = None) -> int:
    """How many stacks a program processes in a loop."""
    view, gradient = view or view_of(name), gradients(1)[0]
    jaxpr = jax.make_jaxpr(view.update)(gradient, jax.eval_shape(view.init, gradient))
    stacks = [eqn.params["jaxpr"].eqns for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    return sum(
        eqn.primitive.name == "scan" and eqn.params["length"] in (3, 2)
        for eqns in stacks
        for eqn in eqns
    )


@pytest.mark.parametrize("name", cells(DIRECTIONS, of=12))
def test_the_numbers_and_the_state_are_those_of_whole_stacks(name, monkeypatch) -> None:
    """Seven matrices in three chunks of two, five in two, and a rest of one."""
    whole, state = run_scanned(view_of(name), gradients())
    assert loops(name) == 0
    monkeypatch.setattr(_chunks, "CHUNK", 2 * 24)
    monkeypatch.setattr(_chunks, "HEAVY", jnp.inf)
    in_chunks, its_state = run_scanned(view_of(name), gradients())
    assert loops(name) == (0 if name == "galore" else 2)
    jax.tree.map(assert_close, in_chunks, whole)
    assert jax.tree.structure(its_state) == jax.tree.structure(state)
    jax.tree.map(assert_close, its_state, state)


def test_some_stacks_stay_whole(monkeypatch) -> None:
    """Those with large states: to copy them out and back would take more than the temporaries do.

    And those that an update reads twice, once to project, once for the way back, if it says so; but
    moments in codes are decoded.
    """
    monkeypatch.setattr(_chunks, "CHUNK", 2 * 24)
    assert loops("racs") == 2 and loops("soap") == 0
    monkeypatch.setattr(_chunks, "HEAVY", jnp.inf)
    view = view_of("galore")
    assert loops("galore") == 0
    assert loops("galore", curvax.quantize_state(view, min_elements=1)) == 2
    assert loops("alice") == 2  # norms and the residual besides


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 9000, 9000), 1),  # one matrix, however large
        ((7, 4096, 4096), 2),  # three chunks and a rest
        ((16, 2048, 2048), 8),
        ((9, 2048, 2048), 5),  # even: not eight and one
        ((2**14, 64, 64), 2**13),
        ((5, 16, 16), 5),
        ((4, 0, 8), 4),
    ],
)
def test_chunks_are_even_and_of_bounded_size(shape, size) -> None:
    assert _chunks.matrices_in_chunk(shape) == size


def test_a_train_step_needs_little_beside_its_gradients(monkeypatch) -> None:
    """Directions are written over the gradients, and other temporaries are those of a chunk."""
    layers, order = 24, 96
    racs = lambda: curvax.racs(0.1, weight_dimension_numbers=AXES)  # noqa: E731
    assert temporaries_per_gradient(racs(), layers, order) > 1.9
    monkeypatch.setattr(_chunks, "CHUNK", 2 * order * order)
    assert temporaries_per_gradient(racs(), layers, order) < 1.2
