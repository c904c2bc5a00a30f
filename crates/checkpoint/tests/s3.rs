//! Copies in S3, spoken to over HTTP: whole ones come back, errors of the server are tried again, torn ones are none.
#![cfg(feature = "s3")]

mod common;
mod fake_s3;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use checkpoint::store::{Objects, S3, Store};
use checkpoint::{Checkpoint, CheckpointError, Retention, step_dir};
use common::State;
use fake_s3::Server;

fn s3(server: &Server) -> S3 {
    S3::open("bucket", "runs/one", server.settings()).unwrap()
}

fn store(server: &Server) -> Store {
    Store::objects(Arc::new(s3(server)), "s3://bucket/runs/one".into())
}

fn saved(root: &Path, step: u64) -> Checkpoint {
    Checkpoint::open(&State::new(2, 1).save(root, step)).unwrap()
}

#[test]
fn a_checkpoint_goes_there_and_back_and_room_is_made() {
    let (server, root, other) = (Server::start(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = store(&server);
    assert!(store.steps().unwrap().is_empty());
    for step in [1, 2, 3] {
        assert!(store.put(&saved(root.path(), step)).unwrap() > 0);
    }
    assert_eq!(store.put(&Checkpoint::open(&step_dir(root.path(), 3)).unwrap()).unwrap(), 0, "it is there");
    // Another run's in the same bucket is none of ours.
    let foreign = "bucket/runs/one-more/step-00000009/manifest.json";
    server.bucket.lock().unwrap().objects.insert(foreign.into(), b"{}".to_vec());
    assert_eq!(store.steps().unwrap(), [1, 2, 3]);
    store.retain(&Retention { keep: 2, ..Retention::default() }).unwrap();
    assert_eq!(store.steps().unwrap(), [2, 3]);
    let place = store.fetch(3, other.path()).unwrap();
    assert!(Checkpoint::open(&place).unwrap().verify().good());
    let bucket = server.bucket.lock().unwrap();
    assert!(bucket.objects.contains_key(foreign));
    assert!(bucket.objects.keys().all(|name| !name.contains("one/step-00000001/")));
    for what in ["PUT", "GET list", "GET range", "HEAD", "DELETE"] {
        assert!(bucket.asked.get(what).is_some_and(|n| *n > 0), "{what}: {:?}", bucket.asked);
    }
}

#[test]
fn large_files_go_in_parts_and_come_in_ranges() {
    let (server, folder) = (Server::start(), tempfile::tempdir().unwrap());
    let s3 = s3(&server);
    let path = folder.path().join("large");
    let bytes: Vec<u8> = (0..50_000_001_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    s3.put("step/large", &path).unwrap();
    assert_eq!(s3.size("step/large").unwrap(), Some(bytes.len() as u64));
    let mut back = Vec::new();
    s3.get("step/large", &mut back).unwrap();
    assert!(back == bytes, "{} of {} bytes", back.len(), bytes.len());
    s3.copy("step/large", "aside/large").unwrap();
    s3.remove("step/large").unwrap();
    s3.remove("step/large").unwrap();
    assert_eq!(s3.list().unwrap().into_iter().collect::<Vec<_>>(), [("aside/large".to_owned(), bytes.len() as u64)]);
    assert_eq!(s3.get("step/large", &mut back).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let asked = &server.bucket.lock().unwrap().asked;
    assert_eq!((asked["POST begin"], asked["PUT part"], asked["POST complete"]), (1, 6, 1), "{asked:?}");
    assert_eq!(asked["GET range"], 6);
}

#[test]
fn errors_of_the_server_are_tried_again() {
    let (server, root) = (Server::start(), tempfile::tempdir().unwrap());
    let from = saved(root.path(), 4);
    for at in 0..4 {
        server.bucket.lock().unwrap().sick = at;
        assert!(store(&server).put(&from).is_ok());
        assert_eq!(server.bucket.lock().unwrap().sick, 0, "it was asked that often");
    }
    assert_eq!(store(&server).steps().unwrap(), [4]);
}

#[test]
fn what_was_torn_is_never_a_checkpoint() {
    let (server, root, other) = (Server::start(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (from, store) = (saved(root.path(), 5), store(&server));
    server.bucket.lock().unwrap().torn = true;
    assert!(matches!(store.put(&from).unwrap_err(), CheckpointError::Io { .. }), "worth another try");
    assert!(store.steps().unwrap().is_empty() && store.fetch(5, other.path()).is_err());
    assert!(server.bucket.lock().unwrap().objects.is_empty());
    // The same for parts of a large file.
    let path = root.path().join("large");
    fs::write(&path, vec![7; 20_000_000]).unwrap();
    let s3 = s3(&server);
    assert!(s3.put("large", &path).is_err());
    assert_eq!(s3.size("large").unwrap(), None);
    assert!(server.bucket.lock().unwrap().asked["DELETE upload"] > 0, "the parts are given back");
    server.bucket.lock().unwrap().torn = false;
    assert!(store.put(&from).unwrap() > 0);
    assert!(Checkpoint::open(&store.fetch(5, other.path()).unwrap()).unwrap().verify().good());
}

#[test]
fn a_store_that_refuses_is_an_error_that_says_so() {
    let server = Server::start();
    let keyless = server.settings().into_iter().filter(|(name, _)| !name.contains("KEY"));
    let settings = keyless.chain([("AWS_SKIP_SIGNATURE".to_owned(), "true".to_owned())]);
    let refused = S3::open("bucket", "p", settings).unwrap().list().unwrap_err().to_string();
    assert!(refused.contains("403") || refused.contains("Forbidden") || refused.contains("AccessDenied"), "{refused}");
}
