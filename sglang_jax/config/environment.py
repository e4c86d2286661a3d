"""What is read from the environment: here, and nowhere else."""

from __future__ import annotations

from pydantic_settings import BaseSettings, SettingsConfigDict


class Environment(BaseSettings):
    """What is read from the environment; nothing else in the project reads it.

    - `SGLANG_JAX_DEBUG_MEMORY=1`: every page has one recorded owner, and each step checks conservation.
    - `SGLANG_JAX_API_KEY`, `SGLANG_JAX_ADMIN_API_KEY`: the server's keys, where no option gives them.
    - `SGLANG_JAX_GROUP_SECRET`: what the nodes of a group know each other by, where `group_secret_file` is not given.
    """

    model_config = SettingsConfigDict(env_prefix="SGLANG_JAX_", hide_input_in_errors=True)

    debug_memory: bool = False
    api_key: str | None = None
    admin_api_key: str | None = None
    group_secret: str | None = None


class TpuEnvironment(BaseSettings):
    """What a TPU VM, or GKE in a container on one, says of its slice; `tpu.launch` alone looks at it.

    - `TPU_ACCELERATOR_TYPE`: `v6e-8`; `TPU_TOPOLOGY`: `2x4`.
    - `TPU_WORKER_ID`: which of the slice's nodes this is; `TPU_WORKER_HOSTNAMES`: all of them, with commas.
    """

    model_config = SettingsConfigDict(env_prefix="TPU_")

    accelerator_type: str | None = None
    topology: str | None = None
    worker_id: int = 0
    worker_hostnames: str = ""


class VisibleDevices(BaseSettings):
    """Which accelerators this process was told to use, in the words of their drivers; replicas share these.

    - `CUDA_VISIBLE_DEVICES`: numbers or UUIDs of GPUs, with commas; `TPU_VISIBLE_CHIPS`: numbers of chips, likewise.
    """

    cuda_visible_devices: str | None = None
    tpu_visible_chips: str | None = None
