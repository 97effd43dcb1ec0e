"""XLA's compilers for devices that this machine does not have: a v5e and an H200.

`jax.jit(...).trace(shapes).lower(lowering_platforms=(platform,)).compile()` compiles for the device
of the shapes' shardings. The compilers come with the packages `jax[tpu]` and `jax[cuda12]`; without
the package of a device it has no compiler. Import this before JAX, which reads the environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs on a device
# Settings that the TPU's compiler otherwise asks a cloud's server for.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # a lock for a device that is not there
FLAG = "--xla_gpu_autotune_level=0"  # which would run kernels
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

import jax  # noqa: E402
from jax._src.interpreters import pxla  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

# NVIDIA's published figures, as XLA writes them.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" driver_version: "13.0.0"
  runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
PLATFORMS = {"cpu": "cpu", "v5e": "tpu", "h200": "cuda"}
MEMORY = {"v5e": 16 * 2**30}  # bytes; XLA refuses programs that do not fit, and keeps some itself


@functools.cache  # another topology would have other devices
def devices(name: str, slice: str = "") -> Any:
    """Devices that this machine does not have: those of a slice of v5e, or an H200."""
    if name == "cpu":
        return jax.devices("cpu")
    if name == "v5e":
        topology = f"v5e:{slice or '2x2'}"
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    ).devices


def compiled(name: str, step: Any, arguments: Any, **how: Any) -> Any:
    """A step for the devices of its arguments or for one; None if it needs more memory than it has.

    Args:
      name: of the device, in `PLATFORMS`.
      step: a function.
      arguments: their shapes, with shardings if there are several devices.
      how: other arguments of `jax.jit`.
    """
    if name != "cpu":
        sharding = SingleDeviceSharding(devices(name)[0])
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or sharding),
            arguments,
        )
    traced = jax.jit(step, **how).trace(*arguments)
    lowered = traced.lower(lowering_platforms=(PLATFORMS[name],))
    # JAX does not compare shardings with those of an H200's program, which are of another class.
    asked = lambda program, shardings, *rest: shardings  # noqa: E731
    checks = (f"_maybe_get_and_check_{side}_shardings" for side in ("in", "out"))
    patches: dict[str, Any] = dict.fromkeys(checks, asked) if name == "h200" else {}
    try:
        with mock.patch.multiple(pxla, **patches) if patches else contextlib.nullcontext():
            return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
