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
from tests.registry import NAMED
from tests.shared.meshes import TWO_SHAPES, begin, given, mesh_of


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
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
        assert len(r.kind) == len(r.entry) == devices
        assert len(set(r.kinds)) == len(r.kinds) == len(set(r.kind) - {len(r.kinds)})
        for device, (kind, entry) in enumerate(zip(r.kind, r.entry, strict=True)):
            if kind < len(r.kinds):
                found[r.kinds[kind]].append(shares.even[r.kinds[kind]] + entry)
                number[device] += 1
                load[device] += _shares.cost(*shapes[r.kinds[kind]][1:])
    for key, shape in shapes.items():
        assert sorted(found[key]) == list(range(shape[0]))
    dearest = max((_shares.cost(*shape[1:]) for shape in shapes.values()), default=0)
    assert max(number) - min(number) <= len(shares.rounds)
    assert max(number) < number.mean() + 1
    assert max(load) - min(load) <= dearest * (1 + 1e-9)
    # The least that the rounds need: as many as there are matrices left for a device.
    assert len(shares.rounds) == math.ceil(sum(n[0] % devices for n in shapes.values()) / devices)


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)
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
    left = {key: shape[0] % devices for key, shape in shapes.items()}

    def duration(shares: Any) -> float:
        """Of the busiest device, and of what all exchange."""
        load = np.full(
            devices, float(sum(shares.even[key] // devices * price[key] for key in shapes))
        )
        load += sum(left[key] * price[key] for key in shares.shared) / devices
        dealt = collections.Counter[str]()
        for r in shares.rounds:
            for device, kind in enumerate(r.kind):
                if kind < len(r.kinds):
                    dealt[r.kinds[kind]] += 1
                    load[device] += price[r.kinds[kind]]
        assert dealt == {key: n for key, n in left.items() if n and key not in shares.shared}
        return max(load) + sum(left[key] * 20 * min(shapes[key][1:]) ** 2 for key in shares.shared)

    def best(cost: float) -> Any:
        with mock.patch.object(_shares, "EXCHANGE", cost):
            return _shares.share(shapes, devices, divisible)

    shares, alone, whole = best(20.0), best(1e99), best(0.0)
    assert set(shares.shared) <= divisible
    open_to_it = {key for key in divisible - set(shares.shared) if left[key]}
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
