"""The containers, without an engine: the Dockerfile, the Compose file, and their command lines for noloco-node."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from noloco_p2p.cli.node import app
from noloco_p2p.launch import settings

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose.yaml"
TOOLS = Path(sys.executable).parent
"""Where the `test` extra installs hadolint and docker-compose."""

FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
NODES = ("bootstrap", "node", "node-gpu")

Instruction = tuple[str, str]


def stages() -> list[list[Instruction]]:
    """The Dockerfile's instructions as (name, arguments): a list of ARGs, then a list for each FROM."""
    text = re.sub(r"(?m)^#.*\n", "", (DOCKER / "Dockerfile").read_text("utf-8")).replace("\\\n", " ")
    found: list[list[Instruction]] = [[]]
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append((name, " ".join(arguments.split())))
    return found


def image_environment() -> dict[str, str]:
    """The variables that ENV sets in the image."""
    (last,) = [arguments for name, arguments in stages()[-1] if name == "ENV"]
    return dict(word.split("=", 1) for word in last.split())


def composed(*profiles: str, **environment: str) -> dict[str, dict[str, Any]]:
    """The services as Compose itself resolves them."""
    given = [part for profile in profiles for part in ("--profile", profile)]
    command = [str(TOOLS / "docker-compose"), "-f", str(COMPOSE), *given, "config", "--format", "json"]
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "warnings are not allowed either"
    services: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return services


def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    done = subprocess.run([TOOLS / "hadolint", "--no-color", DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_one_node_as_an_unprivileged_user() -> None:
    last = dict(stages()[-1])
    assert last["USER"] == "10001:10001"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert last["VOLUME"] == '["/data"]'
    assert last["ENTRYPOINT"] == '["noloco-node"]'
    assert last["CMD"] == '["--dir", "/data"]'
    assert last["HEALTHCHECK"].endswith('CMD ["noloco-node", "health", "--dir", "/data"]')
    assert [line for line in stages()[0] if line[0] == "ARG"] == [("ARG", "BASE=python:3.11-slim")]
    for stage in stages()[1:]:
        assert stage[0][1].split()[0] in ("${BASE}", "dependencies")


def test_a_source_change_does_not_reinstall_the_dependencies() -> None:
    by_name = {stage[0][1].partition(" AS ")[2]: stage for stage in stages()[1:]}
    installing = by_name["dependencies"]
    assert any("pip install -r requirements.txt" in arguments for _, arguments in installing)
    assert [arguments for name, arguments in installing if name == "COPY"] == [
        "--from=requirements /requirements.txt ./"
    ]
    assert [arguments for name, arguments in by_name["requirements"] if name == "COPY"] == ["pyproject.toml /"]
    copied = [arguments for name, arguments in by_name[""] if name == "COPY"]
    assert copied == ["--from=dependencies /opt/noloco /opt/noloco", "--from=package /package /opt/noloco"]


def test_only_files_that_the_image_needs_are_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copies = [arguments.split()[:-1] for stage in stages() for name, arguments in stage if name == "COPY"]
    sources = {source for words in copies if not words[0].startswith("--from") for source in words}
    assert sources == sent
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_listens_on_the_exposed_ports_and_has_writable_caches() -> None:
    environment = image_environment()
    listen = settings.read(None, environment, []).node().listen
    assert listen.host == "0.0.0.0"
    exposed = dict(stages()[-1])["EXPOSE"].split()
    assert sorted(map(str, (listen.metrics_port, listen.grpc_port, listen.dht_port))) == sorted(exposed)
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
        assert Path(environment[name]).is_relative_to("/data")


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_limits_is_confined_and_restarts_only_on_failure(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "${NOLOCO_RESTART:-on-failure}"
    assert service["mem_limit"]
    assert service["cpus"]
    assert int(service["pids_limit"]) <= 512
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "userns_mode", "devices"} & service.keys()
    assert "depends_on" not in service, "with it Compose would stop services one after the other"


def test_a_private_swarm_has_its_key_in_a_volume_and_its_invitation_in_a_secret() -> None:
    private = yaml.safe_load((DOCKER / "compose.members.yaml").read_text("utf-8"))
    services = private["services"]
    made = {name: noloco_node(services[name]["command"]) for name in services}
    assert noloco_node(SERVICES["bootstrap"]["command"]) | {"key": Path("/data/root.key")} == made["bootstrap"]
    assert [*made["member"]["join"]] == ["@/run/secrets/invitation"]
    composing = [str(TOOLS / "docker-compose"), "-f", str(COMPOSE), "-f", str(DOCKER / "compose.members.yaml")]
    done = subprocess.run(
        [*composing, "--profile", "member", "config", "--format", "json"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["services"]
    assert [secret["source"] for secret in found["member"]["secrets"]] == [*private["secrets"]] == ["invitation"]
    assert found["member"]["read_only"] is True
    assert found["bootstrap"]["command"] == services["bootstrap"]["command"]


def noloco_node(command: list[str]) -> dict[str, Any]:
    """The options that noloco-node parses from a command line."""
    return typer.main.get_command(app).make_context("noloco-node", [*command], resilient_parsing=True).params


@pytest.mark.parametrize("name", NODES)
def test_noloco_node_accepts_the_command_line_of_each_service(name: str) -> None:
    service = SERVICES[name]
    read = noloco_node(service["command"])
    given = (read["dir"], [*read["join"]], read["address_file"])
    first: object = (Path("/data"), [], Path("/join/address"))
    # Without --dir a node takes the first directory below the working directory that no other node holds.
    assert given == (first if name == "bootstrap" else (None, ["@/join/address"], None))
    assert dict(stages()[-1])["WORKDIR"] == "/data"
    assert service["healthcheck"]["test"] == ["CMD", "noloco-node", "health", "--url", "http://127.0.0.1:9464"]
    own = {key: str(value) for key, value in service["environment"].items() if key.startswith("NOLOCO__")}
    config = settings.read(None, image_environment() | own, []).node()
    assert config.limits.drain_s < 20 <= int(service["stop_grace_period"].removesuffix("s"))
    assert config.device == ("cuda" if name == "node-gpu" else "auto")
    writes = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert writes == (["bootstrap:/data", "join:/join"] if name == "bootstrap" else ["nodes:/data"])
    assert any(tmpfs.startswith("/tmp:") for tmpfs in service["tmpfs"]), "the libp2p daemon needs it for its sockets"


def test_prometheus_discovers_all_nodes_through_any_of_them() -> None:
    found = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    asked = {sd["url"] for job in found for sd in job["http_sd_configs"]}
    port = image_environment()["NOLOCO__LISTEN__METRICS_PORT"]
    assert asked == {f"http://swarm:{port}/sd"}
    for name in NODES:
        assert SERVICES[name]["networks"]["default"]["aliases"] == ["swarm"]


def test_grafana_finds_prometheus_and_its_dashboards() -> None:
    grafana = SERVICES["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    provisioning = DOCKER / "grafana" / "provisioning"
    (sources,) = (yaml.safe_load(path.read_text("utf-8")) for path in (provisioning / "datasources").glob("*.y*ml"))
    (boards,) = (yaml.safe_load(path.read_text("utf-8")) for path in (provisioning / "dashboards").glob("*.y*ml"))
    assert [source["url"] for source in sources["datasources"]] == ["http://prometheus:9090"]
    assert [provider["options"]["path"] for provider in boards["providers"]] == [mounts["./grafana/dashboards"]]


def test_compose_accepts_every_profile_and_mounted_files_exist() -> None:
    plain, full = composed(), composed("monitoring", "gpu")
    assert plain.keys() == {"bootstrap", "node"}
    assert full.keys() == {*NODES, "prometheus", "grafana"}
    assert {name: service["image"] for name, service in full.items()} == {
        "bootstrap": "noloco-node:local",
        "node": "noloco-node:local",
        "node-gpu": "noloco-node:cuda",
        "prometheus": "prom/prometheus",
        "grafana": "grafana/grafana",
    }
    mounted = [Path(v["source"]) for service in full.values() for v in service["volumes"] if v["type"] == "bind"]
    assert len(mounted) == 4
    assert all(path.exists() for path in mounted), mounted
    assert full["bootstrap"]["build"]["context"] == str(ROOT)
    assert full["node"]["build"]["args"]["TORCH_INDEX"].endswith("/whl/cpu")
    (device,) = full["node-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}


def test_images_ports_and_limits_can_be_set_by_variables() -> None:
    full = composed(
        "monitoring",
        NOLOCO_IMAGE="registry.example/node:7",
        NOLOCO_CPUS="4",
        NOLOCO_MEMORY="8g",
        PROMETHEUS_IMAGE="prometheus:1",
        GRAFANA_IMAGE="grafana:1",
        PROMETHEUS_PORT="9191",
        TORCH_INDEX="",
    )
    assert {full[name]["image"] for name in ("bootstrap", "node")} == {"registry.example/node:7"}
    assert (full["prometheus"]["image"], full["grafana"]["image"]) == ("prometheus:1", "grafana:1")
    assert full["node"]["environment"]["OMP_NUM_THREADS"] == "4"
    assert (full["node"]["cpus"], int(full["node"]["mem_limit"])) == (4, 8 * 2**30)
    assert full["prometheus"]["ports"][0]["published"] == "9191"
    assert full["node"]["build"]["args"]["TORCH_INDEX"] == ""
