"""`batch --engine ray` over echo engines, as a process that tests kill: ADDRESS INPUT OUTPUT STARTED."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.ray_cluster import launcher

from sglang_jax.batch.options import BatchConfig, RayOptions
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.config import EngineConfig

if __name__ == "__main__":
    address, source, output, started = sys.argv[1:]
    status = run_ray_batch(
        BatchConfig(input=source, output=output),
        RayOptions(address=address, max_replicas=1, rows_per_batch=8, batches_per_replica=4, rows_per_file=16),
        EngineConfig(model_path="echo:0.01"),
        launch=launcher(Path(started)),
    )
    backends = {"jax", "torch"} & set(sys.modules)
    assert not backends, backends
    sys.exit(status)
