"""The version of JAX that curvax needs, checked before all other imports."""

import jax

NEEDED = (0, 10)

if jax.__version_info__ < NEEDED:
    raise ImportError(
        f"curvax needs JAX {'.'.join(map(str, NEEDED))} or later, and this is JAX "
        f"{jax.__version__}: pip install --upgrade jax"
    )
