"""Messages that carry tensor bytes, written and read field by field: exactly the bytes of proto/noloco.proto.

Why by hand: the generated classes copy every chunk three times more on its way out and twice more on its way in. Here
a chunk is copied once into the message that is sent and once out of the one received. On two cores `noloco bench
transport` carries 64 MiB tensors at 1,220 MiB/s so and at 750 MiB/s with the generated classes, which would miss its
target; calls of 4 KiB take as long with either. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import FILLER_BYTES
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import noloco_pb2 as pb

M = TypeVar("M", bound=Message)

LENGTH_DELIMITED = 2
CHUNK, END = 0x0A, 0x12
"""Tags of the two kinds of Frame."""
TENSOR, OFFSET, LENGTH, DATA, DIGEST = 0x08, 0x10, 0x10, 0x1A, 0x19
"""Tags of the fields of Chunk and End."""
DIGEST_BYTES = 8
FILLERS = {nbytes: pb.Reply(filler=pb.Filler(data=bytes(nbytes))).SerializeToString() for nbytes in FILLER_BYTES}
"""The message before a reply that makes a connection fast (`filler`), by its bytes."""
HEAD_BYTES = {"ActivationMessage": 1 << 14, "Reply": 1 << 18}
"""Longest headers of messages that do not name the tensors of a stage: peer ids of 128 letters for 1,024 stages."""
MOST_HEADS = 8
"""Fields of one message that are no frames."""
HEADS_KEPT = 4096
"""What stands before a chunk's bytes is the same in each microbatch."""


def frames_field(kind: type[Message]) -> int:
    """Number of the field `frames` in this kind of message."""
    return int(kind.DESCRIPTOR.fields_by_name["frames"].number)


def varint(value: int) -> bytes:
    """Seven bits a byte, lowest first, the eighth bit set in all but the last."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def is_filler(message: object) -> bool:
    """A reply is still to come: this says nothing."""
    return any(message == filler for filler in FILLERS.values())


def packed(head: Message, frames: Iterable[wire.Frame]) -> bytes:
    """The message `head` with these frames in it, as it travels."""
    field = frames_field(type(head))
    pieces: list[bytes | memoryview] = [head.SerializeToString()]
    for frame in frames:
        if isinstance(frame, wire.Chunk):
            pieces += [_chunk_head(field, frame.tensor, frame.offset, len(frame.data)), frame.data]
        else:
            digest = frame.digest.to_bytes(DIGEST_BYTES, "little")
            pieces += [_end_head(field, frame.tensor, frame.length), digest]
    return b"".join(pieces)


@lru_cache(HEADS_KEPT)
def _chunk_head(field: int, tensor: int, offset: int, size: int) -> bytes:
    """All of a chunk but its bytes, which come after it."""
    inner = bytes([TENSOR, *varint(tensor), OFFSET, *varint(offset), DATA, *varint(size)])
    return _frame_head(field, CHUNK, inner, size)


@lru_cache(HEADS_KEPT)
def _end_head(field: int, tensor: int, length: int) -> bytes:
    """All of an end marker but its digest, which comes after it."""
    return _frame_head(field, END, bytes([TENSOR, *varint(tensor), LENGTH, *varint(length), DIGEST]), DIGEST_BYTES)


def _frame_head(field: int, kind: int, inner: bytes, rest: int) -> bytes:
    """The tags and lengths around `inner`, which `rest` more bytes will follow."""
    middle = bytes([kind, *varint(len(inner) + rest)]) + inner
    return varint(field << 3 | LENGTH_DELIMITED) + varint(len(middle) + rest) + middle


def unpacked(raw: bytes, kind: type[M]) -> tuple[M, list[wire.Frame]]:
    """The message without its frames, and the frames, whose data are views of `raw`. Raises Violation: broken bytes."""
    tag = frames_field(kind) << 3 | LENGTH_DELIMITED
    view = memoryview(raw)
    frames: list[wire.Frame] = []
    head: list[memoryview] = []
    at = 0
    try:
        while at < len(raw):
            begin = at
            found, at = _read_varint(raw, at)
            if found & 7 != LENGTH_DELIMITED:
                raise Violation("a message holds a field that no message of this protocol has")
            at, end = _read_size(raw, at, len(raw))
            if found == tag:
                frames.append(_frame(raw, view, at, end))
            else:
                head.append(view[begin:end])
            at = end
            if len(frames) > wire.MOST_FRAMES or len(head) > MOST_HEADS:
                raise Violation(f"a message has more than {wire.MOST_FRAMES} frames, or {MOST_HEADS} other fields")
        if sum(map(len, head)) > HEAD_BYTES.get(kind.DESCRIPTOR.name, len(raw)):
            raise Violation(f"a {kind.DESCRIPTOR.name} of {len(raw)} bytes has too long a header")
        return kind.FromString(b"".join(head)), frames
    except (IndexError, DecodeError):
        raise Violation(f"{len(raw)} bytes came that are not a {kind.DESCRIPTOR.name}") from None


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where what follows begins."""
    value = raw[at]
    at += 1
    if value < 128:
        return value, at
    value, shift = value & 127, 7
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if value >> 64 or shift > 70:
            raise IndexError
        if byte < 128:
            return value, at


def _read_size(raw: bytes, at: int, within: int) -> tuple[int, int]:
    """Where the bytes of a length-delimited field begin and end whose length is at `at`; they end `within`."""
    size, at = _read_varint(raw, at)
    if at + size > within:
        raise IndexError
    return at, at + size


def _frame(raw: bytes, view: memoryview, at: int, end: int) -> wire.Frame:
    """The frame from `at` to `end`."""
    kind = raw[at]
    at, inner_end = _read_size(raw, at + 1, end)
    if kind not in (CHUNK, END) or inner_end != end:
        raise IndexError
    tensor = number = digest = 0
    data = view[end:end]
    while at < end:
        tag = raw[at]
        if tag in (TENSOR, OFFSET):
            value, at = _read_varint(raw, at + 1)
            if tag == OFFSET:
                number = value
            elif value >> 32:
                raise IndexError
            else:
                tensor = value
        elif tag == DATA and kind == CHUNK:
            begin, at = _read_size(raw, at + 1, end)
            data = view[begin:at]
        elif tag == DIGEST and kind == END:
            at += 1 + DIGEST_BYTES
            digest = int.from_bytes(raw[at - DIGEST_BYTES : at], "little")
        else:
            raise IndexError
    if at != end:
        raise IndexError
    return wire.Chunk(tensor, number, data) if kind == CHUNK else wire.End(tensor, number, digest)
