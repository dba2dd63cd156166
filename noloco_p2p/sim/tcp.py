"""What lost packets cost a connection: two formulas of TCP's.

Inside a transfer losses cost speed: at most `ceiling_bytes_per_s`. At its end, and for a message of one packet, nothing
comes after the lost packet that would tell of it, so its sender waits for the retransmission timer: `resend_s`.
Connections are taken as warm: slow start is left out. Reno's ceiling is a low one; CUBIC and BBR get more.
"""

import math
import random

SEGMENT_BYTES = 1460
"""An Ethernet frame's payload less the headers of IPv4 and TCP."""
RENO = math.sqrt(3 / 2)
"""1.22, of periodic losses with every segment acknowledged: Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior
of the TCP congestion avoidance algorithm", ACM CCR 27(3), 1997."""
LEAST_TIMER_S = 0.2
"""What the timer adds to a round trip: Linux, TCP_RTO_MIN. (RFC 6298 would have it wait a second.)"""
LONGEST_TIMER_S = 120.0
"""Linux, TCP_RTO_MAX."""


def ceiling_bytes_per_s(loss: float, round_trip_s: float) -> float:
    """What one connection reaches at most: 1.22·segment / (round trip·√loss)."""
    if loss <= 0 or round_trip_s <= 0:
        return math.inf
    return RENO * SEGMENT_BYTES / (round_trip_s * math.sqrt(loss))


def resend_s(loss: float, round_trip_s: float, rng: random.Random) -> float:
    """How much later a message's last packet arrives: 0 unless it is lost, else the timers, each twice the one before.

    Each sending is lost with chance `loss`, which must be below 1. RFC 6298, section 5.5.
    """
    late_s, timer_s = 0.0, round_trip_s + LEAST_TIMER_S
    while rng.random() < loss:
        late_s += timer_s
        timer_s = min(2 * timer_s, LONGEST_TIMER_S)
    return late_s
