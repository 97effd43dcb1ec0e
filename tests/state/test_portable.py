"""States move to other meshes, to one device, to other stacks, and to files."""

import functools
import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh
from test_checkpoints import numbered

import curvax
from curvax.transforms._paths import named_leaves
from tests.cells import cells
from tests.helpers import assert_close, states_by_parameter
from tests.registry import NAMED
from tests.shared.meshes import (
    TWO_SHAPES,
    assert_same_arrays,
    begin,
    begun,
    copied,
    given,
    mesh_of,
    of_matrices,
    on,
    on_no_mesh,
    shapes_and_dtypes,
)


@functools.cache
def trained(name: str, kind: str = "auto", *shape: int) -> tuple[Any, Any, Any, Any]:
    """A method after two steps: itself, its jitted step, parameters and state."""
    if not shape:
        optimizer, state = NAMED[name].make(), jax.device_put(on_no_mesh(name)[1][1])
        return optimizer, jax.jit(optimizer.update), given(TWO_SHAPES)[0], state
    optimizer, params, gradients, state = begun(name, kind, *shape)
    step = jax.jit(optimizer.update)
    for gradient in gradients[:2]:
        _, state = step(gradient, state, params)
    return optimizer, step, params, state


@functools.cache
def portable_of(*place: Any) -> Any:
    optimizer, _, params, state = trained(*place)
    return curvax.portable_state(optimizer, params, state)


def continued(place: tuple[Any, ...], state: Any) -> Any:
    """The third step from a state, where `trained(*place)` is."""
    _, step, params, _ = trained(*place)
    gradient = given(TWO_SHAPES)[1][2]
    return step(on(mesh_of(*place[1:]), gradient) if len(place) > 2 else gradient, state, params)[0]


@pytest.mark.parametrize(
    ("name", "source", "there"),
    cells([("muon", ("auto", 8), ("auto", 8)), ("muon", ("explicit", 8), ("explicit", 8))], of=2)
    + cells(
        [
            ("muon", ("auto", 8), ("auto",)),
            ("eigen_adam", ("auto",), ("auto", 4)),
            ("muon", ("auto",), ("auto", 4)),
            ("muon", ("explicit", 8), ("auto", 2, 2)),
            ("muon", ("auto", 8), ("explicit", 8)),
        ],
        of=5,
    ),
)
def test_a_checkpoint_can_be_restored_anywhere(
    tmp_path: Path, name: str, source: tuple[Any, ...], there: tuple[Any, ...]
) -> None:
    """In its place it goes on bit for bit. On the way it may have been in the host's memory."""
    optimizer, _, params, own = trained(name, *there)
    target = curvax.portable_state(optimizer, params, jax.eval_shape(optimizer.init, params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", portable_of(name, *source))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", target)
    state = curvax.place_state(optimizer, params, restored)
    back = curvax.portable_state(optimizer, params, state)
    assert_close(of_matrices(back), of_matrices(portable_of(name, *source)), factor=0)
    assert shapes_and_dtypes(back) == shapes_and_dtypes(target)
    if len(there) > 1:
        on_host = jax.tree.map(np.asarray, restored)
        from_host = curvax.place_state(optimizer, params, on_host)
        assert_same_arrays(of_matrices(from_host), of_matrices(state))
        for x, y in zip(*map(jax.tree.leaves, map(of_matrices, (target, back))), strict=True):
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
    if source == there:
        assert_same_arrays(state, own)
    updates = continued((name, *there), state)
    expected = continued((name, *source), trained(name, *source)[3])
    assert_close(updates, expected, 0 if source == there else NAMED[name].growth)


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    """The portable state is a copy: steps that give the state away cannot spoil it."""
    optimizer, _, params, state = trained("muon", "auto", 8)
    mine = copied(state)
    portable = curvax.portable_state(optimizer, params, mine)
    expected = jax.tree.map(np.array, portable)
    step = jax.jit(optimizer.update, donate_argnums=1)
    gradient = on(mesh_of("auto", 8), given(TWO_SHAPES)[1][2])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", of_matrices(portable))
        step(gradient, mine, params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", of_matrices(portable))
    assert_close(restored, of_matrices(expected), factor=0)


@pytest.mark.parametrize(
    ("name", "kind"), cells([("muon", "explicit"), ("eigen_adam", "auto")], of=2)
)
def test_map_params_maps_what_it_maps_on_one_device(name: str, kind: str) -> None:
    params, _ = given(TWO_SHAPES)
    divided, placed, _, first = begun(name, kind, 4)
    one, mapped = NAMED[name].make(), []
    for optimizer, state in ((one, jax.jit(one.init)(params)), (divided, first)):
        state = optax.tree.map_params(optimizer, lambda x: np.asarray(x) + 1, state)
        mapped.append(curvax.portable_state(optimizer, placed, state))
    assert_close(mapped[1], mapped[0], factor=0)


@pytest.mark.parametrize("name", cells(["muon", "eigen_adam"], of=2))
def test_a_bad_gradient_touches_no_other_matrix(name: str) -> None:
    """Of a matrix that is one of several on its device, and of two of the left-over ones."""
    clean = jax.tree.map(np.asarray, given(TWO_SHAPES)[1][2])
    optimizer, step, params, state = trained(name, "auto", 4)
    victims = {"0/kernel": 2, "4/kernel": 3, "tall/kernel": 4}
    for victim, bad in ((v, (np.nan, np.inf)[i % 2]) for v, n in victims.items() for i in range(n)):
        hit, zero = ({**clean, victim: clean[victim].copy()} for _ in range(2))
        hit[victim][1, 2], zero[victim][:] = bad, 0
        (wanted, _), (updates, state), (_, there) = (
            step(on(mesh_of(), g), state, params) for g in (clean, hit, zero)
        )
        assert_close(updates, wanted | {victim: np.zeros((*clean[victim].shape,))}, factor=0)
        numbers = [[x for x in jax.tree.leaves(s) if x.dtype == np.float32] for s in (state, there)]
        assert_close(*numbers, factor=0)
    for path, own in states_by_parameter(optimizer, params, state).items():
        counts = [int(x.sum()) for place, x in own.items() if "skipped" in place.split("/")]
        assert counts == [victims.get(path, 0)]


LAYERS = {f"{i}": {"kernel": np.full((4, 6), 1.0 + i, np.float32)} for i in range(12)}
LARGE = {name: {"kernel": np.ones((160, 160), np.float32)} for name in ("a", "b")}


@pytest.mark.parametrize("name", cells(["muon", "asgo", "alice", "soap"], of=4))
def test_the_portable_form_is_the_same_for_every_stack_and_mesh(name: str) -> None:
    """On matrices that are stacked on a mesh only, and on those that are stacked anyway."""
    mesh = mesh_of("auto", 2)
    for params in (LARGE, LAYERS):
        plain = NAMED[name].make()
        portable = curvax.portable_state(plain, params, numbered(plain, params))
        paths = [*named_leaves(portable).present()]
        assert all(any(f"/{layer}/kernel/" in path for path in paths) for layer in params)
        for settings in (
            {"mesh": mesh},
            {"matrices": curvax.MatrixRule(stack=True)},
            {"matrices": curvax.MatrixRule(stack=False)},
        ):
            other = NAMED[name].make(**settings)
            placed = curvax.place_state(other, params, portable)
            assert shapes_and_dtypes(placed) == shapes_and_dtypes(
                jax.eval_shape(other.init, params)
            )
            assert_close(curvax.portable_state(other, params, placed), portable, factor=0)


def test_states_go_to_the_layers_of_their_paths() -> None:
    """Layers 10 and 11 sort after 9 as numbers and before 2 as strings."""
    optimizer = NAMED["muon"].make()
    numbers: Any = {int(layer): leaf for layer, leaf in LAYERS.items()}
    state = numbered(optimizer, numbers)
    description = curvax.describe_state(optimizer, numbers)
    by_path = curvax.place_state(
        optimizer, LAYERS, curvax.portable_state(optimizer, numbers, state)
    )
    as_it_is = curvax.place_state(optimizer, LAYERS, state, description=description)
    for moved in (by_path, as_it_is):
        for layer in LAYERS:
            path = f"{layer}/kernel"
            ours = curvax.state_of(optimizer, LAYERS, moved, path)
            theirs = curvax.state_of(optimizer, numbers, state, path)
            assert_close(ours, theirs, factor=0)
    curvax.check_state(optimizer, LAYERS, description, portable=True)
    with pytest.raises(ValueError, match="the stacks .* in another order.*place_state"):
        curvax.check_state(optimizer, LAYERS, description)


# With an attention's `value`, whose path ends like that of a box.
LIKE_VALUES = LAYERS | {"attention": {"value": np.ones((4, 6), np.float32)}}


def plain(node: Any) -> Any:
    """With dicts for named tuples and strings for numbers, as Orbax gives it."""
    if hasattr(node, "_asdict"):
        node = node._asdict()
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, tuple) else node


def msgpack(state: Any) -> Any:
    """As Flax reads its files: dicts alone."""
    return flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))


@functools.cache
def foam_of_values() -> tuple[Any, Any]:
    optimizer = NAMED["foam"].make()
    return optimizer, numbered(optimizer, LIKE_VALUES)


@pytest.mark.parametrize("restored", [plain, msgpack])
def test_a_state_restored_without_a_target_is_understood(restored: Any) -> None:
    """In its portable form; and as it is, for an optimizer with other stacks."""
    optimizer, state = foam_of_values()
    portable = curvax.portable_state(optimizer, LIKE_VALUES, state)
    placed = curvax.place_state(optimizer, LIKE_VALUES, restored(portable))
    assert_close(curvax.portable_state(optimizer, LIKE_VALUES, placed), portable, factor=0)
    about = json.loads(json.dumps(curvax.describe_state(optimizer, LIKE_VALUES)))
    other = NAMED["foam"].make(matrices=curvax.MatrixRule(stack=False))
    placed = curvax.place_state(other, LIKE_VALUES, restored(state), description=about)
    assert_close(curvax.portable_state(other, LIKE_VALUES, placed), portable, factor=0)


def test_numbers_of_a_file_become_arrays() -> None:
    """JSON has numbers for arrays without axes."""
    optimizer = NAMED["muon"].make()
    portable = curvax.portable_state(optimizer, LAYERS, optimizer.init(LAYERS))
    given = jax.tree.map(lambda x: x.item() if x.ndim == 0 else x, portable)
    assert any(isinstance(x, int) for x in jax.tree.leaves(given))
    placed = curvax.place_state(optimizer, LAYERS, given)
    assert shapes_and_dtypes(placed) == shapes_and_dtypes(jax.eval_shape(optimizer.init, LAYERS))
    for wrong in ("float32", 2**40, True, None, [3], object()):
        bad = jax.tree.map(lambda x, wrong=wrong: wrong if isinstance(x, int) else x, given)
        with pytest.raises(ValueError, match="^portable has .*count"):
            curvax.place_state(optimizer, LAYERS, bad)


def test_a_state_moves_to_the_same_devices_in_another_order() -> None:
    mesh = mesh_of("auto", 4)
    other = Mesh(mesh.devices[::-1], mesh.axis_names)
    params, gradients = given(TWO_SHAPES)
    before, after = (NAMED["muon"].make(mesh=m) for m in (mesh, other))
    here, there = on(mesh, params), on(other, params)
    state = begin(before, here, mesh)
    with pytest.raises(ValueError, match=r"state is on the devices \[0, 1, 2, 3\], the grad.*\[3,"):
        after.update(there, state, there)
    with pytest.raises(ValueError, match=r"of the devices \[0, 1, 2, 3\].*of the devices \[3, 2"):
        curvax.state_sharding(after, here, other)
    moved = curvax.place_state(after, there, curvax.portable_state(before, here, state))
    found, _ = jax.jit(after.update)(on(other, gradients[0]), moved, there)
    expected, _ = jax.jit(before.update)(on(mesh, gradients[0]), state, here)
    assert_close(found, expected, factor=0)


def test_the_state_of_an_nnx_optimizer_is_understood() -> None:
    """Its arrays are in boxes; so are the parameters of `nnx.state`, but not pure ones."""
    model, transformation = nnx.Dict(a=nnx.Linear(4, 6, rngs=nnx.Rngs(0))), NAMED["muon"].make()
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(np.ones_like, nnx.state(model, nnx.Param)))
    boxed = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(boxed)
    assert curvax.describe_state(transformation, boxed) == curvax.describe_state(
        transformation, pure
    )
    given = optimizer.opt_state, nnx.as_pure(optimizer.opt_state)
    reports = {
        curvax.report(transformation, params, state) for params in (boxed, pure) for state in given
    }
    assert len(reports) == 1 and "| a/kernel | 0 | 0 |" in reports.pop()
    portable = curvax.portable_state(transformation, pure, given[0])
    placed = curvax.place_state(transformation, pure, portable)
    own = curvax.state_of(transformation, boxed, given[0], "a/kernel")
    assert_close(curvax.state_of(transformation, pure, placed, "a/kernel"), own, factor=0)


def test_the_error_about_merged_vectors_names_a_predicate_that_helps() -> None:
    params = {name: {"kernel": np.ones((8, 6))} for name in "ab"}

    def portable(least: int) -> Any:
        optimizer = curvax.quantize_state(curvax.racs(0.1), where=lambda _, leaf: leaf.ndim > least)
        return curvax.portable_state(optimizer, params, optimizer.init(params))

    with pytest.raises(ValueError, match="merges vectors: .* leaf.ndim > 2"):
        portable(1)
    assert jax.tree.leaves(portable(2))
