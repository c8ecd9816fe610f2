//! Attributes of GPU core dumps, as a process sets them: for itself, and for single contexts.

use std::collections::BTreeMap;

/// Bytes of a text with its terminator, at most.
pub const TEXT: usize = 1024;

/// `CUcoredumpSettings`, from 1.
pub mod attribute {
    /// Whether a fault of a kernel writes a dump.
    pub const ON_EXCEPTION: u32 = 1;
    /// Whether a fault also aborts the process.
    pub const TRIGGER_HOST: u32 = 2;
    /// Whether a dump leaves out memory.
    pub const LIGHTWEIGHT: u32 = 3;
    /// Whether the pipe can ask for a dump.
    pub const USER_TRIGGER: u32 = 4;
    /// Name of the dump, with `%p` and the like.
    pub const FILE: u32 = 5;
    /// Name of the pipe that asks for a dump.
    pub const PIPE: u32 = 6;
    /// `CUCoredumpGenerationFlags`: parts that a dump leaves out.
    pub const FLAGS: u32 = 7;
}

/// `CUCoredumpGenerationFlags`, as far as their meaning matters here.
pub mod flag {
    /// Leaves out global memory.
    pub const SKIP_GLOBAL_MEMORY: u32 = 1 << 1;
    /// Lets the process live after a dump.
    pub const SKIP_ABORT: u32 = 1 << 4;
    /// Leaves out memory of every kind, and images that are not relocated.
    pub const LIGHTWEIGHT: u32 = 0x2f;
}

/// Bytes of a dump beside device memory: images, the state of threads, and host memory that the
/// device sees.
const MORE_THAN_MEMORY: u64 = 1 << 30;
/// Bytes of a dump, however much device memory there is.
const MAX_BYTES: u64 = 4 << 40;

/// Returns the bytes that a dump of GPUs with this much memory may have.
pub fn most_bytes(memory: u64) -> u64 {
    memory.saturating_add(MORE_THAN_MEMORY).min(MAX_BYTES)
}

/// Name of a dump for which the program gives none.
const DEFAULT_FILE: &[u8] = b"core_%t_%h_%p.nvcudmp";

/// Type of an attribute's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One byte.
    Flag,
    /// Four bytes.
    Number,
    /// Text with a terminator, at most [`TEXT`] bytes.
    Text,
}

impl Kind {
    /// Returns the bytes that a program has to reserve for a value.
    pub fn room(self) -> usize {
        match self {
            Self::Flag => 1,
            Self::Number => 4,
            Self::Text => TEXT,
        }
    }
}

/// Reason for refusing a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The attribute or its value is none.
    Invalid,
    /// The environment, or an earlier setting, has the last word.
    NotPermitted,
}

struct Row {
    attribute: u32,
    kind: Kind,
    /// Variable of the environment whose value precedes every setting.
    variable: &'static str,
    /// Whether a context may have a value of its own.
    per_context: bool,
}

const ROWS: [Row; 7] = {
    use attribute::*;
    const fn row(attribute: u32, kind: Kind, variable: &'static str, per_context: bool) -> Row {
        Row { attribute, kind, variable, per_context }
    }
    [
        row(ON_EXCEPTION, Kind::Flag, "CUDA_ENABLE_COREDUMP_ON_EXCEPTION", true),
        row(TRIGGER_HOST, Kind::Flag, "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION", true),
        row(LIGHTWEIGHT, Kind::Flag, "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", true),
        row(USER_TRIGGER, Kind::Flag, "CUDA_ENABLE_USER_TRIGGERED_COREDUMP", false),
        row(FILE, Kind::Text, "CUDA_COREDUMP_FILE", true),
        row(PIPE, Kind::Text, "CUDA_COREDUMP_PIPE", false),
        row(FLAGS, Kind::Number, "CUDA_COREDUMP_GENERATION_FLAGS", true),
    ]
};

/// Names of the bits of `FLAGS` in the environment, from bit 0.
const FLAG_NAMES: [&str; 6] = [
    "skip_nonrelocated_elf_images",
    "skip_global_memory",
    "skip_shared_memory",
    "skip_local_memory",
    "skip_abort",
    "skip_constbank_memory",
];

fn row(attribute: u32) -> Result<&'static Row, Refusal> {
    ROWS.iter().find(|row| row.attribute == attribute).ok_or(Refusal::Invalid)
}

/// Returns the type of an attribute.
pub fn kind(attribute: u32) -> Result<Kind, Refusal> {
    row(attribute).map(|row| row.kind)
}

/// Values as the program gives and gets them; text without its terminator.
type Values = BTreeMap<u32, Vec<u8>>;

/// The attributes of one process.
#[derive(Debug, Default)]
pub struct Settings {
    defaults: Values,
    environment: Values,
    process: Values,
    contexts: BTreeMap<u64, Values>,
    host: String,
    pid: u32,
}

/// The dump that a fault makes, as the attributes are at the creation of its context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// Flags of the driver; the lightweight attribute is among them.
    pub flags: u32,
    /// Whether the process aborts after the dump.
    pub aborts: bool,
    /// Name of its file, in which `%t` stands for the time.
    file: Vec<u8>,
    host: String,
    pid: u32,
}

impl Dump {
    /// Returns the name of a dump that begins at this time, in seconds since 1970.
    pub fn name(&self, time: u64) -> Vec<u8> {
        let mut name = Vec::new();
        let mut rest = self.file.iter().copied();
        while let Some(byte) = rest.next() {
            let mut ahead = rest.clone();
            let text = match (byte, ahead.next()) {
                (b'%', Some(b'h')) => self.host.clone(),
                (b'%', Some(b'p')) => self.pid.to_string(),
                (b'%', Some(b't')) => time.to_string(),
                _ => {
                    name.push(byte);
                    continue;
                }
            };
            name.extend_from_slice(text.as_bytes());
            rest = ahead;
        }
        name
    }
}

impl Settings {
    /// Creates the attributes of a process with this id on this host.
    pub fn new(host: &str, pid: u32, variable: impl Fn(&str) -> Option<String>) -> Self {
        let mut settings = Self { host: host.into(), pid, ..Self::default() };
        for row in &ROWS {
            let default = match (row.attribute, row.kind) {
                (attribute::TRIGGER_HOST, _) => vec![1],
                (attribute::PIPE, _) => format!("corepipe.cuda.{host}.{pid}").into_bytes(),
                // The driver chooses the file's name at a dump, and returns none before it.
                (_, Kind::Text) => Vec::new(),
                (_, kind) => vec![0; kind.room()],
            };
            settings.defaults.insert(row.attribute, default);
            let Some(text) = variable(row.variable) else { continue };
            let value = match row.kind {
                Kind::Flag => vec![u8::from(text == "1")],
                Kind::Number => flags(&text).to_ne_bytes().to_vec(),
                Kind::Text => text.into_bytes(),
            };
            settings.environment.insert(row.attribute, value);
        }
        settings
    }

    /// Returns the value that holds for a context, or for the process.
    pub fn get(&self, ctx: Option<u64>, attribute: u32) -> Result<&[u8], Refusal> {
        row(attribute)?;
        let own = ctx.and_then(|ctx| self.contexts.get(&ctx));
        let tables = [Some(&self.environment), own, Some(&self.process), Some(&self.defaults)];
        let found = tables.into_iter().flatten().find_map(|table| table.get(&attribute));
        found.map(Vec::as_slice).ok_or(Refusal::Invalid)
    }

    /// Sets a value for a context, or for the process; `given` may be longer than the value.
    pub fn set(&mut self, ctx: Option<u64>, attribute: u32, given: &[u8]) -> Result<(), Refusal> {
        let row = row(attribute)?;
        if ctx.is_some() && !row.per_context {
            return Err(Refusal::Invalid);
        }
        let value = match row.kind {
            Kind::Flag => vec![u8::from(*given.first().ok_or(Refusal::Invalid)? != 0)],
            Kind::Number => given.first_chunk::<4>().ok_or(Refusal::Invalid)?.to_vec(),
            Kind::Text => {
                let text: Vec<u8> = given.iter().copied().take_while(|byte| *byte != 0).collect();
                if text.is_empty() || text.len() >= TEXT {
                    return Err(Refusal::Invalid);
                }
                text
            }
        };
        let pipe_in_use =
            attribute == attribute::PIPE && self.get(None, attribute::USER_TRIGGER) == Ok(&[1][..]);
        if self.environment.contains_key(&attribute) || pipe_in_use {
            return Err(Refusal::NotPermitted);
        }
        let table = match ctx {
            Some(ctx) => self.contexts.entry(ctx).or_default(),
            None => &mut self.process,
        };
        table.insert(attribute, value);
        Ok(())
    }

    /// Returns the dump that a fault of a context makes which is created now; `None` without one.
    ///
    /// With `forced`, the context's own flags ask for it.
    pub fn dump(&self, forced: bool) -> Option<Dump> {
        let value = |attribute| self.get(None, attribute).unwrap_or_default();
        let is_set = |attribute| value(attribute).first().is_some_and(|byte| *byte != 0);
        if !is_set(attribute::ON_EXCEPTION) && !forced {
            return None;
        }
        let flags = value(attribute::FLAGS).first_chunk().copied().map_or(0, u32::from_ne_bytes);
        let lightweight = if is_set(attribute::LIGHTWEIGHT) { flag::LIGHTWEIGHT } else { 0 };
        let file = match value(attribute::FILE) {
            [] => DEFAULT_FILE,
            file => file,
        };
        Some(Dump {
            flags: flags | lightweight,
            aborts: flags & flag::SKIP_ABORT == 0 && is_set(attribute::TRIGGER_HOST),
            file: file.to_vec(),
            host: self.host.clone(),
            pid: self.pid,
        })
    }

    /// Forgets a destroyed context.
    pub fn forget(&mut self, ctx: u64) {
        self.contexts.remove(&ctx);
    }
}

/// Reads names of flags, with commas between them.
fn flags(text: &str) -> u32 {
    let bit =
        |name: &str| FLAG_NAMES.iter().position(|known| *known == name.trim()).map_or(0, |bit| 1 << bit);
    text.split(',').map(bit).fold(0, |all, one| all | one)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        Settings::new("vm-1", 77, |_| None)
    }

    #[test]
    fn defaults_are_those_of_the_driver() {
        let settings = settings();
        assert_eq!(settings.get(None, attribute::FILE), Ok(&b""[..]));
        assert_eq!(settings.get(Some(5), attribute::PIPE), Ok(&b"corepipe.cuda.vm-1.77"[..]));
        assert_eq!(settings.get(None, attribute::TRIGGER_HOST), Ok(&[1][..]));
        assert_eq!(settings.get(None, attribute::FLAGS), Ok(&[0; 4][..]));
        assert_eq!(settings.get(None, 8), Err(Refusal::Invalid));
    }

    #[test]
    fn value_of_a_context_precedes_that_of_the_process() {
        let mut settings = settings();
        settings.set(None, attribute::FILE, b"all\0rest").unwrap();
        settings.set(Some(5), attribute::FILE, b"one").unwrap();
        assert_eq!(settings.get(Some(5), attribute::FILE), Ok(&b"one"[..]));
        assert_eq!(settings.get(Some(6), attribute::FILE), Ok(&b"all"[..]));
        settings.forget(5);
        assert_eq!(settings.get(Some(5), attribute::FILE), Ok(&b"all"[..]));
    }

    #[test]
    fn environment_precedes_every_setting() {
        let mut settings = Settings::new("vm-1", 77, |name| match name {
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION" => Some("1".into()),
            "CUDA_COREDUMP_GENERATION_FLAGS" => Some("skip_abort,skip_global_memory".into()),
            _ => None,
        });
        assert_eq!(settings.set(None, attribute::ON_EXCEPTION, &[0]), Err(Refusal::NotPermitted));
        assert_eq!(settings.get(None, attribute::ON_EXCEPTION), Ok(&[1][..]));
        assert_eq!(settings.get(None, attribute::FLAGS), Ok(&18u32.to_ne_bytes()[..]));
    }

    #[test]
    fn dump_has_the_name_and_the_flags_of_the_process() {
        let mut settings = settings();
        assert_eq!(settings.dump(false), None);
        settings.set(Some(5), attribute::ON_EXCEPTION, &[1]).unwrap();
        assert_eq!(settings.dump(false), None, "one context alone has no dump");
        assert!(settings.dump(true).is_some());
        settings.set(None, attribute::ON_EXCEPTION, &[1]).unwrap();
        let dump = settings.dump(false).unwrap();
        assert_eq!((dump.flags, dump.aborts), (0, true));
        assert_eq!(dump.name(1700), b"core_1700_vm-1_77.nvcudmp");
        settings.set(None, attribute::FILE, b"/d/%p-%h.%t%%x%").unwrap();
        settings.set(None, attribute::LIGHTWEIGHT, &[1]).unwrap();
        settings.set(None, attribute::FLAGS, &flag::SKIP_ABORT.to_ne_bytes()).unwrap();
        let dump = settings.dump(false).unwrap();
        assert_eq!((dump.flags, dump.aborts), (flag::LIGHTWEIGHT | flag::SKIP_ABORT, false));
        assert_eq!(dump.name(9), b"/d/77-vm-1.9%%x%");
        settings.set(None, attribute::FLAGS, &[0; 4]).unwrap();
        settings.set(None, attribute::TRIGGER_HOST, &[0]).unwrap();
        assert!(!settings.dump(false).unwrap().aborts);
    }

    #[test]
    fn wrong_values_are_refused() {
        let mut settings = settings();
        for (ctx, attribute, value) in [
            (None, attribute::FLAGS, &[1, 2, 3][..]),
            (None, attribute::ON_EXCEPTION, &[]),
            (None, attribute::FILE, b"\0"),
            (None, attribute::FILE, &[b'x'; TEXT]),
            (None, 0, &[1]),
            (Some(5), attribute::USER_TRIGGER, &[1]),
            (Some(5), attribute::PIPE, b"pipe"),
        ] {
            assert_eq!(settings.set(ctx, attribute, value), Err(Refusal::Invalid), "{attribute}");
        }
        settings.set(None, attribute::USER_TRIGGER, &[7]).unwrap();
        assert_eq!(settings.get(None, attribute::USER_TRIGGER), Ok(&[1][..]), "a flag is 0 or 1");
        assert_eq!(settings.set(None, attribute::PIPE, b"pipe"), Err(Refusal::NotPermitted));
    }
}
