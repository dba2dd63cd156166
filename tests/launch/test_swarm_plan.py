"""What `noloco swarm` starts: a new run with the given settings, or the unfinished run of a directory."""

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import Holding
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.data.corpora import matching_files
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.launch import foreseen, run_files, run_key, settings
from noloco_p2p.launch import swarm_plan as planning
from noloco_p2p.launch.swarm import LocalSwarm, run_swarm
from noloco_p2p.launch.swarm_plan import ResumePoint, common_point, make_run_dir

Given = tuple[Path | None, int | None, int | None, int | None, tuple[str, ...]]
"""--config, --stages, --replicas, --steps, --set."""
NOTHING: Given = (None, None, None, None, ())


def make_plan(given: Given, run_dir: Path | None, environ: Mapping[str, str]) -> planning.SwarmPlan:
    """Make a plan as `noloco swarm` does."""
    config, stages, replicas, steps, sets = given
    options = {"--stages": ("stages", stages), "--replicas": ("start_replicas", replicas), "--steps": ("steps", steps)}
    return planning.make_plan(settings.read(config, environ, sets, options), run_dir)


def test_options_come_after_the_file_and_after_set(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("name: mine\nstages: 3\nsteps: 7\nstart_replicas: 5\nlimits:\n  drain_s: 3\n")
    plan = make_plan((config, None, 1, 9, ("stages=2", "steps=8")), None, {"NOLOCO__SEED": "4"})
    manifest = plan.manifest
    assert (manifest.name, manifest.stages, manifest.start_replicas, manifest.steps, manifest.seed) == (
        "mine",
        2,
        1,
        9,
        4,
    )
    assert plan.local.limits.drain_s == 3.0
    assert plan.nodes == [(0, 0), (1, 0)]


def test_nodes_get_their_settings_from_a_file_not_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOLOCO__SEED", "4")
    sets = ("inner.eps=1.5e-9", "model.config.hidden_size=64", "data_files=[é*.txt]")
    plan = make_plan((None, 2, 1, 9, sets), None, os.environ)
    plan.write(tmp_path)
    arguments = plan.arguments(tmp_path)
    environment = plan.environment(3)
    assert (environment["OMP_NUM_THREADS"], environment["PATH"]) == ("3", os.environ["PATH"])
    assert environment["OPENBLAS_NUM_THREADS"] == "1", "no thread before a fork"
    assert arguments[:2] == ["--config", str(tmp_path / "swarm.json")]
    assert "NOLOCO__SEED" not in environment, (
        "the variable has been applied, and a resumed run must not see another value"
    )
    theirs = settings.read(Path(arguments[1]), environment, arguments[3::2])
    assert theirs.manifest() == plan.manifest
    assert theirs.manifest().seed == 4
    assert theirs.node().data_files == (str(Path.cwd() / "é*.txt"),)
    assert theirs.node().listen.dht_port == 0
    assert theirs.node().listen.libp2p_metrics_port is None


def test_a_run_finds_its_files_whatever_directory_it_is_continued_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sets = ("data.kind=text", "data_files=[a.txt, ~/b.txt]", "tokenizer_dir=words", "audit.dir=audit")
    make_plan((None, 1, 1, 9, sets), None, {}).write(tmp_path)
    monkeypatch.chdir("/")
    local = make_plan(NOTHING, tmp_path, {}).local
    assert local.data_files == (str(tmp_path / "a.txt"), os.path.expanduser("~/b.txt"))
    assert (local.tokenizer_dir, local.audit.dir) == (str(tmp_path / "words"), str(tmp_path / "audit"))


def test_only_the_glob_itself_has_wildcards_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory called `mine [2]` no data file matched."""
    here = tmp_path / "mine [2]" / "*"
    here.mkdir(parents=True)
    (here / "a.txt").touch()
    (tmp_path / "mine [2]" / "b.txt").touch()
    monkeypatch.chdir(here)
    relative = ("*.txt", "../b.txt")
    names = {name: path.resolve() for name, path in matching_files(relative).items()}
    assert len(names) == 2
    found = run_files.LocalFiles.of(NodeConfig(data_files=relative)).data_files
    monkeypatch.chdir("/")
    assert {name: path.resolve() for name, path in matching_files(found).items()} == names, "also what is held out"


def test_a_name_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the copies that some editors keep: the rest of the name was taken for a user, whom nobody knows."""
    (tmp_path / "~a.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert run_files.LocalFiles.of(NodeConfig(data_files=("~a.txt", "~*.txt"), tokenizer_dir="~b")) == (
        str(tmp_path / "~b"),
        (str(tmp_path / "~a.txt"), str(tmp_path / "~*.txt")),
    )


def test_each_node_of_a_machine_serves_its_daemons_metrics_on_its_own_port(tmp_path: Path) -> None:
    plan = make_plan((None, 2, 1, 9, ("listen.libp2p_metrics_port=9400",)), None, {})
    plan.write(tmp_path)
    arguments = plan.arguments(tmp_path)
    assert settings.read(Path(arguments[1]), {}, arguments[3::2]).node().listen.libp2p_metrics_port == 0


@pytest.mark.parametrize("members", [False, True])
def test_a_swarm_that_others_can_reach_is_as_open_as_it_was_planned(tmp_path: Path, members: bool) -> None:
    """Its first node must not make a key of its own: the others would then belong to another run."""
    plan = make_plan((None, 2, 1, 9, ("listen.host=0.0.0.0",)), None, {})
    plan = planning.for_members(plan, tmp_path) if members else plan
    plan.write(tmp_path)
    arguments = plan.arguments(tmp_path)
    theirs = settings.read(Path(arguments[1]), {}, arguments[3::2])
    assert theirs.says_who_may_join
    assert theirs.manifest().run_id == plan.manifest.run_id


def test_a_members_only_swarm_needs_its_key(tmp_path: Path) -> None:
    """Its first node made another one, so that the others belonged to another run, and the directory was lost."""
    root = run_key.make(tmp_path / "mine.key")
    plan = make_plan((None, 2, 1, 9, (f"security.root_key={root}",)), None, {})
    with pytest.raises(ConfigError, match=r"^security.root_key: its private key is not in a --dir, as root.key: put"):
        planning.check_key(plan, None)
    with pytest.raises(ConfigError, match=rf"its private key is not in {tmp_path}/root.key: put"):
        planning.check_key(plan, tmp_path)
    (tmp_path / "mine.key").rename(tmp_path / "root.key")
    planning.check_key(plan, tmp_path)
    with pytest.raises(ConfigError, match="its private key is not"):
        planning.check_key(make_plan((None, 2, 1, 9, (f"security.root_key={'ab' * 32}",)), None, {}), tmp_path)


def test_members_does_not_overrule_what_the_settings_say_of_security(tmp_path: Path) -> None:
    for said, why in (
        ("open", "contradict each other"),
        ("{root_key: " + "ab" * 32 + "}", "its private key is not in"),
    ):
        given = settings.read(None, {}, [f"security={said}"])
        with pytest.raises(ConfigError, match=why):
            run_swarm(given, tmp_path / "run", None, members=True)
    assert not (tmp_path / "run").exists()


def unfinished(run_dir: Path, *sets: str) -> RunManifest:
    """Prepare a directory in which a swarm was started; returns its manifest."""
    run_dir.mkdir()
    plan = make_plan((None, 2, 1, 9, sets), run_dir, {})
    plan.write(run_dir)
    return plan.manifest


def test_an_unfinished_run_is_resumed_with_the_settings_it_had(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    manifest = unfinished(run_dir, "seed=5", "limits.drain_s=3", "limits.linger_s=4")
    plan = make_plan(NOTHING, run_dir, {})
    assert (plan.resumes, plan.manifest, plan.local.limits.drain_s) == (True, manifest, 3.0)
    same = make_plan((None, 2, None, 9, ("seed=5", "limits.drain_s=7")), run_dir, {})
    assert same.manifest == manifest
    assert (same.local.limits.drain_s, same.local.limits.linger_s) == (7.0, 4.0), "local settings may change"
    (run_dir / "summary.json").write_text('{"completed": false}')
    assert make_plan(NOTHING, run_dir, {}).resumes
    (run_dir / "summary.json").write_text('{"completed": true}')
    with pytest.raises(ConfigError, match="finished run; name another --dir"):
        make_plan(NOTHING, run_dir, {})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("summary.json", '{"completed": true}', "holds a finished run; name another --dir"),
        ("swarm.json", '{"seed": 6}', "seed is 0 here, 6 in the unfinished run"),
    ],
)
def test_what_another_launcher_did_after_the_checks_is_seen(
    name: str, text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had planned before it took the lock: the settings of the other run were replaced by its own."""
    monkeypatch.setattr(foreseen, "check_swarm", lambda *_: (tmp_path / name).write_text(text))
    monkeypatch.setattr(LocalSwarm, "run", lambda swarm: 0)
    with pytest.raises(ConfigError, match=expected):
        run_swarm(settings.read(None, {}, ["seed=0"]), tmp_path, None, plain=True, sample=False)
    assert (tmp_path / name).read_text() == text


@pytest.mark.parametrize(
    ("asked", "environ", "expected"),
    [
        (
            (None, 3, None, None, ()),
            {},
            r"--stages: stages is 3 here, 2 in the unfinished run of \S+: leave it out",
        ),
        ((None, None, 2, None, ("steps=9",)), {}, "--replicas: start_replicas is 2 here, 1"),
        ((None, None, None, 10, ()), {}, "--steps: steps is 10 here, 9"),
        ((None, None, None, None, ("seed=6",)), {}, "--set seed: seed is 6 here, 5"),
        (NOTHING, {"NOLOCO__OUTER__ALPHA": "0.25"}, "NOLOCO__OUTER__ALPHA: outer.alpha is 0.25 here, 0.0"),
    ],
)
def test_a_conflicting_setting_is_refused_by_name(
    asked: Given, environ: dict[str, str], expected: str, tmp_path: Path
) -> None:
    unfinished(tmp_path / "run", "seed=5")
    with pytest.raises(ConfigError, match=expected) as refused:
        make_plan(asked, tmp_path / "run", environ)
    assert len(str(refused.value).splitlines()) == 1


def test_a_node_of_another_run_is_refused(tmp_path: Path) -> None:
    manifest = unfinished(tmp_path / "run")
    (tmp_path / "run/1-0").mkdir()
    (tmp_path / "run/1-0/manifest.json").write_bytes(manifest.canonical_json())
    make_plan(NOTHING, tmp_path / "run", {})
    other = manifest.model_copy(update={"seed": 1})
    (tmp_path / "run/1-0/manifest.json").write_bytes(other.canonical_json())
    with pytest.raises(ConfigError, match=r"1-0 belongs to the run tiny with other settings \(seed\)"):
        make_plan(NOTHING, tmp_path / "run", {})


def test_fresh_directories_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [make_run_dir("tiny", None).name for _ in range(2)] == ["tiny-1", "tiny-2"]
    own = tmp_path / "own"
    assert make_run_dir("tiny", own) == own
    own.rename("moved")
    own.symlink_to("nowhere")
    with pytest.raises(LocalError, match=f"^{own} cannot be created: File exists$"):
        make_run_dir("tiny", own)


def test_a_folder_of_runs_that_is_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a link to a disk that is not mounted. Numbers were tried without end."""
    monkeypatch.chdir(tmp_path)
    Path("noloco-runs").symlink_to("nowhere")
    with pytest.raises(LocalError, match=r"^noloco-runs cannot be created: File exists$"):
        make_run_dir("tiny", None)
    Path("noloco-runs").unlink()
    Path("noloco-runs").touch()
    with pytest.raises(LocalError, match=r"^noloco-runs cannot be written: File exists$"):
        next(run_files.own_identities(None))


def test_one_launcher_at_a_time(tmp_path: Path) -> None:
    with (
        planning.held(tmp_path),
        pytest.raises(LocalError, match="another noloco swarm is running in"),
        planning.held(tmp_path),
    ):
        pass
    with planning.held(tmp_path):
        pass


def test_the_launcher_waits_for_nodes_that_are_still_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NODES_END_S", 0.2)
    node_dir = tmp_path / "0-0"
    planning.wait_for_old_nodes([node_dir])
    with (
        closing(Identity.open(node_dir / KEY)),
        pytest.raises(LocalError, match=r"a node is still running in \S+0-0: stop it"),
    ):
        planning.wait_for_old_nodes([node_dir])
    planning.wait_for_old_nodes([node_dir])


@pytest.mark.parametrize(
    ("held", "point"),
    [
        ([], None),
        ([Holding(0, 3, 30), Holding(0, 4, 41), Holding(1, 4, 40)], ResumePoint(4, 40)),
        ([Holding(0, 5, 50), Holding(0, 4, 41), Holding(1, 4, 44), Holding(1, 3, 30)], ResumePoint(4, 41)),
        ([Holding(0, 6, 60), Holding(0, 5, 52), Holding(1, 4, 44)], ResumePoint(4, 44)),
        ([Holding(0, 3, 4), Holding(1, 4, 4)], ResumePoint(3, 4)),
    ],
)
def test_a_run_resumes_at_the_newest_round_that_every_stage_has(held: list[Holding], point: ResumePoint | None) -> None:
    assert common_point(held) == point
