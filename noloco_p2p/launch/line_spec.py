"""Parses `--link`: the line that every node gets, and the latency between two nodes."""

import re
from dataclasses import dataclass
from typing import Self

from noloco_p2p.errors import ConfigError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
FORM = "DOWN[/UP]mbit[,LATENCYms[,JITTERms]], such as 200mbit,25ms or 200/20mbit,25ms,3ms"
_SPEC = re.compile(
    r"(?P<down>[\d.]{1,12})(?:/(?P<up>[\d.]{1,12}))?(?P<unit>[kmg]bit)"
    r"(?:,(?P<latency>[\d.]{1,12})ms(?:,(?P<jitter>[\d.]{1,12})ms)?)?"
)


@dataclass(frozen=True, slots=True)
class LineSpec:
    """The line of every node, and the latency between two nodes."""

    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float = 0.0
    """Median one-way latency between two nodes."""
    spread: float = 0.0
    """Sigma of the log-normal latency, as in `sim.links.Link`: about its standard deviation over its median."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the value of `--link` (FORM). Raises ConfigError."""
        match = _SPEC.fullmatch(text.replace(" ", "").lower())
        try:
            parts = match.groupdict() if match else {}
            unit = UNITS[parts["unit"]] / 8
            latency, jitter = (float(parts[name] or 0) / 1e3 for name in ("latency", "jitter"))
            down, up = (float(parts[name] or parts["down"]) * unit for name in ("down", "up"))
        except (KeyError, ValueError):
            raise ConfigError(f"--link {text}: write it as {FORM}") from None
        if min(down, up) <= 0 or jitter > latency:
            raise ConfigError(f"--link {text}: rates must be above 0, and the jitter at most the latency; {FORM}")
        return cls(down, up, latency, jitter / latency if latency else 0.0)
