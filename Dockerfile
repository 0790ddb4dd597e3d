# syntax=docker/dockerfile:1
# OpenRL's server, from a checkout:
#   docker build --target cuda -t openrl .    # torch for NVIDIA GPUs (gigabytes); the default
#   docker build --target cpu -t openrl:cpu . # the small one, with the demo model
ARG PYTHON=python:3.12.11-slim-bookworm

# An environment in /opt/openrl; only that goes into the image.
FROM ${PYTHON} AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/openrl/bin:$PATH
RUN python -m venv /opt/openrl
WORKDIR /src
COPY constraints.txt ./
# torch comes from an index of its own, so that its version is not in the pins that follow.
RUN grep '^torch==' constraints.txt > torch.txt && grep -v '^torch==' constraints.txt > pins.txt

# Weighty layers first: a change of the code rebuilds the last one alone.
FROM builder AS builder-cpu
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-deps -r torch.txt --index-url "${CPU_INDEX}"
COPY pyproject.toml README.md LICENSE ./
COPY openrl openrl
RUN pip install -c pins.txt '.[server]'

FROM builder AS builder-cuda
RUN pip install -r torch.txt -c pins.txt
COPY pyproject.toml README.md LICENSE ./
COPY openrl openrl
RUN pip install -c pins.txt '.[server]'

FROM ${PYTHON} AS runtime
RUN useradd --uid 10001 --create-home openrl && install -d -o openrl -g openrl /data /homes
ENV PATH=/opt/openrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/data/huggingface
# By number, so that Kubernetes can see that it isn't root.
USER 10001:10001
WORKDIR /home/openrl
EXPOSE 8000
VOLUME ["/data"]
# Exec form: SIGTERM reaches the server, which drains.
ENTRYPOINT ["openrl"]
CMD ["serve", "--host", "0.0.0.0", "--data", "/data", "--log-format", "json"]

FROM runtime AS cpu
COPY --from=builder-cpu /opt/openrl /opt/openrl

FROM runtime AS cuda
COPY --from=builder-cuda /opt/openrl /opt/openrl
