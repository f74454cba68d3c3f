"""Alqahtani and Demirbas' performance model, formulas 7 to 21, exactly as they are published.

"Performance Analysis and Comparison of Distributed Machine Learning Systems", section III. Nothing
here is corrected: a function's docstring says where its formula contradicts the paper's own words
or another formula, and `foreprop.plan.refined` is what we use instead. Names are the paper's:

========== =============================================================================
``epoch``  number of epochs
``n``      number of training examples
``b``      batch size; the paper leaves open whether a worker's or all workers' together
``w``      number of workers
``ps``     number of parameter servers
``W``      size of the model, bits here so that it goes with the bandwidth
``B``      total bandwidth, bit/s (Table I); of one server's link in 8, of a node's in 16 and 20
========== =============================================================================

Times are in seconds. Values that a formula cannot take raise `ConfigError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from foreprop.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """What the formulas are about. Checked on construction."""

    n: float
    b: float
    w: int
    ps: int = 1
    W: float
    """Model size, bits."""
    B: float
    """Bandwidth, bit/s."""
    processing_s: float
    """T_processing: formula 7."""
    update_s: float = 0.0
    """PS_time of formula 11, update_time of 15 and 19: "a constant time in our analysis"."""
    epoch: float = 1.0

    def __post_init__(self) -> None:
        for name in ("n", "b", "w", "ps", "W", "B", "epoch"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be positive and finite")
        for name in ("processing_s", "update_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be finite and at least 0")


def processing_s(feedforward_s: float, loss_s: float, backward_s: float) -> float:
    """Formula 7: T_processing = T_a(L) + T_C + T_dC/dW, "the computation time"."""
    return feedforward_s + loss_s + backward_s


# Parameter server
def available_bandwidth_ps(s: Symbols) -> float:
    """Formula 8: (1/w * TotalBandwidth) * ps, bit/s "between every client and PS".

    The paper asks for w >= ps "in order to divide the bandwidth evenly", yet its experiments have
    four servers with one to three workers; there the formula gives a worker more than its own
    link has. It is computed all the same. That servers hold unequal shares is left out.
    """
    return (1 / s.w * s.B) * s.ps


def pull_s(s: Symbols) -> float:
    """Formula 9: epoch * W / available_B * (n / b).

    If b is one worker's batch, as in the experiments (100, whatever w is), w workers take n / (b w)
    iterations per epoch, not n / b.
    """
    return s.epoch * s.W / available_bandwidth_ps(s) * (s.n / s.b)


def push_s(s: Symbols) -> float:
    """Formula 10: epoch * (W / w) / available_B * (n / b).

    W / w is said to be "our formula to calculate the gradients size"; but in data parallelism every
    worker has a gradient for every parameter, W in all: the push is w times too short.
    """
    return s.epoch * (s.W / s.w) / available_bandwidth_ps(s) * (s.n / s.b)


def cpu_ps_s(s: Symbols) -> float:
    """Formula 11: epoch * (n / b) * (T_processing + PS_time).

    With b a worker's batch this does not fall with w; 15 and 19, for the same computation on the
    same number of workers, count n / w.
    """
    return s.epoch * (s.n / s.b) * (s.processing_s + s.update_s)


def tcp_ps_s(s: Symbols) -> float:
    """Formula 12: Pull(W) + Push(W). A full-duplex link can carry both at the same time."""
    return pull_s(s) + push_s(s)


def total_ps_s(s: Symbols) -> float:
    """Formula 13: T_cpu-ps + T_tcp-ps.

    A sum, although "Push(W) time often is overlapped under computation time".
    """
    return cpu_ps_s(s) + tcp_ps_s(s)


def ideal(single_s: float, s: Symbols) -> float:
    """Formula 14: (T_single * n) * w, called "the ideal samples per second".

    T_single "denotes for the single training processing time", so that the product is in seconds
    times samples and grows with a slower machine. Samples per second are w n / T_single.
    """
    return single_s * s.n * s.w


# Peer to peer
def cpu_p2p_s(s: Symbols) -> float:
    """Formula 15: epoch * (n / w) * (T_processing + update_time).

    n / w are the examples of one worker, not its iterations: this is b times too long if
    T_processing is that of a batch as in formula 11, and updates once per example if it is not.
    """
    return s.epoch * (s.n / s.w) * (s.processing_s + s.update_s)


def available_bandwidth_p2p(s: Symbols) -> float:
    """Formula 16: TotalBandwidth / (2 (w - 1)), bit/s "between the peer and other peers".

    The text explains the 2 by sending and receiving, and has nothing pulled from other machines;
    but a peer that holds W / w gets the rest from the others, so that pushes and replies are
    2 (w - 1) messages each way, and the 2 is right for full-duplex links, too. One worker has no
    peers: `ConfigError`.
    """
    if s.w < 2:
        raise ConfigError(f"w is {s.w}; formula 16 divides by w - 1, it takes at least 2 workers")
    return s.B / (2 * (s.w - 1))


def tcp_p2p_s(s: Symbols) -> float:
    """Formula 17: W / available_B * (n / w), which is n times 2 (w - 1) / w * W / B.

    The text has "2 (w - 1) messages" of W / w "in every iteration": 2 (w - 1) / w * W / B, the same
    as a ring's (20). So the formula counts one iteration for each of the n examples, b times as
    many as there are. It lacks ``epoch``.
    """
    return s.W / available_bandwidth_p2p(s) * (s.n / s.w)


def total_p2p_s(s: Symbols) -> float:
    """Formula 18: T_cpu-p2p + T_tcp-p2p."""
    return cpu_p2p_s(s) + tcp_p2p_s(s)


# Ring all-reduce
def cpu_ring_s(s: Symbols) -> float:
    """Formula 19: epoch * (n / w) * (T_processing + update_time); see formula 15."""
    return s.epoch * (s.n / s.w) * (s.processing_s + s.update_s)


def tcp_ring_s(s: Symbols) -> float:
    """Formula 20: 2 (w - 1) * (W / w) / Bandwidth.

    Of one iteration: the number of iterations, and ``epoch``, are missing. Added to 19, which is of
    all epochs, it makes a ring's communication vanish; that a ring beats peers, whose links carry
    the same bytes, follows from this alone.
    """
    return 2 * (s.w - 1) * (s.W / s.w) / s.B


def total_ring_s(s: Symbols) -> float:
    """Formula 21: T_cpu-ring + T_tcp-ring. A sum, although the text has the two overlap."""
    return cpu_ring_s(s) + tcp_ring_s(s)
