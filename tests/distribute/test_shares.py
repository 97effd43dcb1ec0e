"""Who has which matrices: each is on one device, which does its work."""

import collections
import math
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import curvax
from curvax.transforms.distribute import _shares
from curvax.transforms.linalg import _turns
from tests.algebra import leaves_in
from tests.cells import ALL_CELLS
from tests.registry import NAMED
from tests.shared.meshes import (
    TWO_SHAPES,
    as_on_one_device,
    begin,
    explicit_by_default,
    given,
    mesh_of,
)
from tests.shared.processes import run_python

EXAMPLES = 100 if ALL_CELLS else 25


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.tuples(st.integers(1, 40), st.integers(1, 64), st.integers(1, 64)),
        max_size=6,
    ),
    st.integers(1, 17),
)
def test_every_matrix_is_on_one_device_and_no_device_has_much_more_than_others(
    shapes: dict[str, tuple[int, int, int]], devices: int
) -> None:
    shares = _shares.share(shapes, devices)
    number, load = np.zeros(devices, int), np.zeros(devices)
    found: dict[str, list[int]] = {}
    for key, shape in shapes.items():
        assert shares.even[key] % devices == 0 and shares.even[key] <= shape[0]
        found[key] = list(range(shares.even[key]))
        number += shares.even[key] // devices
        load += shares.even[key] // devices * _shares.cost(*shape[1:])
    for r in shares.rounds:
        busy = [device for owners in r.owners.values() for device in owners]
        assert len(set(busy)) == len(busy) and set(busy) <= set(range(devices))
        for i, (key, owners) in enumerate(r.owners.items()):
            places = r.places(key, devices)[[*owners]]
            found[key] += [*places]  # in order: updates come back round by round
            assert {*owners} == {*np.flatnonzero(r.kinds(devices) == i)}
            number[[*owners]] += 1
            load[[*owners]] += _shares.cost(*shapes[key][1:])
    for key, shape in shapes.items():
        assert found[key] == list(range(shape[0]))
    dearest = max((_shares.cost(*shape[1:]) for shape in shapes.values()), default=0)
    assert max(number) - min(number) <= len(shares.rounds)
    assert max(load) - min(load) <= dearest * (1 + 1e-9)
    if shapes:
        np.testing.assert_allclose(shares.busiest, max(load) / load.mean())
    if all(shares.even[key] == shape[0] // devices * devices for key, shape in shapes.items()):
        if shares.busiest > _shares.BALANCED:
            assert max(number) < number.mean() + 1
            # As many rounds as there are matrices left for a device.
            left = sum(n[0] % devices for n in shapes.values())
            assert len(shares.rounds) == math.ceil(left / devices)
    else:  # cheap matrices fill the gaps only if they can
        assert shares.busiest <= _shares.BALANCED


MODELS = {  # matrices of transformers, devices, and what one may hold over its share of the state
    "GPT-2": ({"qkvo": (48, 768, 768), "up": (12, 768, 3072), "down": (12, 3072, 768)}, 16, 1.25),
    "LLaMA-1B": (
        {"qkvo": (96, 2048, 2048), "up": (48, 2048, 5461), "down": (24, 5461, 2048)},
        32,
        1.25,
    ),
    "LLaMA-7B": (
        {"qkvo": (128, 4096, 4096), "up": (64, 4096, 11008), "down": (32, 11008, 4096)},
        64,
        1.25,
    ),
    "experts": ({"qkvo": (32, 512, 512), "up": (128, 512, 256), "kv": (16, 512, 128)}, 64, 1.8),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_device_has_a_tenth_more_work_than_the_mean(name: str) -> None:
    """Nor much more state. If matrices were dealt by number alone, it would have."""
    shapes, devices, most = MODELS[name]
    shares = _shares.share(shapes, devices, (), _shares.product_cost)
    assert shares.busiest <= 1.1
    held = sum(shares.even[key] // devices * math.prod(shape[1:]) for key, shape in shapes.items())
    held += sum(max(math.prod(shapes[key][1:]) for key in r.owners) for r in shares.rounds)
    assert held <= most * sum(map(math.prod, shapes.values())) / devices
    with mock.patch.object(_shares, "BALANCED", math.inf):
        assert _shares.share(shapes, devices, (), _shares.product_cost).busiest > 1.1


@explicit_by_default
def test_cheap_matrices_that_fill_gaps_are_updated_as_on_one_device(kind: str) -> None:
    """Of twelve narrow ones two devices get none: they have two large ones each."""
    shapes = {f"{i}/kernel": (8, 12) for i in range(6)}
    shapes |= {f"narrow/{i}/kernel": (4, 6) for i in range(12)}
    mesh, muon = mesh_of(kind), NAMED["muon"]
    optimizer, params, *_ = as_on_one_device(muon.make, *given(shapes, 2), mesh, muon.growth)
    summary = curvax.summarize(optimizer, params)
    mean = (6 * 8**2 * 32 + 12 * 4**2 * 16) / 4
    assert f"4 devices the busiest has {2 * 8**2 * 32 / mean:.2f}" in summary


def test_a_matrix_that_is_dealt_out_early_into_a_late_round_gets_its_own_update() -> None:
    """The third of four small ones goes to a device that has one, the last to one that has none."""
    shapes = {"large": (2, 24, 12), "square": (1, 16, 16), "small": (4, 12, 12)}
    assert len(_shares.share(shapes, 4).rounds) == 3
    kernels = {f"{key}/{i}/kernel": x[1:] for key, x in shapes.items() for i in range(x[0])}
    racs = NAMED["racs"]
    as_on_one_device(racs.make, *given(kernels, 2), mesh_of(), racs.growth)


@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), max_size=5),
    st.sets(st.integers(0, 4)),
    st.integers(1, 17),
)
def test_matrices_are_shared_as_far_as_it_makes_a_step_shorter(
    sizes: list[tuple[int, int, int]], chosen: set[int], devices: int
) -> None:
    shapes = {str(i): shape for i, shape in enumerate(sizes)}
    divisible = {str(i) for i in chosen} & set(shapes)
    hypothesis.assume(divisible)
    price = {key: _shares.product_cost(*shape[1:]) for key, shape in shapes.items()}

    def duration(shares: Any) -> float:
        """Of the busiest device, and of what all exchange."""
        left = {key: shape[0] - shares.even[key] for key, shape in shapes.items()}
        load = np.full(
            devices, float(sum(shares.even[key] // devices * price[key] for key in shapes))
        )
        load += sum(left[key] * price[key] for key in shares.shared) / devices
        dealt = collections.Counter[str]()
        for r in shares.rounds:
            for key, owners in r.owners.items():
                dealt[key] += len(owners)
                load[[*owners]] += price[key]
        assert dealt == {key: n for key, n in left.items() if n and key not in shares.shared}
        return max(load) + sum(left[key] * 20 * min(shapes[key][1:]) ** 2 for key in shares.shared)

    def best(cost: float) -> Any:
        with mock.patch.object(_shares, "EXCHANGE", cost):
            return _shares.share(shapes, devices, divisible, _shares.product_cost)

    shares, alone, whole = best(20.0), best(1e99), best(0.0)
    assert set(shares.shared) <= divisible
    open_to_it = {key for key in divisible - set(shares.shared) if shapes[key][0] % devices}
    for key in shares.shared:  # the most expensive first
        assert price[key] >= max((price[other] for other in open_to_it), default=0)
    assert not alone.shared
    assert duration(shares) <= min(duration(alone), duration(whole)) * (1 + 1e-9)


def test_a_device_decomposes_the_factors_of_its_own_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve matrices on four devices, and a thirteenth: a quarter, and one more."""
    params, gradients = given({f"{i}/kernel": (4, 6) for i in range(13)}, 4)
    log: collections.Counter[int] = collections.Counter()
    plain = _turns.by_eigh

    def logged(u: jax.Array, h: jax.Array) -> Any:
        device = jax.lax.axis_index("x")
        jax.debug.callback(lambda device, _: log.update([int(device)]), device, h[0, 0])
        return plain(u, h)

    monkeypatch.setattr(_turns, "by_eigh", logged)
    mesh = mesh_of()
    optimizer = NAMED["shampoo"].make(mesh=mesh, side="left")
    step, state, executed = jax.jit(optimizer.update), begin(optimizer, params, mesh), []
    for gradient in gradients:
        _, state = step(gradient, state, params)
        jax.effects_barrier()
        executed.append([log.pop(device, 0) for device in range(4)])
    assert [sorted(counts) for counts in executed] == 2 * [[0] * 4, [3, 3, 3, 4]]
    portable = curvax.portable_state(optimizer, params, state)
    counts = leaves_in(portable, ["refreshes"])["refreshes"]
    assert {int(n) for x in counts for n in x} == {2}


def test_the_summary_says_on_how_many_devices_matrices_are() -> None:
    params, _ = given(TWO_SHAPES)
    summary = curvax.summarize(NAMED["muon"].make(mesh=mesh_of("auto", 8)), params)
    lines = {line.split(" | ")[0].strip("| "): line for line in summary.splitlines()}
    for name in TWO_SHAPES:
        if "bias" not in name:
            number = 5 if name[0].isdigit() else 2
            assert f"on {number} of 8 devices" in lines[name]
    assert "devices" not in lines["a/bias"]
    assert "devices" not in curvax.summarize(NAMED["muon"].make(), params)


def test_processes_divide_alike_whatever_their_hashes() -> None:
    """Stacks of one price are dealt out in their order; each host of a mesh computes it anew."""
    shapes = {"large": (1, 80, 80)} | {f"{i}": (8, 32 + i, 64 - i) for i in range(4)}
    call = f"from curvax.transforms.distribute._shares import share; print(share({shapes}, 4))"
    printed = {run_python("-c", call, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert printed == {str(_shares.share(shapes, 4))}
