"""Join addresses from a file: what it may contain, waiting for it, and outdated contents."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from daemons import daemon, node, run
from processes import node_processes

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError, Declined, LocalError, Unreachable
from noloco_p2p.io.dht.identity import KEY, Identity, peer_id_of
from noloco_p2p.io.dht.join_handshake import serve_manifest
from noloco_p2p.launch import bootstrap, join_file, run_files
from noloco_p2p.launch.bootstrap import NodeOptions
from noloco_p2p.launch.join_file import FILE_LIMIT_BYTES, JoinAddresses
from noloco_p2p.launch.settings import Overrides

ONE, OTHER = (f"/ip4/10.0.0.{n}/tcp/9466/p2p/{peer_id_of(bytes([n]) * 32)}" for n in (1, 2))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_file, "POLL_S", 0.005)
    monkeypatch.setattr(join_file, "AGAIN_S", 0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "address"


def test_a_file_is_written_whole_read_back_and_removed(path: Path) -> None:
    join_file.remove(path)
    join_file.write(path, [ONE, OTHER])
    assert path.read_text() == f"{ONE}\n{OTHER}\n"
    assert [*path.parent.iterdir()] == [path], "no other file is left there"
    assert join_file.read(path) == [ONE, OTHER]
    join_file.remove(path)
    assert join_file.read(path) == []


def test_an_address_in_a_file_keeps_its_invitation(path: Path) -> None:
    path.write_text(f"{ONE}/invite/2Uw1bpp\n")
    assert join_file.read(path) == [f"{ONE}/invite/2Uw1bpp"]


def test_blank_lines_are_ignored_and_an_empty_file_has_no_address(path: Path) -> None:
    path.write_text(f"\n  {ONE} \r\n\n{OTHER}")
    assert join_file.read(path) == [ONE, OTHER]
    path.write_text("\n")
    assert join_file.read(path) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{ONE}\nbootstrap:9466\n".encode(), ":2: malformed join address 'bootstrap:9466'"),
        (f"{ONE} {OTHER}".encode(), ":1: malformed join address"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"\n" * (FILE_LIMIT_BYTES + 1), "it is not a list of join addresses"),
    ],
)
def test_invalid_content_is_reported_in_one_line_with_its_place(path: Path, content: bytes, expected: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        asyncio.run(JoinAddresses([f"@{path}"]).wait())
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_or_pipe_in_place_of_a_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"^{path} is not a regular file"):
            join_file.check([f"@{path}"])
    with pytest.raises(LocalError, match="there is no directory"):
        join_file.remove(tmp_path / "none" / "address")


def test_an_invalid_join_option_is_refused_before_anything_starts(path: Path) -> None:
    join_file.check([ONE, f"@{path}"])
    with pytest.raises(ConfigError, match="write --join @FILE"):
        join_file.check(["@"])
    with pytest.raises(ConfigError, match="malformed join address"):
        join_file.check([ONE, str(path)])
    path.write_text("not yet")
    with pytest.raises(ConfigError, match=f"{path}:1: malformed join address"):
        join_file.check([ONE, f"@{path}"])


def test_a_node_waits_for_the_file_and_logs_it_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> tuple[str, ...]:
        coming = asyncio.create_task(JoinAddresses([f"@{path}"]).wait())
        await asyncio.sleep(0.03)
        assert not coming.done()
        join_file.write(path, [ONE])
        return await asyncio.wait_for(coming, 5)

    assert asyncio.run(scenario()) == (ONE,)
    assert caplog.messages == [f"waiting for the join address in {path}"]


def test_a_node_does_not_wait_for_a_file_if_it_has_another_address(path: Path) -> None:
    assert asyncio.run(JoinAddresses([f"@{path}", OTHER]).wait()) == (OTHER,)
    assert asyncio.run(JoinAddresses([]).wait()) == ()
    path.write_text(ONE)
    assert asyncio.run(JoinAddresses([OTHER, f"@{path}"]).wait()) == (OTHER, ONE)


def test_a_file_is_read_again_if_nobody_answers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(ONE)
    failure = Unreachable("nobody answers")

    async def scenario() -> None:
        addresses = JoinAddresses([f"@{path}"])
        assert await addresses.wait() == (ONE,)
        assert await addresses.may_change(failure)
        join_file.write(path, [OTHER])
        assert await addresses.wait() == (OTHER,)
        assert await addresses.may_change(failure)
        assert not await JoinAddresses([ONE]).may_change(failure)

    asyncio.run(scenario())
    assert caplog.messages == ["nobody answers; reading the file again until a node answers"]


def test_a_returning_node_waits_for_a_file_for_a_limited_time(path: Path) -> None:
    async def scenario() -> None:
        addresses = JoinAddresses([f"@{path}"], patience_s=0.02)
        with pytest.raises(Unreachable, match=f"there is no join address in {path}"):
            await asyncio.wait_for(addresses.wait(), 5)
        join_file.write(path, [ONE])
        assert await addresses.wait() == (ONE,)
        assert not await addresses.may_change(Unreachable("nobody answers"))

    asyncio.run(scenario())


def test_an_observer_does_not_wait_for_a_file(path: Path) -> None:
    """`noloco top --join @FILE`, with a mistyped name, said nothing for a minute."""

    async def observe(*join: str) -> None:
        async with bootstrap.observing(join):
            raise AssertionError("it has joined nothing")

    for content in (None, "\n"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ConfigError, match=f"no join address is in @{path} yet: is its node running?"):
            asyncio.run(observe(f"@{path}"))
    with pytest.raises(ConfigError, match="write --join @FILE"):
        asyncio.run(observe("@"))
    assert join_file.known([f"@{path}", ONE]) == (ONE,)
    assert join_file.known([]) == ()


def test_one_joined_node_that_answers_is_enough(tmp_path: Path) -> None:
    """The other one may still be starting, or be stopped while its daemon goes on."""

    async def scenario() -> None:
        manifest = RunManifest()
        async with daemon(tmp_path / "starting") as starting, node(tmp_path / "here") as here:
            join = [starting.join_addresses[0], here.address]
            with pytest.raises(Declined, match=f"{starting.peer_id} does not answer .* it is still starting"):
                async with bootstrap.observing(join):
                    raise AssertionError("no node has told it the run")
            await serve_manifest(here.libp2p, manifest.canonical_json())
            async with bootstrap.observing(join) as observer:
                assert observer.manifest == manifest
            local, identity = NodeConfig(), Identity.open(tmp_path / "new" / KEY)
            options = NodeOptions((), None, identity, watch_stdin=False, overrides=Overrides(()))
            async with daemon(tmp_path / "joining", join=join) as joining:
                assert await bootstrap.joined_run(options, joining, local) == manifest
            identity.close()

    run(scenario)


def test_a_node_waits_for_a_joined_one_that_is_still_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all nodes were started again at once, as after a power cut, one whose peer had its libp2p daemon already,
    and no answers yet, ended, although it knew the run."""

    async def scenario() -> None:
        manifest, local, identity = RunManifest(), NodeConfig(), Identity.open(tmp_path / "again" / KEY)
        options = NodeOptions((), None, identity, watch_stdin=False, overrides=Overrides(()))
        run_files.store_manifest(options.dir, manifest)
        asks_again = asyncio.Event()
        monkeypatch.setattr(bootstrap.log, "info", lambda *_: asks_again.set())
        async with daemon(tmp_path / "1") as first, daemon(tmp_path / "2", join=first.join_addresses) as second:
            monkeypatch.setattr(bootstrap, "TIMES_AGAIN", 1)
            with pytest.raises(Declined, match="it is still starting, or runs another version of noloco"):
                await bootstrap.joined_run(options, second, local)
            monkeypatch.setattr(bootstrap, "TIMES_AGAIN", 100_000)
            asks_again.clear()
            joining = asyncio.create_task(bootstrap.joined_run(options, second, local))
            await asks_again.wait()
            await serve_manifest(first, manifest.canonical_json())
            assert await joining == manifest
        identity.close()

    run(scenario)


def test_a_signal_ends_the_wait_at_once_and_cleanly(tmp_path: Path) -> None:
    with node_processes(tmp_path) as nodes:
        node = nodes.start("--join", f"@{tmp_path / 'address'}", own_dir="node")
        node.wait_for(lambda: "waiting for the join address in" in node.logged(), "word that it waits")
        node.process.send_signal(signal.SIGTERM)
        assert node.end() == 0
        assert node.logged().splitlines()[-1].endswith("stopped at once")
        nodes.nothing_left()
