"""Debian's Prometheus for tests: promtool, and a server on loopback with the configuration that the project ships.

If the two programs are missing, the test is skipped, or fails if NOLOCO_NEEDS_PROMETHEUS=1 says that they must be
installed.
"""

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

SHIPPED = Path(__file__).parents[2] / "docker" / "prometheus"
DISCOVERY_URL = "http://swarm:9464/sd"
"""As written in the shipped configuration."""
PACKAGE = "Debian's package `prometheus`"


def program(name: str) -> str:
    """The path of one of Prometheus' programs."""
    found = shutil.which(name)
    if found is not None:
        return found
    assert os.environ.get("NOLOCO_NEEDS_PROMETHEUS") != "1", f"{name} is not there: install {PACKAGE}"
    pytest.skip(f"{name} is not there ({PACKAGE} has it)")


def promtool(*arguments: str, given: str | None = None, cwd: Path = SHIPPED) -> str:
    """The output of promtool, with `given` on its standard input. Fails the test if promtool finds an error."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=given, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@dataclass(frozen=True)
class Sample:
    """One series of an instant query's answer."""

    labels: Mapping[str, str]
    value: float


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def ask(self, path: str, **query: str) -> Any:
        """`data` of an API response. Fails the test with the server's message if it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def query(self, expr: str) -> list[Sample]:
        """The samples of an instant vector whose values are numbers."""
        found = [Sample(one["metric"], float(one["value"][1])) for one in self.ask("query", query=expr)["result"]]
        return [sample for sample in found if sample.value == sample.value]

    def targets(self, job: str) -> dict[str, bool]:
        """Peer id → whether it is up, for the targets that the server scrapes now."""
        active = self.ask("targets", state="active")["activeTargets"]
        return {t["labels"]["node"]: t["health"] == "up" for t in active if t["labels"]["job"] == job}

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their health."""
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


def answers(url: str) -> bool:
    """Whether a server at this address answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (OSError, ValueError):  # no server, not ready, or its address is not known yet
        return False


@contextmanager
def running_prometheus(home: Path, discovery_url: str) -> Iterator[Prometheus]:
    """A server with the shipped configuration and rules, evaluated every second instead of every five."""
    text = (SHIPPED / "prometheus.yml").read_text()
    assert text.count(DISCOVERY_URL) == 1
    text = text.replace(DISCOVERY_URL, discovery_url)
    text = re.sub(r"(interval|timeout): [45]s", r"\1: 1s", text)
    home.mkdir()
    (home / "prometheus.yml").write_text(text)
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(SHIPPED / name, home)
    log = home / "log"
    command = [
        program("prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--scrape.discovery-reload-interval=1s",
    ]
    with log.open("wb") as to_log:
        process = subprocess.Popen(command, cwd=home, stdout=to_log, stderr=to_log, process_group=0)
    try:

        def url() -> str:
            assert process.poll() is None, log.read_text()
            found = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
            return f"http://{found[1]}" if found else ""

        wait_until(lambda: answers(f"{url()}/-/ready"), "Prometheus", 30)
        yield Prometheus(url())
    finally:
        process.kill()
        process.wait()
