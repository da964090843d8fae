# shellcheck shell=bash
# Functions for the other scripts, which source this file.

script=scripts/$(basename "$0")

fail() {
    echo "$script: $*" >&2
    exit 1
}

# Puts cargo on PATH. rustup adds it only to the profiles of interactive shells.
find_cargo() {
    type -P cargo >/dev/null || PATH=${CARGO_HOME:-${HOME:-/root}/.cargo}/bin:$PATH
    type -P cargo >/dev/null || fail "cargo was not found. Install Rust with rustup."
}

# Prints the Debian packages that are missing to build precis and to run its tests, except Postgres.
missing_build_packages() {
    # Rust links with cc, and some crates contain C.
    type -P cc >/dev/null || printf '%s\n' gcc libc6-dev
    # The tests of the README's commands use curl.
    type -P curl >/dev/null || echo curl
    # HTTP clients need the certificates of the system, even if a test uses loopback only.
    local file
    for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/cert.pem; do
        [[ -n $file && -s $file ]] && return
    done
    echo ca-certificates
}

# Installs Debian packages. Names all of them if this is not possible.
install_packages() {
    (($# > 0)) || return 0
    if ((EUID != 0)) || ! type -P apt-get >/dev/null; then
        fail "these packages are missing: $*. Install them (Debian: apt-get install $*), or run this as root on Debian."
    fi
    echo "$script: installing $*" >&2
    # Otherwise Debian's postgresql creates and starts a cluster, which nothing here uses.
    local settings=/etc/postgresql-common/createcluster.d new_settings=
    if [[ " $* " == *" postgresql "* ]]; then
        [[ -d $settings ]] || new_settings=yes
        mkdir --parents "$settings"
        echo "create_main_cluster = false" >"$settings/precis-test.conf"
    fi
    local status=0
    {
        DEBIAN_FRONTEND=noninteractive apt-get update &&
            DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
    } >&2 || status=$?
    rm -f "$settings/precis-test.conf"
    if [[ -n $new_settings ]]; then
        rmdir --ignore-fail-on-non-empty "$settings" /etc/postgresql-common 2>/dev/null || true
    fi
    ((status == 0)) || fail "these packages could not be installed: $*"
}
