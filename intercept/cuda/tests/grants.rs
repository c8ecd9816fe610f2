//! Results of `cuInit` for each answer of the daemon.

use std::process::Output;

use gpusession_proto::grant::{Denial, Endpoint, Reply};
use gpusession_proto::preface::Key;
use gpusession_test_support::cuda::{call, library, run};

gpusession_test_support::programs!(init);

/// A program of its own, because `cuInit` has one outcome per process.
fn init() {
    let library = library();
    println!("cuInit: {}", call(&library, "cuInit", &[0]));
    println!("cuInit again: {}", call(&library, "cuInit", &[0]));
    println!("cuDeviceGetCount: {}", call(&library, "cuDeviceGetCount", &[&mut 0i32 as *mut i32 as u64]));
}

fn after(answers: Vec<Reply>) -> (Output, usize) {
    run("init", answers, &[])
}

/// Checks that every call returned `status`, and that the trace output contains each text of `why`.
fn all_say(output: &Output, status: i32, why: &[&str]) {
    let said = String::from_utf8_lossy(&output.stdout);
    for call in ["cuInit", "cuInit again", "cuDeviceGetCount"] {
        assert!(said.contains(&format!("{call}: {status}\n")), "{output:?}");
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(why.iter().all(|why| said.contains(why)), "{said}");
}

/// Grants a worker at a port without a listener.
fn gone() -> Reply {
    Reply::Granted(vec![Endpoint {
        server: "gpu1".into(),
        addresses: vec!["127.0.0.1:1".into()],
        worker: [1; 16],
        key: Key::new(&[0; 32], &[1; 16], 0),
        fingerprint: None,
        ticket: vec![0; 64],
        lease: "lease".into(),
        devices: 1,
    }])
}

fn denied(denial: Denial, reason: &str) -> Reply {
    Reply::Denied { denial, reason: reason.into() }
}

#[test]
fn each_denial_has_its_code() {
    for (denial, status) in [
        (Denial::NoDevice, 100),
        (Denial::NotReady, 802),
        (Denial::Quota, 46),
        (Denial::ProtocolMismatch, 803),
        (Denial::OutOfMemory, 2),
    ] {
        let (output, asked) = after(vec![denied(denial, "for this reason")]);
        all_say(&output, status, &["for this reason"]);
        assert_eq!(asked, 1, "{denial:?}: what is denied is not asked for again");
    }
}

#[test]
fn a_daemon_that_answers_something_else_is_a_mismatch() {
    let (output, _) = after(vec![Reply::Version(13000)]);
    all_say(&output, 803, &["does not fit the request"]);
}

#[test]
fn a_grant_without_workers_is_no_device() {
    let (output, _) = after(vec![Reply::Granted(Vec::new())]);
    all_say(&output, 100, &["names no worker"]);
}

#[test]
fn without_a_daemon_there_is_no_device() {
    let (output, asked) = run("init", vec![gone()], &[("GPUSESSION_SOCKET", "/nowhere/grant.sock".into())]);
    all_say(&output, 100, &["daemon"]);
    assert_eq!(asked, 0);
}

#[test]
fn a_user_can_do_without() {
    let (output, asked) = run("init", vec![gone()], &[("GPUSESSION_DISABLE", "1".into())]);
    all_say(&output, 100, &["GPUSESSION_DISABLE=1 is set"]);
    assert_eq!(asked, 0, "the daemon is not asked");
    let (output, asked) =
        run("init", vec![denied(Denial::Quota, "asked")], &[("GPUSESSION_DISABLE", "0".into())]);
    all_say(&output, 46, &["asked"]);
    assert_eq!(asked, 1);
}

#[test]
fn an_unreachable_worker_is_asked_for_again() {
    let (output, asked) = after(vec![gone(), gone(), denied(Denial::Quota, "no more than 2 programs")]);
    all_say(&output, 46, &["gpu1", "no more than 2 programs"]);
    assert_eq!(asked, 3);
}

#[test]
fn workers_that_stay_unreachable_are_an_error() {
    let (output, asked) = after(vec![gone()]);
    all_say(&output, 802, &["gpu1"]);
    // Pauses of up to a second, within 30 seconds.
    assert!((10..=35).contains(&asked), "{asked}");
}
