//! Tickets: each lets one process of a client use one worker, once.
//!
//! The daemon holds the lease's key and seals a ticket per process; the server holds the same key
//! and opens it for its worker. A process sees only sealed bytes, which are useless elsewhere: they
//! name the worker, and a worker admits one process.

use serde::{Deserialize, Serialize};

/// Content of a ticket: one process of a client, and one worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Lease id.
    pub lease: String,
    /// The only worker that accepts the ticket.
    pub worker: [u8; 16],
    /// User id on the client, as the kernel reported it to the daemon.
    pub uid: u32,
    /// Name of that user on the client, at most [`MAX_USER`] bytes; empty if it has none.
    pub user: String,
    /// Process id on the client, as the kernel reported it to the daemon.
    pub pid: u32,
    /// Boot id of the client.
    ///
    /// A ticket of an earlier boot is useless, since its only worker no longer exists.
    pub boot_id: [u8; 16],
    /// Time of issue on the daemon's clock since boot, in microseconds.
    ///
    /// Only the log uses it: the clocks of two hosts are never compared.
    pub issued_usec: u64,
    /// Random bytes, so that no two tickets are equal.
    pub nonce: [u8; 16],
    /// Name of the program, for listings.
    pub program: String,
    /// File that the program runs, for accounting, at most [`MAX_EXECUTABLE`] bytes.
    ///
    /// Like the name, it is the program's own word.
    pub executable: String,
}

/// Reason why a ticket was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Shorter than a seal, too long, or the body does not decode.
    Malformed,
    /// Not sealed with this lease's key, or changed since.
    Forged,
    /// Sealed for another worker.
    WrongWorker,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Malformed => "malformed ticket",
            Self::Forged => "ticket was not made with this lease's key",
            Self::WrongWorker => "ticket is for another worker",
        })
    }
}

impl std::error::Error for Refused {}

const SEAL: usize = blake3::OUT_LEN;
const MAX_TICKET: usize = 1024;
/// Longest name of a user, in bytes; a user with a longer name counts as nameless.
pub const MAX_USER: usize = 255;
/// Longest name of a program's file, in bytes.
pub const MAX_EXECUTABLE: usize = 200;

/// Returns the end of a file's name that is too long, since the end is the telling part.
pub fn shortened(executable: &str) -> &str {
    let from = executable.len().saturating_sub(MAX_EXECUTABLE);
    executable.char_indices().find(|(at, _)| *at >= from).map_or("", |(at, _)| &executable[at..])
}

impl Ticket {
    /// Seals the ticket with the lease's key.
    ///
    /// # Panics
    /// Never: the type serializes.
    #[allow(clippy::expect_used, reason = "derived `Serialize` of a type without maps")]
    pub fn seal(&self, key: &[u8; 32]) -> Vec<u8> {
        let mut bytes = postcard::to_allocvec(self).expect("a ticket serializes");
        let seal = blake3::keyed_hash(key, &bytes);
        bytes.extend_from_slice(seal.as_bytes());
        bytes
    }

    /// Opens a sealed ticket that a client presented to `worker`.
    pub fn open(sealed: &[u8], key: &[u8; 32], worker: &[u8; 16]) -> Result<Self, Refused> {
        let (body, seal) = Self::split(sealed)?;
        // blake3::Hash compares in constant time.
        if blake3::keyed_hash(key, body) != blake3::Hash::from_bytes(*seal) {
            return Err(Refused::Forged);
        }
        Self::read(sealed, worker)
    }

    /// Reads a ticket whose seal the supervisor checks, since the worker has no key.
    pub fn read(sealed: &[u8], worker: &[u8; 16]) -> Result<Self, Refused> {
        let (body, _) = Self::split(sealed)?;
        let ticket: Self = crate::message::decode(body).map_err(|_| Refused::Malformed)?;
        if ticket.worker != *worker {
            return Err(Refused::WrongWorker);
        }
        Ok(ticket)
    }

    fn split(sealed: &[u8]) -> Result<(&[u8], &[u8; SEAL]), Refused> {
        let parts = sealed.split_last_chunk().filter(|(body, _)| !body.is_empty());
        parts.filter(|_| sealed.len() <= MAX_TICKET).ok_or(Refused::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> Ticket {
        Ticket {
            lease: "abcdefghijkl".into(),
            worker: [7; 16],
            uid: 1000,
            user: "alice".into(),
            pid: 4242,
            boot_id: [1; 16],
            issued_usec: 12,
            nonce: [9; 16],
            program: "python3".into(),
            executable: "/usr/bin/python3.13".into(),
        }
    }

    #[test]
    fn opens_what_was_sealed() {
        let sealed = ticket().seal(&[3; 32]);
        assert_eq!(Ticket::open(&sealed, &[3; 32], &[7; 16]), Ok(ticket()));
    }

    #[test]
    fn another_ticket_is_another_version_of_the_data_plane() {
        let hash = blake3::hash(&ticket().seal(&[3; 32])).to_hex();
        assert_eq!(
            (crate::preface::VERSION, &hash[..16]),
            (4, "4536c85c84adc1b2"),
            "raise the VERSION of prefaces"
        );
    }

    #[test]
    fn the_longest_names_fit() {
        let program = "𝄞".repeat(64);
        for (path, kept) in
            [("/a/b".to_string(), 4), ("x".repeat(300), 200), ("𝄞€".repeat(100), 199), (String::new(), 0)]
        {
            let executable = shortened(&path).to_owned();
            assert!(path.ends_with(&executable) && executable.len() == kept, "{executable}");
            let user = "u".repeat(MAX_USER);
            let longest = Ticket { user, program: program.clone(), executable, ..ticket() };
            assert_eq!(Ticket::open(&longest.seal(&[3; 32]), &[3; 32], &[7; 16]), Ok(longest));
        }
    }

    #[test]
    fn refuses_other_keys_workers_and_any_changed_byte() {
        let sealed = ticket().seal(&[3; 32]);
        assert_eq!(Ticket::open(&sealed, &[4; 32], &[7; 16]), Err(Refused::Forged));
        assert_eq!(Ticket::open(&sealed, &[3; 32], &[8; 16]), Err(Refused::WrongWorker));
        for i in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[i] ^= 1;
            assert_eq!(Ticket::open(&changed, &[3; 32], &[7; 16]), Err(Refused::Forged), "byte {i}");
            assert!(Ticket::open(&sealed[..i], &[3; 32], &[7; 16]).is_err());
            assert!(Ticket::read(&sealed[..i.min(SEAL)], &[7; 16]).is_err());
        }
    }
}
