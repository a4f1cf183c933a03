"""The chart renders for clusters of every kind, and what it renders is what Kubernetes and its extensions accept."""

from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from service.settings import load_settings
from tests.deploy.kubernetes import VERSIONS, check

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "batchweave"
SMALL = {
    "name": "small",
    "model": "Qwen/Qwen3-8B",
    "gpu": "h100",
    "gpusPerNode": 1,
    "settings": {"BATCHWEAVE_LEASE_S": 20},
}
LARGE = {
    "name": "large",
    "model": "deepseek-ai/DeepSeek-V3",
    "modelName": "it's large",
    "adapters": {"sql": "someone/sql-lora"},
    "nodes": 2,
    "gpusPerNode": 8,
    "replicas": 0,
    "maxReplicas": 3,
    "engineArgs": {"tp_size": 16},
    "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "900Gi"}},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
}
EVERYTHING = {
    "models": [SMALL, LARGE],
    "scaling": {"enabled": True},
    "metrics": {"podMonitor": True},
    "settings": {"BATCHWEAVE_WORKER_HOUR_PRICE": 2.5},
    "image": {"tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
}
PLAIN = {"models": [SMALL, LARGE], "online": {"enabled": False}, "podDisruptionBudget": {"enabled": False}}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="bw", namespace="prod", is_install=True)
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def one(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [each] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return each


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, PLAIN, EVERYTHING], ids=["default", "plain", "everything"])
def test_what_is_rendered_is_accepted(values: dict[str, Any], version: str) -> None:
    found = render(values)
    assert {each["kind"] for each in found} >= {"Deployment", "Service"}
    for each in found:
        check(each, version)


def test_lint_finds_nothing() -> None:
    report = helm.lint(str(CHART), EVERYTHING, strict=True, namespace="prod", kube_version="v1.30.0")
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"api": {"replica": 2}}, "replica"),
        ({"models": [{"name": "Big_Model", "model": "m"}]}, "name"),
        ({"models": [{"name": "m"}]}, "model"),
        ({"planner": {"replicas": 0}}, "replicas"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(helm.HelmError, match=fault):
        render(values)


def pods(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    templates = [each["spec"]["template"] for each in found if each["kind"] == "Deployment"]
    sets = [each["spec"]["leaderWorkerTemplate"] for each in found if each["kind"] == "LeaderWorkerSet"]
    return [each["spec"] for each in (*templates, *(each["workerTemplate"] for each in sets))]


def test_pods_keep_to_the_restricted_standard() -> None:
    found = pods(render(EVERYTHING))
    assert len(found) == 4
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {next(iter(set(each) - {"name"})) for each in pod["volumes"]} == {"emptyDir"}


def test_every_variable_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in pods(render(EVERYTHING)):
        for container in pod["containers"]:
            with monkeypatch.context() as context:
                for each in container["env"]:
                    context.setenv(each["name"], each.get("value", "10.0.0.1"))
                assert load_settings().worker_hour_price == 2.5  # and a misspelt one stops the start


def test_workers_are_reached_by_the_api_and_their_own_engine_alone() -> None:
    def who(name: str, values: dict[str, Any]) -> list[tuple[str, list[int]]]:
        """Return the component that may come in, if it is named, and the ports, none for all."""
        rules = one(render(values), "NetworkPolicy", name)["spec"]["ingress"]
        component = "app.kubernetes.io/component"
        named = [each.get("from", [{"podSelector": {"matchLabels": {component: "any"}}}]) for each in rules]
        return [
            (peers[0]["podSelector"]["matchLabels"][component], [port["port"] for port in rule.get("ports", [])])
            for rule, peers in zip(rules, named, strict=True)
        ]

    assert who("bw-small", EVERYTHING) == [("any", [9100]), ("api", [8090])]
    assert who("bw-large", EVERYTHING) == [("any", [9100]), ("api", [8090]), ("worker-large", [])]
    assert who("bw-small", PLAIN) == [("any", [9100])]
    assert who("bw-api", PLAIN) == [("any", [8080])]
    assert who("bw-planner", PLAIN) == [("any", [9100])]
    assert not any(each["kind"] == "NetworkPolicy" for each in render({**PLAIN, "networkPolicy": {"enabled": False}}))


def test_an_engine_over_two_nodes_is_a_group_of_pods() -> None:
    found = one(render(PLAIN), "LeaderWorkerSet", "bw-large")
    template = found["spec"]["leaderWorkerTemplate"]
    [container] = template["workerTemplate"]["spec"]["containers"]
    assert (found["spec"]["replicas"], template["size"]) == (0, 2)
    assert container["resources"]["limits"] == {"memory": "900Gi", "nvidia.com/gpu": 8}
    assert {"name": "BATCHWEAVE_ENGINE_ARGS", "value": '{"tp_size":16}'} in container["env"]
