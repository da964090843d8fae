//! The file system of the container image, with the binary under test.

use crate::service::Precis;
use serde_json::json;
use std::fs::{self, Permissions};
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
    let lines = [json!({"role": "user", "content": "Hello"}), json!({"role": "assistant", "content": "Hi"})];
    let lines = lines.map(|line| line.to_string()).join("\n");
    let import = service.request(reqwest::Method::POST, "/sessions/s/import");
    import.header("content-type", "application/x-ndjson").body(lines).await.ok(201);
    assert_eq!(service.get("/sessions/s").await.ok(200)["last_seq"], 2);
    // A container has /proc, and this file system has not.
    assert!(service.get("/metrics").await.text.contains("precis_http_requests_total"));
    let data = image.path().join("var/lib/precis");
    for (path, owner, _) in files(image.path()) {
        assert_eq!(owner == USER, Path::new(&path).starts_with(&data), "{path}");
    }
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
