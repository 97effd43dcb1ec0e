"""Every method with its numbers: the start of tuning, the varied numbers, and the optimizer.

All methods have these numbers, besides their own:

- `rate`: peak learning rate of the matrices;
- `adam_rate`: that of AdamW, which takes all other parameters; AdamW itself has it where it is
  tuned apart from `rate`;
- `decay`: the weights' decay in a step at the peak, that is, rate × `weight_decay`. Rates differ by
  two orders of magnitude between methods, so an equal `weight_decay` would not be equal at all.

Whole numbers (ranks, periods) are part of the program, and another value is another program; all
others are arguments of the compiled step. A `scale` that multiplies the direction is not varied,
because the rate does the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax

import curvax
from curvax._published_calls import PRINTED

from ._descent import Coordinate, Point

DECAY = Coordinate("decay", (0.0, 1e-4, 3e-4, 1e-3, 3e-3))
START_DECAY = 3e-4
FIRST = (0.0, 0.8, 0.9, 0.95, 0.98)
SECOND = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
PERIODS = (1, 3, 10, 30, 100, 300)
COMMON = ("rate", "adam_rate", "decay")
CLIP = 1.0  # of the gradient's norm, as in nanoGPT's recipe
LOOKAHEAD = 0.3  # of EMA-Nesterov at the peak learning rate, as in entry 46 of track 3, whose
# tail average begins at step 2400 of 2900
FLOOR = curvax.weights.floor(0.3825, unit="column")  # the same


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A method and where its tuning starts."""

    name: str
    rate: float  # the best of benchmarks/results/train.json, a smaller model
    own: Mapping[str, tuple[Any, tuple[Any, ...]]]  # by argument: start and ladder, in turn
    of: str = ""  # the method whose best it starts at, of which it is a form
    adapters: int = 0  # rank of LoRA

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """In the order of the descent; AdamW's `adam_rate` is its rate."""
        own = [Coordinate(name, ladder) for name, (_, ladder) in self.own.items()]
        adam = [] if self.name in ADAM else [Coordinate("adam_rate")]
        return (Coordinate("rate"), *own, DECAY, *adam)

    def start(self, adamw: Mapping[str, Any] | None) -> Point:
        """The first point; it takes the numbers of the other parameters from AdamW's best."""
        point: Point = {"rate": self.rate, "decay": START_DECAY}
        point |= {name: value for name, (value, _) in self.own.items()}
        if adamw is not None:
            point |= {f"adam_{name}": adamw[name] for name in ("rate", "b1", "b2", "decay")}
        return point


ADAM = ("adamw", "lora_8", "lora_16")
STORAGES = {
    "shampoo_packed": curvax.packed(),
    "shampoo_vq": curvax.quantized(),
    "shampoo_cq": curvax.cholesky(error_feedback=0.95),
}
B1 = {"b1": (0.9, FIRST)}
B1_95 = {"b1": (0.95, FIRST)}
LOW_RANK = {"refresh": (100, PERIODS), "rank": (32, (16, 32, 64)), **B1}
PROJECTED = {**LOW_RANK, "b2": (0.999, SECOND)}
SHAMPOO = {"refresh": (10, PERIODS), "b2": (0.95, SECOND), **B1}
ADAPTIVE = {
    "max_damping": (3e-7, (3e-10, 3e-9, 3e-8, 3e-7, 3e-6)),
    **B1_95,
    "b2": (0.995, SECOND),
}

ALL = (
    Tuned("adamw", 0.008, {"b2": (0.99, SECOND), "b1": (0.9, FIRST)}),
    Tuned("muon", 0.032, B1_95),
    Tuned("osgdm", 0.016, B1),
    Tuned("swan", 0.128, {}),
    Tuned("racs", 0.128, {"b2": (0.9, SECOND)}),
    Tuned("dasgo", 0.032, {**B1, "b2": (0.99, SECOND)}),
    Tuned(
        "asgo",
        0.128,
        {"everything": (1, (0, 1)), "refresh": (1, PERIODS), **B1, "b2": (0.95, SECOND)},
    ),
    Tuned("shampoo", 0.008, SHAMPOO),
    Tuned("foam", 0.064, ADAPTIVE),
    Tuned(
        "dr_shampoo", 0.064, {"threshold": (0.1, (0.03, 0.1, 0.3)), **B1_95, "b2": (0.995, SECOND)}
    ),
    Tuned("soap", 0.016, {"refresh": (10, PERIODS), **B1_95, "b2": (0.95, SECOND)}),
    Tuned("eigen_adam", 0.008, {"refresh": (10, PERIODS), **B1_95, "b2": (0.95, SECOND)}),
    Tuned("galore", 0.128, PROJECTED),
    Tuned("fira", 0.128, PROJECTED),
    Tuned(
        "alice",
        0.064,
        {**LOW_RANK, "b2": (0.9, SECOND), "compensation_scale": (0.4, (0.0, 0.2, 0.4, 0.8))},
    ),
    Tuned("apollo", 0.032, PROJECTED),
    Tuned("sumo", 0.016, {**LOW_RANK, "b1": (0.95, FIRST)}),
)
ADAMW = ALL[0].own
RMS = {f"{name}_rms": name for name in ("muon", "osgdm", "swan", "sumo")}
"""With directions of AdamW's root mean square, so that AdamW's learning rate carries over."""
SIDES = {  # of weights, around methods and within: each with the method that it is a form of
    "muon_hyperball": "muon",
    "muon_floor": "muon",
    "muon_ahead": "muon",
    "muon_hyperball_ahead": "muon",
    "soap_hyperball": "soap",
    "kl_soap": "soap",
    "kl_soap_hyperball": "soap",
}
FORMS = (  # of others, in suites of their own
    Tuned("stale_shampoo", 0.064, {**B1_95, "b2": (0.995, SECOND)}, of="shampoo"),
    Tuned("lora_8", 0.016, ADAMW, adapters=8),
    Tuned("lora_16", 0.016, ADAMW, adapters=16),
    *(Tuned(name, 0.008, SHAMPOO, of="shampoo") for name in STORAGES),
    Tuned("swan_products", 0.128, {}, of="swan"),
    *(
        dataclasses.replace(method, name=name, of=of)
        for name, of in (RMS | SIDES).items()
        for method in ALL
        if method.name == of
    ),
    Tuned("record", 0.032, {}, of="muon"),
)
METHODS = {method.name: method for method in (*ALL, *FORMS)}


def schedule_of(steps: int) -> optax.Schedule:
    """nanoGPT's: a warm-up of 5 % of the steps, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    return optax.warmup_cosine_decay_schedule(1 / warmup, 1.0, warmup, steps, end_value=0.1)


def split(point: Point) -> tuple[Point, Point]:
    """The constants of the program, whole numbers and words, and the arguments of its step."""
    traced = {name: value for name, value in point.items() if isinstance(value, float)}
    return {name: value for name, value in point.items() if name not in traced}, traced


def decayed(params: Any) -> Any:
    """Which parameters decay: not the scales of norms, as in nanoGPT."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def adamw(rate: Any, peak: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """AdamW with the numbers of this prefix."""
    return optax.adamw(
        rate,
        b1=values[f"{prefix}b1"],
        b2=values[f"{prefix}b2"],
        weight_decay=values[f"{prefix}decay"] / peak,
        mask=decayed,
    )


def optimizer(
    name: str, steps: int, static: Point, values: Mapping[str, Any]
) -> optax.GradientTransformation:
    """A method at a point.

    Args:
      name: of the method, or a call (`_calls.py`).
      steps: of a run, whose peak learning rates follow a schedule.
      static: the whole numbers of the point.
      values: its other numbers, which may be traced.
    """
    clip, schedule = optax.clip_by_global_norm(CLIP), schedule_of(steps)

    def scheduled(peak: Any) -> optax.Schedule:
        return lambda count: peak * schedule(count)

    if name not in METHODS:
        inside = {"curvax": curvax, "optax": optax, "schedule": scheduled}
        called = eval(name, {**inside, **values})
        # Learning rates multiply last, so that the schedule may come after.
        after = [] if "schedule" in name else [optax.scale_by_schedule(schedule)]
        return optax.chain(clip, called, *after)
    peak = values["rate"]
    rate = scheduled(peak)
    if name in ADAM and "adam_rate" not in values:
        return optax.chain(clip, adamw(rate, peak, values, ""))
    adam_peak = values["adam_rate"]
    adam_rate = scheduled(adam_peak)
    if name in ADAM:  # at two rates: that of matrices, and that of what is not a matrix
        direction = optax.scale_by_adam(values["b1"], values["b2"])
        others = adamw(adam_rate, adam_peak, values, "")
        decay = {"weight_decay": values["decay"] / peak, "weight_decay_mask": decayed}
        return optax.chain(clip, curvax.assemble(direction, rate, others=others, **decay))
    others = adamw(adam_rate, adam_peak, values, "adam_")
    own = {k: v for k, v in values.items() if k not in COMMON and not k.startswith("adam_")}
    own |= static
    if name in ("shampoo", *STORAGES):  # its base has the momentum and the decay
        base = functools.partial(
            optax.adamw,
            b1=own.pop("b1"),
            b2=values["adam_b2"],
            weight_decay=values["decay"] / peak,
            mask=decayed,
        )
        own = {"base": base, "statistics_every": 1, "storage": STORAGES.get(name), **own}
    else:
        own |= {"weight_decay": values["decay"] / peak, "weight_decay_mask": decayed}
    if name in RMS:
        own["consistent_rms"] = 0.2
    if name == "record":  # with its own momentum and weights' side, and its averages around it
        made = curvax.recipes.record_46(rate, others=others)
        made = curvax.ema_nesterov(made, scheduled(LOOKAHEAD))
        start, tau = round(steps * 2400 / 2900), steps * 150 / 2900
        return optax.chain(clip, curvax.tail_average(made, start, tau=tau, end=steps))
    if name.startswith("kl_soap"):
        own["statistics"] = "kl"
    if "hyperball" in name or name == "muon_floor":
        decay = own.pop("weight_decay")
        del own["weight_decay_mask"]  # all matrices decay
        floored = curvax.weights.chain(curvax.weights.decay(decay), FLOOR)
        own["weights"] = floored if name == "muon_floor" else "hyperball"
    if name == "swan_products":  # as Muon orthogonalizes, without a decomposition
        own["method"] = curvax.polar.newton_schulz(norm="gram", eps=0.0)
    if name == "asgo":  # by default every parameter is a matrix, embeddings and scales too
        own["matrices"] = "all" if own.pop("everything") else None
    if name == "stale_shampoo":  # FOAM's opponent: as printed, at FOAM's period, ε0 and length
        own |= {"refresh": curvax.every(20, offset=1), "eps": 1e-9, "base": None, **PRINTED}
    if name in ("foam", "stale_shampoo", "dr_shampoo"):  # the momentum is the grafted Adam's
        own["graft"] = curvax.grafts.adam(own.pop("b1"))
    if name == "alice":
        leading = max(1, static["rank"] * 40 // 128)  # the paper's share, at 60M
        own.setdefault("switching", curvax.subspaces.complement(leading))
        own["compensation"] = curvax.subspaces.optimal(weight=own.pop("compensation_scale"))
    made = getattr(curvax, METHODS[name].of or name)(rate, others=others, **own)
    if name.endswith("_ahead"):
        made = curvax.ema_nesterov(made, scheduled(LOOKAHEAD))
    return optax.chain(clip, made)
