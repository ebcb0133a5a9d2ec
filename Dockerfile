# c2cserve on CPU slices. Build: docker build -t c2cserve .
# Run: docker run --read-only --cap-drop ALL --security-opt no-new-privileges --shm-size=16g \
#          -p 8000:8000 -v /models:/models:ro -e C2CSERVE_API_KEYS -e C2CSERVE_ADMIN_KEY \
#          c2cserve --catalog /models/catalog.toml
# Nothing is written outside /dev/shm, unless models come from a hub: give HF_HOME a volume then.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY src src
# For a small image without CUDA libraries pass the index of PyTorch's CPU builds:
# --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""
# For many machines: --build-arg EXTRAS=[cluster] (docs/cluster.md).
ARG EXTRAS=""
RUN pip install --no-cache-dir --prefix=/install --constraint constraints.txt ".${EXTRAS}"

FROM python:3.12-slim-bookworm
COPY --from=build /install /usr/local
COPY examples/specialists /usr/share/c2cserve/specialists
RUN useradd --create-home --user-group --uid 1000 c2cserve
# By number: only so can Kubernetes tell that it is not root (runAsNonRoot).
USER 1000:1000
EXPOSE 8000
# Weights live in shared memory: give the container a /dev/shm as large as the pool (--shm-size).
HEALTHCHECK --interval=5s --start-period=60s CMD ["python", "-m", "c2cserve.server.health_check"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["c2cserve", "serve", "--host", "0.0.0.0"]
CMD ["--catalog", "/usr/share/c2cserve/specialists/catalog.toml"]
