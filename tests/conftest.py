"""Settings for the whole suite: eight simulated devices, and ranks never promoted in silence.

LAPACK gets one thread: its threads and XLA's would wait for each other's cores.
"""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
