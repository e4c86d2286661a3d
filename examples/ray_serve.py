"""Replicas of the server behind Ray Serve's proxy, which distributes requests and replaces replicas that die.

Needs `pip install 'ray[serve]'`. Run it with `python examples/ray_serve.py [MODEL] [REPLICAS] [PORT]`, or on a cluster
with `serve run examples.ray_serve:build model_path=demo num_replicas=2`; then, as with any server:

    python examples/openai_client.py http://127.0.0.1:8000
"""

import signal
import sys
import threading
from typing import Any

from ray import serve
from ray.serve import Application

from sglang_jax.server.embedded import EmbeddedServer


@serve.deployment(
    # By default, Ray Serve sends a replica 5 requests at a time, too few for an engine, which batches many.
    max_ongoing_requests=256,
    # Starting takes as long as loading and compiling the model.
    health_check_period_s=10,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=60,
)
@serve.ingress()
class Replica:
    """All routes of the server; its engine runs in a separate process."""

    async def __init__(self, options: dict[str, Any]) -> None:
        self.server = await EmbeddedServer.start(**options)

    def __serve_build_asgi_app__(self) -> Any:
        return self.server.app

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        self.server.check()


def build(arguments: dict[str, Any]) -> Application:
    """The application for `serve run` and Ray Serve's config files. Arguments are server options, and:

    - `num_replicas`: a number, or `auto` to have Ray Serve add and remove replicas by load.
    - `num_cpus`, `num_gpus`, `resources`: what a replica reserves; the default of `num_gpus` is `tp_size` if `device`
      is `cuda`. On TPUs, use `resources={"TPU": chips}`.
    """
    options = dict(arguments)
    num_replicas = options.pop("num_replicas", 1)
    reserved = {name: options.pop(name) for name in ("num_cpus", "num_gpus", "resources") if name in options}
    if options.get("device") == "cuda":
        reserved.setdefault("num_gpus", options.get("tp_size", 1))
    replicas = num_replicas if num_replicas == "auto" else int(num_replicas)
    return Replica.options(num_replicas=replicas, ray_actor_options=reserved).bind(options)


def main(model: str = "demo", replicas: str = "2", port: str = "8000") -> None:
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(build({"model_path": model, "num_replicas": replicas}))
    told_to_stop = threading.Event()
    # Set explicitly, because a shell starts background processes with Ctrl-C ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told_to_stop.set())
    print(f"Ready: {replicas} replicas of {model} at http://127.0.0.1:{port}", flush=True)
    told_to_stop.wait()
    serve.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
