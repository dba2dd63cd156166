"""The committed stubs are what the pinned generators make of proto/noloco.proto, and every part of it is explained."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
STUBS = ("noloco_pb2.py", "noloco_pb2.pyi", "noloco_pb2_grpc.py", "noloco_pb2_grpc.pyi")


def generate(*arguments: str) -> None:
    """Runs protoc in the repository's root, with the plug-ins of this environment."""
    search = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "noloco_p2p/io=proto", *arguments]
    subprocess.run(
        [*command, "noloco_p2p/io/noloco.proto"],
        cwd=ROOT,
        env=os.environ | {"PATH": search},
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_generating_the_stubs_again_changes_nothing(tmp_path: Path) -> None:
    generate(*(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")))
    made = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert made == sorted(STUBS)
    for name in STUBS:
        fresh = (tmp_path / "noloco_p2p" / "io" / name).read_text()
        assert fresh == (ROOT / "noloco_p2p" / "io" / name).read_text(), f"{name} is not what proto/noloco.proto gives"


def test_every_message_field_and_method_has_a_sentence(tmp_path: Path) -> None:
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
