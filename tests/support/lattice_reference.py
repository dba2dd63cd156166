"""What a partner's vector is decoded to in each codec, straight from METHOD.md, "Codecs of outer rounds"."""

from collections.abc import Mapping

import numpy as np
import torch
from audit_record import require
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Tensors = dict[str, torch.Tensor]
BITS = {"int8": 8, "int4": 4}
CHUNK = 4096


def decoded_difference(mine: Vector, theirs: Vector, step: Vector, dither: Vector) -> Vector:
    """û_j − û_i: both rounded to 2^-8 of `step`, then to multiples of it, shifted by the same dither."""
    k_theirs, k_mine = (np.floor(np.round(256 * vector / step) / 256 + dither) for vector in (theirs, mine))
    difference: Vector = step * (k_theirs - k_mine)
    return difference


def as_decoded(mine: Tensors, theirs: Tensors, used: Tensors, codec: str, limits: Mapping[str, float]) -> Tensors:
    """What `theirs` may be decoded to at a replica with the vector `mine`. On a lattice: the values `used`, if valid.

    In bfloat16: `mine` plus the difference of the two rounded vectors. On a lattice, in each chunk the values used must
    differ from the replica's own by a number of steps for which the codec has a code, where the step is a power of two,
    and be less than a step away from the partner's own. Dither and bounds are not recomputed. Afterwards no value is
    further away than the limit of its tensor: where one is that far, the partner's own must be, too, but for a step.
    Raises AssertionError if they are not valid.
    """
    if codec == "full":
        return theirs
    if codec == "bfloat16":
        return {name: u + (theirs[name].bfloat16().double() - u.bfloat16().double()) for name, u in mine.items()}
    most = {name: torch.full_like(u, limits[name]) for name, u in mine.items()}
    flat = [torch.cat([vectors[name].flatten() for name in mine]).numpy() for vectors in (mine, theirs, used, most)]
    for at in range(0, len(flat[0]), CHUNK):
        own, partner, found, limit = (vector[at : at + CHUNK] for vector in flat)
        moved, error, gap = np.abs(found - own), np.abs(found - partner), (partner - own) * np.sign(found - own)
        require(bool((moved < limit + 1e-12).all()), f"chunk {at // CHUNK} has a difference above its limit")
        free, step = moved < limit - 1e-12, 0.0
        if not free.all() and not (moved[free] > 1e-12).any():
            step = np.inf  # the others are within a step, whose size nothing shows
        elif error[free].max(initial=0.0) > 1e-12:
            steps = [2.0**e for e in range(-60, 20) if on_lattice(moved[free], 2.0**e, 1 << (BITS[codec] - 1))]
            require(bool(steps), f"chunk {at // CHUNK} deviates by what is no number of steps")
            step = max(steps)
            require(error[free].max() < step, f"chunk {at // CHUNK} deviates by {error[free].max() / step:.2g} steps")
        require(bool((gap >= limit - step - 1e-12)[~free].all()), f"chunk {at // CHUNK} was limited without need")
    return {name: torch.minimum(torch.maximum(used[name], u - most[name]), u + most[name]) for name, u in mine.items()}


def on_lattice(distances: Vector, step: float, levels: int) -> bool:
    """Whether all distances are multiples of the step, by a factor below `levels`, and not all of them are zero."""
    counts = np.round(distances / step)
    return bool(0 < counts.max() < levels and np.abs(distances - counts * step).max() < 1e-12)
