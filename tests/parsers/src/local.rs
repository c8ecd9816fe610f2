//! Bytes from other processes of the machine, from administrators' files, and from certificates.

use std::path::{Path, PathBuf};

use gpuserver::admin::{Ask, read as read_answer};
use gpuserver::audit::{self, Wanted};
use gpuserver::certificate;
use gpuserver::checkpoint::{Place, Verifier};
use gpuserver::config::{Surroundings, from_text};
use gpuserver::signer::authorities::Present;
use gpuserver::signer::{Done, Operation, Outcome, ca};
use gpuserver::starter::{self as starting, Said};
use gpusession_common::units;
use gpusession_login::{Reply, Request, variables as login_variables};
use gpusession_proto::message;
use gpusessiond::config::Config;

use crate::seeds::KEY;

/// Packets between the PAM module and the daemon.
pub fn login(bytes: &[u8]) {
    if let Ok(request) = Request::parse(bytes) {
        assert_eq!(Request::parse(&request.encode()).map(|again| again.encode()), Ok(request.encode()));
    }
    if let Ok(reply) = Reply::parse(bytes) {
        assert_eq!(Reply::parse(&reply.encode()).map(|again| again.encode()), Ok(reply.encode()));
    }
}

/// The file of login variables.
pub fn variables(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(read) = login_variables::parse(text) {
        for (name, value) in &read {
            assert_eq!(login_variables::check(name, value), Ok(()));
        }
        let written = login_variables::encode(read.iter().copied());
        assert_eq!(login_variables::parse(&written.expect("variables that were read")), Ok(read));
    }
}

/// A certificate that TLS accepted.
pub fn certificate(bytes: &[u8]) {
    let holder = certificate::holder(bytes);
    if let (Some(holder), Some(expiry)) = (holder, certificate::expiry(bytes)) {
        assert_eq!(holder.expires_unix, expiry);
        let _ = certificate::day(expiry);
    }
}

/// A certificate request in PEM, or its content.
pub fn request(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let _ = ca::requested_key(&text);
}

/// A request of an administrator, and the server's answer.
pub fn admin(bytes: &[u8]) {
    if let Ok(read) = serde_json::from_slice::<Ask>(bytes) {
        let _ = (read.local(), read.answer_timeout(), read.event("administrator a".into()));
        let written = serde_json::to_vec(&read).expect("a request that was read");
        let again: Ask = serde_json::from_slice(&written).expect("a request that was written");
        assert_eq!(serde_json::to_vec(&again).ok(), Some(written));
    }
    let _ = read_answer(bytes);
}

/// A request to the signer, and its answer.
pub fn signer(bytes: &[u8]) {
    if let Ok(read) = message::decode::<Operation>(bytes) {
        let _ = read.needs_root();
        let written = message::encode(&read);
        assert_eq!(message::decode::<Operation>(&written[4..]), Ok(read));
    }
    if let Ok(read) = message::decode::<Outcome>(bytes) {
        let written = message::encode(&read);
        let again = message::decode::<Outcome>(&written[4..]).expect("an answer that was written");
        assert_eq!(message::encode(&again), written);
        if let Ok(Done::Present(described)) = read {
            let _ = Present::try_from(described);
        }
    }
}

/// A request to the starter, and its messages.
pub fn starter(bytes: &[u8]) {
    if let Ok(read) = message::decode::<starting::Request>(bytes) {
        let written = message::encode(&read);
        assert_eq!(message::decode::<starting::Request>(&written[4..]), Ok(read));
    }
    if let Ok(read) = message::decode::<Said>(bytes) {
        let written = message::encode(&read);
        assert_eq!(message::decode::<Said>(&written[4..]), Ok(read));
    }
}

/// Sizes, durations, parts of a GPU's memory.
pub fn units(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(size) = units::parse_size(text) {
        let _ = units::human_bytes(size);
    }
    if let Ok(duration) = units::parse_duration(text) {
        let shown = units::show_duration(duration);
        assert_eq!(units::parse_duration(&shown), Ok(duration), "{shown}");
        let _ = units::human_duration(duration);
    }
    if let Ok(memory) = text.parse::<units::Memory>() {
        let _ = memory;
    }
    let _ = units::nearest(text, ["memory", "leases"]);
}

/// A day of the audit trail, which somebody may have changed.
pub fn trail(bytes: &[u8]) {
    let state = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(state.path().join("audit")).expect("a folder");
    std::fs::write(state.path().join("audit/2026-01-01.jsonl"), bytes).expect("a file");
    let verifier = Verifier { key: KEY.into(), latest: Place::default() };
    let before = audit::verify::verify(state.path(), &verifier);
    let lines = audit::list(state.path(), &Wanted::default(), 1000).expect("the lines that can be read");
    assert!(before.as_ref().map_or(true, |whole| lines.len() as u64 == whole.lines.min(1000)));
    // A line without an end is one that a crash cut, and the next line takes its place.
    let Some(before) = before.ok().filter(|_| bytes.ends_with(b"\n")) else { return };
    match audit::note_offline(state.path(), "gpu1", audit::own("join")) {
        Ok(()) => {
            let after = audit::verify::verify(state.path(), &verifier).expect("one more line");
            assert_eq!((after.lines, after.last_seq), (before.lines + 1, before.last_seq + 1));
        }
        Err(error) => assert_eq!(before.last_seq, u64::MAX, "{error}"),
    }
}

/// `gpuserver.toml`.
pub fn server_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let env = |name: &str| (name == "STATE_DIRECTORY").then(|| "/var/lib/gpuserver".to_owned());
    let around = Surroundings {
        env: &env,
        host_name: "gpu1.example.org".into(),
        ephemeral: Some((32768, 60999)),
        nvidia_driver: true,
        signer_unit: false,
        starter_unit: false,
    };
    if let Err(error) = from_text(Path::new("gpuserver.toml"), text, &around) {
        assert!(error.to_string().contains("gpuserver.toml"), "{error}");
    }
}

/// `gpusession.toml`.
pub fn client_config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(error) = Config::from_texts(&[(PathBuf::from("gpusession.toml"), text.into())]) {
        assert!(error.to_string().contains("gpusession.toml"), "{error}");
    }
}
