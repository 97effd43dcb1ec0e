"""A row of the registry: what tests need to know about a method.

All of it stands in the method's docstring or is small settings. Most fields have a default, and the
suites derive most of their input from a few: what a method keeps between refreshes, and on which
side.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import curvax

from ._bounds import Step

Settings = Mapping[str, Any]
Kept = Literal["roots", "bases", "subspaces"]

Family = Literal[
    "orthogonalized", "scaled, or one-sided", "Kronecker factors", "eigenbases", "low rank"
]
"""The groups of methods on pages and in benchmarks, in this order."""

# What each policy can refresh, by what it examines.
POLICIES: Mapping[str, tuple[Kept, ...]] = {
    "every": ("roots", "bases", "subspaces"),
    "stagger": ("roots", "bases", "subspaces"),
    "foam": ("roots",),  # a damping to adapt
    "diagonal_residual": ("roots", "bases"),  # a symmetric factor
    "below_norm": ("subspaces",),  # a projected gradient, whose norm may be small
}
ADAPTIVE = ("foam", "diagonal_residual", "below_norm")
"""Policies that examine the state or the gradient before they refresh."""

COUNTED = {"refreshes", "rejected"}
FIELDS = {
    None: set(),
    "roots": {"statistic", "basis", "eigenvalues", "checks", *COUNTED},
    "eigenpairs": {"statistic", "basis", "checks", "eigenvalues", "damping", "proxy", *COUNTED},
    "bases": {"statistic", "basis", *COUNTED},
    "subspaces": {"key", *COUNTED},
}
"""The state fields of roots, bases and subspaces, by `keeps`."""


class Size(NamedTuple):
    """The size of a matrix, for the size of its state."""

    m: int
    n: int
    r: int  # rank
    side: str

    @property
    def orders(self) -> tuple[int, ...]:
        """Orders of the sides that have a factor, a basis or a projection."""
        m, n = self.m, self.n
        one = {"left": m, "right": n, "smaller": min(m, n), "larger": max(m, n)}
        return (m, n) if self.side == "both" else (one[self.side],)

    @property
    def squares(self) -> int:
        """Numbers in one factor or basis per such side."""
        return sum(d * d for d in self.orders)

    @property
    def basis(self) -> int:
        """Numbers in the basis of a subspace."""
        return self.orders[0] * self.r

    @property
    def other(self) -> int:
        """The order of the side that is not projected."""
        return self.m * self.n // self.orders[0]

    @property
    def low(self) -> int:
        """Numbers in a projected matrix."""
        return self.other * self.r


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Row:
    """Everything that the suites know about one method."""

    name: str
    family: Family
    transcribed: tuple[str, ...] = ()  # in tests/reference, if not in the file of its name
    optimizer: Callable[..., Any] = None  # pyright: ignore  # `curvax.<name>` by default

    keeps: Kept | None = None  # what it refreshes
    # Of a refresh, "" for none; by default "eigh" for roots and bases.
    decomposes: str | None = None
    own_policy: bool = False  # takes `check_every` and `threshold` instead of `refresh`
    svd: bool = False  # every step computes an SVD
    everything: bool = False  # vectors, biases and scalars are matrices too
    spares_output_layer: bool = False  # sends the output layer to AdamW by default
    base: bool = False  # a base optimizer takes its direction as a gradient
    after_the_matrices: bool = False  # momentum of the tree's updates, after `on_matrices`
    random: bool = False  # draws random numbers, which differ between dtypes
    blind_to_norms: bool = False  # the norm of a matrix stays
    scale_free: bool = False  # bitwise equal for a gradient times a power of two
    reads_weights: bool = False  # updates depend on the parameters, which `update` needs
    narrow: bool = False  # a momentum of the matrix's size has the dtype of the parameters
    fields: frozenset[str] = frozenset()  # state fields besides `FIELDS[keeps]`
    numbers: Callable[[Size], int]  # in the state of a matrix, as the papers count them

    # Small settings for optimizer and direction, and additions for three suites.
    settings: Settings = dataclasses.field(default_factory=dict)
    algebra: Settings = dataclasses.field(default_factory=dict)  # makes quantization errors visible
    faults: Settings = dataclasses.field(default_factory=dict)
    fuzz: Settings = dataclasses.field(default_factory=dict)  # this suite uses the papers' ε

    # The growth of rounding errors from the gradient to the update, in units of the dtype's
    # epsilon; see assert_close.
    growth: float = 512.0

    # Upper bounds on the Frobenius norm of its direction: for any gradients (None if there is no
    # bound), and for the same gradient at every step. Most bounds are attained.
    longest: Callable[[Step], float] | None = None
    longest_repeated: Callable[[Step], float] = None  # pyright: ignore

    # From the gradients of a matrix to the directions with `settings` (and one dictionary a step,
    # which may be empty), in NumPy float64. It has to agree to `64 · growth` roundings of float64,
    # so `settings` set an ε to 0 that the reference does not have. Where it is None,
    # tests/optimizers/test_*references.py has cases of its own for the method.
    reference: Callable[[Any], Any] | None = None

    # The weights of which decay takes a share, for a direction.
    decayed: Callable[[Any, Any], Any] = lambda direction, weights: weights

    def __post_init__(self) -> None:
        """Fills in the fields that follow from the others."""
        usual = "eigh" if self.factors else None
        found = {
            "optimizer": self.optimizer or getattr(curvax, self.name),
            "decomposes": usual if self.decomposes is None else self.decomposes,
            "longest_repeated": self.longest_repeated or self.longest,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """The name, which test reports show."""
        return self.name

    @property
    def title(self) -> str:
        """Its name in text: what stands before the colon in the docstring of its file."""
        return (sys.modules[self.optimizer.__module__].__doc__ or "").partition(":")[0]

    @property
    def direction(self) -> Callable[..., Any]:
        """`curvax.scale_by_<name>`, or what the optimizer of a recipe is made of."""
        own = getattr(self.optimizer, "direction", None)
        return own or getattr(curvax, f"scale_by_{self.name}")

    @property
    def on_weights(self) -> bool:
        """Whether its decay is a value of `weights=`, which has no mask."""
        return "weights" not in self.defaults

    @property
    def factors(self) -> bool:
        """Whether it has symmetric factors, which take a storage."""
        return self.keeps in ("roots", "bases")

    @property
    def ranked(self) -> bool:
        """Whether it has a rank."""
        return "rank" in self.settings

    @property
    def policies(self) -> tuple[str, ...]:
        """The refresh policies that it takes; none for FOAM: with another policy it is Shampoo."""
        own = self.keeps if not self.own_policy else None
        return tuple(name for name, kinds in POLICIES.items() if own in kinds)

    @property
    def state_fields(self) -> frozenset[str]:
        """State fields that hold entries of a matrix."""
        kept = FIELDS["eigenpairs" if self.own_policy else self.keeps]
        return self.fields | kept | ({"failures"} if self.svd else set())

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's keyword arguments."""
        return dict(self.optimizer.__kwdefaults__ or {})

    @property
    def static(self) -> tuple[str, ...]:
        """Static arguments for `optax.inject_hyperparams`: integers and callables."""
        given = self.defaults | {**self.settings}
        whole = lambda x: isinstance(x, int) and not isinstance(x, bool)  # noqa: E731
        return tuple(name for name, x in given.items() if whole(x) or callable(x))

    def side(self, settings: Settings) -> str:
        """The side with a factor, a basis or a projection, or "both"."""
        both = "both" if self.keeps == "roots" else "smaller"
        return (self.defaults | {**settings}).get("side", both) or "smaller"

    # Optimizers and their settings.

    @property
    def with_output_layer(self) -> dict[str, Any]:
        """Settings that make the output layer a matrix."""
        rule = {"matrices": curvax.MatrixRule(output_layer=None)}
        return rule if self.spares_output_layer else {}

    def make(self, learning_rate: Any = 0.1, **settings: Any) -> Any:
        """The full optimizer."""
        return self.optimizer(learning_rate, **{**self.for_contract(), **settings})

    def make_direction(self) -> Any:
        """The direction alone, for batches of matrices."""
        return self.direction(**self.settings)

    def for_contract(self) -> dict[str, Any]:
        """Small settings for the contract suite."""
        # Accumulated steps of a momentum behind the rates keep the rates of their own steps.
        plain = {"b1": 0.0} if self.after_the_matrices else {}
        return {**self.settings, **({"base": None} if self.base else {}), **plain}

    def for_algebra(self) -> dict[str, Any]:
        """Settings that make quantization errors visible and the decisions of policies clear."""
        return {**self.settings, **self.with_output_layer, **self.algebra}

    def for_faults(self) -> dict[str, Any]:
        """Settings under which the effects of a fault last."""
        base = {"base": None} if self.base else {}
        return {**self.settings, **base, **self.with_output_layer, **self.faults}

    def for_fuzzing(self) -> dict[str, Any]:
        """Settings with the papers' ε, too small to hide a division by zero."""
        large = ("eps", "max_damping")
        settings = {name: x for name, x in self.for_contract().items() if name not in large}
        return {**settings, **self.with_output_layer, **self.fuzz}

    def needed(self, params: Any) -> Any:
        """The parameters if `update` needs them, otherwise None."""
        return params if self.reads_weights else None

    # The size of its state.

    def size(self, m: int, n: int, rank: int, settings: Settings) -> Size:
        """The size of a matrix for the method with these settings."""
        return Size(m, n, min(rank, m, n), self.side(settings))

    def matrix_bytes(self, m: int, n: int, itemsize: int) -> int:
        """Bytes of the state of one matrix in the contract suites, including all counters.

        Args:
          m: rows.
          n: columns.
          itemsize: bytes per entry of a parameter.
        """
        size = self.size(m, n, self.settings.get("rank", 0), self.settings)
        momentum = (4 - itemsize) * m * n if self.narrow else 0
        each = 4 * len(("checks", "refreshes", "indefinite", "rejected", "restarted"))
        counted = {
            None: 0,
            "roots": each * len(size.orders),
            "bases": each * len(size.orders),
            "subspaces": 16,  # two counters and a random key
        }[self.keeps]
        if self.own_policy:  # ε and h
            counted += 4 * 2 * len(size.orders)
        failures, guard = 4 * self.svd, 4 * len(("skipped", "restarted", "damaged"))
        return 4 * self.numbers(size) - momentum + counted + failures + guard
