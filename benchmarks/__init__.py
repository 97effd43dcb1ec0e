"""Measurements: `python -m benchmarks` lists them."""

import os

# LAPACK's threads wait for each other in busy loops: where other programs share the cores, an
# eigendecomposition of order 512 on two threads was measured to take five times as long as on one.
# This must be set before JAX loads the library.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
