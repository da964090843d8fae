# syntax=docker/dockerfile:1

FROM rust:1.95.0-slim-bookworm AS build
# Else rust-toolchain.toml would fetch components that only development needs.
ENV RUSTUP_TOOLCHAIN=1.95.0
WORKDIR /src
COPY . .
# The caches outlive a change of the sources, so that only what changed is compiled again. The binary is moved out of
# them in the same step: a cache is not part of the image.
RUN --mount=type=cache,target=/usr/local/cargo/registry,sharing=locked \
    --mount=type=cache,target=/src/target,sharing=locked \
    cargo build --profile dist --locked --bin precis \
    && cp target/dist/precis /usr/local/bin/precis

FROM debian:bookworm-slim
# The certificates that models' servers are checked against are the system's.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 precis \
    && useradd --uid 10001 --gid precis --no-create-home --home-dir /var/lib/precis --shell /usr/sbin/nologin precis \
    && install --directory --owner=precis --group=precis --mode=0700 /var/lib/precis
COPY --from=build /usr/local/bin/precis /usr/local/bin/precis

# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
# The service's defaults lead here: SQLite's `precis.db`, and `precis.toml` where one is mounted. The URL of the database
# is no variable of the image: that would win over the file's, or over DATABASE_URL.
WORKDIR /var/lib/precis
VOLUME ["/var/lib/precis"]

# Loopback would be the container's own. The service refuses to listen on anything else without an API key, and the image
# doesn't override that: whoever runs it makes one first (`docker run … keys create --tenant NAME`, over the same
# database), or sets PRECIS__SERVER__ALLOW_UNAUTHENTICATED=true, if only those who may see everything can reach the port.
ENV PRECIS__SERVER__BIND=0.0.0.0:8080
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["precis", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["precis"]
