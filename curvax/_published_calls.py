"""The optimizers of published runs, from a learning rate and the plain numbers of the papers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from . import grafts, subspaces
from .optimizers import (
    alice,
    asgo,
    assemble,
    dasgo,
    dr_shampoo,
    fira,
    foam,
    galore,
    muon,
    racs,
    scale_by_dr_shampoo,
    scale_by_foam,
    scale_by_shampoo,
    shampoo,
    soap,
    sumo,
)
from .transforms.matrices._matrix_rule import MatrixRule
from .transforms.refresh._policy import every
from .transforms.storage._cholesky import cholesky
from .transforms.storage._quantized import quantized

EXACT: dict[str, Any] = {"method": "eigh"}
"""As the papers have it, on all platforms."""


def exact_asgo(rate: Any, **numbers: Any) -> optax.GradientTransformation:
    """An et al.: roots by decompositions."""
    return asgo(rate, **{**EXACT, **numbers})


def adamw(rate: Any, **numbers: Any) -> optax.GradientTransformation:
    """Without weight decay, if the paper has no number for it."""
    return optax.adamw(rate, **{"weight_decay": 0.0, **numbers})


def sgd(rate: Any, *, momentum: float, weight_decay: float) -> optax.GradientTransformation:
    """With weight decay inside the momentum, as in torch."""
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(decay, optax.sgd(rate, momentum=momentum))


def alice_of(
    rate: Any,
    *,
    leading: int,
    compensation_scale: float,
    b3: float | None = None,
    output_layer: Any = None,
    **numbers: Any,
) -> optax.GradientTransformation:
    """Gong et al.: the numbers l and α_c of two values. Alice-0 has no b3."""
    values = {
        "b3": b3,
        "matrices": MatrixRule(output_layer=output_layer),
        "switching": subspaces.complement(leading),
        "compensation": subspaces.optimal(weight=compensation_scale),
    }
    return alice(rate, **{**values, **numbers})


def shampoo_on(
    rate: Any, *, base: Any, storage: Any, **numbers: Any
) -> optax.GradientTransformation:
    """Li et al.: a base optimizer, which all other parameters have too."""
    if isinstance(base, Mapping):
        known = {name: x for name, x in base.items() if name != "optimizer"}
        base = functools.partial(MAKERS[base["optimizer"]], **known)
    storages = {
        "dense": None,
        "vq": quantized(),
        "cq": cholesky(damping_mode="absolute"),
        "cq-ef": cholesky(error_feedback=0.95, damping_mode="absolute"),
    }
    stored = storages.get(storage, storage)
    return shampoo(rate, base=base, **{"storage": stored, "others": base(rate), **numbers})


def warmed_shampoo(
    rate: Any, *, warmup_steps: int, refresh: int, b1: float, b2: float, root: int, **changes: Any
) -> optax.GradientTransformation:
    """An et al.: the first steps only collect statistics; their learning rate is 0."""
    direction = scale_by_shampoo(
        b1=b1,
        b2=b2,
        root=root,
        graft=None,
        statistics_every=1,
        refresh=every(refresh, offset=1),
        warmup_steps=warmup_steps,
        **EXACT,
    )
    return assemble(direction, rate, **changes)


def _with_adamw(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """Nam and Ahn: a method with the AdamW of all other parameters."""

    def make(
        rate: Any, *, b1: float, b2: float, eps: float, weight_decay: float, **numbers: Any
    ) -> optax.GradientTransformation:
        others = optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay)
        rest = {"others": others, "weight_decay": weight_decay, **numbers}
        return method(rate, b1=b1, b2=b2, eps=eps, **rest)

    return make


PRINTED = {"root": 2, "damping_mode": "absolute", "initial": 0.0, "statistics_every": 1}


def stale_direction(check_every: int, **numbers: Any) -> optax.GradientTransformation:
    """Shampoo with old roots, to which Nam and Ahn compare FOAM."""
    return scale_by_shampoo(refresh=every(check_every, offset=1), **PRINTED, **numbers)


def grafted(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As printed: the gradient is preconditioned, and Adam gives the length."""

    def make(rate: Any, *, b1: float, eps: float, **numbers: Any) -> Any:
        own = {"graft": grafts.adam(b1, eps), "eps": eps, **EXACT}
        return method(rate, **{**own, **numbers})

    return _with_adamw(make)


def _stale(rate: Any, *, check_every: int, **numbers: Any) -> Any:
    return shampoo(rate, refresh=every(check_every, offset=1), base=None, **{**PRINTED, **numbers})


@_with_adamw
def soap_with_adamw(rate: Any, *, b2: float, check_every: int, **numbers: Any) -> Any:
    """SOAP, one decay rate for moments and factors."""
    own = {"refresh": check_every, "bias_correction": True, **EXACT}
    return soap(rate, b2=b2, b3=b2, **{**own, **numbers})


def as_code(direction: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As in the authors' code: averaged gradients, weighted means, Adam's first steps, blocks."""

    def make(
        rate: Any, *, b1: float, b2: float, eps: float, start: int, block_size: int, **numbers: Any
    ) -> Any:
        names = ("check_every", "threshold", "max_damping")
        own = {name: numbers.pop(name) for name in names if name in numbers}
        own |= {"graft": grafts.adam(b1, eps), "warmup_steps": start - 1, "bias_correction": True}
        rule = {"matrices": MatrixRule(block_size=block_size)}
        made = direction(b1=b1, b2=b2, eps=eps, **EXACT, **own)
        return assemble(made, rate, **{**rule, **numbers})

    return _with_adamw(make)


MAKERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "alice": alice_of,
    "alice-0": alice_of,
    "asgo": exact_asgo,
    "dasgo": dasgo,
    "dr-shampoo": grafted(dr_shampoo),
    "dr-shampoo-code": as_code(scale_by_dr_shampoo),
    "fira": functools.partial(fira, compensation=subspaces.fira(limit=math.inf)),  # as printed
    "foam": grafted(foam),
    "foam-code": as_code(scale_by_foam),
    "galore": galore,
    "muon": muon,
    "racs": functools.partial(racs, limit=math.inf),  # as printed
    "sgd": sgd,
    "shampoo_on": shampoo_on,
    "soap": soap_with_adamw,
    "stale-shampoo": grafted(_stale),
    "stale-shampoo-code": as_code(stale_direction),
    "sumo": sumo,
    "warmed_shampoo": warmed_shampoo,
}
"""By the names in `published.toml`."""
