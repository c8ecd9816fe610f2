//! First bytes of a data connection, in clear; they name the worker.
//!
//! So `gpuserver` can hand over the socket without reading more. The MAC shows that a grant for
//! this worker made the preface; the preface gives no other right. Admission happens inside the
//! worker.
//!
//! The layout is the same in all versions from 4 on: the server checks worker, attempt and MAC, and
//! the worker its version. So a program can come back to its worker after the server's upgrade.
//!
//! Before it closes a connection whose preface cannot be served, the server or the worker sends a
//! [`refusal`]: a little-endian `u32`, then a reason in UTF-8. The word's highest bit is set, its
//! next 7 bits are the [`Code`], and the lower 16 bits are the length of the reason. Neither a TLS
//! record nor a frame starts with four such bytes, so a client checks the first bytes with
//! [`refusal_len`].
//!
//! A connection that does not start with a preface is closed without an answer.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic number at the start of every data connection.
pub const MAGIC: [u8; 8] = *b"GPUSESS\x01";
/// Version of the data plane that programs speak.
///
/// It is raised when frames, operations, lanes or tickets change their meaning. An addition needs
/// no new version: [`crate::frame::ability`] and [`crate::frame::library_ability`] announce it.
pub const VERSION: u16 = 4;
/// Oldest version that a worker serves: that of the previous release, or an older one.
pub const OLDEST: u16 = 4;
/// Oldest version with the present layout.
const FIRST_LAYOUT: u16 = 4;
/// Flag of a connection on which TLS follows the preface.
pub const FLAG_TLS: u16 = 1;
/// Flag of a connection that takes the place of an earlier one; a handshake follows.
pub const FLAG_RESUME: u16 = 2;
/// Length of a preface, in bytes.
pub const LEN: usize = 64;
/// Number of lanes that a preface may name.
pub const LANES: u16 = 1 + crate::frame::UP_LANES + crate::frame::DOWN_LANES;

const MAC: usize = 24;

/// The preface as it travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Preface {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// [`FLAG_TLS`], [`FLAG_RESUME`].
    pub flags: U16,
    /// Id of the worker that the connection is for.
    pub worker: [u8; 16],
    /// 0: the ordered log; others: bulk data.
    pub lane: U16,
    /// Zero.
    pub reserved: U16,
    /// Number of the lane's connection attempt, from 1; a later attempt fences earlier ones.
    pub attempt: U32,
    /// User id on the client for which the grant was made.
    pub uid: U32,
    /// Start of the keyed hash of all bytes before it.
    pub mac: [u8; MAC],
}

/// Key of the prefaces that one grant makes.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Key {
    bytes: [u8; 32],
    uid: u32,
}

/// Shows no secret.
impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key of uid {}", self.uid)
    }
}

impl Key {
    /// Derives the key for one user's connections to one worker from the lease's key.
    pub fn new(lease_key: &[u8; 32], worker: &[u8; 16], uid: u32) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("gpusession 2026 preface");
        hasher.update(lease_key).update(worker).update(&uid.to_le_bytes());
        Self { bytes: *hasher.finalize().as_bytes(), uid }
    }

    fn mac(&self, preface: &Preface) -> [u8; MAC] {
        let mut mac = [0; MAC];
        mac.copy_from_slice(
            &blake3::keyed_hash(&self.bytes, &preface.as_bytes()[..LEN - MAC]).as_bytes()[..MAC],
        );
        mac
    }
}

/// Reason why the first bytes of a connection are no preface that this end can serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadPreface {
    /// Not gpusession's data plane.
    Magic,
    /// A version that this end does not support.
    Version(u16),
}

impl std::fmt::Display for BadPreface {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("not a gpusession data connection"),
            Self::Version(v) => {
                let (found, remedy) = mismatch("this server", OLDEST.into(), VERSION.into(), (*v).into());
                write!(f, "{found}: {remedy}")
            }
        }
    }
}

impl std::error::Error for BadPreface {}

impl Preface {
    /// Creates a preface for an attempt to connect a lane of `worker`.
    pub fn new(worker: [u8; 16], key: &Key, lane: u16, attempt: u32, flags: u16) -> Self {
        let mut preface = Self {
            magic: MAGIC,
            version: VERSION.into(),
            flags: flags.into(),
            worker,
            lane: lane.into(),
            reserved: 0.into(),
            attempt: attempt.into(),
            uid: key.uid.into(),
            mac: [0; MAC],
        };
        preface.mac = key.mac(&preface);
        preface
    }

    /// Reads a preface of any version that has this layout.
    pub fn parse(bytes: &[u8; LEN]) -> Result<Self, BadPreface> {
        let preface = Self::read_from_bytes(bytes).map_err(|_| BadPreface::Magic)?;
        if preface.magic != MAGIC {
            return Err(BadPreface::Magic);
        }
        match preface.version.get() {
            FIRST_LAYOUT.. => Ok(preface),
            other => Err(BadPreface::Version(other)),
        }
    }

    /// Checks that this end serves the version of the frames behind the preface.
    pub fn check_version(&self) -> Result<(), BadPreface> {
        match self.version.get() {
            OLDEST..=VERSION => Ok(()),
            other => Err(BadPreface::Version(other)),
        }
    }

    /// Returns `true` if a grant of this lease made the preface.
    pub fn is_genuine(&self, lease_key: &[u8; 32]) -> bool {
        let key = Key::new(lease_key, &self.worker, self.uid.get());
        // Full hashes compare in constant time.
        let padded = |mac: [u8; MAC]| {
            let mut hash = [0; 32];
            hash[..MAC].copy_from_slice(&mac);
            blake3::Hash::from_bytes(hash)
        };
        padded(key.mac(self)) == padded(self.mac)
    }

    /// Returns `true` if the program comes back.
    pub fn resumes(&self) -> bool {
        self.flags.get() & FLAG_RESUME != 0
    }

    /// Returns the bytes that travel.
    pub fn to_bytes(&self) -> [u8; LEN] {
        zerocopy::transmute!(*self)
    }

    /// Returns `true` if TLS follows.
    pub fn tls(&self) -> bool {
        self.flags.get() & FLAG_TLS != 0
    }
}

/// Returns `true` if a server of these versions serves programs of this machine.
///
/// `oldest` is `None` from a server that serves one version; `newest` is 0 until it is known.
pub fn served(oldest: Option<u32>, newest: u32) -> bool {
    newest == 0 || (oldest.unwrap_or(newest)..=newest).contains(&VERSION.into())
}

/// Describes a server that does not serve a program's version; also returns the remedy.
pub fn mismatch(server: &str, oldest: u32, newest: u32, program: u32) -> (String, &'static str) {
    let serves = match oldest {
        _ if oldest == newest => format!("version {newest}"),
        _ => format!("versions {oldest} to {newest}"),
    };
    let remedy =
        if program < oldest { "update the client's packages" } else { "update the server's packages" };
    (format!("{server} serves {serves} of the data plane, the program speaks version {program}"), remedy)
}

const REFUSED: u32 = 1 << 31;
const CODE_SHIFT: u32 = 24;
/// Longest reason of a refusal, in bytes.
pub const MAX_REASON: usize = 1024;

/// Kind of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// None of the others; the same connection would be refused again.
    Other = 0,
    /// The worker has ended.
    Gone = 1,
    /// The worker is of another data-plane version.
    Version = 2,
    /// The connection must be encrypted.
    Clear = 3,
    /// Program and worker do not agree on what they have received.
    State = 4,
    /// Too many connections wait.
    Busy = 5,
    /// A limit allows no further connection now.
    Limit = 6,
    /// The server starts, and has not taken over its workers yet.
    Starting = 7,
}

impl Code {
    const ALL: [Self; 8] = [
        Self::Other,
        Self::Gone,
        Self::Version,
        Self::Clear,
        Self::State,
        Self::Busy,
        Self::Limit,
        Self::Starting,
    ];

    /// Returns `true` if a later attempt may succeed.
    pub fn passes(self) -> bool {
        matches!(self, Self::Busy | Self::Limit | Self::Starting)
    }

    fn of(first: [u8; 4]) -> Self {
        let code = u32::from_le_bytes(first) >> CODE_SHIFT & 0x7f;
        Self::ALL.into_iter().find(|known| *known as u32 == code).unwrap_or(Self::Other)
    }
}

/// Refusal as the client reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Kind of the refusal.
    pub code: Code,
    /// Reason for a person, in one line.
    pub reason: String,
}

impl Refusal {
    /// Reads a refusal from the first bytes of a connection, which may be cut short; `None` if they
    /// are something else.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (first, text) = bytes.split_first_chunk::<4>()?;
        let len = refusal_len(*first)?.min(text.len());
        Some(Self { code: Code::of(*first), reason: String::from_utf8_lossy(&text[..len]).into_owned() })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Refusal {}

/// Returns the bytes that refuse a connection whose preface was read.
pub fn refusal(code: Code, reason: &str) -> Vec<u8> {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let reason = &reason[..end];
    let word = REFUSED | (code as u32) << CODE_SHIFT | reason.len() as u32;
    let mut out = word.to_le_bytes().to_vec();
    out.extend_from_slice(reason.as_bytes());
    out
}

/// Returns the reason's length if a connection's first four bytes are a refusal.
///
/// The result is at most [`MAX_REASON`].
pub fn refusal_len(first: [u8; 4]) -> Option<usize> {
    let word = u32::from_le_bytes(first);
    (word & REFUSED != 0).then_some(((word & 0xffff) as usize).min(MAX_REASON))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_refusals() {
        let key = Key::new(&[1; 32], &[5; 16], 1000);
        let preface = Preface::new([5; 16], &key, 2, 3, FLAG_TLS);
        let mut bytes: [u8; LEN] = preface.as_bytes().try_into().unwrap();
        assert_eq!(Preface::parse(&bytes), Ok(preface));
        assert!(preface.tls() && preface.check_version().is_ok());
        bytes[8] = 99;
        let later = Preface::parse(&bytes).unwrap();
        assert_eq!(later.check_version(), Err(BadPreface::Version(99)));
        bytes[8] = 3;
        assert_eq!(Preface::parse(&bytes), Err(BadPreface::Version(3)));
        bytes[0] = b'H';
        assert_eq!(Preface::parse(&bytes), Err(BadPreface::Magic));
    }

    /// Highest number in `calls.txt` of the first release with [`VERSION`], and the hash of its
    /// numbered lines, without the `*` of calls that a client forwards by hand.
    const FIRST: (u16, &str) = (412, "5ade94e9f5d9837b");

    #[test]
    fn numbers_of_the_first_release_of_this_version_keep_their_meaning() {
        // A value's kind and an operation's effect, which only the worker needs, change no byte.
        const KINDS: [&str; 8] =
            ["array", "mipmap", "texture", "surface", "memory", "pool", "node", "condition"];
        const EFFECTS: [&str; 4] = [" brief", " waits", " works", " answer"];
        let numbered = |line: &str| {
            let number = line.strip_prefix("op ").unwrap_or(line).split(' ').next()?.parse::<u16>().ok()?;
            let line = EFFECTS.iter().fold(line.to_owned(), |line, effect| line.replace(effect, ""));
            let sent = line.replacen("call* ", "call ", 1).replacen("post* ", "post ", 1);
            let sent = KINDS.iter().fold(sent, |sent, kind| {
                sent.replace(&format!("@object {kind}"), "@object").replace(&format!(" @known {kind}"), "")
            });
            (number <= FIRST.0).then(|| format!("{sent}\n"))
        };
        let text = include_str!("../calls/calls.txt");
        let lines: String = text.lines().filter_map(numbered).collect();
        let hash = blake3::hash(lines.as_bytes()).to_hex();
        assert_eq!(
            (VERSION, &hash[..16]),
            (4, FIRST.1),
            "give an operation with another meaning a new number above {}, or raise VERSION",
            FIRST.0
        );
    }

    #[test]
    fn servers_serve_the_versions_that_they_name() {
        let own = u32::from(VERSION);
        assert!(served(None, 0), "it has not described itself yet");
        assert!(served(None, own) && served(Some(own), own) && served(Some(own - 1), own + 1));
        assert!(!served(None, own + 1) && !served(Some(own + 1), own + 2) && !served(Some(1), own - 1));
        let (found, remedy) = mismatch("gpu1", 7, 9, own);
        assert!(found.contains("versions 7 to 9") && remedy.contains("client"), "{found}: {remedy}");
        let (found, remedy) = mismatch("gpu1", 3, 3, own);
        assert!(found.contains("version 3 of") && remedy.contains("server"), "{found}: {remedy}");
    }

    #[test]
    fn only_a_grant_of_the_lease_makes_a_preface() {
        let key = Key::new(&[1; 32], &[5; 16], 1000);
        let preface = Preface::new([5; 16], &key, 2, 3, FLAG_TLS);
        assert!(preface.is_genuine(&[1; 32]));
        assert!(!preface.is_genuine(&[2; 32]));
        for other in [Key::new(&[1; 32], &[6; 16], 1000), Key::new(&[1; 32], &[5; 16], 0)] {
            let mut forged = Preface::new([5; 16], &other, 2, 3, FLAG_TLS);
            forged.uid = 1000.into();
            assert!(!forged.is_genuine(&[1; 32]));
        }
        for byte in 0..LEN {
            let mut bytes: [u8; LEN] = preface.as_bytes().try_into().unwrap();
            bytes[byte] ^= 1;
            let changed = Preface::read_from_bytes(&bytes).unwrap();
            assert!(!changed.is_genuine(&[1; 32]), "byte {byte}");
        }
    }

    #[test]
    fn refusals_differ_from_tls_and_frames() {
        let bytes = refusal(Code::Gone, "no such worker");
        assert_eq!(refusal_len(bytes[..4].try_into().unwrap()), Some(14));
        let read = Refusal { code: Code::Gone, reason: "no such worker".into() };
        assert_eq!(Refusal::read(&bytes), Some(read));
        assert_eq!(Refusal::read(&bytes[..9]).unwrap().reason, "no su");
        // Records of TLS: handshake and alert, up to the longest possible record.
        for first in [[0x16, 3, 3, 0x41], [0x15, 3, 3, 0]] {
            assert_eq!(refusal_len(first), None);
            assert_eq!(Refusal::read(&first), None);
        }
        assert_eq!(refusal(Code::Busy, &"é".repeat(2000)).len(), 4 + MAX_REASON);
        assert_eq!(refusal_len([0xff; 4]), Some(MAX_REASON));
        for code in Code::ALL {
            assert_eq!(Refusal::read(&refusal(code, "")).unwrap().code, code);
        }
        assert_eq!(Refusal::read(&[0xff; 4]).unwrap().code, Code::Other);
    }
}
