"""The README's code runs as it stands, top to bottom."""

import pathlib
import re

import jax.numpy as jnp
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def namespace():
    """What the README's Python blocks define, run one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    return names


def test_the_step_compiles_once(namespace):
    assert namespace["step"]._cache_size() == 1


def test_the_combined_method_gives_an_orthogonal_direction(namespace):
    params = {"a": {"kernel": jnp.eye(3) + 1}}
    optimizer = namespace["optimizer"]
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    norm = float(jnp.linalg.norm(updates["a"]["kernel"]))
    assert abs(norm - 0.02 * 3**0.5) < 1e-6  # an orthogonal 3×3 matrix has the norm √3
