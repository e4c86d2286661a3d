"""The environment variables of the project. No other module reads the environment."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict


class Environment(BaseSettings):
    """Variables that start with `SGLANG_JAX_`.

    - `SGLANG_JAX_DEBUG_MEMORY=1`: every page has one recorded owner, and each step checks conservation.
    - `SGLANG_JAX_API_KEY`, `SGLANG_JAX_ADMIN_API_KEY`: the server's keys, if no option sets them.
    - `SGLANG_JAX_GROUP_SECRET`: the secret by which the nodes of a group authenticate each other, if
      `group_secret_file` is not set.
    """

    model_config = SettingsConfigDict(env_prefix="SGLANG_JAX_", hide_input_in_errors=True)

    debug_memory: bool = False
    api_key: str | None = None
    admin_api_key: str | None = None
    group_secret: str | None = None


class TpuEnvironment(BaseSettings):
    """Variables by which a TPU VM, or GKE in a container on one, describes its slice; only `tpu.launch` reads them.
    `TPU_ACCELERATOR_TYPE`: `v6e-8`; `TPU_TOPOLOGY`: `2x4`; `TPU_WORKER_ID`: index of this node in the slice;
    `TPU_WORKER_HOSTNAMES`: all nodes, separated by commas."""

    model_config = SettingsConfigDict(env_prefix="TPU_")

    accelerator_type: str | None = None
    topology: str | None = None
    worker_id: int = 0
    worker_hostnames: str = ""


class VisibleDevices(BaseSettings):
    """The accelerators that this process may use, as their drivers name them; replicas share them.
    `CUDA_VISIBLE_DEVICES`: indices or UUIDs of GPUs, separated by commas; `TPU_VISIBLE_CHIPS`: indices of chips."""

    cuda_visible_devices: str | None = None
    tpu_visible_chips: str | None = None
