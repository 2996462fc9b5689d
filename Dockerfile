# Another base of the same version of Python can be named: docker build --build-arg PYTHON_IMAGE=...
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build

WORKDIR /build
COPY requirements.lock requirements-build.lock ./
RUN python -m venv /opt/batchline \
    && /opt/batchline/bin/pip install --no-cache-dir --require-hashes -r requirements.lock \
    && pip install --no-cache-dir --require-hashes -r requirements-build.lock

COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/batchline/bin/pip install --no-cache-dir --no-index --no-deps dist/*.whl


FROM ${PYTHON_IMAGE}

# The engine of the embedded model needs libgomp1. Debian removes old versions from its mirrors, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 batchline \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin batchline \
    && install --directory --owner=10001 --group=10001 --mode=0700 /data

COPY --from=build /opt/batchline /opt/batchline

# batchline writes only to /data and /tmp: the rest may be read-only.
ENV PATH=/opt/batchline/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/data/cache \
    BATCHLINE_HOST=0.0.0.0 \
    BATCHLINE_PORT=8000 \
    BATCHLINE_DATA_DIR=/data

# By number, so that Kubernetes can check that it is not root.
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", "import http.client, os, sys; server = http.client.HTTPConnection('127.0.0.1', int(os.environ['BATCHLINE_PORT']), timeout=4); server.request('GET', '/healthz'); sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["batchline"]
CMD ["serve"]
