//! The file system of the container image, with the binary under test.

use crate::service::{Precis, Process};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// The user of the image.
const USER: u32 = 10001;
/// The size of everything except the binary.
const MAX_OTHER_BYTES: u64 = 8 * 1024 * 1024;

/// Creates the file system of the image, with a folder for data that belongs to the user.
fn image() -> TempDir {
    let image = TempDir::new().expect("a folder");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/image-root");
    let mut command = Command::new(script);
    command.arg(env!("CARGO_BIN_EXE_precis")).arg(image.path());
    assert!(command.status().expect("a shell").success());
    fs::set_permissions(image.path(), Permissions::from_mode(0o755)).expect("own folder");
    let data = image.path().join("var/lib/precis");
    fs::create_dir(&data).expect("a new folder");
    chown(&data, Some(USER), Some(USER)).expect("tests of the image run as root, as chroot does");
    image
}

/// Returns the path, the owner and the size of each file in a folder.
fn files(folder: &Path) -> Vec<(String, u32, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let metadata = fs::symlink_metadata(&path).expect("metadata");
        if metadata.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.display().to_string(), metadata.uid(), metadata.len()));
        }
    }
    found
}

/// Imports a session of two messages.
async fn import(service: &Process) {
    let lines = [json!({"role": "user", "content": "Hello"}), json!({"role": "assistant", "content": "Hi"})];
    let lines = lines.map(|line| line.to_string()).join("\n");
    let import = service.request(reqwest::Method::POST, "/sessions/s/import");
    import.header("content-type", "application/x-ndjson").body(lines).await.ok(201);
    assert_eq!(service.get("/sessions/s").await.ok(200)["last_seq"], 2);
    // A container has /proc, and this file system has not.
    assert!(service.get("/metrics").await.text.contains("precis_http_requests_total"));
}

#[tokio::test]
async fn image_serves_an_import_without_privileges() {
    let image = image();
    let mut chroot = Command::new("/usr/sbin/chroot");
    chroot.arg(format!("--userspec={USER}:{USER}")).arg(image.path()).arg("/usr/local/bin/precis");
    // The working directory is the root, which is not writable, as in a container with a read-only file system.
    let service = Precis::started_by(chroot)
        .env("DATABASE_URL", "sqlite:///var/lib/precis/precis.db")
        .env("TMPDIR", "/var/lib/precis")
        .start()
        .await;
    import(&service).await;
    let data = image.path().join("var/lib/precis");
    for (path, owner, _) in files(image.path()) {
        assert_eq!(owner == USER, Path::new(&path).starts_with(&data), "{path}");
    }
}

/// Returns a command that runs precis in an image, as a container engine does: with a root that is read-only except for a folder
/// with data, and as a user without privileges, `USER:GROUP`.
fn contained(root: &str, data: &Path, user: &str) -> Command {
    const ENTER: &str = "set -e; PATH=/usr/sbin:/usr/bin:/sbin:/bin
        mount --bind \"$1\" \"$1\"; mount --bind \"$2\" \"$1/var/lib/precis\"; mount -o remount,bind,ro \"$1\"
        exec unshare --root \"$1\" --wd /var/lib/precis --setgid \"${3#*:}\" --setuid \"${3%:*}\" /usr/local/bin/precis";
    let mut command = Command::new("/usr/bin/unshare");
    command.args(["--mount", "/bin/sh", "-c", ENTER, "sh", root]).arg(data).arg(user);
    command
}

/// Run by `scripts/image`.
#[tokio::test]
#[ignore = "needs the image that scripts/image builds"]
async fn built_image_serves_an_import_from_a_read_only_root() {
    let [root, image_json] =
        ["PRECIS_IMAGE_ROOT", "PRECIS_IMAGE_JSON"].map(|name| std::env::var(name).expect(name));
    let image: Value =
        serde_json::from_str(&fs::read_to_string(&image_json).expect("readable")).expect("JSON");
    let config = &image["Docker"]["config"];
    let labels = &config["Labels"];
    // Docker abbreviates these names to `precis:VERSION` and `precis`, as documented commands call the image. It keeps `localhost`.
    let archive = Path::new(&image_json).with_file_name("precis.tar");
    let mut tar = Command::new("tar");
    let output = tar.args(["--extract", "--to-stdout", "--file"]).arg(archive).arg("manifest.json").output();
    let manifest: Value = serde_json::from_slice(&output.expect("tar runs").stdout).expect("JSON");
    let tags: Vec<&str> =
        manifest[0]["RepoTags"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let expected = [concat!("/precis:", env!("CARGO_PKG_VERSION")), "/precis:latest"];
    assert_eq!(tags.len(), expected.len(), "{tags:?}");
    for (tag, end) in tags.iter().zip(expected) {
        assert!(tag.ends_with(end) && !tag.starts_with("localhost"), "{tags:?}");
    }
    assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(labels["org.opencontainers.image.licenses"], "Apache-2.0");
    assert_eq!(config["Entrypoint"], json!(["precis"]));
    assert_eq!(config["Healthcheck"]["Test"], json!(["CMD", "precis", "health"]));
    assert_eq!(config["WorkingDir"], "/var/lib/precis");
    assert_eq!(
        config["Volumes"].as_object().map_or(0, serde_json::Map::len),
        0,
        "a volume would be anonymous"
    );

    let data = TempDir::new().expect("a folder");
    chown(data.path(), Some(USER), Some(USER)).expect("this test runs as root, as mount does");
    let before = files(Path::new(&root));
    let user = config["User"].as_str().expect("a user");
    let variables = config["Env"].as_array().expect("a list").iter().filter_map(Value::as_str);
    let variables = variables.filter_map(|variable| variable.split_once('='));
    let precis = Precis::started_by(contained(&root, data.path(), user));
    let precis = variables.fold(precis, |precis, (name, value)| precis.env(name, value));
    let service = precis.start().await;
    import(&service).await;
    let process = format!("/proc/{}", service.id());
    assert_eq!(fs::metadata(&process).expect("running").uid(), USER);
    // The path leads into the mounts of the service.
    let written = fs::write(format!("{process}/root/usr/written"), "").expect_err("a read-only root");
    assert_eq!(written.kind(), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(files(Path::new(&root)), before);
    let stored = files(data.path());
    assert!(stored.iter().any(|(path, ..)| path.ends_with("/precis.db")), "{stored:?}");
    assert!(stored.iter().all(|(_, owner, _)| *owner == USER), "{stored:?}");
}

#[test]
fn image_has_little_besides_the_binary() {
    let image = image();
    let others = files(image.path()).into_iter().filter(|(path, ..)| !path.ends_with("/bin/precis"));
    let others: Vec<_> = others.collect();
    let bytes: u64 = others.iter().map(|(.., bytes)| bytes).sum();
    assert!(bytes < MAX_OTHER_BYTES, "{bytes} bytes: {others:?}");
    let names: Vec<_> = others.iter().filter_map(|(path, ..)| path.rsplit('/').next()).collect();
    for name in ["libc.so.6", "ca-certificates.crt", "passwd", "nsswitch.conf"] {
        assert!(names.contains(&name), "{names:?}");
    }
}
