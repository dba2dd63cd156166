"""What a node waits for: every wait has a name, and is listed while it lasts and never after."""

import ast
import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import noloco_p2p
from noloco_p2p import ports
from noloco_p2p.config import DirectorySettings, LimitSettings, NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.health import problem_line
from noloco_p2p.core.status import ForMicrobatch, Resource, Status, Trouble, Wait
from noloco_p2p.node.device_stage import DeviceStage
from noloco_p2p.node.waits import Waits
from noloco_p2p.sim.virtual_time import run
from noloco_p2p.sim.world import SimPlan, SimSwarm

PACKAGE = Path(noloco_p2p.__file__).parent
SOURCES = sorted(set((PACKAGE / "node").rglob("*.py")) - {PACKAGE / "node" / "device_stage.py"})  # its callers wait
PORTS = (ports.Transport, ports.Directory, DeviceStage, ports.Batches, ports.Checkpoints)
PORT_CALLS = {name for port in PORTS for name, f in vars(port).items() if inspect.iscoroutinefunction(f)}
PORT_CALLS -= {name for port in PORTS for name, f in vars(port).items() if not inspect.iscoroutinefunction(f)}
PORT_CALLS |= {"make_stage", "make_batches"}
RECEIVERS = ("world", "stage", "batches", "data", "transport", "directory", "checkpoints")
COMPOSED = {"asyncio.gather", "asyncio.shield", "asyncio.TaskGroup", "asyncio.timeout"}
"""Exceptions: they wait for the node's own tasks, whose waits are named, or only bound a wait."""
NAMING = (".waiting", ".computing")


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that a file awaits outside a `with` that names it."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)} | OWN

    def walk(node: ast.AST, named: bool) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.With):
            named = named or any(
                isinstance(i.context_expr, ast.Call) and ast.unparse(i.context_expr.func).endswith(NAMING)
                for i in node.items
            )
        found = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            if node.func.attr in PORT_CALLS and receiver in RECEIVERS:
                found = ast.unparse(node.func)
            if node.func.attr in ("make_stage", "make_batches"):
                found = ast.unparse(node.func)
        waited = None
        if isinstance(node, ast.Await):
            waited = node.value
        elif isinstance(node, ast.AsyncFor):
            waited = node.iter
        elif isinstance(node, ast.AsyncWith):
            waited = node.items[0].context_expr
        choices = [waited.body, waited.orelse] if isinstance(waited, ast.IfExp) else [waited]
        for choice in (one for one in choices if one is not None):
            text = ast.unparse(choice.func if isinstance(choice, ast.Call) else choice)
            if text not in COMPOSED and text.rpartition(".")[2] not in own:
                found = text
        if found is not None and not named:
            yield getattr(node, "lineno", 0), found
        for child in ast.iter_child_nodes(node):
            yield from walk(child, named and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return iter(dict.fromkeys(walk(tree, False)))


OWN = {
    node.name
    for path in SOURCES
    for node in ast.walk(ast.parse(path.read_text("utf-8")))
    if isinstance(node, ast.AsyncFunctionDef)
}
THE_ONE_PLACE = {
    ("state.py", "asyncio.shield"),
    ("loop.py", "asyncio.wait"),  # for the tasks of the node
    ("restore.py", "asyncio.wait"),  # for the end of a transfer that is over or cancelled
    # Calls to the next stage, whose waits the dispatcher names in `_call`.
    ("dispatch.py", "self._transport.propagate"),
    ("liveness.py", "bound"),
    ("liveness.py", "reply"),
    ("race.py", "asyncio.wait"),
    ("race.py", "call"),
}


def test_nothing_waits_unnamed() -> None:
    found = [
        f"{path.name}:{line} {what}"
        for path in SOURCES
        for line, what in unnamed(path.read_text("utf-8"))
        if (path.name, what) not in THE_ONE_PLACE
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.sleep(1)",
        "await self._event.wait()",
        "await self._gate.acquire()",
        "await node.stage.forward(x)",
        "await to_the_end(stage.backward(x))",
        "await node.world.transport.propagate(a, b)",
        "await node.world.make_stage(0)",
        "task = asyncio.create_task(node.world.directory.peers())",
        "await self._transport.fetch_snapshot(peer, 1)",
        "task = asyncio.create_task(self._directory.peers())",
        "async with self._lock:\n        pass",
        "with node.waiting('a', 'b'):\n        f = lambda: node.stage.forward(x)",
    ],
)
def test_an_unnamed_wait_is_found(line: str) -> None:
    source = f"async def duty(self, node, stage):\n    {line}\n"
    assert len(list(unnamed(source))) == 1
    assert not list(
        unnamed("async def duty(self, node, stage):\n    with node.waiting('a', 'b'):\n        await x.wait()\n")
    )


def test_waits_are_listed_while_they_last() -> None:
    async def story() -> None:
        waits, loop = Waits(), asyncio.get_running_loop()
        with waits.waiting("gradient", "s1r0", 5.0, ForMicrobatch("s0r0", 1)):
            await asyncio.sleep(2.0)
            with waits.waiting("forward", Resource.DEVICE, idle=True):
                await asyncio.sleep(1.0)
                assert waits.current(loop.time()) == (
                    Wait("gradient", "s1r0", 3.0, 5.0, ForMicrobatch("s0r0", 1)),
                    Wait("forward", Resource.DEVICE, 1.0, None, None, True),
                )
        assert waits.current(loop.time()) == ()
        with pytest.raises(TimeoutError), waits.waiting("x", "y"):
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()
        assert waits.current(loop.time()) == ()

    run(story())


def test_an_operation_that_is_given_up_is_no_sign_of_the_device() -> None:
    async def story() -> None:
        waits, loop = Waits(), asyncio.get_running_loop()

        async def compute(seconds: float) -> None:
            with waits.computing("forward"):
                await asyncio.sleep(seconds)

        operations = [asyncio.create_task(compute(seconds)) for seconds in (1.0, 100.0, 100.0)]
        await asyncio.sleep(3.0)
        assert (waits.operations, waits.stuck_s(loop.time())) == (1, 2.0)
        operations[1].cancel()
        await asyncio.sleep(1.0)
        assert (waits.operations, waits.stuck_s(loop.time())) == (1, 3.0)
        operations[2].cancel()
        await asyncio.wait(operations)
        assert waits.stuck_s(loop.time()) == 0.0, "it has no work"
        assert [one.cancelled() for one in operations] == [False, True, True]

    run(story())


PEERS = ("s0r0", "s0r1", "s1r0", "s1r1")


def small() -> SimPlan:
    manifest = RunManifest(
        stages=2,
        start_replicas=1,
        steps=40,
        sequence_length=4,
        microbatch_size=1,
        outer=OuterSettings(rule="noloco", inner_steps=10, deadline_s=5.0),
    )
    bounds = LimitSettings(patience_floor_s=0.2, linger_s=10.0, drain_s=5.0)
    config = NodeConfig(limits=bounds, directory=DirectorySettings(ttl_s=6.0), rebalance=False)
    return SimPlan(manifest, (2, 2), config=config)


def statuses(swarm: SimSwarm, at: float) -> dict[str, Status]:
    """The statuses of all nodes at one time of a run, which continues to its end."""
    found: dict[str, Status] = {}

    def ask() -> None:
        now = asyncio.get_running_loop().time()
        found.update({peer: swarm.process(peer).node.status(now) for peer in PEERS})

    swarm.at(at, ask)
    swarm.run(limit_s=600)
    return found


def test_a_swarm_at_work_is_well_and_tells_where_it_stands() -> None:
    found = statuses(SimSwarm(small()), 2.0)
    assert sorted(found) == ["s0r0", "s0r1", "s1r0", "s1r1"]
    for peer, status in found.items():
        assert (status.advert.peer_id, status.advert.state, status.troubles) == (peer, "training", ())
        assert [s.advert.peer_id for s in status.seen] == sorted(set(found) - {peer})
        assert status.inner_steps > 0
        assert status.step_took_s is not None
        assert status.since_step_s is not None
        assert status.since_step_s < 10 * status.step_took_s
        assert problem_line(status) is None
        assert [w for w in status.waits if not w.idle], "there is always some wait"
        since = [wait.since_s for wait in status.waits]
        assert since == sorted(since, reverse=True)
        for wait in status.waits:
            assert wait.what
            assert wait.whom
    gradients = {(w.whom, w.why) for s in found.values() for w in s.waits if w.what == "gradient" and w.whom in found}
    served = {(peer, call.why) for peer, status in found.items() for call in status.serving}
    assert gradients, "stage 0 waits for gradients"
    # Only one side knows of what is on the wire at this moment.
    assert gradients & served


def test_a_deserted_stage_is_named_by_the_nodes_that_wait_for_it() -> None:
    swarm = SimSwarm(small())
    for peer in ("s1r0", "s1r1"):
        swarm.at(2.0, lambda peer=peer: swarm.bounce(peer, 38.0))  # type: ignore[misc]
    found: dict[str, Status] = {}

    def ask() -> None:
        found.update({peer: swarm.process(peer).node.status(30.0) for peer in ("s0r0", "s0r1")})

    swarm.at(30.0, ask)
    swarm.run(limit_s=600)
    for status in found.values():
        assert 20.0 < status.deserted[1] < 28.0
        line = problem_line(status)
        assert line is not None
        assert line.startswith("no inner step for 2")
        assert "from stage 1" in line


def test_nothing_is_waited_for_when_a_node_has_ended() -> None:
    swarm, processes = SimSwarm(small()), []
    swarm.at(1.3, lambda: processes.append(swarm.process("s0r1")))
    swarm.at(1.3, lambda: swarm.bounce("s0r1", 1.0))
    swarm.run(limit_s=600)
    assert len(processes) == 1
    for process in (*processes, *map(swarm.process, PEERS)):
        status = process.node.status(1e6)
        assert (status.waits, status.serving) == ((), ()), process.peer


def test_a_trouble_stands_until_it_is_over() -> None:
    swarm = SimSwarm(small())
    found: list[tuple[Trouble, ...]] = []

    def say(message: str | None) -> None:
        node = swarm.process("s1r0").node
        node.state.trouble("disk", message)
        found.append(node.status(asyncio.get_running_loop().time()).troubles)

    swarm.at(1.0, lambda: say("no checkpoint of outer round 1: the disk is full"))
    swarm.at(4.0, lambda: say("no checkpoint of outer round 2: the disk is full"))
    swarm.at(5.0, lambda: say(None))
    outcome = swarm.run(limit_s=600)
    assert found[0] == (Trouble("disk", "no checkpoint of outer round 1: the disk is full", 0.0),)
    (again,) = found[1]
    assert again.message == "no checkpoint of outer round 2: the disk is full"
    assert again.since_s == pytest.approx(3.0)
    assert found[2] == ()
    assert len([h for h in outcome.trace.of("warning", "s1r0") if "the disk is full" in str(h.get("message"))]) == 2
