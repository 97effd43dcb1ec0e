"""The optimizers of published runs, from a learning rate and the plain numbers of the papers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import grafts, polar, recipes, subspaces, weights
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
    scale_by_soap,
    shampoo,
    soap,
    sumo,
)
from .transforms.directions._blend import trust_gate
from .transforms.linalg._coefficients import NEWTON_SCHULZ_COEFFICIENTS
from .transforms.matrices._matrix_rule import MatrixRule
from .transforms.refresh._policy import every
from .transforms.state._inject import inject_hyperparams
from .transforms.storage._cholesky import cholesky
from .transforms.storage._quantized import quantized
from .transforms.weights._averages import ema_nesterov, tail_average

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

    def with_adamw(
        rate: Any, *, b1: float, b2: float, eps: float, weight_decay: float, **numbers: Any
    ) -> optax.GradientTransformation:
        others = optax.adamw(rate, b1, b2, eps, weight_decay=weight_decay)
        rest = {"others": others, "weight_decay": weight_decay, **numbers}
        return method(rate, b1=b1, b2=b2, eps=eps, **rest)

    return with_adamw


PRINTED = {"root": 2, "damping_mode": "absolute", "initial": 0.0, "statistics_every": 1}


def stale_direction(check_every: int, **numbers: Any) -> optax.GradientTransformation:
    """Shampoo with old roots, to which Nam and Ahn compare FOAM."""
    return scale_by_shampoo(refresh=every(check_every, offset=1), **PRINTED, **numbers)


def grafted(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As printed: the gradient is preconditioned, and Adam gives the length."""

    def with_graft(rate: Any, *, b1: float, eps: float, **numbers: Any) -> Any:
        as_printed = {"graft": grafts.adam(b1, eps), "eps": eps, **EXACT}
        return method(rate, **{**as_printed, **numbers})

    return _with_adamw(with_graft)


def _stale(rate: Any, *, check_every: int, **numbers: Any) -> Any:
    return shampoo(rate, refresh=every(check_every, offset=1), base=None, **{**PRINTED, **numbers})


@_with_adamw
def soap_with_adamw(rate: Any, *, b2: float, check_every: int, **numbers: Any) -> Any:
    """SOAP, one decay rate for moments and factors."""
    as_printed = {"refresh": check_every, "bias_correction": True, **EXACT}
    return soap(rate, b2=b2, b3=b2, **{**as_printed, **numbers})


def as_code(direction: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """As in the authors' code: averaged gradients, weighted means, Adam's first steps, blocks."""

    def as_in_code(
        rate: Any, *, b1: float, b2: float, eps: float, start: int, block_size: int, **numbers: Any
    ) -> Any:
        names = ("check_every", "threshold", "max_damping")
        settings = {name: numbers.pop(name) for name in names if name in numbers}
        settings |= {
            "graft": grafts.adam(b1, eps),
            "warmup_steps": start - 1,
            "bias_correction": True,
        }
        rule = {"matrices": MatrixRule(block_size=block_size)}
        made = direction(b1=b1, b2=b2, eps=eps, **EXACT, **settings)
        return assemble(made, rate, **{**rule, **numbers})

    return _with_adamw(as_in_code)


def marins(method: Callable[..., Any]) -> Callable[..., optax.GradientTransformation]:
    """Marin: gradients clipped, and Adam with a rate of its own for all other parameters."""

    def with_clipping(
        rate: Any,
        *,
        schedule: Callable[..., Any],
        steps: int,
        clip: float,
        adam_rate: float,
        adam_b1: float,
        adam_b2: float,
        adam_eps: float,
        others: Any = None,
        **numbers: Any,
    ) -> Any:
        adam = optax.scale_by_adam(adam_b1, adam_b2, adam_eps)
        rest = optax.chain(adam, optax.scale_by_learning_rate(schedule(adam_rate, steps)))
        made = method(rate, adam=adam, others=rest if others is None else others, **numbers)
        return optax.chain(optax.clip_by_global_norm(clip), made)

    return with_clipping


FIVE = ((4.0848, -6.8946, 2.9270), *NEWTON_SCHULZ_COEFFICIENTS["turbo_muon"])
QUINTIC = polar.newton_schulz(5, coefficients=FIVE, eps=1e-5)
"""Marin's: Jiacheng You's five rows, of which Turbo-Muon has the last four."""
OUTPUT_TOO, HIDDEN = MatrixRule(output_layer=None), MatrixRule(output_layer="auto")


@marins
def muon_of_marin(
    rate: Any, *, adam: Any, others: Any, weight_decay: float, **numbers: Any
) -> optax.GradientTransformation:
    """With plain Nesterov momentum, and decay of matrices alone."""
    how = {"accumulate": "sum", "method": QUINTIC, "weights": weights.decay(weight_decay)}
    return muon(rate, others=others, **{**how, "matrices": HIDDEN, **numbers})


@marins
def adam_h(rate: Any, *, adam: Any, others: Any, **numbers: Any) -> optax.GradientTransformation:
    """Adam on spheres, with the output layer."""
    settings = {"matrices": OUTPUT_TOO, "weights": "hyperball", **numbers}
    return assemble(adam, rate, others=others, **settings)


@marins
def muon_h(rate: Any, *, adam: Any, others: Any, **numbers: Any) -> optax.GradientTransformation:
    """Muon on spheres; the output layer has Adam on a sphere."""
    output = assemble(adam, rate, matrices=OUTPUT_TOO, weights="hyperball", others=others)
    settings = {"matrices": HIDDEN, "weights": "hyperball", **numbers}
    return muon(rate, accumulate="sum", method=QUINTIC, others=output, **settings)


def _rest_of_records(schedule: Any, steps: int, b2: float, final: float, cooldown: float) -> Any:
    """Embedding, output layer and vectors, each at its rate."""

    def adam(peak: float) -> Any:
        rate = dataclasses.replace(schedule, final=final, cooldown=cooldown)(peak, steps)
        return optax.adamw(rate, 0.8, b2, 1e-10, weight_decay=0.0)

    def label(path: Any, x: Any) -> str:
        if x.ndim < 2:
            return "vectors"
        return "embedding" if "embed" in jax.tree_util.keystr(path).lower() else "output"

    return optax.partition(
        {"embedding": adam(0.3), "output": adam(1 / 320), "vectors": adam(0.01)},
        functools.partial(jax.tree_util.tree_map_with_path, label),
    )


def kl_soap_h(
    rate: Any, *, schedule: Any, steps: int, adam_final: float, adam_cooldown: float, **numbers: Any
) -> optax.GradientTransformation:
    """KL-SOAP on spheres, in the bases of the step before; the first step only makes bases."""
    direction = scale_by_soap(
        statistics="kl", initial=0.1, method="qr", skip_first=True, lagged=True, **numbers
    )
    others = _rest_of_records(schedule, steps, 0.95, adam_final, adam_cooldown)
    return assemble(direction, rate, matrices=HIDDEN, weights="hyperball", others=others)


def record_46(
    rate: Any,
    *,
    schedule: Any,
    steps: int,
    adam_b2: float,
    adam_cooldown: float,
    lookahead: float,
    gated: str,
    **numbers: Any,
) -> optax.GradientTransformation:
    """The record; its marks are in proportion to the number of steps."""
    unit = steps / 2900
    ahead = dataclasses.replace(schedule, cooldown=adam_cooldown)(lookahead, steps)

    def momenta(t: Any) -> Any:
        warm, cool = 0.85 + 0.1 * t / (300 * unit), 0.95 - 0.1 * (t - 2700 * unit) / (200 * unit)
        return jnp.where(t < 300 * unit, warm, jnp.where(t > 2700 * unit, cool, 0.95))

    def lookaheads(t: Any) -> Any:
        return jnp.where((300 * unit <= t) & (1950 * unit > t), ahead(t - 1), 0.0)

    gate = trust_gate(
        lowest=lambda t: 0.45 * jnp.clip((1625 - t / unit) / 250, 0.0, 1.0),
        highest=lambda t: jnp.where(1625 * unit > jnp.asarray(t), 0.85, 1.0),
    )
    rest = _rest_of_records(schedule, steps, adam_b2, 0.0, adam_cooldown)
    make = functools.partial(inject_hyperparams(recipes.record_46), rate, b1=momenta, **numbers)
    outputs = make(gate=gate, matrices=[gated], others=rest)
    whole = make(others=outputs, matrices=HIDDEN, weight_dimension_numbers={gated: None})
    start, tau = max(1, math.ceil(2400 * unit)), max(1.0, 150 * unit)
    return tail_average(ema_nesterov(whole, lookaheads), start, tau=tau, end=max(start + 1, steps))


MAKERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam-h": adam_h,
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
    "kl-soap-h": kl_soap_h,
    "muon": muon,
    "muon-h": muon_h,
    "muon-marin": muon_of_marin,
    "record-46": record_46,
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
