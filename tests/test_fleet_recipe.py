"""The Kubernetes recipe of a fleet matches the code, and its parts fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_jax.cli.serve import serve

RECIPE = Path(__file__).parent.parent / "docs" / "recipes" / "fleet-kubernetes.yaml"


@pytest.fixture(scope="module")
def parts() -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name."""
    objects = list(yaml.safe_load_all(RECIPE.read_text()))
    return {(part["kind"], part["metadata"]["name"]): part["spec"] for part in objects}


def container(spec: dict[str, Any]) -> dict[str, Any]:
    [only] = spec["template"]["spec"]["containers"]
    return only


def flags(spec: dict[str, Any]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in container(spec)["args"])


def test_flags_are_those_of_the_server(parts) -> None:
    known = {name for parameter in serve.params for name in parameter.opts}
    for key in (("StatefulSet", "replica"), ("Deployment", "sglang-jax-router")):
        assert container(parts[key])["command"] == ["python", "-m", "sglang_jax.launch_server"]
        assert set(flags(parts[key])) <= known


def test_the_router_knows_every_replica_by_its_name(parts) -> None:
    replicas = parts["StatefulSet", "replica"]
    router = flags(parts["Deployment", "sglang-jax-router"])
    port = flags(replicas)["--port"]
    service = replicas["serviceName"]
    assert router["--connect"].split(",") == [f"replica-{n}.{service}:{port}" for n in range(replicas["replicas"])]
    assert router["--model-path"] == flags(replicas)["--model-path"]


def test_services_select_existing_pods(parts) -> None:
    workloads = {key: spec for key, spec in parts.items() if "template" in spec}
    pods = {spec["template"]["metadata"]["labels"]["app"] for spec in workloads.values()}
    services = {name: spec for (kind, name), spec in parts.items() if kind == "Service"}
    assert {spec["selector"]["app"] for spec in services.values()} == pods
    assert parts["StatefulSet", "replica"]["serviceName"] in services
    for spec in workloads.values():
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert {port["containerPort"] for port in container(spec)["ports"]} == {int(flags(spec)["--port"])}
    budget = parts["PodDisruptionBudget", "replica"]
    assert budget["selector"] == parts["StatefulSet", "replica"]["selector"]
