//! Messages between `pam_gpusession.so` and the client daemon on `pam.sock`, and the file of the
//! variables that logins get ([`variables`]).
//!
//! Each way carries one bounded packet of a `SOCK_SEQPACKET` socket. The crate uses the standard
//! library only, since the module runs inside `sshd`, `login` and `su`.
//!
//! All integers are little-endian.
//!
//! | request | bytes |
//! |---|---|
//! | [`MAGIC`] | 4 |
//! | [`VERSION`] | 2 |
//! | kind: 1 open, 2 close | 2 |
//! | *open only:* uid | 4 |
//! | lengths of service, user, tty, rhost | 4 × 2 |
//! | the four texts | |
//!
//! The session's leader is the process that sends the request: the daemon takes it from the socket,
//! so that it need not believe anything about it. A close ends the session whose leader sends it,
//! and has no answer.
//!
//! | reply to open | bytes |
//! |---|---|
//! | [`MAGIC`] | 4 |
//! | [`VERSION`] | 2 |
//! | number of variables; 0 if this user has no lease on this client | 2 |
//! | each: length of its name, length of its value, name, value | 2 + 2 + … |
//!
//! The only variable is `GPUSESSION_ID`, empty for a login session that the daemon does not follow.
//! The module skips others, which an earlier daemon names.
#![forbid(unsafe_code)]

pub mod variables;

/// Magic number at the start of every packet.
pub const MAGIC: [u8; 4] = *b"gpsL";
/// Version of this exchange.
pub const VERSION: u16 = 1;
/// Longest text of a request, in bytes.
pub const MAX_TEXT: usize = 255;
/// Longest request, in bytes.
pub const MAX_REQUEST: usize = 8 + 4 + 4 * 2 + 4 * MAX_TEXT;
/// Longest reply, in bytes.
pub const MAX_REPLY: usize = 16 * 1024;
/// Maximum number of variables of a reply.
const MAX_REPLY_VARIABLES: usize = 64;
/// Longest id of a login session, in bytes.
const MAX_SESSION: usize = 64;

/// A message from `pam_gpusession.so` to the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A login session begins.
    Open(Open),
    /// The login session of this process ends.
    Close,
}

/// A login, as PAM describes it; texts are cut after [`MAX_TEXT`] bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Open {
    /// User id.
    pub uid: u32,
    /// PAM service: `sshd`, `login`, `su`.
    pub service: String,
    /// Name of the user.
    pub user: String,
    /// Terminal: `ssh` for sshd, `pts/3`, `tty1`; empty without one.
    pub tty: String,
    /// Host that the user comes from; empty if unknown.
    pub rhost: String,
}

/// Bytes that are not a packet of this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(
    /// Reason, for the log.
    pub &'static str,
);

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Malformed {}

/// Reads the parts of a packet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed("the packet is too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed("the packet is too short"))?;
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn text(&mut self, n: usize, limit: usize) -> Result<&'a str, Malformed> {
        if n > limit {
            return Err(Malformed("a text is too long"));
        }
        let text = std::str::from_utf8(self.bytes(n)?).map_err(|_| Malformed("a text is not UTF-8"))?;
        if text.chars().any(char::is_control) {
            Err(Malformed("a text has control characters"))
        } else {
            Ok(text)
        }
    }

    /// Checks magic and version; returns a reader for the bytes after them.
    fn begin(packet: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Self(packet);
        if reader.array()? != MAGIC {
            return Err(Malformed("not a packet of gpusession"));
        }
        if reader.u16()? != VERSION {
            return Err(Malformed("another version of the protocol"));
        }
        Ok(reader)
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes are left over")) }
    }
}

fn begin(third: u16) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&third.to_le_bytes());
    out
}

/// Returns the beginning of a text, as far as it fits, without control characters.
fn cut(text: &str) -> String {
    let mut out: String = text.chars().filter(|c| !c.is_control()).collect();
    while out.len() > MAX_TEXT {
        out.pop();
    }
    out
}

impl Request {
    /// Encodes the packet.
    pub fn encode(&self) -> Vec<u8> {
        let open = match self {
            Self::Open(open) => open,
            Self::Close => return begin(2),
        };
        let mut out = begin(1);
        out.extend_from_slice(&open.uid.to_le_bytes());
        let texts = [&open.service, &open.user, &open.tty, &open.rhost].map(|text| cut(text));
        for text in &texts {
            out.extend_from_slice(&(text.len() as u16).to_le_bytes());
        }
        for text in &texts {
            out.extend_from_slice(text.as_bytes());
        }
        out
    }

    /// Reads a packet.
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::begin(packet)?;
        let request = match reader.u16()? {
            1 => {
                let uid = u32::from_le_bytes(reader.array()?);
                let lengths = [reader.u16()?, reader.u16()?, reader.u16()?, reader.u16()?];
                let mut text = |n: u16| reader.text(n.into(), MAX_TEXT).map(str::to_owned);
                let [service, user, tty, rhost] = lengths;
                Self::Open(Open {
                    uid,
                    service: text(service)?,
                    user: text(user)?,
                    tty: text(tty)?,
                    rhost: text(rhost)?,
                })
            }
            2 => Self::Close,
            _ => return Err(Malformed("an unknown request")),
        };
        reader.end()?;
        Ok(request)
    }
}

/// The answer to [`Request::Open`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reply<'a> {
    /// Id of the login session, empty if the daemon does not follow it; `None` for a user without
    /// access and leases.
    pub session: Option<&'a str>,
}

impl<'a> Reply<'a> {
    /// Encodes the packet.
    pub fn encode(&self) -> Vec<u8> {
        const NAME: &str = "GPUSESSION_ID";
        let mut out = begin(self.session.is_some().into());
        if let Some(session) = self.session {
            out.extend_from_slice(&(NAME.len() as u16).to_le_bytes());
            out.extend_from_slice(&(session.len() as u16).to_le_bytes());
            out.extend_from_slice(NAME.as_bytes());
            out.extend_from_slice(session.as_bytes());
        }
        out
    }

    /// Reads a packet.
    pub fn parse(packet: &'a [u8]) -> Result<Self, Malformed> {
        if packet.len() > MAX_REPLY {
            return Err(Malformed("the packet is too long"));
        }
        let mut reader = Reader::begin(packet)?;
        let count = usize::from(reader.u16()?);
        if count > MAX_REPLY_VARIABLES {
            return Err(Malformed("too many variables"));
        }
        let mut session = (count > 0).then_some("");
        for _ in 0..count {
            let (name, value) = (reader.u16()?, reader.u16()?);
            let name = reader.text(name.into(), MAX_REPLY)?;
            let value = reader.text(value.into(), MAX_REPLY)?;
            if name != "GPUSESSION_ID" {
                continue;
            }
            if value.len() > MAX_SESSION || !value.bytes().all(|b| b.is_ascii_alphanumeric()) {
                return Err(Malformed("not the id of a login session"));
            }
            session = Some(value);
        }
        reader.end()?;
        Ok(Self { session })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> Open {
        Open {
            uid: 1000,
            service: "sshd".into(),
            user: "alice".into(),
            tty: "ssh".into(),
            rhost: "2001:db8::1".into(),
        }
    }

    #[test]
    fn requests_survive_the_way() {
        for request in [Request::Open(open()), Request::Open(Open::default()), Request::Close] {
            assert_eq!(Request::parse(&request.encode()), Ok(request));
        }
        let long = Open { rhost: "é".repeat(300), user: "a\nb".into(), ..open() };
        let packet = Request::Open(long).encode();
        assert!(packet.len() <= MAX_REQUEST);
        let Ok(Request::Open(read)) = Request::parse(&packet) else { panic!() };
        assert_eq!((read.rhost.len(), read.user.as_str()), (254, "ab"));
    }

    #[test]
    fn replies_survive_the_way() {
        for session in [None, Some(""), Some("abcdefghijkl")] {
            assert_eq!(Reply::parse(&Reply { session }.encode()), Ok(Reply { session }));
        }
    }

    #[test]
    fn the_layout_is_fixed() {
        let packet =
            Request::Open(Open { uid: 0x01020304, service: "su".into(), ..Open::default() }).encode();
        assert_eq!(packet, b"gpsL\x01\0\x01\0\x04\x03\x02\x01\x02\0\0\0\0\0\0\0su");
        assert_eq!(Request::Close.encode(), b"gpsL\x01\0\x02\0");
        let reply = Reply { session: Some("yz") };
        assert_eq!(reply.encode(), b"gpsL\x01\0\x01\0\x0d\0\x02\0GPUSESSION_IDyz");
        assert_eq!(Reply::default().encode(), b"gpsL\x01\0\0\0");
    }

    /// The answer of an earlier daemon, which had the variables of `[environment]` too.
    #[test]
    fn other_variables_are_skipped() {
        let packet = b"gpsL\x01\0\x02\0\x0a\0\x01\0PYTHONPATHx\x0d\0\x02\0GPUSESSION_IDyz";
        assert_eq!(Reply::parse(packet), Ok(Reply { session: Some("yz") }));
        assert_eq!(Reply::parse(b"gpsL\x01\0\x01\0\x01\0\x01\0Xy"), Ok(Reply { session: Some("") }));
        for id in ["a b", "$(id)", "a\n", "\u{e9}", &"a".repeat(MAX_SESSION + 1)] {
            assert!(Reply::parse(&Reply { session: Some(id) }.encode()).is_err(), "{id}");
        }
        let one = Reply { session: Some("y") }.encode();
        let many = [&one[..6], &65u16.to_le_bytes(), &one[8..].repeat(65)].concat();
        assert!(Reply::parse(&many).is_err());
    }

    /// Tries each prefix, each extension and each changed byte of good packets.
    ///
    /// Prefixes and extensions are rejected; with a changed byte the content stays within bounds.
    #[test]
    fn no_packet_does_harm() {
        let reply = Reply { session: Some("abcdefghijkl") };
        let packets = [reply.encode(), Request::Open(open()).encode(), Request::Close.encode()];
        let look = |packet: &[u8]| {
            let _ = Request::parse(packet);
            if let Ok(reply) = Reply::parse(packet) {
                assert!(reply.session.is_none_or(|id| id.bytes().all(|b| b.is_ascii_alphanumeric())));
            }
        };
        for packet in &packets {
            for cut in 0..packet.len() {
                assert!(Reply::parse(&packet[..cut]).is_err());
                assert!(Request::parse(&packet[..cut]).is_err());
            }
            for at in 0..packet.len() {
                for byte in 0..=255 {
                    let mut changed = packet.clone();
                    changed[at] = byte;
                    look(&changed);
                }
            }
            let mut longer = packet.clone();
            longer.push(0);
            assert!(Request::parse(&longer).is_err());
            assert!(Reply::parse(&longer).is_err());
        }
        assert!(Reply::parse(&[0; MAX_REPLY + 1]).is_err());
        assert!(Reply::parse(b"gpsL\x01\0\xff\xff").is_err());
    }
}
