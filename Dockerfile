# Needs BuildKit, the default of Docker since version 23, or buildah.

FROM rust:1.95.0-slim-bookworm AS build
# Overrides rust-toolchain.toml, which would install components for development.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
# The caches survive changes of the sources, so that only changed crates are compiled. The binary is copied out of the
# cache, which is not part of the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --profile dist --locked --bin precis \
    && scripts/image-root target/dist/precis /image \
    && mkdir /data

# Only the binary, the C library and certificates: no shell and no package that needs updates.
FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="precis" \
    org.opencontainers.image.description="A memory for LLM agents that fits their context window" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION"
COPY --from=build /image/ /
COPY --from=build --chown=10001:10001 /data/ /var/lib/precis/

# A number, so that an orchestrator can verify that it is not root.
USER 10001:10001
# By default the service looks here for `precis.db` (SQLite) and `precis.toml` (if mounted). The image does not set the
# database URL, because the environment overrides the file. It declares no volume: without one of your own, the data of SQLite
# ends with the container, and an unnamed volume would only hide that.
WORKDIR /var/lib/precis
# Imports are buffered in a temporary file, which can be larger than a file system in memory.
ENV TMPDIR=/var/lib/precis PATH=/usr/local/bin

# Loopback would be reachable only inside the container. On other addresses the service starts only if there is an API
# key: create one with `docker run … keys create --tenant NAME` for the same database. If only trusted clients can reach
# the port, set PRECIS__SERVER__ALLOW_UNAUTHENTICATED=true instead.
ENV PRECIS__SERVER__BIND=0.0.0.0:8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["precis", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["precis"]
