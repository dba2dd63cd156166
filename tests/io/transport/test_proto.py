"""The committed stubs match proto/noloco.proto, every part of which is documented, and the hand-written codec."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from noloco_p2p.core.wire import PROTOCOL, Chunk, End, Frame
from noloco_p2p.errors import Violation
from noloco_p2p.io.dht.join_handshake import MANIFEST_CALL
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.frame_codec import packed, unpacked

ROOT = Path(__file__).resolve().parents[3]
OLDEST = dict(re.findall(r'"([a-z-]+)[>=]=([0-9.]+)', (ROOT / "pyproject.toml").read_text()))
"""Package → the oldest version allowed."""
STUBS = ("noloco_pb2.py", "noloco_pb2.pyi")


def generate(*arguments: str) -> None:
    """Run protoc in the root of the repository, with the plug-ins of this environment."""
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "noloco_p2p/io/transport=proto", *arguments]
    subprocess.run(
        [*command, "noloco_p2p/io/transport/noloco.proto"],
        cwd=ROOT,
        env=os.environ | {"PATH": search},
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_generating_the_stubs_again_changes_nothing(tmp_path: Path) -> None:
    generate(*(f"--{kind}_out={tmp_path}" for kind in ("python", "mypy")))
    made = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(STUBS)
    for name in STUBS:
        fresh = (tmp_path / "noloco_p2p" / "io" / "transport" / name).read_text()
        kept = (ROOT / "noloco_p2p" / "io" / "transport" / name).read_text()
        assert fresh == kept, f"{name} does not match proto/noloco.proto"


def test_the_contract_states_its_version() -> None:
    (named,) = re.findall(r'the version of this file, "(\d+)"', (ROOT / "proto" / "noloco.proto").read_text())
    assert named == PROTOCOL
    assert f"noloco/manifest/{named}" == MANIFEST_CALL, "nodes of other versions are refused when they join"


def test_the_stubs_are_no_newer_than_the_oldest_protobuf_allowed() -> None:
    text = (ROOT / "noloco_p2p" / "io" / "transport" / "noloco_pb2.py").read_text()
    (made_with,) = re.findall(r"^# Protobuf Python Version: (.*)$", text, re.MULTILINE)
    assert Version(made_with) <= Version(OLDEST["protobuf"])


def test_every_message_field_and_method_is_documented(tmp_path: Path) -> None:
    target = tmp_path / "described"
    generate("--include_source_info", f"--descriptor_set_out={target}")
    (described,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    commented = {
        tuple(place.path)
        for place in described.source_code_info.location
        if place.leading_comments.strip().endswith(".")
    }
    wanted: set[tuple[int, ...]] = {(6, s) for s in range(len(described.service))}
    wanted |= {(6, s, 2, m) for s, service in enumerate(described.service) for m in range(len(service.method))}

    def add(path: tuple[int, ...], message: descriptor_pb2.DescriptorProto) -> None:
        wanted.add(path)
        wanted.update((*path, 2, index) for index in range(len(message.field)))
        for index, enum in enumerate(message.enum_type):
            wanted.add((*path, 4, index))
            wanted.update((*path, 4, index, 2, value) for value in range(len(enum.value)))
        for index, nested in enumerate(message.nested_type):
            add((*path, 3, index), nested)

    for index, message in enumerate(described.message_type):
        add((4, index), message)
    assert len(wanted) > 60
    assert wanted <= commented, f"without a sentence: {sorted(wanted - commented)}"


u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
frame_lists = st.lists(st.builds(Chunk, u32, u64, st.binary(max_size=300)) | st.builds(End, u32, u64, u64), max_size=4)
heads = st.sampled_from(
    [
        pb.ActivationMessage(),
        pb.ActivationMessage(header=pb.ActivationHeader(run_id="r" * 200, stage=3, time_left_s=1.5, digest=7)),
        pb.Reply(gradient=pb.GradientHeader(loss_sum=-2.0, tokens=5, served=["A", "B"])),
        pb.Reply(refusal=pb.Refusal(kind=pb.Refusal.KIND_BUSY, message="full")),
        pb.SnapshotMessage(header=pb.SnapshotHeader(peer="A", round=0, step=9)),
    ]
)
Head = pb.ActivationMessage | pb.Reply | pb.SnapshotMessage


def generated(head: Head, frames: list[Frame]) -> Head:
    """The same message, built with the generated classes."""
    whole = type(head).FromString(head.SerializeToString())
    for frame in frames:
        if isinstance(frame, Chunk):
            chunk = pb.Chunk(tensor=frame.tensor, offset=frame.offset, data=bytes(frame.data))
            whole.frames.append(pb.Frame(chunk=chunk))
        else:
            whole.frames.append(pb.Frame(end=pb.End(tensor=frame.tensor, length=frame.length, digest=frame.digest)))
    return whole


@given(heads, frame_lists)
def test_the_hand_written_codec_packs_frames_as_the_generated_classes_do(head: Head, frames: list[Frame]) -> None:
    whole = generated(head, frames)
    assert type(head).FromString(packed(head, frames)) == whole
    for raw in (whole.SerializeToString(), packed(head, frames)):
        read, found = unpacked(raw, type(head))
        assert read == head
        assert found == frames


@given(heads, frame_lists, st.data())
def test_arbitrary_bytes_are_a_violation_or_read_as_the_generated_classes_read_them(
    head: Head, frames: list[Frame], data: st.DataObject
) -> None:
    raw = bytearray(packed(head, frames) or b"\x00")
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[place] ^= data.draw(st.integers(1, 255))
    else:
        del raw[place:]
    try:
        read, found = unpacked(bytes(raw), type(head))
    except Violation:
        return
    assert type(head).FromString(bytes(raw)) == generated(read, found), "the codec and the generated classes disagree"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00",
        b"\x12\x05\x0a",
        b"\xff" * 12,
        b"\x12\x80",
        b"\x12\x02\x1a\x00",
        b"\x12\x04\x0a\x02\x1a\x05",
        b"\x12\x04\x0a\x03\x1a\x01",
        b"\x12\x05\x0a\x01\x1a\x01x",
        b"\x0a\x7f",
        b"\x78\x00",
        b"\x92" + b"\x80" * 10 + b"\x00\x04\x0a\x02\x08\x00",
        b"\x12\x00",
        b"\x12\x00\x0a\x00",
        b"\x12\x07\x12\x05\x19abcd",
        b"\x12\x07\x12\x05\x19abcd" + b"\x12\x02\x0a\x00",
        b"\x12\x05\x12\x03\x1a\x01x",
        b"\x12\x0b\x0a\x09\x19abcdefgh",
        b"\x12\x04\x0a\x00\x12\x00",
        b"\x12\x08\x0a\x06\x08\x80\x80\x80\x80\x10",
        b"\x12\x0d\x0a\x0b\x10" + b"\xff" * 9 + b"\x02",
    ],
)
def test_broken_bytes_are_a_violation(raw: bytes) -> None:
    with pytest.raises(Violation):
        unpacked(raw, pb.ActivationMessage)
