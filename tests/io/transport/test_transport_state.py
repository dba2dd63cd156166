"""A replica's state over gRPC: bit for bit, or an error and no state."""

from collections.abc import Iterator
from dataclasses import replace
from math import nan

import pytest
from state_fixture import MIB, SPECS, STATE, TENSORS, Donor
from transport_fixture import Events, Node, alive, hang, pair, run, soon, watched_buffers

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Advert, HostTensor, MicrobatchId, TensorSpec
from noloco_p2p.errors import Declined, PeerError, Unreachable, Violation
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport import weights_codec
from noloco_p2p.io.transport.frame_codec import unpacked


def test_a_state_arrives_bit_for_bit() -> None:
    async def scenario() -> None:
        mine, theirs = Events(), Events()
        donor = Donor(STATE)
        async with pair(Node(hang, lend=donor.lend), mine, theirs) as both:
            assert await both.a.fetch_state(both.peer, 10.0, SPECS) == STATE
            await soon(donor.returned.wait())
            assert (donor.asked, donor.lent) == ([None], 0)
        size = sum(spec.nbytes for spec in SPECS)
        assert mine.seen == [("bytes", {"direction": "in", "kind": "state", "bytes": size})]
        assert theirs.seen == [("bytes", {"direction": "out", "kind": "state", "bytes": size})]

    run(scenario())


def test_a_flipped_bit_is_a_violation_and_everything_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, original = watched_buffers(monkeypatch), weights_codec._frames

    def flipped(tensors: tuple[HostTensor, ...], first: int, offset: int) -> Iterator[wire.Frame]:
        for frame in original(tensors, first, offset):
            if isinstance(frame, wire.Chunk) and frame.tensor == 5:
                yield frame._replace(data=bytes([frame.data[0] ^ 16]) + bytes(frame.data[1:]))
            else:
                yield frame

    monkeypatch.setattr(weights_codec, "_frames", flipped)

    async def scenario() -> None:
        donor = Donor()
        async with pair(Node(hang, lend=donor.lend)) as both:
            with pytest.raises(Violation, match=f"'{SPECS[5].name}' do not match the digest") as caught:
                await both.a.fetch_state(both.peer, 10.0, SPECS)
            assert not caught.value.ours
            assert alive(made) == 0 < len(made)
            assert donor.asked == [None], "the same bytes are never requested again"

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "expected", "error"),
    [
        ({}, SPECS[:-1], Violation),
        ({}, (*SPECS, TensorSpec("adam_square/more", "float32", (3,))), Violation),
        ({}, (SPECS[1], SPECS[0], *SPECS[2:]), Violation),
        ({}, (SPECS[0]._replace(shape=(MIB // 3, 3)), *SPECS[1:]), Violation),
        ({}, (SPECS[0]._replace(dtype="int32"), *SPECS[1:]), Violation),
        ({"peer": "C"}, SPECS, Violation),
        ({"step": nan}, SPECS, Violation),
        ({"step": -1.0}, SPECS, Violation),
        ({"adam_steps": 67}, SPECS, Violation),
        ({"round": 1 << 60}, SPECS, Violation),
        ({"fresh_round": 8}, SPECS, Violation),
        ({"spent": (MicrobatchId("two\nlines", 1, 1),)}, SPECS, Violation),
        ({"stage": 2}, SPECS, Declined),
    ],
)
def test_an_unexpected_state_is_refused_before_memory_is_allocated(
    changes: dict[str, object],
    expected: tuple[TensorSpec, ...],
    error: type[PeerError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = watched_buffers(monkeypatch)

    async def scenario() -> None:
        donor = Donor(replace(STATE, **changes))  # type: ignore[arg-type]
        async with pair(Node(hang, lend=donor.lend)) as both:
            with pytest.raises(error) as caught:
                await both.a.fetch_state(both.peer, 10.0, expected)
            assert not getattr(caught.value, "ours", False)
            assert made == []
            await soon(donor.returned.wait())

    run(scenario())


def test_a_peer_without_a_state_declines_and_an_absent_peer_is_unreachable() -> None:
    async def scenario() -> None:
        async with pair(Node(hang)) as both:
            with pytest.raises(Declined, match="no state here"):
                await both.a.fetch_state(both.peer, 10.0, SPECS)
            await both.b.close()
            # Whether the end of the connection is noticed before the call or by it depends on the load of the machine.
            with pytest.raises(Unreachable, match=r"B cannot be reached|B was lost while waiting for a state"):
                await both.a.fetch_state(both.peer, 10.0, SPECS)

    run(scenario())


@pytest.mark.parametrize("where", [(99, 0), (len(TENSORS), 0), (1, 13)])
def test_a_resume_position_outside_the_state_is_a_violation(where: tuple[int, int]) -> None:
    with pytest.raises(Violation, match="has no byte"):
        next(weights_codec.to_state(STATE, *where))


def test_only_the_newest_spent_ids_travel_and_no_more_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    state = replace(STATE, step=0.0, adam_steps=STATE.inner_steps, fresh_round=STATE.round)
    state = replace(state, spent=tuple(MicrobatchId("A", 1, number) for number in range(3)))
    whole = next(weights_codec.to_state(state, 0, 0))
    monkeypatch.setattr(weights_codec, "MAX_SPENT", 2)
    newest = next(weights_codec.to_state(state, 0, 0))
    assert [one.counter for one in unpacked(newest, pb.StateMessage)[0].header.spent] == [1, 2]
    reader = weights_codec.StateReader(Advert(STATE.peer, "ab" * 32, STATE.stage, ()), SPECS)
    assert reader.feed(newest) is None
    reader = weights_codec.StateReader(Advert(STATE.peer, "ab" * 32, STATE.stage, ()), SPECS)
    with pytest.raises(Violation, match="more than 2 microbatches"):
        reader.feed(whole)
