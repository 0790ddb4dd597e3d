# OpenRL's server. Built from a checkout:
#   docker build -t openrl .                      # torch for NVIDIA GPUs (gigabytes)
#   docker build -t openrl --build-arg TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" .
FROM python:3.12-slim

ARG TORCH="torch==2.13.0"
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# Weights of torch alone, then what is pinned: a change of the code rebuilds the last layer only.
WORKDIR /src
COPY constraints.txt ./
# TORCH is several words, and names its version itself.
# hadolint ignore=DL3013,SC2086
RUN pip install --no-deps ${TORCH} && grep -v '^torch==' constraints.txt > /tmp/pins
COPY pyproject.toml README.md LICENSE ./
COPY openrl openrl
RUN pip install -c /tmp/pins '.[server]' && rm -rf /src

RUN useradd --uid 10001 --create-home openrl && install -d -o openrl /data /models
USER 10001
WORKDIR /home/openrl
ENV HF_HOME=/models/huggingface
EXPOSE 8000
VOLUME ["/data"]
# Exec form: SIGTERM reaches the server, which drains.
ENTRYPOINT ["openrl"]
CMD ["serve", "--host", "0.0.0.0", "--data", "/data", "--log-format", "json"]
