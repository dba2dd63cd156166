"""The source of all randomness: one generator per (seed, purpose), the same on every machine and in every process."""

import hashlib
import json
import random


def generator(seed: int, *purpose: str | int) -> random.Random:
    """A fresh generator, a function of its arguments only (PYTHONHASHSEED plays no part).

    The arguments are encoded as a JSON list, in which 1 and "1", or ("ab",) and ("a", "b"), differ.
    """
    encoded = json.dumps([seed, *purpose], separators=(",", ":")).encode("ascii")
    return random.Random(int.from_bytes(hashlib.sha256(encoded).digest(), "big"))
