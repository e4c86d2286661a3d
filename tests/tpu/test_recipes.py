"""The recipes are valid YAML that matches the code: labels and counts of real slices, existing commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_jax.cli.serve import serve
from tpu.choices import MEETING_PORT
from tpu.launch import launch
from tpu.topologies import CHIPS, parse_topology

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def by_kind(name: str, kind: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == kind)


@pytest.mark.parametrize(("name", "kind"), [("tpu-v6e-gke.yaml", "Deployment"), ("tpu-v6e-16-gke.yaml", "Job")])
def test_pods_request_existing_slices(name: str, kind: str) -> None:
    document = by_kind(name, kind)
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    selector = pod["nodeSelector"]
    (chip,) = (
        chip for chip in CHIPS.values() if chip.gke_accelerator == selector["cloud.google.com/gke-tpu-accelerator"]
    )
    topology = parse_topology(f"{chip.generation}:{selector['cloud.google.com/gke-tpu-topology']}")
    nodes = document["spec"].get("completions", 1)
    assert container["resources"]["limits"]["google.com/tpu"] == container["resources"]["requests"]["google.com/tpu"]
    assert container["resources"]["limits"]["google.com/tpu"] * nodes == topology.chips
    assert topology.nodes == nodes
    assert container["command"] == ["python", "-m", "tpu.launch"]
    known = {name for command in (serve, launch) for parameter in command.params for name in parameter.opts}
    assert {argument.split("=")[0] for argument in container["args"]} <= known


def test_services_find_their_pods() -> None:
    deployment, service = by_kind("tpu-v6e-gke.yaml", "Deployment"), by_kind("tpu-v6e-gke.yaml", "Service")
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    headless, job = by_kind("tpu-v6e-16-gke.yaml", "Service"), by_kind("tpu-v6e-16-gke.yaml", "Job")
    assert job["spec"]["template"]["spec"]["subdomain"] == headless["metadata"]["name"]
    assert headless["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert MEETING_PORT in {port["containerPort"] for port in container["ports"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert "SGLANG_JAX_GROUP_SECRET" in {variable["name"] for variable in container["env"]}


def test_skypilot_asks_for_a_slice_and_starts_the_launcher() -> None:
    (task,) = documents("tpu-v6e-skypilot.yaml")
    assert parse_topology(task["resources"]["accelerators"]).nodes == 1
    assert "-m tpu.launch" in task["run"]
    assert ".[tpu]" in task["setup"]
    assert {"MODEL", "HF_TOKEN", "SGLANG_JAX_API_KEY", "HF_HOME", "XDG_CACHE_HOME"} == set(task["envs"])
    [cache] = task["file_mounts"]
    assert {task["envs"][name].split("/")[1] for name in ("HF_HOME", "XDG_CACHE_HOME")} == {cache.strip("/")}
    assert task["service"]["readiness_probe"]["path"] == "/readyz"


def test_the_docs_page_starts_skypilot_like_the_recipe() -> None:
    """The command in the recipe's first line has the key, without which the server does not start."""
    command = (RECIPES / "tpu-v6e-skypilot.yaml").read_text().splitlines()[0].removeprefix("# ")
    (task,) = documents("tpu-v6e-skypilot.yaml")
    assert [name for name, value in task["envs"].items() if not value] == re.findall(r"--env (\w+)", command)
    assert command in (RECIPES.parent / "tpu.md").read_text().splitlines()


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.yaml")))
def test_a_recipe_says_why_it_has_no_disruption_budget_or_shared_memory(name: str) -> None:
    text = (RECIPES / name).read_text()
    assert "kind: PodDisruptionBudget" in text or re.search("no (PodDisruptionBudget|disruption budget)", text)
    assert "/dev/shm" in text


@pytest.mark.parametrize(("name", "kind"), [("tpu-v6e-gke.yaml", "Deployment"), ("tpu-v6e-16-gke.yaml", "Job")])
def test_everything_downloaded_or_compiled_is_kept(name: str, kind: str) -> None:
    (container,) = by_kind(name, kind)["spec"]["template"]["spec"]["containers"]
    [volume] = [mount["mountPath"] for mount in container["volumeMounts"]]
    places = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    compiled = dict(argument.split("=", 1) for argument in container["args"])["--compilation-cache-dir"]
    for place in (places["HF_HOME"], places["XDG_CACHE_HOME"], compiled):
        assert Path(volume) in (Path(place), *Path(place).parents)
