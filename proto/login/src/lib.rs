//! Messages between `pam_gpusession.so` and the client daemon on `pam.sock`.
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
#![forbid(unsafe_code)]

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
pub const MAX_VARIABLES: usize = 64;
/// Longest name of a variable, in bytes.
pub const MAX_NAME: usize = 64;
/// Longest value of a variable, in bytes.
pub const MAX_VALUE: usize = 1024;

/// Beginnings of variable names that are never set at login.
///
/// They belong to the loader (`LD_`) and the shell, or say who is logged in, from where and how.
/// PAM's list would override the values of sshd and the user's terminal.
const FOREIGN_BEGINNINGS: &[&str] = &["BASH_", "DBUS_", "LC_", "LD_", "SSH_", "SUDO_", "XDG_"];
/// Other names of the C library, the shells and the login.
const FOREIGN: &[&str] = &[
    "BASHOPTS",
    "CDPATH",
    "DISPLAY",
    "ENV",
    "EUID",
    "FPATH",
    "GCONV_PATH",
    "GETCONF_DIR",
    "GLIBC_TUNABLES",
    "GLOBIGNORE",
    "HOME",
    "IFS",
    "KRB5CCNAME",
    "LANG",
    "LANGUAGE",
    "LOCPATH",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PATH",
    "PPID",
    "PROMPT",
    "PROMPT_COMMAND",
    "PS0",
    "PS1",
    "PS2",
    "PS3",
    "PS4",
    "PWD",
    "SHELL",
    "SHELLOPTS",
    "SHLVL",
    "TERM",
    "UID",
    "USER",
    "XAUTHORITY",
    "ZDOTDIR",
];

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

/// The answer to [`Request::Open`]: the session's environment, empty for a user without leases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply<'a> {
    /// Names and values, each name once.
    pub environment: Vec<(&'a str, &'a str)>,
}

impl<'a> Reply<'a> {
    /// Encodes the packet; an error if [`check`] or a bound refuses the environment.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        if self.environment.len() > MAX_VARIABLES {
            return Err(Malformed("more than 64 variables, GPUSESSION_ID among them"));
        }
        let mut out = begin(self.environment.len() as u16);
        for (name, value) in &self.environment {
            check(name, value)?;
            out.extend_from_slice(&(name.len() as u16).to_le_bytes());
            out.extend_from_slice(&(value.len() as u16).to_le_bytes());
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(value.as_bytes());
        }
        if out.len() > MAX_REPLY {
            Err(Malformed("the variables are longer than 16384 bytes together"))
        } else {
            Ok(out)
        }
    }

    /// Reads a packet; rejects it if one variable may not be set at login.
    pub fn parse(packet: &'a [u8]) -> Result<Self, Malformed> {
        if packet.len() > MAX_REPLY {
            return Err(Malformed("the packet is too long"));
        }
        let mut reader = Reader::begin(packet)?;
        let count = usize::from(reader.u16()?);
        if count > MAX_VARIABLES {
            return Err(Malformed("more than 64 variables, GPUSESSION_ID among them"));
        }
        let mut environment: Vec<(&str, &str)> = Vec::with_capacity(count);
        for _ in 0..count {
            let (name, value) = (reader.u16()?, reader.u16()?);
            let name = reader.text(name.into(), MAX_NAME)?;
            let value = reader.text(value.into(), MAX_VALUE)?;
            check(name, value)?;
            if environment.iter().any(|(known, _)| *known == name) {
                return Err(Malformed("a variable occurs twice"));
            }
            environment.push((name, value));
        }
        reader.end()?;
        Ok(Self { environment })
    }
}

/// Checks whether a variable may be set at login.
///
/// Its name must not control the loader, a shell or the login itself, and its value must be a
/// bounded line that needs no quoting. The administrator, who writes it into a file of root, has to
/// know what other software does with it.
pub fn check(name: &str, value: &str) -> Result<(), Malformed> {
    let bytes = name.as_bytes();
    let word = bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_');
    if !(1..=MAX_NAME).contains(&bytes.len()) || !word || bytes[0].is_ascii_digit() {
        return Err(Malformed(
            "not the name of a variable: at most 64 letters, digits and _, no digit in front",
        ));
    }
    if name == "CUDA_VISIBLE_DEVICES" {
        return Err(Malformed("belongs to the user; the server determines the GPUs of a lease"));
    }
    if name.starts_with("GPUSESSION_") && name != "GPUSESSION_ID" {
        return Err(Malformed("belongs to the user, who sets it for a program or a shell"));
    }
    if FOREIGN.contains(&name) || FOREIGN_BEGINNINGS.iter().any(|begin| name.starts_with(begin)) {
        return Err(Malformed(
            "belongs to the loader, the shell or the login, and is never set at login; set it where the program is started",
        ));
    }
    if value.len() > MAX_VALUE {
        return Err(Malformed("the value is longer than 1024 bytes"));
    }
    // Shells and systemd interpret other bytes in their own ways.
    if !value.bytes().all(|b| matches!(b, b' '..=b'~') && !b"\"'`$\\".contains(&b)) {
        return Err(Malformed(
            "the value may have letters, digits and plain signs of ASCII only: no quote, backslash, dollar sign or control character",
        ));
    }
    Ok(())
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
        let reply = Reply {
            environment: vec![("GPUSESSION_ID", "abc"), ("NCCL_DEBUG", ""), ("OMP_NUM_THREADS", "4")],
        };
        assert_eq!(Reply::parse(&reply.encode().unwrap()), Ok(reply.clone()));
        assert_eq!(Reply::parse(&Reply::default().encode().unwrap()), Ok(Reply::default()));
    }

    #[test]
    fn the_layout_is_fixed() {
        let packet =
            Request::Open(Open { uid: 0x01020304, service: "su".into(), ..Open::default() }).encode();
        assert_eq!(packet, b"gpsL\x01\0\x01\0\x04\x03\x02\x01\x02\0\0\0\0\0\0\0su");
        assert_eq!(Request::Close.encode(), b"gpsL\x01\0\x02\0");
        let reply = Reply { environment: vec![("CUDA_X", "yz")] };
        assert_eq!(reply.encode().unwrap(), b"gpsL\x01\0\x01\0\x06\0\x02\0CUDA_Xyz");
    }

    #[test]
    fn variables_of_loader_shell_and_login_are_refused() {
        let long = "A".repeat(MAX_NAME + 1);
        let no_names = ["", "1A", "CUDA_ X", "CUDA_X=Y", "BASH_FUNC_ls%%", "É", "A\n", "A\0", long.as_str()];
        let of_the_user = ["CUDA_VISIBLE_DEVICES", "GPUSESSION_SOCKET", "GPUSESSION_DISABLE"];
        let beginnings = [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "LD_",
            "BASH_ENV",
            "LC_ALL",
            "SSH_AUTH_SOCK",
            "XDG_RUNTIME_DIR",
        ];
        for name in no_names.iter().chain(&of_the_user).chain(&beginnings).chain(FOREIGN) {
            assert!(check(name, "x").is_err(), "{name}");
        }
        for name in [
            "GPUSESSION_ID",
            "NCCL_NET_PLUGIN",
            "HF_HOME",
            "http_proxy",
            "PYTHONPATH",
            "_X",
            "LDX",
            &long[1..],
        ] {
            assert_eq!(check(name, "x"), Ok(()), "{name}");
        }
        for value in ["1\n", "1\0", "\x1b[31m", "$(id)", "`id`", "a'b", "a\"b", "a\\b", "é"] {
            assert!(check("NCCL_SHM_DISABLE", value).is_err(), "{value}");
        }
        assert!(check("NCCL_SHM_DISABLE", &"1".repeat(MAX_VALUE + 1)).is_err());
        assert!(check("NCCL_SHM_DISABLE", &"1".repeat(MAX_VALUE)).is_ok());
    }

    #[test]
    fn replies_are_bounded() {
        let names: Vec<String> = (0..=MAX_VARIABLES).map(|i| format!("X{i}")).collect();
        let reply = |n: usize, value: &'static str| Reply {
            environment: names[..n].iter().map(|name| (name.as_str(), value)).collect(),
        };
        assert!(reply(MAX_VARIABLES, "").encode().is_ok());
        assert!(reply(MAX_VARIABLES + 1, "").encode().is_err());
        let long: &'static str = "1".repeat(MAX_VALUE).leak();
        assert!(reply(15, long).encode().is_ok());
        assert!(reply(16, long).encode().is_err());
        // Packets that this encoder never writes.
        let one = Reply { environment: vec![("X", "y")] }.encode().unwrap();
        let variable = &one[8..];
        let many = [&one[..6], &65u16.to_le_bytes(), &variable.repeat(65)].concat();
        let twice = [&one[..6], &2u16.to_le_bytes(), &variable.repeat(2)].concat();
        for packet in [many, twice] {
            assert!(Reply::parse(&packet).is_err());
        }
    }

    /// Tries each prefix, each extension and each changed byte of good packets.
    ///
    /// Prefixes and extensions are rejected; with a changed byte the content stays within bounds.
    #[test]
    fn no_packet_does_harm() {
        let reply = Reply { environment: vec![("GPUSESSION_ID", "abcdefghijkl"), ("NCCL_DEBUG", "WARN")] };
        let packets = [reply.encode().unwrap(), Request::Open(open()).encode(), Request::Close.encode()];
        let look = |packet: &[u8]| {
            let _ = Request::parse(packet);
            if let Ok(reply) = Reply::parse(packet) {
                assert!(reply.environment.iter().all(|(n, v)| check(n, v).is_ok()));
            }
        };
        for packet in &packets {
            for cut in 0..packet.len() {
                assert!(Reply::parse(&packet[..cut]).is_err());
                // The head of a reply with two variables reads like a close.
                assert!(matches!(Request::parse(&packet[..cut]), Err(_) | Ok(Request::Close)));
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
