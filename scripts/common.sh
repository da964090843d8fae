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

# Prints the folder of the user for what all clones on this machine share.
cache_folder() { echo "${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/precis"; }

# Prints a folder of the cache that a function creates once: its name contains a hash of the standard input, so clones with other
# versions do not disturb each other.
#
#     folder=$(cached NAME FUNCTION <VERSIONS)
cached() {
    local folder cached_lock
    folder=$(cache_folder)/$1-$(sha256sum | cut --bytes=1-16)
    mkdir --parents "$(dirname "$folder")"
    exec {cached_lock}>"$folder.lock"
    flock "$cached_lock"
    # The stamp is written last, so that an interrupted installation is repeated.
    if [[ ! -f $folder/complete ]]; then
        rm -rf "$folder"
        { "$2" "$folder" && touch "$folder/complete"; } >&2 || fail "$1 could not be installed into $folder"
    fi
    touch "$folder" "$folder.lock"
    exec {cached_lock}>&-
    echo "$folder"
}

# Prints the folder of the programs of a crate, which cargo compiles once:
#
#     tool=$(installed_crate NAME VERSION [OPTION…])/bin/NAME
installed_crate() {
    local crate=$1@$2 options=("${@:3}")
    # It would put its dependencies into the target folder of precis. It runs for a second, so it is not optimised.
    build() {
        env --unset=CARGO_TARGET_DIR CARGO_PROFILE_DEV_DEBUG=0 \
            cargo install --quiet --locked --debug --root "$1" "${options[@]}" "$crate"
    }
    printf '%s\n' "$@" "$(rustc --version)" | cached "$1" build
}

# Lets cargo build in a folder of the cache, so that a run in another clone finds the compiled dependencies. One run at a time has the
# folder: another one builds in its clone.
share_dependencies() {
    [[ -z ${CARGO_TARGET_DIR:-} ]] || return 0
    local cache key folder old
    cache=$(cache_folder)
    key=$({
        rustc -vV
        cat Cargo.lock fuzz/Cargo.lock fuzz/rustc .cargo/config.toml
        sed '0,/^\[profile/d' Cargo.toml fuzz/Cargo.toml
    } | sha256sum)
    folder=$cache/target-${key:0:16}
    mkdir --parents "$folder"
    # All children inherit the lock, so a cargo that outlives this script keeps it.
    exec {shared_target}>"$folder.lock"
    if ! flock --nonblock "$shared_target"; then
        echo ".ci/run: another run builds in $folder, so this one builds in its clone" >&2
        exec {shared_target}>&-
        unset shared_target
        return 0
    fi
    touch "$folder" "$folder.lock"
    export CARGO_TARGET_DIR=$folder
    [[ $(cat "$folder/clone" 2>/dev/null) == "$PWD" ]] || drop_workspace
    echo "$PWD" >"$folder/clone"
    # The two that were used last remain: those of the main branch and of a change of the dependencies.
    while read -r old; do
        flock --nonblock "$old.lock" rm -rf "$old" || true
    done < <(ls --directory -t "$cache"/target-*/ | sed 's|/$||' | tail --lines=+3)
    find "$cache" -mindepth 1 -maxdepth 1 -mtime +30 -exec rm -rf {} +
}

# Removes what was compiled of precis itself from the shared folder. Cargo compares only times: it takes the program of another clone for
# that of this one if the files here are older.
drop_workspace() {
    [[ -n ${shared_target:-} ]] || return 0
    cargo clean --locked --quiet --package precis
    cargo clean --locked --quiet --manifest-path fuzz/Cargo.toml --package precis --package precis-fuzz
    rm -rf "$CARGO_TARGET_DIR/doc" "$CARGO_TARGET_DIR/clone"
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
