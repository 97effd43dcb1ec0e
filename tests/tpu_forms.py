"""Programs for CPUs with the forms that programs for other platforms have."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from curvax.transforms.linalg import _eigh, _loops

FORMS = itertools.count()


@contextlib.contextmanager
def forms_of_tpus() -> Iterator[None]:
    """What is traced inside has the forms for TPUs, wherever the platform decides.

    Metadata of its own keep it apart: JAX would give what it has traced elsewhere, and the reverse.
    """
    with (
        mock.patch.object(jax.lax, "platform_dependent", _for_a_tpu),
        mock.patch.object(_eigh, "jacobi", _jacobi),
        set_xla_metadata(forms=next(FORMS)),
    ):
        yield


def loops_of(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, traces have the loops over matrices of a platform: "cpu", "gpu" or "tpu"."""

    def chosen(*, default: Callable[..., Any], **forms: Callable[..., Any]) -> Callable[..., Any]:
        return forms.get(platform, default)

    monkeypatch.setattr(_loops, "by_platform", chosen)


def _for_a_tpu(*args: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    return forms.get("tpu", default)(*args)


def _jacobi(a: jax.Array) -> jax.Array:
    """XLA's iteration as JAX's lowering for TPUs calls it; JAX's `eigh` has it for no CPU."""
    shapes = [jax.ShapeDtypeStruct(shape, a.dtype) for shape in (a.shape, a.shape[:-1])]
    call = jax.ffi.ffi_call(
        "Eigh",
        shapes,
        vmap_method="sequential",
        custom_call_api_version=1,
        legacy_backend_config="1,1,100,1e-6",
    )
    return call(a)[0]
