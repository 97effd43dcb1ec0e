"""States that older versions saved go on as they would have there.

`older_states.npz` has, for formats 1 to 3 and five methods, the state after three steps and the
updates of the fourth, written by the versions that had these formats.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import assert_close

import curvax
from curvax.transforms.state._format import STATE_FORMAT

METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": lambda: curvax.muon(0.1, weight_decay=0.1),
    "shampoo": lambda: curvax.shampoo(0.1, refresh=2, b2=0.9),
    "soap": lambda: curvax.soap(0.1, refresh=4, side="smaller"),
    "galore": lambda: curvax.galore(0.1, rank=2),
    "foam": lambda: curvax.foam(0.1, check_every=2),
}
SHAPES = {"a": {"kernel": (6, 4), "bias": (4,)}, "b": {"kernel": (6, 4)}, "c": {"kernel": (3, 5)}}


def trees() -> Iterator[Any]:
    """The parameters, and the gradients of four steps."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        yield jax.tree.map(
            lambda shape: rng.standard_normal(shape).astype(np.float32),
            SHAPES,
            is_leaf=lambda x: isinstance(x, tuple),
        )


@functools.cache
def stored() -> dict[str, np.ndarray]:
    """All arrays, by format, method and path."""
    with np.load(Path(__file__).parent / "older_states.npz") as file:
        flat = {name: file[name] for name in file.files}
    index = json.loads(flat.pop("index").tobytes())
    return {
        name: flat[dtype][start : start + int(np.prod(shape))].reshape(shape)
        for name, (dtype, start, shape) in index.items()
    }


def tree_of(prefix: str) -> dict[str, Any]:
    """What a checkpoint gives without a target: dictionaries, with strings for numbers."""
    root: dict[str, Any] = {}
    for name, x in stored().items():
        if name.startswith(f"{prefix}/"):
            *parents, last = name.removeprefix(f"{prefix}/").split("/")
            node = root
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = x
    return root


def of_format(number: int) -> dict[str, int]:
    return {"curvax_state_format": number}


@pytest.mark.parametrize("method", METHODS)
def test_a_state_of_an_older_format_goes_on(method: str) -> None:
    params, *_, gradient = trees()
    optimizer = METHODS[method]()
    update = jax.jit(optimizer.update)
    fresh, _ = update(gradient, optimizer.init(params), params)
    for number in range(1, STATE_FORMAT):
        old = tree_of(f"{number}/{method}/state")
        state = curvax.convert_state(optimizer, params, old, of_format(number))
        updates, after = update(gradient, state, params)
        expected = tree_of(f"{number}/{method}/updates")
        # FOAM's floor of roots is newer, and of the size of these errors.
        assert_close(updates, expected, condition=1e4 if method == "foam" else 100)
        assert not np.allclose(fresh["a"]["kernel"], expected["a"]["kernel"], rtol=1e-2)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert curvax.report(optimizer, params, after)


def test_the_last_formats_have_a_conversion() -> None:
    from curvax.transforms.state._older import CONVERSIONS

    assert len(CONVERSIONS) == STATE_FORMAT - 1


@pytest.mark.parametrize("portable", [False, True])
def test_counters_and_large_matrices_keep_their_numbers(portable: bool) -> None:
    """Matrices above 128 × 128 had an array of their own, whatever their shapes.

    In the portable form of format 3 all had.
    """
    shape = jax.ShapeDtypeStruct((2, 136), np.float32)
    params = {name: {"kernel": shape} for name in "abc"}
    mu = np.arange(2 * 3 * 136.0, dtype=np.float32).reshape(3, 1, 2, 136)
    optimizer = curvax.on_matrices(curvax.momentum())
    skipped = {"2x136": np.array([5, 7], np.int32), "b": {"kernel": np.array([6], np.int32)}}
    stacked = {"2x136": np.concatenate([mu[0], mu[2]]), "b": {"kernel": mu[1]}}
    if portable:
        skipped = {n: {"kernel": np.array([5 + i], np.int32)} for i, n in enumerate("abc")}
        stacked = {n: {"kernel": mu[i]} for i, n in enumerate("abc")}
    old = {"inner": {"skipped": skipped, "inner": {"count": np.int32(3), "mu": stacked}}}
    state = curvax.convert_state(optimizer, params, old, of_format(3))
    for i, name in enumerate("abc"):
        entries = curvax.state_of(optimizer, params, state, f"{name}/kernel")
        (momentum,) = (x for place, x in entries.items() if "/mu/" in place)
        (counter,) = (x for place, x in entries.items() if place.endswith("skipped"))
        np.testing.assert_array_equal(momentum, mu[i])
        assert counter.tolist() == [5 + i]


@pytest.mark.parametrize(
    ("optimizer", "number", "message"),
    [
        (curvax.muon(0.1), STATE_FORMAT, "must be 1 to 3, an older format; got 4"),
        (curvax.muon(0.1), "1", "an older format; got '1'"),
        (curvax.muon(0.1, b2=0.9), 3, "old has nothing for .*/neurons/.*Start with optimizer.init"),
        (curvax.muon(0.1, others=optax.sgd(0.1)), 3, "nothing here corresponds to .*Start with"),
        (curvax.muon(0.1, dtype="bfloat16"), 3, "old has float32.* where this optimizer has bfl"),
    ],
)
def test_what_cannot_be_taken_over_is_named(optimizer: Any, number: Any, message: str) -> None:
    params, *_ = trees()
    with pytest.raises(ValueError, match=message):
        curvax.convert_state(optimizer, params, tree_of("3/muon/state"), of_format(number))


def test_codes_of_a_storage_start_anew() -> None:
    params = {"a": {"kernel": np.ones((64, 64), np.float32)}}
    plain = curvax.scale_by_shampoo(storage=curvax.quantized(min_elements=1))
    optimizer = curvax.on_matrices(plain)
    dense = curvax.on_matrices(curvax.scale_by_shampoo())
    with pytest.raises(ValueError, match="Start with optimizer.init"):
        curvax.convert_state(optimizer, params, dense.init(params), of_format(3))
