"""A row of the registry: all that tests, benchmarks and pages have to know about a method.

Most fields have a default, and most of what the suites need follows from the few traits: what a
method keeps from one refresh to the next, and on which side. `muon.py` is a short row, `shampoo.py`
a long one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import curvax

from ._bounds import Step

Settings = Mapping[str, Any]
Family = Literal[
    "orthogonalized", "scaled, or one-sided", "Kronecker factors", "eigenbases", "low rank"
]
Kept = Literal["roots", "bases", "subspaces"]

# By which policies a refresh can be decided: it takes what they look at.
POLICIES: Mapping[str, tuple[Kept, ...]] = {
    "every": ("roots", "bases", "subspaces"),
    "stagger": ("roots", "bases", "subspaces"),
    "foam": ("roots",),  # a damping to adapt
    "diagonal_residual": ("roots", "bases"),  # a symmetric factor
    "below_norm": ("subspaces",),  # a projected gradient, whose norm may be small
}
ADAPTIVE = ("foam", "diagonal_residual", "below_norm")
"""Policies that look before they refresh."""

COUNTED = {"refreshes", "rejected"}
FIELDS = {
    None: set(),
    "roots": {"statistic", "inverse_root", "error", "checks", *COUNTED},
    "eigenpairs": {"statistic", "inverse_root", "checks", "eigenvectors", "eigenvalues", "damping"}
    | {"proxy", *COUNTED},
    "bases": {"statistic", "basis", *COUNTED},
    "subspaces": {"key", *COUNTED},
}
"""Fields of the state in which methods keep what they refresh."""


class Size(NamedTuple):
    """A matrix whose state is counted."""

    m: int
    n: int
    r: int  # rank
    side: str

    @property
    def orders(self) -> tuple[int, ...]:
        """Of the sides that have a factor, a basis or a projection."""
        m, n = self.m, self.n
        one = {"left": m, "right": n, "smaller": min(m, n), "larger": max(m, n)}
        return (m, n) if self.side == "both" else (one[self.side],)

    @property
    def squares(self) -> int:
        """Numbers of one factor or basis of each of these sides."""
        return sum(d * d for d in self.orders)

    @property
    def basis(self) -> int:
        """Numbers of the basis of a subspace."""
        return self.orders[0] * self.r

    @property
    def other(self) -> int:
        """The order of the side that is not projected."""
        return self.m * self.n // self.orders[0]

    @property
    def low(self) -> int:
        """Numbers of a projected matrix."""
        return self.other * self.r


class Readme(NamedTuple):
    """A line of the README's table of methods, for `m ≤ n`."""

    direction: str
    state: str
    work: str
    refresh: str
    paper: str


class Peer(NamedTuple):
    """The same method elsewhere."""

    name: str
    aim: float  # for the time of a step over the peer's
    brief: bool = False


class Coded(NamedTuple):
    """The method with its factors in 4 bits, as it is trained."""

    storage: str  # a label of `benchmarks/_methods.py`
    mind: str
    brief: bool = False


class Variant(NamedTuple):
    """The method with other settings, as the step benchmark has it beside the plain one."""

    settings: Settings
    floor: str
    aim: float | None = None
    numbers: Callable[[Size], int] | None = None


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Row:
    """A method."""

    name: str
    family: Family
    mind: str  # why one might not take it
    readme: Readme
    brief: bool = False  # whether the README's table of results has it

    # By default `curvax.<name>` and `curvax.scale_by_<name>`.
    optimizer: Callable[..., Any] = None  # pyright: ignore
    direction: Callable[..., Any] = None  # pyright: ignore

    # What it has.
    keeps: Kept | None = None  # what it refreshes
    own_policy: bool = False  # `check_every` and `threshold` are its, `refresh` is not
    decomposes: str | None = None  # by what it refreshes; "eigh" of roots and bases
    svd: bool = False  # whether every step takes one
    fields: frozenset[str] = frozenset()  # of its state, beside those of what it refreshes
    everything: bool = False  # whether vectors, biases and scalars are matrices too
    spares_output_layer: bool = False  # leaves it to AdamW by default
    block_size: int | None = None  # of the blocks in which it cuts large matrices by default
    base: bool = False  # its direction is the gradient of a base optimizer
    after_the_matrices: bool = False  # its momentum is of whole updates, behind the matrices
    random: bool = False  # whether its numbers depend on random ones, other ones for each dtype
    blind_to_means: bool = False  # whether nothing changes the mean of a row
    scale_free: bool = False  # bit for bit the same for a gradient that is a power of two larger

    # Settings: small ones that optimizer and direction take, and what suites add to them.
    settings: Settings = dataclasses.field(default_factory=dict)
    contract: Settings = dataclasses.field(default_factory=dict)  # of the optimizer alone
    algebra: Settings = dataclasses.field(default_factory=dict)  # for errors of codes to be seen
    faults: Settings = dataclasses.field(default_factory=dict)
    fuzz: Settings = dataclasses.field(default_factory=dict)  # which has the papers' ε
    long: Settings = dataclasses.field(default_factory=dict)  # for matrices of 10,000 rows
    fault_cell: tuple[str | None, str | None] | None = None  # policy and storage, by default
    minima_rate: float = 0.1  # with which it finds Rosenbrock's minimum
    faults_rate: float = 0.1  # with which it trains through faults

    # How much it multiplies rounding errors from the gradient to the update, in units of the
    # dtype's epsilon; see assert_close.
    growth: float

    # The Frobenius norm of its direction, at most: for any gradients (None if nothing bounds it),
    # and where the same gradient comes again at every step. Most are attained.
    longest: Callable[[Step], float] | None = None
    longest_repeated: Callable[[Step], float] = None  # pyright: ignore

    # Numbers of the state of a matrix, as the papers count; `narrow` if a momentum among them, of
    # the matrix's size, has the parameters' dtype instead of float32.
    numbers: Callable[[Size], int]
    narrow: bool = False

    # Benchmarks.
    floor: str | None = None  # what a step cannot do without, see `benchmarks/_floors.py`
    aim: float | None = None  # for its time over the floor's
    peer: Peer | None = None
    benchmark: Settings = dataclasses.field(default_factory=dict)
    variants: Mapping[str, Variant] = dataclasses.field(default_factory=dict)
    offset: int = 1  # of the steps at which it refreshes there, counted from 1
    by_rank: Callable[[int], Settings] = lambda rank: {}  # what else depends on the rank
    trained: Callable[[int], Settings] = lambda period: {}  # in training, from a period
    coded: Coded | None = None

    def __post_init__(self) -> None:
        """Fills in what follows from the rest."""
        found = {
            "optimizer": self.optimizer or getattr(curvax, self.name),
            "direction": self.direction or getattr(curvax, f"scale_by_{self.name}"),
            "decomposes": self.decomposes or ("eigh" if self.factors else None),
            "longest_repeated": self.longest_repeated or self.longest,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """As tests show it."""
        return self.name

    # What follows from the traits.

    @property
    def factors(self) -> bool:
        """Whether it has symmetric factors, which have storages."""
        return self.keeps in ("roots", "bases")

    @property
    def ranked(self) -> bool:
        """Whether it has a rank."""
        return "rank" in self.settings

    @property
    def policies(self) -> tuple[str, ...]:
        """The refresh policies that it takes; FOAM with another one is Shampoo."""
        own = self.keeps if not self.own_policy else None
        return tuple(name for name, kinds in POLICIES.items() if own in kinds)

    @property
    def state_fields(self) -> frozenset[str]:
        """Fields of the state that hold entries of a matrix."""
        kept = FIELDS["eigenpairs" if self.own_policy else self.keeps]
        return self.fields | kept | ({"failures"} if self.svd else set())

    @functools.cached_property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's keyword arguments."""
        return dict(self.optimizer.__kwdefaults__ or {})

    @property
    def static(self) -> tuple[str, ...]:
        """Arguments that `optax.inject_hyperparams` has to leave alone: integers and callables."""
        given = self.defaults | {**self.settings}
        whole = lambda x: isinstance(x, int) and not isinstance(x, bool)  # noqa: E731
        return tuple(name for name, x in given.items() if whole(x) or callable(x))

    def side(self, settings: Settings) -> str:
        """The side, or both, that has factors, a basis or a projection."""
        both = "both" if self.keeps == "roots" else "smaller"
        return (self.defaults | {**settings}).get("side", both) or "smaller"

    # Making it.

    @property
    def without_base(self) -> dict[str, Any]:
        """What makes the direction that of plain descent."""
        return {"base": None} if self.base else {}

    @property
    def with_output_layer(self) -> dict[str, Any]:
        """What makes a matrix of the output layer."""
        rule = {"matrices": curvax.MatrixRule(output_layer=None)}
        return rule if self.spares_output_layer else {}

    def make(self, learning_rate: Any = 0.1, **settings: Any) -> Any:
        """The full optimizer."""
        return self.optimizer(learning_rate, **{**self.for_contract(), **settings})

    def make_direction(self) -> Any:
        """The direction alone, for batches of matrices."""
        return self.direction(**self.settings)

    def for_contract(self) -> dict[str, Any]:
        """Small settings."""
        return {**self.settings, **self.without_base, **self.contract}

    def for_algebra(self) -> dict[str, Any]:
        """Settings with which errors of codes are seen, and decisions of policies are clear."""
        return {**self.settings, **self.with_output_layer, **self.algebra}

    def for_faults(self) -> dict[str, Any]:
        """Settings in which what a fault leaves behind lasts."""
        return {**self.settings, **self.without_base, **self.with_output_layer, **self.faults}

    def for_fuzzing(self) -> dict[str, Any]:
        """Settings with the papers' ε, behind which no division hides."""
        large = ("eps", "max_damping")
        settings = {name: x for name, x in self.for_contract().items() if name not in large}
        return {**settings, **self.with_output_layer, **self.fuzz}

    # Its state.

    def size(self, m: int, n: int, rank: int, settings: Settings) -> Size:
        """A matrix's as the method sees it with these settings."""
        return Size(m, n, min(rank, m, n), self.side(settings))

    def matrix_bytes(self, m: int, n: int, itemsize: int) -> int:
        """Of the state of one matrix in the contract suites, all counters among them.

        Args:
          m: rows.
          n: columns.
          itemsize: bytes of a parameter's entry.
        """
        size = self.size(m, n, self.settings.get("rank", 0), self.settings)
        momentum = (4 - itemsize) * m * n if self.narrow else 0
        each = 4 * len(("error", "checks", "refreshes", "indefinite", "rejected"))
        counted = {
            None: 0,
            "roots": each * len(size.orders),
            "bases": 12 * len(size.orders),
            "subspaces": 16,  # two counters, and a random key
        }[self.keeps]
        if self.own_policy:  # ε and h in place of the error, and the eigenvalues
            counted += 4 * sum(1 + d for d in size.orders)
        failures, skipped = 4 * self.svd, 4
        return 4 * self.numbers(size) - momentum + counted + failures + skipped
