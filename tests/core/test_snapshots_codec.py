"""The size of a partner's vector in each codec."""

import pytest

from noloco_p2p.core.snapshots import partner_bytes


@pytest.mark.parametrize("parameters", [5_000_000, 300_000_000])
@pytest.mark.parametrize(("codec", "most"), [("full", 4.1), ("bfloat16", 2.05), ("int8", 1.1), ("int4", 0.56)])
def test_bytes_per_parameter_including_the_request(codec: str, most: float, parameters: int) -> None:
    assert 0.88 * most < partner_bytes(codec, parameters, parameters, "float32") / parameters <= most  # type: ignore[arg-type]
