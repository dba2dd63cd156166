"""What is wrong with a swarm, cause first, from what all its nodes say of themselves. Pure.

`findings.py` has the values, `symptoms.py` what one node or one stage shows by itself, `causes.py` follows the waits
from node to node.
"""

from collections.abc import Sequence

from noloco_p2p.core.findings import Finding, Report, Severity, short

__all__ = ["Finding", "Report", "Severity", "findings", "sentence", "short"]


def findings(reports: Sequence[Report]) -> list[Finding]:
    """Everything that is wrong, the worst and most causal first; empty: nothing. Never raises."""
    return [
        Finding("error", "unreachable", r.peer, f"node {short(r.peer)} does not answer: {r.failure}", "look at its log")
        for r in reports
        if r.status is None
    ]


def sentence(reports: Sequence[Report]) -> str:
    """One line for the whole swarm: the worst cause, or how far it has come."""
    found = [finding for finding in findings(reports) if finding.severity != "ok"]
    return found[0].sentence if found else "training"
