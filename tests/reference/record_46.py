"""The optimizer of entry #46 of modded-nanogpt's track 3 on one matrix, in NumPy float64.

Source: `records/track_3_optimization/results/20260619_cwd_rowfloor_tailema/train_gpt_cwd_SOTA.py`
(2690 steps): lines 262-517 (matrices), 556-653 (EMA-Nesterov), 849-884 (schedules), 921-975 (tail
EMA). W is outputs by inputs, (m, n). Step t = 0, 1, ..., with rate eta_t and momentum mu_t:

1. Lookahead: W <- W + beta_t E, and the gradient G is taken there (`reference.ema_nesterov`).
2. M <- mu M + (1 - mu) G; A = (1 - mu) G + mu M.
3. SOAP in the bases that the step before left (none at t = 0: S = A, and V stays 0):
   P = Q_r' A Q_c; V <- b V + (1 - b) P^2; S = Q_r (P / max(sqrt(V), 1e-8)) Q_c', at A's length
   in the Schatten 4-norm. b = 0.9.
4. Attention alone: the blend of A and S at A's length (`reference.blends`), with g = 1, but for
   the attention's output matrix, whose g is the bounded trust gate.
5. Polar factor: X / max(||X||_S4, 1e-7), twelve times (2, -1.5, 0.5); times sqrt(max(1, m / n)).
6. Brake on W (outward 0.5), floor by rows (0.3825 of the row), then the step
   W - eta u, pinned (`reference.brakes`, `reference.floors`).
7. Cautious decay behind the pin: W <- W (1 - eta 0.025 1(u W > 0)), the mask with the floored u and
   the W from before the step.
8. L <- b L + (1 - b) G G', R alike; bases: eigenvectors at t = 0, then at each step the columns
   sorted by diag(Q' L Q), V with them, and Q of QR(L Q).
9. E <- gamma E + (1 - gamma) (W - W before 1).

Readings chosen:
- `gradients` are arrays, or functions of the point at which they are taken.
- `role` is "mlp", "attention" (queries, keys, values: g = 1, which repeats the length of step 3) or
  "attention_output".
- V is of the rotated Nesterov update A, not of G.
- `bases`: where a statistic has no full rank, as the first ones of a non-square matrix, its null
  space has no basis of its own, and the result is not a function of the gradients. bases[t] =
  (Q_r, Q_c) are the bases that step t leaves, and (Q_r, Q_c, rows, columns) are they and the orders
  of V; others are computed.
- lengths of 0: the clamps 1e-8 (lengths of A and S), 1e-7 (Newton-Schulz), 1e-12, 1e-8 (brake,
  pin) of the source; by them a matrix of zeros leaves zero.
- Rates, momenta and lookaheads are one number per step; `published_settings` makes those of the
  entry, for a run of any length whose marks are moved in proportion. The lookahead follows the rate
  of the token embedding of the step before.
- Everything is float64; the source has Newton-Schulz in bfloat16.
"""

from dataclasses import dataclass, field

import numpy as np

from .averages import tail_ema
from .blends import blend, bounded_gate, trust_gate
from .brakes import brake_update, pinned_step
from .ema_nesterov import lookahead_rates
from .floors import floored
from .lengths import schatten_4
from .muon import newton_schulz_from
from .soap import eigenvectors, qr_refresh
from .track3_schedules import POWER_FACTORS, momentum_schedule, power_cool


@dataclass(frozen=True)
class Settings:
    """The numbers of the entry; the three schedules have one number per step."""

    rates: np.ndarray
    momenta: np.ndarray
    lookaheads: np.ndarray
    role: str = "mlp"
    soap_b: float = 0.9
    outward: float = 0.5
    inward: float = 1.0
    share: float = 0.3825
    unit: str = "row"
    cautious_decay: float = 0.025
    lookahead_gamma: float = 0.99
    polar: tuple = ((2.0, -1.5, 0.5),) * 12
    gate: dict = field(default_factory=dict)
    tail: dict = field(default_factory=dict)


def published_settings(steps=2900, **changes):
    """The entry's settings; its marks are in proportion to the number of steps.

    The time of the tail EMA, 150 steps, is at least one step.
    """
    t, unit = np.arange(steps), steps / 2900

    def rates_of(kind):
        rate, factor = POWER_FACTORS[kind]
        return power_cool(t / unit, rate, factor)

    betas = lookahead_rates(
        rates_of("embedding") / POWER_FACTORS["embedding"][0],
        prefill=300 * unit,
        rest=1950 * unit,
    )
    settings = {
        "rates": rates_of("matrices"),
        "momenta": momentum_schedule(t / unit),
        "lookaheads": betas,
        "gate": {"floor_end": 1375 * unit, "fade_end": 1625 * unit},
        "tail": {"tau": max(150 * unit, 1.0), "start": 2400 * unit, "end": 2900 * unit},
    }
    return Settings(**{**settings, **changes})


class Soap:
    """Statistics, bases and second moment of the preconditioner."""

    def __init__(self, shape, b, bases):
        self.b, self.bases = b, bases
        self.V, self.Q_r, self.Q_c = np.zeros(shape), None, None
        self.L, self.R = (np.zeros((order, order)) for order in shape)

    def precondition(self, A):
        """Step 3."""
        if self.Q_r is None or self.Q_c is None:
            return A
        P = self.Q_r.T @ A @ self.Q_c
        self.V = self.b * self.V + (1 - self.b) * P**2
        S = self.Q_r @ (P / np.maximum(np.sqrt(self.V), 1e-8)) @ self.Q_c.T
        return S * (max(schatten_4(A), 1e-8) / max(schatten_4(S), 1e-8))

    def update(self, t, G):
        """Step 8."""
        self.L = self.b * self.L + (1 - self.b) * G @ G.T
        self.R = self.b * self.R + (1 - self.b) * G.T @ G
        rows, columns = (np.arange(order) for order in G.shape)
        if self.Q_r is None or self.Q_c is None:
            new = eigenvectors(self.L), eigenvectors(self.R)
        else:
            new_r, rows = qr_refresh(self.L, self.Q_r)
            new_c, columns = qr_refresh(self.R, self.Q_c)
            new = new_r, new_c
        given = self.bases.get(t, new)
        if len(given) == 4:
            rows, columns = given[2:]
        self.Q_r, self.Q_c = given[:2]
        self.V = self.V[np.ix_(rows, columns)]


def direction(t, A, S, G, settings):
    """Steps 4 and 5."""
    X = S
    if settings.role != "mlp":
        g = 1.0
        if settings.role == "attention_output":
            g = bounded_gate(trust_gate(A, S, G), t, **settings.gate)
        X = blend(A, S, (1 - g, g))
    outputs, inputs = X.shape
    X = newton_schulz_from(X / max(schatten_4(X), 1e-7), settings.polar)
    return X * np.sqrt(max(1.0, outputs / inputs))


def record(gradients, W, settings, bases=None):
    """Run the entry over the gradients, from t = 0 on.

    Returns the weights after each step, what is evaluated after each step, and the states: point,
    G, M, A, S, u (floored), V, L, R, Q_r, Q_c and E, the average step.
    """
    soap = Soap(W.shape, settings.soap_b, {} if bases is None else bases)
    M, E = np.zeros(W.shape), np.zeros(W.shape)
    weights, states = [], []
    schedules = zip(gradients, settings.rates, settings.momenta, settings.lookaheads, strict=True)
    for t, (gradient, eta, mu, beta) in enumerate(schedules):
        before = W
        point = W + beta * E
        G = gradient(point) if callable(gradient) else gradient
        M = mu * M + (1 - mu) * G
        A = (1 - mu) * G + mu * M
        S = soap.precondition(A)
        u = brake_update(direction(t, A, S, G, settings), point, settings.outward, settings.inward)
        u = floored(u, point, settings.share, settings.unit)
        decayed = u * point > 0
        W = pinned_step(point, u, eta)
        W = W * (1 - eta * settings.cautious_decay * decayed)
        soap.update(t, G)
        E = settings.lookahead_gamma * E + (1 - settings.lookahead_gamma) * (W - before)
        weights.append(W)
        states.append(
            {
                **{"point": point, "G": G, "M": M, "A": A, "S": S, "u": u, "V": soap.V, "E": E},
                **{"L": soap.L, "R": soap.R, "Q_r": soap.Q_r, "Q_c": soap.Q_c},
            }
        )
    return weights, tail_ema(weights, **settings.tail)[0], states
