"""The files in docker/prometheus and docker/grafana, checked by promtool and by a real Prometheus on a real swarm."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import PACED, SMALL, NodeProcess, node_processes, settings, wait_until
from real_prometheus import SHIPPED, Prometheus, promtool, running_prometheus

from noloco_p2p.config import RunManifest
from noloco_p2p.core.members import STATES
from noloco_p2p.core.snapshots import partner_bytes
from noloco_p2p.io.telemetry.counters import KNOWN

GRAFANA = SHIPPED.parent / "grafana"
GENERATE = (sys.executable, str(GRAFANA / "generate.py"))
BOARDS = ("swarm", "training", "outer-rounds", "node")
RUN = [
    *settings(steps="1000000", evaluation__every_steps="20"),
    *SMALL,
]
LOCAL = settings(
    checkpoint__every_steps="1", directory__ttl_s="12", directory__refresh_s="1", listen__libp2p_metrics_port="0"
)
PATIENCE_S = 60.0


def rules_of(name: str) -> list[dict[str, Any]]:
    loaded = yaml.safe_load((SHIPPED / name).read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def board(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text())
    return found


def expressions() -> dict[str, str]:
    """Place → expression, for every panel of every dashboard."""
    return {
        f"{name}: {panel['title']} ({panel['type']}): {target['refId']}": target["expr"]
        for name in BOARDS
        for panel in board(name)["panels"]
        for target in panel["targets"]
    }


def test_promtool_finds_no_fault_in_the_configuration_and_rules() -> None:
    output = promtool("check", "config", "prometheus.yml")
    assert f"{len(rules_of('alerts.yml'))} rules found" in output


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    files = sorted(path.name for path in SHIPPED.glob("*_test.yml"))
    promtool("test", "rules", *files)
    cases: dict[str, set[bool]] = {}
    for file in files:
        for test in yaml.safe_load((SHIPPED / file).read_text())["tests"]:
            for case in test["promql_expr_test"]:
                name = re.search(r'alertname="(\w+)"', case["expr"])
                assert name is not None
                cases.setdefault(name[1], set()).add(bool(case["exp_samples"]))
    assert cases == {rule["alert"]: {True, False} for rule in rules_of("alerts.yml")}


def test_each_alert_has_a_severity_and_says_what_to_do() -> None:
    for rule in rules_of("alerts.yml"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert len(rule["annotations"]["summary"]) < 160
        assert len(rule["annotations"]["description"]) > 60
        assert not rule["annotations"]["summary"].endswith(".")


def test_no_alert_advises_to_change_the_settings_of_a_run_under_way() -> None:
    """They are fixed: a node with other ones is refused, even in its own directory."""
    for rule in rules_of("alerts.yml"):
        advice = rule["annotations"]["description"]
        named = re.findall(rf"\b(?:{'|'.join(RunManifest.model_fields)})\.[a-z]\w*", advice)
        assert not named or re.search(r"\b(next|new) run\b", advice), f"{rule['alert']} names {named}"


def test_the_dashboards_are_as_generated() -> None:
    subprocess.run([*GENERATE, "--check"], check=True, timeout=30)
    for name in BOARDS:
        made = board(name)
        assert made["uid"] == f"noloco-{name}"
        assert [one["name"] for one in made["templating"]["list"]] == ["run", "stage", "node"]
        shown = [(panel["title"], panel["type"]) for panel in made["panels"]]
        assert len(set(shown)) == len(shown)
    source = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    uids = re.findall(r'"uid": "(\w+)"', (GRAFANA / "dashboards" / "node.json").read_text())
    assert set(uids) == {source["datasources"][0]["uid"]}


def test_a_dashboard_edited_by_hand_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "grafana"
    (copy / "dashboards").mkdir(parents=True)
    for path in (*GRAFANA.glob("*.py"), *GRAFANA.glob("dashboards/*.json")):
        (copy / path.relative_to(GRAFANA)).write_bytes(path.read_bytes())
    edited = copy / "dashboards" / "swarm.json"
    edited.write_text(edited.read_text().replace('"refresh": "5s"', '"refresh": "10s"'))
    command = [sys.executable, str(copy / "generate.py")]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "swarm.json is not as generated" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    subprocess.run(command, check=True, timeout=30)
    assert edited.read_bytes() == (GRAFANA / "dashboards" / "swarm.json").read_bytes()


def test_the_dashboards_show_the_alerts_of_the_chosen_run_only() -> None:
    asked = [expr for expr in expressions().values() if "ALERTS" in expr]
    asked += [one["expr"] for name in BOARDS for one in board(name)["annotations"]["list"]]
    assert len(asked) == 2 + len(BOARDS)
    for expr in asked:
        assert set(re.findall(r"ALERTS\{.*?\}", expr)) == {'ALERTS{alertstate="firing", run=~"$run|"}'}


def test_the_figures_of_a_swarm_that_is_gone_do_not_remain(tmp_path: Path) -> None:
    """A stat shows the last value in its range. So there must be a zero, or the last nodes seem to answer and train."""
    shown = {where: expr for where, expr in expressions().items() if re.search("(answer|Tokens.*) .stat", where)}
    assert len(shown) == 3
    series = {'up{job="noloco", run="r", node="a"}': "1x6 0x20", 'run:noloco_tokens:rate1m{run="r"}': "1x6"}
    cases = [
        {"expr": expr.replace("$run", "r"), "eval_time": time, "exp_samples": [{"labels": "{}", "value": value}]}
        for expr in shown.values()
        for time, value in (("25s", 1), ("10m", 0))
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "5s", "input_series": given, "promql_expr_test": cases}
    (tmp_path / "gone_test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    promtool("test", "rules", "gone_test.yml", cwd=tmp_path)


def test_a_node_that_comes_back_at_another_address_keeps_its_line() -> None:
    """Nothing but its stage and its name tells its series apart, so no legend has a node twice."""
    own = re.compile(r"label_join\((max|sum) by \(node_stage, node_name\) \(.+\), \"at\", \" · \", .+\)")
    for name in BOARDS:
        for target in (target for panel in board(name)["panels"] for target in panel["targets"]):
            by_node = own.fullmatch(target["expr"]) is not None
            assert by_node == ("{{at}}" in target["legendFormat"]), target
            assert by_node or "ALERTS" in target["expr"] or "node_name" not in target["legendFormat"], target


def test_the_dashboards_know_all_states_and_results() -> None:
    (timeline,) = (p for p in board("swarm")["panels"] if p["title"] == "State of each node")
    (mapping,) = timeline["fieldConfig"]["defaults"]["mappings"]
    assert tuple(mapping["options"][str(value)]["text"] for value in range(len(STATES))) == STATES
    coloured = {"Rounds per minute, by result": "outer_rounds", "Microbatches per second, by result": "microbatches"}
    coloured["Bubbles: idle devices, by cause"] = "idle_seconds"
    for name in BOARDS:
        for panel in board(name)["panels"]:
            metric = coloured.pop(panel["title"], None)
            if metric is not None:
                overrides = panel["fieldConfig"]["overrides"]
                assert {one["matcher"]["options"] for one in overrides} == set(KNOWN[metric])
    assert not coloured


def test_a_real_prometheus_finds_a_real_swarm_and_every_expression_has_data(tmp_path: Path) -> None:
    """2 × 2 nodes, of which Prometheus is given only the first. One is killed during the test."""
    with node_processes(tmp_path) as nodes:
        a = nodes.start("--stage", "0", *RUN, *LOCAL, command=PACED, own_dir="a")
        discovery_url = a.endpoints().metrics.replace("/metrics", "/sd")
        with running_prometheus(tmp_path / "prometheus", discovery_url) as prometheus:
            others = [
                nodes.start("--join", a.endpoints().join[0], "--stage", stage, *LOCAL, command=PACED, own_dir=name)
                for name, stage in (("b", "0"), ("c", "1"), ("d", "1"))
            ]
            alive, d = [a, *others[:2]], others[2]
            all_are_found(prometheus, [*alive, d])
            d.wait_for_steps(10)
            for node in (a, d):
                names_are_right(node)
            d.process.send_signal(signal.SIGKILL)
            every_expression_has_data(prometheus)
            figures_are_true(prometheus)
            the_killed_node_is_reported_and_its_target_ends(prometheus, d, alive)


def peer_ids(nodes: list[NodeProcess]) -> set[str]:
    return {node.endpoints().peer_id for node in nodes}


def all_are_found(prometheus: Prometheus, nodes: list[NodeProcess]) -> None:
    expected = dict.fromkeys(peer_ids(nodes), True)
    for job in ("noloco", "libp2p"):
        wait_until(lambda job=job: prometheus.targets(job) == expected, f"all {job} targets", PATIENCE_S)  # type: ignore[misc]


def names_are_right(node: NodeProcess) -> None:
    with urllib.request.urlopen(node.endpoints().metrics, timeout=10) as reply:
        promtool("check", "metrics", given=reply.read().decode())


def every_expression_has_data(prometheus: Prometheus) -> None:
    """Check that all panels and recording rules have data, and all alerts can be evaluated."""
    (run,) = {sample.labels["run"] for sample in prometheus.query("up")}
    missing = expressions() | {rule["record"]: rule["record"] for rule in rules_of("rules.yml")}
    for name, value in (("run", run), ("stage", ".*"), ("node", ".*"), ("__rate_interval", "20s")):
        missing = {where: expr.replace(f"${name}", value) for where, expr in missing.items()}
    assert not [expr for expr in missing.values() if "$" in expr]

    def none_missing() -> bool:
        for where, expr in [*missing.items()]:
            if prometheus.query(expr):
                del missing[where]
        return not missing

    try:
        wait_until(none_missing, "data for every expression", PATIENCE_S)
    except AssertionError:
        pytest.fail(f"no data for {json.dumps(missing, indent=1)}")
    rules = prometheus.rules()
    assert {rule["name"] for rule in rules} >= {rule["alert"] for rule in rules_of("alerts.yml")}
    assert [rule for rule in rules if rule["health"] != "ok"] == []


def figures_are_true(prometheus: Prometheus) -> None:
    """Check some figures that are known beforehand, and that no label is both on a target and on a metric."""
    series = prometheus.query('{__name__=~"noloco_.+|go_info|up"}')
    assert not [s.labels for s in series if any(label.startswith("exported_") for label in s.labels)]
    assert {len(s.labels["node_name"]) for s in series} == {8}
    assert {s.labels["node_stage"] for s in prometheus.query('up{job="noloco"}')} == {"0", "1"}
    assert {s.labels["stage"] for s in prometheus.query("stage:noloco_replicas:median")} == {"0", "1"}
    # A float32 vector and the sample. A scrape in the middle of a round may have its count but not yet its bytes.
    held = {s.labels["node"]: int(s.value) for s in prometheus.query("noloco_parameters")}
    weighs = {node: partner_bytes("full", parameters, parameters, "float32") for node, parameters in held.items()}
    # One query for both, because a scrape between two queries may bring several rounds.
    both = prometheus.query('{__name__=~"noloco_(pulled_bytes|outer_rounds)_total"}')
    pulled = {s.labels["node"]: s.value for s in both if s.labels["__name__"] == "noloco_pulled_bytes_total"}
    counted = dict.fromkeys(pulled, 0.0)
    for sample in both:
        if sample.labels.get("result", "alone") != "alone":
            counted[sample.labels["node"]] += sample.value
    assert len(pulled) >= 3
    for node, sent in pulled.items():
        assert abs(sent - weighs[node] * counted[node]) <= weighs[node], both
    # Rates over half a minute are extrapolated, for each series separately.
    for sample in prometheus.query("stage:noloco_pulled_bytes:per_parameter_and_round"):
        assert sample.value <= 1.5 * max(weighs[node] / held[node] for node in held)
        assert sample.value > 0 or sample.labels["node_stage"] == "1", "half a minute ago its second replica was killed"
    for sample in prometheus.query("stage:noloco_utilisation:ratio"):
        assert 0 < sample.value <= 1
    (loss,) = prometheus.query("run:noloco_loss:mean")
    assert 0 < loss.value < 8


def the_killed_node_is_reported_and_its_target_ends(
    prometheus: Prometheus, killed: NodeProcess, alive: list[NodeProcess]
) -> None:
    expected = dict.fromkeys(peer_ids(alive), True)
    wait_until(lambda: prometheus.targets("noloco") == expected, "the end of the killed node's target", PATIENCE_S)
    down = prometheus.query('ALERTS{alertname="NodeDown", alertstate="firing"}')
    assert [sample.labels["node"] for sample in down] == [killed.endpoints().peer_id]
