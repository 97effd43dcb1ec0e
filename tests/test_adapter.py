"""Adapters from two sets of weights, against the transcription."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from reference.sumo import extract_adapter

import curvax


def _trees():
    """Parameters before and after, in float32."""
    generator = np.random.default_rng(0)
    before, after = {}, {}
    for name, shape in {"query": (6, 2, 5), "up": (6, 9), "down": (9, 6)}.items():
        kernel, change = generator.standard_normal((2, *shape))
        before[name] = {"kernel": jnp.asarray(kernel, "float32"), "bias": jnp.zeros(shape[1:])}
        after[name] = {"kernel": before[name]["kernel"] + 0.1 * change, "bias": jnp.ones(shape[1:])}
    return before, jax.tree.map(lambda x: x.astype("float32"), after)


@pytest.mark.parametrize("options", [{"rank": 2}, {"rank": 99}, {"tolerance": 0.3}], ids=str)
def test_factors_are_the_transcriptions(options):
    before, after = _trees()
    adapters = curvax.extract_adapter(before, after, **options)
    assert set(adapters) == {"query/kernel", "up/kernel", "down/kernel"}
    for name, adapter in adapters.items():
        key = name.split("/")[0]
        kernels = (np.asarray(tree[key]["kernel"], np.float64) for tree in (before, after))
        old, new = (x.reshape(x.shape[0], -1) for x in kernels)
        a, b, error = extract_adapter(old, new, **options)
        assert_close(adapter.a[0], a, 64, condition=1e2, eps=2.0**-23)
        assert_close(adapter.b[0], b, 64, condition=1e2, eps=2.0**-23)
        assert abs(float(adapter.error[0]) - error / np.linalg.norm(new - old)) < 1e-5


def test_what_sumo_changes_in_one_step_has_its_rank():
    before, gradients = _trees()
    optimizer = curvax.sumo(0.1, rank=2)
    updates, _ = optimizer.update(gradients, optimizer.init(before), before)
    after = {n: {k: x + updates[n][k] for k, x in t.items()} for n, t in before.items()}
    for adapter in curvax.extract_adapter(before, after, rank=2).values():
        assert float(adapter.error[0]) < 1e-4


def test_nothing_changed_gives_zero_factors_and_no_error():
    before, _ = _trees()
    for adapter in curvax.extract_adapter(before, before, tolerance=0.1).values():
        assert not adapter.a.any() and not adapter.b.any() and not adapter.error.any()


def test_bad_arguments_are_named():
    before, after = _trees()
    for options in ({}, {"rank": 2, "tolerance": 0.1}):
        with pytest.raises(ValueError, match="give rank or tolerance"):
            curvax.extract_adapter(before, after, **options)
    with pytest.raises(ValueError, match="rank must be an integer of at least 1, got 0"):
        curvax.extract_adapter(before, after, rank=0)
    with pytest.raises(ValueError, match="tolerance must be a number in"):
        curvax.extract_adapter(before, after, tolerance=1.5)
    with pytest.raises(ValueError, match="after must be a tree like before"):
        curvax.extract_adapter(before, {"up": after["up"]}, rank=1)
    after["up"]["kernel"] = after["up"]["kernel"].at[0, 0].set(jnp.inf)
    with pytest.raises(ValueError, match="change of the parameter 'up/kernel' must be finite"):
        curvax.extract_adapter(before, after, rank=1)
