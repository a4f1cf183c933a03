"""Checks objects by the schemas of Kubernetes and of its extensions."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate.utils import SchemaNotFoundError

SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("1.27", "1.37")


def check(found: dict[str, Any], version: str) -> None:
    """Check an object strictly; one of an extension by its schema, and the pods in it by those of Kubernetes."""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except SchemaNotFoundError:
        schema = SCHEMAS / f"{found['apiVersion'].replace('/', '_')}_{found['kind']}.json"
        jsonschema.validate(found, json.loads(schema.read_text()))
        for pod in _pods(found):
            labels = {"app": "pod"}
            template = {**pod, "metadata": {"labels": labels}}
            spec = {"selector": {"matchLabels": labels}, "template": template}
            deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pod"}, "spec": spec}
            kubernetes_validate.validate(deployment, version, strict=True)


def _pods(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of pods in an object of an extension."""
    spec = found["spec"]
    if found["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"]["workerTemplate"]]
    if found["kind"] == "RayCluster":
        return [each["template"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return []
