r"""Rounding of float32 to bfloat16: to the nearest, or up or down at random.

Stochastic rounding adds 16 random bits to the lower half of a float32's pattern and cuts this half
off. A carry runs into the exponent where it should, so $x$ between two neighbors $a$ and $b$ in
bfloat16 becomes $b$ with probability $(x - a) / (b - a)$, exactly. The bits are a hash of a key and
of the place in the array, so that they do not depend on devices, meshes or layers that are cut out.
(`jax.random.bits` takes 50 times as long on a CPU.)

*From a rounded sum to an update.* `optax.apply_updates` adds in float32 and rounds to the nearest.
If $q$ lies between the neighbors of the float32 sum $p + u$, this restores $q$ from
$d = \mathrm{fl}(q - p)$. Let $e$ be the binary exponent. If $|e(p) - e(q)| \le 16$, $q - p$ is
a float32. If $q$ is larger, the error of $d$ is below half a unit of $q$. If $q$ is smaller,
then $p + u$ is exact (Sterbenz's lemma) and a multiple of $2^{e(p) - 24}$ with at most 8 bits, so
$q = p + u$ and $d = u$.

*Numerics.* Numbers of bfloat16 stay as they are, zeros included. A finite number is never rounded
stochastically to infinity; infinity and NaN stay. XLA may flush subnormal differences to zero.
"""

import jax
import jax.numpy as jnp

LARGEST_FLOAT32 = float(jnp.finfo(jnp.float32).max)
_SIGN, _UPPER, _LARGEST_BITS = 0x80000000, 0xFFFF0000, 0x7F7FFFFF


def nearest(x: jax.Array) -> jax.Array:
    """The nearest number of bfloat16, as float32."""
    # XLA may leave out two casts (`xla_allow_excess_precision`).
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def stochastic(x: jax.Array, bits: jax.Array) -> jax.Array:
    """One of the two neighbors in bfloat16 of `x`, float32, as float32; 16 `bits` decide."""
    pattern = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = jnp.minimum((pattern & ~jnp.uint32(_SIGN)) + bits, jnp.uint32(_LARGEST_BITS))
    pattern = (pattern & jnp.uint32(_SIGN)) | (magnitude & jnp.uint32(_UPPER))
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(pattern, jnp.float32), x)


def update_to(q: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
    """An update that moves `p`, bfloat16, to `q`; `u` where `q` is not finite."""
    change = jnp.clip(q - p.astype(jnp.float32), -LARGEST_FLOAT32, LARGEST_FLOAT32)
    return jnp.where(jnp.isfinite(q), change, u)


def random_bits(key: jax.Array, rows: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """16 random bits for each entry of an array, as uint32.

    Args:
      key: uint32 `(2,)`.
      rows: numbers of the entries of the first axis, uint32; `None` hashes the places in all axes.
      shape: of the array.
    """
    inside = shape if rows is None else shape[1:]
    place, stride = jnp.zeros(inside, jnp.uint32), 1
    for axis in reversed(range(len(inside))):
        along = jax.lax.broadcasted_iota(jnp.uint32, inside, axis)
        place, stride = place + jnp.uint32(stride % 2**32) * along, stride * inside[axis]
    place = _hash(place ^ key[0])
    if rows is None:
        return _hash(place + key[1]) >> 16
    # Twice, so that rows and places have different hashes even where the words of the key agree.
    row = _hash(~_hash(rows ^ key[1])).reshape(-1, *[1] * len(inside))
    return _hash(place[None] + row) >> 16


def _hash(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits: Wellons' `lowbias32`, in the public domain."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
