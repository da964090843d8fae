# syntax=docker/dockerfile:1

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
    && cp target/dist/precis /usr/local/bin/precis

FROM debian:bookworm-slim
# TLS connections to models use the certificates of the system.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 precis \
    && useradd --uid 10001 --gid precis --no-create-home --home-dir /var/lib/precis --shell /usr/sbin/nologin precis \
    && install --directory --owner=precis --group=precis --mode=0700 /var/lib/precis
COPY --from=build /usr/local/bin/precis /usr/local/bin/precis

# A number, so that an orchestrator can verify that it is not root.
USER 10001:10001
# By default the service looks here for `precis.db` (SQLite) and `precis.toml` (if mounted). The image does not set the
# database URL, because the environment overrides the file.
WORKDIR /var/lib/precis
VOLUME ["/var/lib/precis"]
# Imports are buffered in a temporary file. The volume is writable even if the rest of the container is not.
ENV TMPDIR=/var/lib/precis

# Loopback would be reachable only inside the container. On other addresses the service starts only if there is an API
# key: create one with `docker run … keys create --tenant NAME` for the same database. If only trusted clients can reach
# the port, set PRECIS__SERVER__ALLOW_UNAUTHENTICATED=true instead.
ENV PRECIS__SERVER__BIND=0.0.0.0:8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["precis", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["precis"]
