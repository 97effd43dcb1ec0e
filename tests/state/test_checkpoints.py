"""A state can be stored at any step and continues bit for bit; other states are refused.

`PYTHONPATH=. python tests/state/test_checkpoints.py` writes `state_format.json`, the record of
the present format.
"""

import hashlib
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import curvax
from curvax.transforms.state._format import STATE_FORMAT
from tests.cells import cells
from tests.contract import PLAIN, compiled, small_tree, two_stacks
from tests.helpers import assert_close, gradients_like, run
from tests.registry import METHODS, NAMED, REGISTRY, Row

RECORD = Path(__file__).parent / "state_format.json"


def numbered(optimizer: Any, params: Any) -> Any:
    """A state with a number of its own in each entry."""
    shapes, structure = jax.tree.flatten(jax.eval_shape(optimizer.init, params))
    ends = itertools.accumulate(x.size for x in shapes)
    numbers = [np.arange(end - x.size, end) for x, end in zip(shapes, ends, strict=True)]
    arrays = zip(numbers, shapes, strict=True)
    return structure.unflatten([n.reshape(x.shape).astype(x.dtype) for n, x in arrays])


def through_flax(state: Any, empty: Any) -> Any:
    return flax.serialization.from_bytes(empty, flax.serialization.to_bytes(state))


def through_pickle(state: Any, empty: Any) -> Any:
    del empty
    return pickle.loads(pickle.dumps(state))


def assert_continues(optimizer: Any, params: Any, number: int, through: Callable) -> None:
    """A run whose state goes through a file before each step is the same as in one go."""
    gradients, first = gradients_like(params, number), optimizer.init(params)
    state = first
    for gradient, *whole in zip(gradients, *run(optimizer, gradients, params, jit=False)):  # noqa: B905
        found, state = optimizer.update(gradient, through(state, first), params)
        assert_close([found, state], whole, factor=0)


@pytest.mark.parametrize("through", [through_flax, through_pickle])
@pytest.mark.parametrize("row", cells(PLAIN, of=2))
def test_a_restored_state_continues_bit_for_bit(row: Row, through: Callable):
    assert_continues(compiled(row), small_tree(), 4, through)


def test_a_cycle_of_foam_continues_bit_for_bit() -> None:
    """With a coded factor, and checks at every fourth step."""
    settings = {"refresh": curvax.policies.foam(4), "damping_mode": "absolute", "eps": 1e-9}
    storage = curvax.cholesky(block=4, error_feedback=0.95, min_elements=1)
    foam = curvax.scale_by_shampoo(
        storage=storage, root=2, side="left", graft="adam", statistics_every=1, **settings
    )
    foam = optax.GradientTransformation(jax.jit(foam.init), jax.jit(foam.update))
    assert_continues(foam, small_tree()["head"], 8, through_flax)


@pytest.mark.filterwarnings("default")  # warnings of Orbax
def test_orbax_restores_every_state(tmp_path: Path) -> None:
    """All methods' in one checkpoint."""
    params = small_tree()
    optimizers = {row.name: row.make() for row in REGISTRY}
    full = {name: numbered(opt, params) for name, opt in optimizers.items()}
    empty = {name: jax.eval_shape(opt.init, params) for name, opt in optimizers.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", full)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", empty)
    assert_close(restored, full, factor=0)
    assert jax.tree.structure(restored) == jax.tree.structure(empty)


def test_descriptions_of_other_states_and_formats_are_refused() -> None:
    params = small_tree()
    muon, racs = (NAMED[name].make() for name in ("muon", "racs"))
    description = json.loads(json.dumps(curvax.describe_state(muon, params)))
    curvax.check_state(muon, params, description)
    message = r"^description has .* at '.*', where this optimizer has .* \(\d+ of \d+ arrays differ"
    with pytest.raises(ValueError, match=message):
        curvax.check_state(racs, params, description)
    for foreign in ({}, None, [], {"step": 3}, {"curvax_state_format": "1", "arrays": {}}):
        with pytest.raises(ValueError, match="expected the result of curvax.describe_state"):
            curvax.check_state(muon, params, foreign)
    for number, age in ((STATE_FORMAT - 1, "an older"), (STATE_FORMAT + 1, "a later")):
        message = f"format {number}, from {age} version of curvax.*or start with optimizer.init"
        with pytest.raises(ValueError, match=message):
            curvax.check_state(muon, params, description | {"curvax_state_format": number})


WRONG: list[Any] = [None, 3, "x", True, [3], {"x": 3}, {"x": ["int32[]"]}, [[3]], [[["x", 3]]]]
WRONG += [[[["x", [["y", "1"]]]]], [[["x", [["y", -1]]]]], [[["x", [["y"]]]]], [[[3, [["y", 1]]]]]]


@pytest.mark.parametrize(
    "entry", ["curvax_state_format", "arrays", "matrices", "empty", "parts", "stacks"]
)
def test_entries_of_another_type_are_named(entry: str) -> None:
    params, muon = small_tree(), NAMED["muon"].make()
    state, about = muon.init(params), curvax.describe_state(muon, params)
    for wrong in WRONG:
        if entry == "curvax_state_format" and wrong == 3:
            continue  # another format, not another type
        description = about | {entry: wrong}
        message = f"expected the result of curvax.describe_state.* entry '{entry}' is"
        with pytest.raises(ValueError, match=message):
            curvax.check_state(muon, params, description)
        with pytest.raises(ValueError, match=message):
            curvax.place_state(muon, params, state, description=description)
    for stacks in ([], about["stacks"] * 2, [[["4x6", [["a", 1]]]]]):
        description = about | {"stacks": stacks}
        with pytest.raises(ValueError, match=r"matrix views|first axis must be|portable has"):
            curvax.place_state(muon, params, state, description=description)


def test_the_fields_that_one_state_alone_has_are_named() -> None:
    params = small_tree()
    muon, soap = (curvax.describe_state(NAMED[name].make(), params) for name in ("muon", "soap"))
    for name, other, where in (("muon", soap, "description"), ("soap", muon, "the optimizer")):
        with pytest.raises(ValueError, match=rf"^description has .*; only {where} has [^;]*left"):
            curvax.check_state(NAMED[name].make(), params, other)
    of_rank_3 = curvax.describe_state(curvax.galore(0.1, rank=3), params)
    with pytest.raises(ValueError, match=r"^description has .* differ\)\. .*: rank, storage"):
        curvax.check_state(curvax.galore(0.1, rank=2), params, of_rank_3)


def test_a_description_is_that_of_one_device_on_any_mesh() -> None:
    params = small_tree()
    mesh = jax.make_mesh((4,), ("x",))
    alone = curvax.describe_state(curvax.soap(0.1), params)
    assert curvax.describe_state(curvax.soap(0.1, mesh=mesh), params) == alone


SQUARE = {"dense": {"kernel": np.zeros((8, 8), np.float32)}}
TILES = {"block": 4, "min_elements": 1}
BOTH_WAYS = [{"dense/kernel": curvax.MatrixAxes(rows, 1 - rows)} for rows in (0, 1)]
SAME_SHAPES = {
    "policy": (curvax.foam(0.1), curvax.dr_shampoo(0.1)),
    "code": [
        curvax.soap(0.1, storage=curvax.quantized(map=code, **TILES))
        for code in ("linear2", "linear")
    ],
    "tiles": [
        curvax.soap(0.1, storage=curvax.quantized(block=block, min_elements=1)) for block in (8, 16)
    ],
    "signs": [
        curvax.quantize_state(optax.adam(0.1), unsigned=names, min_elements=1)
        for names in ((), ("mu",))
    ],
    "momentum": [curvax.muon(0.1, accumulate=kind) for kind in ("sum", "ema")],
    "neurons": [
        curvax.assemble(curvax.normalize_neurons(side=side), 0.1) for side in ("left", "right")
    ],
    "axes": [curvax.muon(0.1, weight_dimension_numbers=axes) for axes in BOTH_WAYS],
    "axes of blocks": [
        curvax.asgo(0.1, matrices=curvax.MatrixRule(block_size=4), weight_dimension_numbers=axes)
        for axes in BOTH_WAYS
    ],
}


@pytest.mark.parametrize("name", SAME_SHAPES)
def test_arrays_of_the_same_shapes_with_another_meaning_are_refused(name: str) -> None:
    saved, other = SAME_SHAPES[name]
    description = json.loads(json.dumps(curvax.describe_state(saved, SQUARE)))
    assert description["arrays"] == curvax.describe_state(other, SQUARE)["arrays"]
    curvax.check_state(saved, SQUARE, description, portable=True)
    with pytest.raises(ValueError, match="another meaning|1 of 1 matrices differ"):
        curvax.check_state(other, SQUARE, description, portable=True)


@pytest.mark.filterwarnings("default")  # warnings of Orbax
def test_the_arrays_of_another_base_go_where_they_belong(tmp_path: Path) -> None:
    """AdamW and Adam have the same moments in chains of other lengths, which Orbax refuses."""
    params = small_tree()
    saved, other = (curvax.shampoo(0.1, base=base) for base in (optax.adamw, optax.adam))
    state = numbered(saved, params)
    description = json.loads(json.dumps(curvax.describe_state(saved, params)))
    with pytest.raises(ValueError, match=r"containers .*inner_state/1/2.* curvax.place_state"):
        curvax.check_state(other, params, description)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", curvax.portable_state(saved, params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    placed = curvax.place_state(other, params, restored)
    assert jax.tree.structure(placed) == jax.tree.structure(other.init(params))
    assert_close(jax.tree.leaves(placed), jax.tree.leaves(state), factor=0)


def formats() -> dict[str, str]:
    """A digest of every method's state, and of the storages'."""
    made = {row.name: row.make() for row in METHODS}
    storages = {
        "quantized": curvax.quantized(**TILES),
        "cholesky": curvax.cholesky(**TILES),
        "error feedback": curvax.cholesky(error_feedback=0.95, **TILES),
        "packed": curvax.packed(**TILES),
    }
    made |= {name: curvax.shampoo(0.1, storage=storage) for name, storage in storages.items()}
    made["packed bases"] = curvax.soap(0.1, storage=storages["packed"])
    made["coded moments"] = curvax.quantize_state(curvax.muon(0.1), where=lambda *_: True)
    found = {}
    for name, optimizer in made.items():
        arrays = curvax.describe_state(optimizer, two_stacks())["arrays"]
        found[name] = hashlib.sha256(json.dumps(arrays).encode()).hexdigest()[:16]
    return found


def test_a_changed_state_has_another_format() -> None:
    """A method that is new since the last release has no state that somebody has saved."""
    record, found = json.loads(RECORD.read_text()), formats()
    known = {name: found.get(name) for name in record["states"]}
    assert record == {"format": STATE_FORMAT, "states": known}, (
        "States have changed: raise STATE_FORMAT in transforms/state/_format.py if it is that "
        f"of {RECORD.name}, say in CHANGELOG.md what has changed, and run this file as its first "
        "lines say."
    )


if __name__ == "__main__":
    RECORD.write_text(json.dumps({"format": STATE_FORMAT, "states": formats()}, indent=2) + "\n")
