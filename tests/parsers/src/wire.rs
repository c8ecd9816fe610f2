//! Bytes that cross a socket between client, worker, server and daemon.

use gpusession_proto::frame::{HEADER, Header, Reader};
use gpusession_proto::join::{FleetKey, JoinToken};
use gpusession_proto::preface::{LEN, Preface, Refusal, refusal_len};
use gpusession_proto::statement::{MAX_SIGNED, Signed, Statement};
use gpusession_proto::ticket::Ticket;
use gpusession_proto::{changes, grant, message, readings, supervise};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::seeds::KEY;

/// Checks that a message that was read is written to bytes that read as the same message.
fn reads_back<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(read) = message::decode::<T>(bytes) {
        let written = message::encode(&read);
        let (length, body) = written.split_first_chunk::<4>().expect("a length");
        assert_eq!(message::body_len(*length), Ok(body.len()));
        assert_eq!(message::decode::<T>(body), Ok(read));
    }
}

fn supervision<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(packet: &[u8]) {
    if let Ok(read) = supervise::decode::<T>(packet) {
        assert_eq!(supervise::decode::<T>(&supervise::encode(&read)), Ok(read));
    }
}

/// A header, then a body that readers of words, strings and changes take apart.
pub fn frame(bytes: &[u8]) {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER>() else { return };
    if let Ok(header) = Header::parse(header) {
        assert!(header.body_len() <= gpusession_proto::frame::MAX_BODY);
    }
    // The first byte of the body says how it is read.
    let mut r = Reader::new(body);
    let mut read = 0;
    for step in body.iter().cycle().take(body.len() / 4) {
        let len = match step % 3 {
            0 => r.word().map(|_| 8),
            1 => r.bytes().map(|bytes| 8 + bytes.len().next_multiple_of(8)),
            _ => r.text().map(|text| 8 + text.len().next_multiple_of(8)),
        };
        let Ok(len) = len else { break };
        read += len;
        assert!(read <= body.len());
    }
    let mut left = body.len();
    let _ = changes::read(&mut Reader::new(body), |_, part| {
        left = left.checked_sub(part.len()).expect("no more bytes than the body has");
    });
}

/// The first bytes of a data connection, and its refusal.
pub fn preface(bytes: &[u8]) {
    if let Some(first) = bytes.first_chunk::<LEN>()
        && let Ok(preface) = Preface::parse(first)
    {
        assert_eq!(&preface.to_bytes(), first);
        let _ = (preface.check_version(), preface.is_genuine(&KEY), preface.tls(), preface.resumes());
    }
    if let Some(refusal) = Refusal::read(bytes) {
        let first = bytes.first_chunk::<4>().expect("a length");
        assert!(refusal.reason.chars().count() <= refusal_len(*first).expect("a refusal"));
    }
}

/// Messages between a program's library and the daemon.
pub fn grant(bytes: &[u8]) {
    reads_back::<grant::Request>(bytes);
    reads_back::<grant::Reply>(bytes);
    reads_back::<grant::Outcome>(bytes);
}

/// Messages between the server and a worker.
pub fn supervise(bytes: &[u8]) {
    supervision::<supervise::ToWorker>(bytes);
    supervision::<supervise::FromWorker>(bytes);
}

/// Questions about GPUs and their answers.
pub fn readings(bytes: &[u8]) {
    reads_back::<readings::Query>(bytes);
    reads_back::<readings::Answer>(bytes);
    reads_back::<readings::ToMonitor>(bytes);
    reads_back::<readings::FromMonitor>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Some(uuid) = readings::uuid_bytes(text)
    {
        assert_eq!(readings::uuid_bytes(&readings::uuid_text(&uuid)), Some(uuid));
    }
}

/// The proof with which a program greets its worker, under its seal and without one.
pub fn ticket(bytes: &[u8]) {
    let _ = Ticket::open(bytes, &KEY, &[0; 16]);
    reads_back::<Ticket>(bytes);
}

/// A statement of another server, as bytes and as a line of a file.
pub fn statement(bytes: &[u8]) {
    if let Ok((signed, statement)) = Signed::read(bytes) {
        assert!(bytes.len() <= MAX_SIGNED && signed.bytes() == bytes);
        assert_eq!(statement.body(), signed.body);
        assert_eq!(Statement::read(&signed.body).as_ref(), Ok(&statement));
        assert_eq!(Signed::from_text(&signed.text()), Ok((signed, statement)));
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok((signed, _)) = Signed::from_text(text)
    {
        assert_eq!(signed.text(), text);
    }
}

/// The text with which a machine joins a pool, and the one of a fleet key.
pub fn join_token(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.to_text().parse(), Ok(token));
    }
    if let Ok(key) = text.parse::<FleetKey>() {
        assert_eq!(key.to_text().parse(), Ok(key));
    }
}
