"""The environment variables of the project. No other module reads the environment."""

from __future__ import annotations

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from sglang_jax.errors import ConfigError
from sglang_jax.spellings import NEEDLESS_VARIABLES, VARIABLES


class Environment(BaseSettings):
    """Variables that start with `SGLANG_JAX_`.

    - `SGLANG_JAX_DEBUG_MEMORY=1`: every page has one recorded owner, and each step checks conservation.
    - `SGLANG_JAX_API_KEY`, `SGLANG_JAX_ADMIN_API_KEY`: the server's keys, if no option sets them.
    - `SGLANG_JAX_GROUP_SECRET`: the secret by which the nodes of a group authenticate each other, if
      `group_secret_file` is not set.
    """

    model_config = SettingsConfigDict(env_prefix="SGLANG_JAX_", hide_input_in_errors=True)

    debug_memory: bool | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    group_secret: str | None = None


class OtherEnvironment(BaseSettings):
    """Variables of another engine that mean the same here, or have no effect (`[environment]` in `spellings.toml`)."""

    model_config = SettingsConfigDict(env_prefix="SGLANG_", hide_input_in_errors=True)

    debug_memory_pool: bool = False
    test_retract: bool = False
    test_retract_interval: int = Field(3, ge=1)
    test_retract_no_prefill_bs: str | None = None

    @classmethod
    def read(cls) -> OtherEnvironment:
        """Raises `ConfigError` with the name of a variable that has no valid value."""
        try:
            return cls()
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{_variable(str(first['loc'][0]))}: {first['msg']}, got {first['input']!r}") from error

    @property
    def steps_between_retractions(self) -> int | None:
        """The value of `test_retract`."""
        return self.test_retract_interval if self.test_retract else None

    def notes(self) -> list[str]:
        """A sentence on each variable that is set, in the order of their names."""
        given = sorted(_variable(field) for field, value in self.model_dump(exclude_unset=True).items() if value)
        return [
            f"{name} is the same as {VARIABLES[name]}"
            if name in VARIABLES
            else f"{name} has no effect: {NEEDLESS_VARIABLES[name]}"
            for name in given
        ]


def _variable(field: str) -> str:
    return f"SGLANG_{field.upper()}"


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
