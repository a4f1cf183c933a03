"""The fleet on Kubernetes: its file is what Kubernetes and KubeRay accept, and says what the fleet can read."""

import re
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchweave.table import COMMANDS
from service.fleet.spec import read_fleet
from tests.deploy.kubernetes import VERSIONS, check

FILE = Path(__file__).parents[2] / "deploy/kuberay/fleet.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))


def one(kind: str) -> dict[str, Any]:
    [found] = [each for each in OBJECTS if each["kind"] == kind]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_accepted(version: str) -> None:
    for each in OBJECTS:
        check(each, version)


def test_the_fleet_can_read_its_models(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(one("ConfigMap")["data"]["fleet.yaml"])
    assert len(read_fleet(path).models) == 2


def test_its_parts_find_each_other() -> None:
    cluster, fleet = one("RayCluster"), one("Deployment")
    assert cluster["spec"]["rayVersion"] == installed("ray")
    (container,) = fleet["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in script
    assert set(re.findall(r"exec batchweave (\w+)", script)) == {"fleet"} <= set(COMMANDS)
    (volume,) = fleet["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] == one("ConfigMap")["metadata"]["name"]
