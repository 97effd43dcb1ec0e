"""Packed triangles: errors, orthogonality, dither, what stays as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms._side import LEFT, RIGHT
from tests.cells import cells
from tests.helpers import assert_close, generator, orthogonal, with_spectrum

BITS = (4, 6, 8)
ORDERS = (1, 2, 5, 66, 130)
GAPS = {4: 56 / 225, 6: 248 / 3969, 8: 1016 / 65025}  # the largest between neighboring codes
EPS32 = float(np.finfo(np.float32).eps)
every_size = pytest.mark.parametrize(("bits", "order"), cells(BITS, ORDERS, of=12))


def storage_of(bits: int, block: int = 64):
    return curvax.packed(bits, block, min_elements=1)


@functools.cache
def there_and_back(bits: int, block: int = 64):
    """Stored forms of a factor, a root and a basis, and what they decode to."""
    storage = storage_of(bits, block)

    def coded(factor, root, basis):
        start = storage.encode_factor(0 * factor, None), storage.encode_basis(basis, None)
        stored = (
            storage.encode_factor(factor, start[0]),
            storage.encode_root(root),
            storage.encode_basis(basis, start[1]),
        )
        decode = storage.decode_factor, storage.decode_root, storage.decode_basis
        return start, stored, [f(x) for f, x in zip(decode, stored, strict=True)]

    return jax.jit(coded)


def _given(order: int, condition: float = 100.0):
    """A positive definite matrix, its inverse root and its eigenvectors."""
    u = orthogonal(jax.random.key(order), order, order)
    values = np.geomspace(condition, 1, order)
    return (u * values) @ u.T, (u * values**-0.25) @ u.T, u


@every_size
def test_factors_are_positive_and_within_a_gap(bits, order):
    """Roots are symmetric; their codes are those of `test_codec.py`."""
    factor, root, u = map(np.float32, _given(order))
    _, forms, (found, decoded, _) = there_and_back(bits)(factor, root, u)
    stored = forms[0]
    assert np.array_equal(decoded, decoded.T) and np.array_equal(np.diag(decoded), np.diag(root))
    assert np.array_equal(found, found.T)
    c = np.linalg.cholesky(np.float64(factor) + 1e-6 * factor.max() * np.eye(order))
    moved = GAPS[bits] * np.linalg.norm(np.tril(np.ones_like(c), -1)) * np.abs(c).max()
    bound = 2 * np.linalg.norm(c, 2) * moved + moved**2 + 2e-6 * order**0.5 * factor.max()
    assert np.linalg.norm(found - factor) <= bound
    values = np.linalg.eigvalsh(np.float64(found))
    assert values[0] >= -8 * order * EPS32 * values[-1]
    assert stored.updates == 1 and stored.failures == 0


@every_size
def test_bases_are_orthogonal_whatever_their_codes(bits, order):
    """Those of a basis, and any others; the basis moves by the errors of its reflectors."""
    factor, root, u = _given(order)
    stored, found = (x[2] for x in there_and_back(bits)(*map(np.float32, (factor, root, u)))[1:])
    draw = generator(jax.random.key(1))
    other = stored._replace(codes=np.uint8(draw.integers(0, 256, stored.codes.shape)))
    decode = jax.jit(storage_of(bits).decode_basis)
    for basis in (found, decode(other)):
        wide = np.asarray(basis, np.float64)
        gram = wide.T @ wide
        assert_close(gram, np.eye(order), 16 * max(order, 4) ** 0.5, eps=EPS32)
    assert np.linalg.norm(found - u) <= 16 * GAPS[bits] * order**0.5
    if order > 2:
        assert np.linalg.norm(np.float64(decode(other)) - u) > 0.5 * order**0.5


def test_the_identity_is_exact():
    """It is what a basis starts with, and needs no decomposition then."""
    storage, eye = storage_of(8), jnp.eye(70)

    @jax.jit
    def twice(x):
        start = storage.encode_basis(x, None)
        return [storage.decode_basis(s) for s in (start, storage.encode_basis(x, start))]

    assert_close(twice(eye), [eye, eye], 4)
    text = str(jax.make_jaxpr(lambda x: storage.encode_basis(x, None))(eye))
    assert "householder" not in text and "geqrf" not in text
    # What is kept of a statistic in its basis never needs one.
    start = storage.encode_correlation(eye, None)
    assert "cholesky" not in str(jax.make_jaxpr(storage.encode_correlation)(eye, start))


@pytest.mark.parametrize(
    ("shape", "columns"), cells([((), 5), ((2,), 5), ((), 67), ((2,), 67)], of=3), ids=str
)
def test_rotations_are_products_with_the_decoded_basis(shape, columns):
    """By reflectors, or by a basis formed for many columns."""
    storage, order = storage_of(8), 67
    u = jnp.broadcast_to(np.float32(_given(order)[2]), (*shape, order, order))
    draw = generator(jax.random.key(2))
    x = jnp.asarray(draw.standard_normal((*shape, order, columns)), jnp.float32)

    @jax.jit
    def found(u, x):
        stored = storage.encode_basis(u, storage.encode_basis(u, None))
        opened = storage.open_basis(stored, columns)
        assert isinstance(opened, jax.Array) == (columns >= order)
        turned = [storage.rotate(opened, x, LEFT, back) for back in (False, True)]
        turned += [storage.rotate(opened, x.mT, RIGHT, back) for back in (False, True)]
        return storage.decode_basis(stored), turned

    basis, turned = (jax.tree.map(np.float64, y) for y in found(u, x))
    x, inverse = np.float64(x), np.swapaxes(basis, -1, -2)
    wide = np.swapaxes(x, -1, -2)
    desired = [inverse @ x, basis @ x, wide @ basis, wide @ inverse]
    assert_close(turned, desired, 64, eps=EPS32)


def test_bases_are_read_by_products_alone():
    """LAPACK's batches wait for each other forever if both sides' bases are read at once."""
    storage, u = storage_of(8), jnp.broadcast_to(jnp.eye(130), (2, 130, 130))

    def read(u, columns):
        stored = storage.encode_basis(u, None)
        return storage.decode_basis(stored), storage.open_basis(stored, columns)

    for columns in (5, 130):
        text = str(jax.make_jaxpr(read, static_argnums=1)(u, columns))
        assert "dot_general" in text and "triangular_solve" not in text


@pytest.mark.parametrize(
    ("bases", "share"), [(curvax.dense(jnp.bfloat16), 2), (curvax.quantized(8), 1)]
)
def test_bases_in_another_storage(bases, share):
    """They are read as that storage reads them; factors, roots and small bases stay as they are."""
    order = 128
    factor, root, u = map(np.float32, _given(order))
    own, storage = storage_of(8), curvax.packed(bases=bases)

    @jax.jit
    def coded(u):
        stored = storage.encode_basis(u, storage.encode_basis(jnp.eye(order), None))
        turned = storage.rotate(storage.open_basis(stored, order), u, LEFT, False)
        read = [
            s.decode_basis(x) for s, x in ((storage, stored), (bases, bases.encode_basis(u, None)))
        ]
        return stored, *read, turned

    stored, found, desired, turned = coded(u)
    size = sum(x.nbytes for x in jax.tree.leaves(stored))
    assert order**2 * share <= size < order**2 * (share + 0.05)
    assert_close(found, desired)
    assert_close(turned, found.T @ u, 64)
    first = jax.jit(own.encode_factor)(jnp.eye(order), None)
    for one in ("factor", "root"):
        given = (factor, first) if one == "factor" else (root,)
        pair = [jax.jit(getattr(s, f"encode_{one}"))(*given) for s in (own, storage)]
        assert all(map(np.array_equal, *pair))
    assert isinstance(storage.encode_basis(jnp.eye(8), None), jax.Array)
    assert bases.describe(order) in storage.describe(order)


@pytest.mark.parametrize("b2", cells([0.999, 0.95], of=2))
def test_averages_follow_increments_below_a_gap(b2):
    """After the gradients change; rounded to the nearest code, they keep the old ones."""
    order, steps = 24, int(3 / (1 - b2))
    key = jax.random.key(0)
    spectrum = 1 / np.arange(1, order + 1.0) ** 2
    old, new = (
        with_spectrum(jax.random.fold_in(key, i), order, order, spectrum).astype(np.float32)
        for i in range(2)
    )
    old, new = old @ old.T, new @ new.T

    def error(old, new, encode, decode):
        """Of the average, whose exact value is known."""

        def step(stored, gram):
            return encode(b2 * decode(stored) + (1 - b2) * gram, stored), None

        def run(old, new):
            first = encode(old, encode(jnp.zeros_like(old), None))
            last, _ = jax.lax.scan(step, first, jnp.broadcast_to(new, (steps, order, order)))
            return decode(last)

        exact = b2**steps * old + (1 - b2**steps) * new
        return np.linalg.norm(jax.jit(run)(old, new) - exact) / np.linalg.norm(exact)

    storage, nearest = storage_of(8), curvax.cholesky(8, min_elements=1)
    assert error(old, new, storage.encode_factor, storage.decode_factor) <= 4 * GAPS[8]
    stale = error(old, new, nearest.encode_factor, nearest.decode_factor)
    assert b2 < 0.99 or stale > 16 * GAPS[8]
    old, new = (x / np.sqrt(np.outer(np.diag(x), np.diag(x))) for x in (old, new))
    decode = functools.partial(storage.decode_correlation, order=order)
    assert error(old, new, storage.encode_correlation, decode) <= 4 * GAPS[8]
