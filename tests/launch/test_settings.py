"""Settings: precedence, all errors at once with their places, agreement with a swarm, manifests from strangers."""

import json
from pathlib import Path

import pytest
import readme_tables

from noloco_p2p.config import MANIFEST_LIMIT_BYTES, NodeConfig, RunManifest
from noloco_p2p.errors import ConfigError, Violation
from noloco_p2p.io.dht.adverts import LONGEST_TTL_S
from noloco_p2p.launch import settings


def load(path: Path | None, environ: dict[str, str], sets: list[str]) -> tuple[RunManifest, NodeConfig]:
    """Both models, as a first node reads them."""
    given = settings.read(path, environ, sets)
    return given.manifest(), given.node()


def faults(path: Path | None, environ: dict[str, str] | None = None, sets: list[str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {}, sets or [])
    return str(caught.value).split("\n")


def test_without_any_settings_the_defaults_apply() -> None:
    assert load(None, {"PATH": "/bin", "NOLOCO": "1"}, []) == (RunManifest(), NodeConfig())


def test_each_source_overrides_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 1\nseed: 1\nstages: 1\ninner:\n  beta1: 0.1\nlisten:\n  grpc_port: 1\n")
    environ = {"NOLOCO__SEED": "2", "NOLOCO__STAGES": "2", "NOLOCO__LISTEN__GRPC_PORT": "2", "OTHER": "x"}
    manifest, node = load(path, environ, ["stages=3", "outer.inner_steps=7"])
    found = (manifest.steps, manifest.seed, manifest.stages, manifest.inner.beta1, manifest.outer.inner_steps)
    assert found == (1, 2, 3, 0.1, 7)
    assert node.listen.grpc_port == 2
    assert manifest.inner.beta2 == RunManifest().inner.beta2, "keys that a section leaves out have their defaults"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("2E4", 2e4), ("1.5e3", 1.5e3), ("3", 3.0), ("0.5", 0.5)],
)
def test_numbers_are_parsed_as_intended(text: str, value: float) -> None:
    assert load(None, {}, [f"inner.peak_learning_rate={text}"])[0].inner.peak_learning_rate == value


def test_no_number_of_a_manifest_is_too_large_to_compute_with() -> None:
    """A node of a run with 10**400 steps ended with a traceback; one with 10**9 microbatches per step drew 10**9 routes
    first."""
    assert faults(None, sets=[f"steps={2**53 + 1}", "microbatches_per_step=65537"]) == [
        "--set microbatches_per_step: microbatches_per_step must be at most 65536, not 65537",
        "--set steps: steps must be at most 9007199254740992, not 9007199254740993",
    ]
    assert load(None, {}, [f"steps={2**53}"])[0].steps == 2**53


def test_adverts_that_peers_would_refuse_or_never_see_are_refused_before_a_node_starts() -> None:
    """Peers, whose clocks may differ by half of it, refuse records that live longer than five minutes."""
    for given, limit in ((301, "at most 200.0"), (1e-9, "at least 1.0")):
        assert faults(None, sets=[f"directory.ttl_s={given}"]) == [
            f"--set directory.ttl_s: directory.ttl_s must be {limit}, not {given}"
        ]
    assert load(None, {}, ["directory.ttl_s=200"])[1].directory.ttl_s * 1.5 <= LONGEST_TTL_S


@pytest.mark.parametrize("text", ["22:00", "-1:30", "1:30:15.5", "010"])
def test_times_of_day_and_codes_are_text(text: str) -> None:
    """YAML 1.1 reads the first as 1320 and the last as 8."""
    assert faults(None, sets=[f"seed={text}"]) == [f"--set seed: seed must be a whole number, not {text!r}"]


def test_a_time_of_day_in_place_of_a_span_is_quoted_as_written() -> None:
    for given in ("22:00", "[22:00]"):
        assert faults(None, sets=[f"limits.hours={given}"]) == [
            "--set limits.hours: limits.hours must be HH:MM-HH:MM, not '22:00'"
        ]


def test_all_errors_are_reported_at_once_each_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: a\n"
        "stpes: 10\n"
        "seed: many\n"
        "outer:\n"
        "  alhpa: 0.2\n"
        "  alpha: 1.5\n"
        "inner:\n"
        "  clip_norm: .inf\n"
        "model:\n"
        "  config:\n"
        "    hidden_size: {a: 1}\n"
        "device: gpu\n"
        "routing: best\n"
        "evaluation: 3\n"
        "data_files: 7\n"
        "threads: true\n"
        "steps: 1.5\n"
    )
    environ = {"NOLOCO__INNER__BETA1": "x", "NOLOCO__SEEED": "1"}
    found = faults(path, environ, ["steps", "=3", "alpha=3", "outer={gamma: text}", "name=]", "wire_dtype=int8"])
    assert found == [
        "--set steps: write it as --set key=value",
        "--set =3: write it as --set key=value",
        "--set name: not valid YAML: expected the node content, but found ']'",
        f"{path}:2: there is no key stpes; the nearest is steps",
        f"{path}:5: there is no key outer.alhpa; the nearest is outer.alpha",
        "NOLOCO__SEEED: there is no key seeed; the nearest is seed",
        "--set alpha: there is no key alpha; the nearest is outer.alpha",
        "--set wire_dtype: there is no key wire_dtype; the nearest is wire.forward, with wire.backward",
        f"{path}:3: seed must be a whole number, not 'many'",
        f"{path}:11: model.config.hidden_size must be a number, text, true, false, null, or a list of them",
        f"{path}:17: steps must be a whole number, not 1.5",
        "NOLOCO__INNER__BETA1: inner.beta1 must be a number, not 'x'",
        f"{path}:8: inner.clip_norm must be a finite number, not inf",
        f"{path}:6: outer.alpha must be less than 1.0, not 1.5",
        "--set outer: outer.gamma must be a number, not 'text'",
        f"{path}:13: routing must be 'random', 'weighted', 'balanced' or 'fixed', not 'best'",
        f"{path}:14: evaluation must be a section of keys, not 3",
        f"{path}:12: device must be auto, cpu, cuda or cuda:N, not 'gpu'",
        f"{path}:16: threads must be a whole number, not True",
        f"{path}:15: data_files must be a list, not 7",
    ]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("inner_steps", "outer.inner_steps"),
        ("outer.seed", "seed"),
        ("learning_rate", "inner.peak_learning_rate"),
        ("outer.rul", "outer.rule"),
    ],
)
def test_the_nearest_key_has_the_same_name_in_another_section_or_looks_like_it(key: str, nearest: str) -> None:
    assert faults(None, sets=[f"{key}=1"]) == [f"--set {key}: there is no key {key}; the nearest is {nearest}"]


def test_the_nearest_key_of_an_invented_one_is_in_its_section() -> None:
    """It was limits.hours, whose end looks a little like it."""
    (fault,) = faults(None, sets=["outer.bogus=1"])
    assert fault.startswith("--set outer.bogus: there is no key outer.bogus; the nearest is outer.")


def test_a_glob_without_quotes_is_explained(tmp_path: Path) -> None:
    """It said: expected alphabetic or numeric character, but found '.'."""
    path = tmp_path / "run.yaml"
    path.write_text("data_files:\n  - a.txt\n  - *.txt\n")
    assert faults(path) == [f"{path}:3: not valid YAML: text that begins with * must be in quotes"]
    for value in ("*.txt", "[**/*.txt]", "*"):
        found = faults(None, sets=[f"data_files={value}"])
        assert found == ["--set data_files: not valid YAML: text that begins with * must be in quotes"]
    assert load(None, {}, ["data_files='*.txt'"])[1].data_files == ("*.txt",)


def test_a_key_with_dots_in_a_file_is_explained(tmp_path: Path) -> None:
    """It said: there is no key outer.rule; the nearest is outer.rule."""
    path = tmp_path / "run.yaml"
    path.write_text("steps: 2\nouter.rule: noloco\nmodel: {config.hidden_size: 8}\nouter.ruel: noloco\n")
    assert faults(path) == [
        f"{path}:2: dots are for --set; here write outer: {{rule: …}}",
        f"{path}:3: dots are for --set; here write model: {{config: {{hidden_size: …}}}}",
        f"{path}:4: there is no key outer.ruel; the nearest is outer.rule",
    ]


def test_an_error_names_the_source_that_takes_precedence(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\n")
    assert faults(path, sets=["steps=0"]) == ["--set steps: steps must be at least 1, not 0"]


def test_betas_that_leave_adamws_steps_unbounded_are_refused() -> None:
    """In such a run embeddings reached 1e8 within five steps."""
    assert faults(None, sets=["inner.beta2=0.8"]) == [
        "--set inner.beta2: beta2 0.8 leaves AdamW's steps unbounded: it must be greater than beta1 squared, 0.81"
    ]
    assert load(None, {}, ["inner.beta2=0.8", "inner.beta1=0.8"])[0].inner.most_mean < 1.1
    load(None, {}, ["inner.beta2=0", "inner.beta1=0"])


def test_a_single_text_is_a_list_of_one() -> None:
    local = load(None, {}, ["data_files=one.txt", "limits.hours=22:00-07:00"])[1]
    assert (local.data_files, local.limits.hours) == (("one.txt",), ("22:00-07:00",))
    assert load(None, {}, ["data_files=[a.txt, b.txt]"])[1].data_files == ("a.txt", "b.txt")


@pytest.mark.parametrize("host", ["0.0.0.0", '"::"', '"0:0:0:0:0:0:0:0"', '""', 201 * "a"])
def test_a_node_announces_no_host_that_others_cannot_dial(host: str) -> None:
    """Its join address led everybody else to their own machine, or its adverts became too large with time."""
    key, shown = "listen.announce_host", repr(host.strip('"'))
    assert faults(None, sets=[f"{key}={host}"]) == [
        f"--set {key}: {key} must be a host of at most 200 characters that others can dial, not {shown}"
    ]
    for good in ("10.0.0.0", '"2001:db8::"', "0.example", '"::1"'):
        load(None, {}, ["listen.host=0.0.0.0", f"listen.announce_host={good}"])


def test_null_takes_back_the_hours_of_a_file(tmp_path: Path) -> None:
    """`none: always`, says the table, and where it says none, write null."""
    path = tmp_path / "run.yaml"
    path.write_text("limits: {hours: 22:00-07:00}\n")
    assert load(path, {}, ["limits.hours=null"])[1].limits.hours == ()


def test_a_value_that_is_not_utf_8_is_explained() -> None:
    """Such as data files below a directory whose name is not UTF-8. The message was `: Invalid JSON: lone …`."""
    with pytest.raises(
        ConfigError, match=r"^a value is not UTF-8 text; it may begin with the name of the current directory$"
    ):
        settings.read(None, {}, ['data_files="/a/\\udcff"']).node()


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("outer:\n  alpha: 0.1\n  alpha: 0.2\nmodel:\n  config: {a: 1, a: 2}\nsteps: 1\nsteps: 2\n")
    assert sorted(faults(path)) == [
        f"{path}:3: outer.alpha is set a second time",
        f"{path}:5: model.config.a is set a second time",
        f"{path}:7: steps is set a second time",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", ":1: expected lines of the form `key: value`"),
        ("a: 1\nb: [1\n", ":3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("name: !!python/name:os.system\n", ":1: not valid YAML: could not determine a constructor"),
        ("seed: !!timestamp a\n", ": not valid YAML: "),
        ("seed: !!bool a\n", ": not valid YAML: "),
        ("seed: !!int ''\n", ": not valid YAML: "),
        ("seed: {2026-01-31: 1}\n", ":1: seed must be a whole number"),
        ("model: {config: {rope_scaling: {!!binary YQ==: 1}}}\n", ":1: model.config.rope_scaling must be a number, "),
        ("a: &a [1]\nb: [*a]\n", ":2: not valid YAML: an alias of a list or a section: write it out"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    [line] = faults(path)
    assert line.startswith(f"{path}{message}")


def test_an_alias_of_a_single_value_is_that_value(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: &seed 7\nsteps: *seed\n")
    manifest, _ = load(path, {}, [])
    assert (manifest.seed, manifest.steps) == (7, 7)


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    assert faults(tmp_path / "absent.yaml") == [f"{tmp_path / 'absent.yaml'} cannot be read: No such file or directory"]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert faults(tmp_path / "binary.yaml") == [f"{tmp_path / 'binary.yaml'} is not UTF-8 text: invalid start byte"]


def test_an_empty_file_and_an_empty_section_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text in ("", "# nothing\n", "outer:\n  # alpha: 0.1\nlisten:\n"):
        path.write_text(text)
        assert load(path, {}, []) == (RunManifest(), NodeConfig())


def test_incompatible_values_are_refused() -> None:
    [line] = faults(None, sets=["outer.rule=noloco", "outer.alpha=0.9", "outer.gamma=0.7"])
    assert "stability bound S1" in line
    assert "outer.allow_unstable" in line
    load(None, {}, ["outer.rule=noloco", "outer.alpha=0.9", "outer.gamma=0.7", "outer.allow_unstable=true"])
    [line] = faults(None, sets=["outer.alpha=0.9"])
    assert "rule gossip has no alpha: leave it out, or choose another outer.rule" in line


def test_incompatible_values_are_found_at_one_that_the_message_names(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("outer:\n  rule: diloco\n  codec: int4\n  pairing: random\n", encoding="utf-8")
    [line] = faults(path)
    assert line.startswith(f"{path}:3: rule diloco"), "line 3 has the codec"


def test_a_files_model_section_replaces_the_default_and_single_keys_change_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  family: gpt2\n  config:\n    n_embd: 64\n    vocab_size: 384\n")
    changed = ["model.config.vocab_size=500", "model.config.n_layer=3"]
    assert load(path, {}, changed)[0].model.config == {"n_embd": 64, "vocab_size": 500, "n_layer": 3}
    default = RunManifest().model.config
    assert load(None, {}, ["model.config.hidden_size=64"])[0].model.config == default | {"hidden_size": 64}
    assert load(None, {}, ["model.config={n_embd: 8}"])[0].model.config == {"n_embd": 8}


def test_settings_of_a_joining_node_must_agree_with_the_swarm(tmp_path: Path) -> None:
    swarm = RunManifest.model_validate({"steps": 500, "name": "theirs", "outer": {"rule": "noloco"}})
    path = tmp_path / "run.yaml"
    path.write_text("steps: 500\nlisten:\n  grpc_port: 7000\n")
    settings.read(path, {}, ["name=theirs", "outer.beta=0.7"]).check_agrees(swarm)
    path.write_text("steps: 400\nseed: 0\nouter:\n  alpha: 0.1\nmodel:\n  config:\n    hidden_size: 64\n")
    given = settings.read(path, {"NOLOCO__NAME": "mine"}, ["model.config.vocab_size=384"])
    with pytest.raises(ConfigError) as caught:
        given.check_agrees(swarm)
    lines = str(caught.value).split("\n")
    assert f"{path}:1: steps is 400 here, 500 in the swarm: leave it out" in lines
    assert f"{path}:4: outer.alpha is 0.1 here, 0.5 in the swarm: leave it out" in lines
    assert "NOLOCO__NAME: name is 'mine' here, 'theirs' in the swarm: leave it out" in lines
    assert f"{path}:7: model.config.hidden_size is 64 here, 128 in the swarm: leave it out" in lines
    assert f"{path}:6: model.config.num_hidden_layers is not set here, 4 in the swarm: leave it out" in lines
    assert not any("vocab_size" in line or "seed" in line for line in lines)


def test_a_file_that_opens_a_run_also_fits_joining_nodes(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 500\nsecurity: open\n")
    given = settings.read(path, {}, [])
    assert given.says_who_may_join
    given.check_agrees(given.manifest())
    with pytest.raises(ConfigError, match=rf"{path}:2: security.root_key is not set here, 'abab.* in the swarm"):
        given.check_agrees(given.for_members("ab" * 32).manifest())
    assert faults(None, sets=["security=closed"]) == [
        "--set security: security must be a section of keys, not 'closed'"
    ]


def test_a_key_is_checked_against_the_swarms_values_not_the_defaults() -> None:
    """gamma 1.9 violates S1 with the default alpha, but not with the swarm's."""
    swarm = RunManifest.model_validate({"outer": {"rule": "noloco", "alpha": 0.1, "gamma": 1.9}})
    settings.read(None, {}, ["outer.gamma=1.9"]).check_agrees(swarm)


def test_a_manifest_survives_serialisation() -> None:
    manifest = RunManifest(steps=7)
    received = settings.manifest_from_json(manifest.canonical_json())
    assert received == manifest
    assert received.run_id == manifest.run_id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 5000,
        b"{" + b" " * MANIFEST_LIMIT_BYTES + b"}",
        b'{"steps": "7"}',
        b'{"steps": 0}',
        b'{"stages": 1000000000}',
        b'{"unheard_of": 1}',
        b'{"model": {"config": {"a": NaN}}}',
        b'{"outer": {"rule": "noloco", "alpha": 0.9, "gamma": 0.7}}',
        b'{"outer": {"rule": []}}',
        json.dumps({"data": {"dataset": "../../etc/passwd"}}).encode(),
        json.dumps({"data": {"tokenizer": "/etc/passwd"}}).encode(),
        json.dumps({"model": {"config": {"a" * 60000: "b" * 10000}}}).encode(),
    ],
)
def test_a_malformed_manifest_is_a_violation(data: bytes) -> None:
    with pytest.raises(Violation) as caught:
        settings.manifest_from_json(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_no_key_is_in_both_models() -> None:
    assert set(RunManifest.model_fields).isdisjoint(NodeConfig.model_fields)


def test_the_reference_has_every_key_with_its_default_and_a_description() -> None:
    text = readme_tables.configuration_markdown()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == [".".join(key) for key in settings.KNOWN.keys]
    assert all(len(row) == 4 and len(row[3]) > 10 for row in rows)
    assert "| `outer.alpha` | number ≥ 0, < 1 | `0.0` | α, the outer momentum. |" in text
    assert "| `evaluation.every_steps` | whole number ≥ 1 or none | `250` |" in text
    assert '| `wire.backward` | `float64`, `float32`, `bfloat16`, `int8`, `int4` | `"float32"` |' in text


def test_the_manifest_of_an_open_run_has_no_security_section() -> None:
    assert "security" not in json.loads(RunManifest().canonical_json())
    root = {"root_key": "ab" * 32}
    members = settings.read(None, {}, [], {"--key": ("security", root)}).manifest()
    assert json.loads(members.canonical_json())["security"] == root
    assert members.run_id != RunManifest().run_id
    assert settings.manifest_from_json(members.canonical_json()) == members
    assert settings.manifest_from_json(RunManifest().canonical_json()) == RunManifest()
    with pytest.raises(ConfigError, match=r"security\.root_key"):
        settings.read(None, {}, ["security.root_key=short"])
