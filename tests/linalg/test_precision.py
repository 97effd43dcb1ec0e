"""Levels of products: what they round, which operations have them, and what they cost."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg._eigh import eigh
from curvax.transforms.linalg._inverse_root import solve_root
from curvax.transforms.linalg._products import at, exact_product, multiplied, square_of_lower
from curvax.transforms.linalg._qr import qr
from tests.cells import cells
from tests.helpers import generator, orthogonal, scanned
from tests.shared.programs import text_for

ORDER, COLUMNS, STEPS = 24, 40, 20
G = np.float32(generator(jax.random.key(0)).standard_normal((STEPS, ORDER, COLUMNS)))
MAKERS = {
    "asgo": functools.partial(curvax.scale_by_asgo, method="rotations", refresh=2),
    # On the left: the larger side's first statistic has a null space, in which bases are arbitrary.
    "soap": functools.partial(curvax.scale_by_soap, method="rotations", refresh=2, side="left"),
    "kl_shampoo": functools.partial(curvax.scale_by_kl_shampoo, refresh=2),
    "shampoo": functools.partial(
        curvax.scale_by_shampoo, method="products", refresh=2, statistics_every=1, graft=None
    ),
}
OPERATIONS = ("step", "statistics", "refresh")


def pieces(x: Any, number: int) -> list[Any]:
    """Numbers of bfloat16 whose sum is near `x`, in float64: all but the last are cut off."""
    found = []
    for _ in range(number - 1):
        found.append((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))
        x = x - found[-1]
    return [np.float64(y) for y in (*found, np.asarray(x, jnp.bfloat16))]


@pytest.mark.parametrize(("level", "number"), [("bf16", 1), ("bf16x3", 2), ("bf16x6", 3)])
def test_a_level_has_the_error_of_its_products_of_pieces(level: str, number: int) -> None:
    a, b = (
        np.float32(generator(jax.random.key(i)).standard_normal((96, 96))) * 10.0**power
        for i, power in enumerate((3, -5))
    )
    exact = np.matmul(a, b, dtype=np.float64)
    those, others = pieces(a, number), pieces(b, number)
    kept = [(i, j) for i in range(number) for j in range(number - i)]
    of_pieces = sum(those[i] @ others[j] for i, j in kept)
    found = np.asarray(multiplied(jnp.asarray(a), jnp.asarray(b), level), np.float64)
    error, expected = (
        np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (found, of_pieces)
    )
    # Both have the rounding of float32, which is more than that of six products.
    np.testing.assert_allclose(found, of_pieces, rtol=0, atol=1e-6 * np.abs(exact).max())
    assert expected < {1: 4e-3, 2: 2e-5, 3: 1e-7}[number]
    assert error < 5e-7 if number == 3 else 0.99 < error / expected < 1.01


@pytest.mark.parametrize("name", cells(MAKERS, of=4))
def test_each_operation_has_its_own_level(name: str) -> None:
    """A level of one of them rounds its products alone."""
    make = MAKERS[name]

    def updates(**given: Any) -> np.ndarray:
        return scanned(make(**given))(G[:3])[0]

    plain = updates()
    found = {x: updates(products=curvax.products(**{x: "bf16x3"})) for x in OPERATIONS}
    for operation, x in found.items():
        error = np.linalg.norm(x - plain) / np.linalg.norm(plain)
        assert 1e-8 < error < 0.1, (operation, error)
    first, second, third = found.values()
    assert (first != second).any() and (second != third).any() and (first != third).any()


def passes(text: str) -> list[int]:
    """Of the products with an algorithm: how many products of bfloat16 each is."""
    return [int(x) for x in re.findall(r"num_primitive_operations = (\d)", text)]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_programs_for_devices_have_the_presets(platform: str) -> None:
    like = jax.ShapeDtypeStruct((3, ORDER, COLUMNS), jnp.float32)
    products = curvax.products(step="bf16x3", statistics="bf16", refresh="bf16x6")
    direction = curvax.scale_by_soap(method="rotations", refresh=1, products=products)
    state = jax.eval_shape(direction.init, like)
    text = text_for(platform, direction.update, like, state)
    count = {x: passes(text).count(x) for x in (1, 3, 6)}
    # A rotation has six products, and the gradient and its average turn along, on both sides.
    assert count == {1: 2, 3: 4, 6: 2 * (6 + 2)}


@pytest.mark.parametrize(
    ("method", "platform"), cells([None, "eigh"], ["cpu", "cuda", "tpu"], of=2)
)
def test_statistics_and_refreshes_are_in_halves_where_devices_have_them(
    method: str | None, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; not with the papers' form, nor on a GPU without bfloat16."""
    like = jax.ShapeDtypeStruct((3, ORDER, COLUMNS), jnp.float32)
    direction = curvax.scale_by_soap(method=method, refresh=1)
    state = jax.eval_shape(direction.init, like)
    found = passes(text_for(platform, direction.update, like, state))
    halved = 2 * (1 + 6 + 2)  # a Gram product, a rotation, and what turns along
    assert found == ([] if method or platform == "cpu" else halved * [3])

    class Device:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert passes(text_for("cuda", direction.update, like, state)) == []


def test_products_with_reflectors_have_the_level_of_a_step() -> None:
    like = jax.ShapeDtypeStruct((ORDER, COLUMNS), jnp.float32)
    storage, products = curvax.packed(min_elements=1), curvax.products(step="bf16x3")
    direction = curvax.scale_by_soap(side="left", storage=storage, products=products)
    state = jax.eval_shape(direction.init, like)
    found = passes(text_for("cuda", direction.update, like, state))
    assert len(found) >= 2 and {*found} == {3}


@pytest.mark.parametrize(
    "decomposed", [eigh, qr, square_of_lower], ids=["eigh", "qr", "square of a triangle"]
)
def test_decompositions_have_no_level(decomposed: Any) -> None:
    square = jax.ShapeDtypeStruct((ORDER, ORDER), jnp.float32)

    def leveled(x: jax.Array) -> Any:
        with at("bf16"):
            return decomposed(x), exact_product(x, x)

    for platform in ("cuda", "tpu"):
        assert passes(text_for(platform, leveled, square)) == [1]  # of the product beside it


def graded(condition: float) -> tuple[np.ndarray, np.ndarray]:
    spectrum = np.geomspace(1, 1 / condition, ORDER)
    return orthogonal(jax.random.key(1), ORDER, ORDER), spectrum


@pytest.mark.parametrize("level", ["float32", "bf16x6", "bf16x3"])
@pytest.mark.parametrize("root", [2, 4])
def test_roots_by_products_are_as_good_as_their_level(level: str, root: int) -> None:
    """The error is at most four units of the level times the condition number."""
    unit = 2.0**-16 if level == "bf16x3" else 2.0**-24

    @jax.jit
    def solved(a: jax.Array) -> jax.Array:
        with at(level):
            return solve_root(a, root, 0.0, "absolute", "products").inverse_root

    for condition in (1e2, 1e4):
        u, d = graded(condition)
        exact = (u * d ** (-1 / root)) @ u.T
        x = np.asarray(solved(jnp.asarray((u * d) @ u.T, jnp.float32)), np.float64)
        g = (u * d ** (1 / root)) @ u.T @ np.float64(G[0])
        error = np.linalg.norm((x - exact) @ g) / np.linalg.norm(G[0])
        assert error < 4 * unit * condition, (condition, error)


def test_rotations_of_a_step_bear_three_products() -> None:
    """SOAP's direction in exact bases of condition numbers of 1e6; one product is the control."""
    left, d = graded(1e6)
    right = orthogonal(jax.random.key(2), ORDER, ORDER)
    across = np.sqrt(np.outer(d, d))
    given = left @ (across * np.float64(G[0, :, :ORDER])) @ right.T, left, right, across

    def direction(times: Any, g: Any, left: Any, right: Any, across: Any) -> Any:
        return times(times(left, times(times(left.T, g), right) / across), right.T)

    def error(level: str) -> float:
        times = functools.partial(multiplied, precision=level)
        single = [jnp.asarray(x, jnp.float32) for x in given]
        found = np.asarray(jax.jit(functools.partial(direction, times))(*single), np.float64)
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    exact = direction(np.matmul, *given)
    assert error("bf16x6") < 0.01 and error("bf16x3") < 0.1 < 0.5 < error("bf16")


def test_rotated_bases_bear_three_products() -> None:
    """At a condition number of 1e6, also with Gram products in bfloat16."""
    u, d = graded(1e6)
    gradients = np.float32((u * d**0.5) @ np.float64(G))
    exact = sum(0.05 * 0.95**i * (g @ g.T) for i, g in enumerate(np.float64(gradients[::-1])))
    values, vectors = np.linalg.eigh(exact)
    desired = (vectors * values**-0.5) @ (vectors.T @ np.float64(gradients[-1]))

    def error(products: Any) -> float:
        how: Any = {"b2": 0.95, "side": "left", "root": 2, "method": "rotations"}
        direction = curvax.precondition(refresh=curvax.every(1), products=products, **how)
        left = scanned(direction)(gradients)[1].left
        basis, h = (np.asarray(x[-1], np.float64) for x in (left.basis, left.statistic))
        assert np.abs(basis.T @ basis - np.eye(ORDER)).max() < 4e-3
        found = (basis * np.diag(h) ** -0.5) @ (basis.T @ np.float64(gradients[-1]))
        return float(np.linalg.norm(found - desired) / np.linalg.norm(desired))

    in_bf16 = curvax.products(step="bf16x3", statistics="bf16", refresh="bf16x3")
    most = 1.2 * error("float32") + 0.01
    assert error("bf16x3") < most and error(in_bf16) < most
    # One product leaves a defect that no turn straightens; the bases are rotated all the same.
    assert error(curvax.products(refresh="bf16")) < 0.5


@pytest.mark.parametrize("make", [curvax.scale_by_soap, curvax.scale_by_asgo])
def test_float64_has_no_levels(make: Any) -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="products must be None.*float64"):
        make(products="bf16x3").init(jnp.zeros((4, 6), jnp.float64))
