//! The table of CUDA driver calls, for build scripts.
//!
//! `symbols.tsv` holds facts of the ABI: every exported symbol with the CUDA version of its
//! prototype, from which `cuGetProcAddress` answers. `calls.txt` states how gpusession treats each
//! of them. Both together generate exports, proc-address table, frames, dispatch and
//! `docs/coverage.md`.
//!
//! `tables.txt` does the same for the private tables. `used.tsv` holds the calls that real programs
//! were seen to use: tests compare it with both.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

pub mod tables;

const SYMBOLS: &str = include_str!("../symbols.tsv");
const ERRORS: &str = include_str!("../errors.tsv");
const CALLS: &str = include_str!("../calls.txt");

/// One exported symbol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbol {
    /// Name by which `cuGetProcAddress` finds it.
    pub base: &'static str,
    /// First CUDA version (1000 * major + 10 * minor) of this prototype; 0: found by dlsym only.
    pub version: u32,
    /// Whether this is the variant for per-thread default streams.
    pub per_thread: bool,
    /// Exported name.
    pub name: &'static str,
}

impl Symbol {
    /// Returns the name of the call: the exported name without `_ptds` or `_ptsz`.
    pub fn call(&self) -> &'static str {
        call_of(self.name)
    }
}

/// Strips the suffix of the variants for per-thread default streams.
pub fn call_of(name: &str) -> &str {
    name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name)
}

/// Returns every exported symbol, in the order of the file.
pub fn symbols() -> Vec<Symbol> {
    SYMBOLS
        .lines()
        .skip(1)
        .filter(|line| !line.is_empty())
        .map(|line| {
            let mut fields = line.split('\t');
            let mut field = || fields.next().unwrap_or_else(|| panic!("symbols.tsv: {line:?}"));
            let (base, version, per_thread, name) = (field(), field(), field(), field());
            Symbol {
                base,
                version: version.parse().unwrap_or_else(|_| panic!("symbols.tsv: version in {line:?}")),
                per_thread: per_thread == "1",
                name,
            }
        })
        .collect()
}

/// Returns the distinct exported names, sorted.
pub fn exported() -> BTreeSet<&'static str> {
    symbols().iter().map(|s| s.name).collect()
}

/// Returns the `_ptds` or `_ptsz` variant of a call, if it has one.
pub fn per_thread_variant(call: &str) -> Option<&'static str> {
    symbols().iter().find(|s| s.per_thread && s.call() == call).map(|s| s.name)
}

/// Returns Rust source of `PROC_ADDRESSES: [ProcAddress; N]`.
///
/// The array is sorted by base name, then version, then variant, for a library that exports every
/// name of [`exported`]. The including module defines `ProcAddress { base, version, per_thread,
/// function }` with `function: unsafe extern "C" fn()`, and the linker finds the exported
/// functions.
pub fn proc_addresses_source() -> String {
    let mut rows = symbols();
    rows.retain(|s| s.version > 0);
    rows.sort_by_key(|s| (s.base, s.version, s.per_thread));
    let mut out = String::from("unsafe extern \"C\" {\n");
    for name in rows.iter().map(|s| s.name).collect::<BTreeSet<_>>() {
        writeln!(out, "    #[link_name = \"{name}\"]\n    fn address_of_{name}();").unwrap();
    }
    writeln!(out, "}}\n/// See `gpusession_calls::proc_addresses_source`.").unwrap();
    writeln!(out, "pub static PROC_ADDRESSES: [ProcAddress; {}] = [", rows.len()).unwrap();
    for s in &rows {
        writeln!(
            out,
            "    ProcAddress {{ base: {:?}, version: {}, per_thread: {}, function: address_of_{} }},",
            s.base, s.version, s.per_thread, s.name
        )
        .unwrap();
    }
    out.push_str("];\n");
    out
}

/// Returns Rust source of an exported function for each symbol not in `implemented`.
///
/// The names are exported names. Each function calls `$crate::unsupported(NAME)`, which returns the
/// `CUresult`. It ignores arguments, as the C ABI allows.
pub fn unsupported_source(implemented: &BTreeSet<String>) -> String {
    let mut out = String::new();
    for name in exported().into_iter().filter(|name| !implemented.contains(*name)) {
        writeln!(
            out,
            "#[unsafe(no_mangle)]\npub extern \"C\" fn {name}() -> i32 {{ crate::unsupported({name:?}) }}"
        )
        .unwrap();
    }
    out
}

/// Returns Rust source of `ERRORS: [(i32, &CStr, &CStr); N]`, sorted by code.
///
/// A row is a `CUresult`, its name and the driver's own text.
pub fn errors_source() -> String {
    let rows: Vec<Vec<&str>> = ERRORS.lines().skip(1).map(|line| line.split('\t').collect()).collect();
    let mut out =
        format!("pub static ERRORS: [(i32, &::std::ffi::CStr, &::std::ffi::CStr); {}] = [\n", rows.len());
    for row in rows {
        writeln!(out, "    ({}, c{:?}, c{:?}),", row[0], row[1], row[2]).unwrap();
    }
    out.push_str("];\n");
    out
}

/// Treatment of a call by gpusession.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// Answered by `libcuda.so.1` itself.
    Local,
    /// Forwarded by hand-written code on both sides.
    Forward,
    /// Replayed by generated code, and forwarded by generated code unless `own_client`.
    Generated {
        /// Whether the client's side is written by hand (`call*`, `post*`), since it keeps state.
        own_client: bool,
        /// Number of the operation on the wire; never reused.
        op: u16,
        /// Whether the call returns only after the driver has answered.
        wait: bool,
        /// Parameters in order.
        params: Vec<Param>,
    },
    /// Answers `CUDA_ERROR_NOT_SUPPORTED`, for this reason.
    None(&'static str),
}

/// A parameter of a generated call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// NVIDIA's name for it.
    pub name: &'static str,
    /// Type and direction, which determine how it travels.
    pub kind: Kind,
    /// Role in the choice of the worker, if a program has several.
    pub role: Role,
    /// Kind of a value that the driver returns, and takes back only as it returned it.
    pub known: Option<&'static str>,
}

/// Role of a parameter in a program with several workers.
///
/// Each worker numbers devices and objects in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// No role.
    Plain,
    /// `@object KIND`: the server's name of something; a program sees it with the worker's number.
    Object,
    /// `@device`: a device's ordinal.
    Device,
    /// `@address`: an address of device memory.
    Address,
    /// `@location N`: structures with a `CUmemLocation` at byte N.
    Location(usize),
    /// `@resource`: a `CUDA_RESOURCE_DESC`.
    Resource,
}

impl Role {
    fn parse(text: &'static str) -> Self {
        let words: Vec<&'static str> = text.split_whitespace().collect();
        match words[..] {
            ["object", _] => Self::Object,
            ["known", _] => Self::Plain,
            ["device"] => Self::Device,
            ["address"] => Self::Address,
            ["location", n] => Self::Location(n.parse().unwrap_or_else(|_| panic!("calls.txt: {text:?}"))),
            ["resource"] => Self::Resource,
            [] => Self::Plain,
            _ => panic!("calls.txt: unknown role {text:?}"),
        }
    }
}

/// Type and direction of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A number, an address or a handle of the server: `i32`, `u32`, `u64`, `usize`, `f32`.
    Scalar(&'static str),
    /// A handle that the client minted.
    ///
    /// Its kinds are `ctx`, `stream`, `event`, `module`, `library`, `func`, `graph`, `exec`,
    /// `user_object`, `texref` and `surfref`.
    Handle(&'static str),
    /// `out T`: the program's pointer receives an integer.
    Out(&'static str),
    /// `out? T`: like `out T`, but the pointer may be null.
    OutOptional(&'static str),
    /// `in N`: a structure of N bytes behind a pointer.
    In(usize),
    /// `in? N`: like `in N`, but the pointer may be null.
    InOptional(usize),
    /// `result N`: a structure of N bytes that the driver fills.
    Result(usize),
    /// `inout N`: a structure of N bytes that the driver reads and changes.
    InOut(usize),
    /// `array N COUNT`: elements of N bytes; the parameter COUNT holds their number.
    Array(usize, &'static str),
    /// `array? N COUNT`: like `array N COUNT`, but the pointer may be null.
    ArrayOptional(usize, &'static str),
}

impl Kind {
    fn parse(text: &'static str) -> Self {
        let words: Vec<&'static str> = text.split_whitespace().collect();
        let size = |word: &str| word.parse().unwrap_or_else(|_| panic!("calls.txt: size in {text:?}"));
        match words[..] {
            ["out", t] => Self::Out(t),
            ["out?", t] => Self::OutOptional(t),
            ["in", n] => Self::In(size(n)),
            ["in?", n] => Self::InOptional(size(n)),
            ["result", n] => Self::Result(size(n)),
            ["inout", n] => Self::InOut(size(n)),
            ["array", n, count] => Self::Array(size(n), count),
            ["array?", n, count] => Self::ArrayOptional(size(n), count),
            [t @ ("i32" | "u32" | "u64" | "usize" | "f32")] => Self::Scalar(t),
            [
                t @ ("ctx" | "stream" | "event" | "module" | "library" | "func" | "graph" | "exec"
                | "user_object" | "texref" | "surfref"),
            ] => Self::Handle(t),
            _ => panic!("calls.txt: unknown parameter kind {text:?}"),
        }
    }
}

/// Returns the table: every exported call (without `_ptds`, `_ptsz`) and its treatment.
///
/// # Panics
/// If the table is wrong (it is part of this crate): an unknown name, a name twice, a number twice.
pub fn calls() -> BTreeMap<&'static str, Class> {
    let known: BTreeSet<&str> = exported().into_iter().map(call_of).collect();
    let mut table = BTreeMap::new();
    let mut numbers = BTreeSet::new();
    for line in lines() {
        let (verb, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match verb {
            "local" | "forward" => {
                for name in rest.split_whitespace() {
                    let class = if verb == "local" { Class::Local } else { Class::Forward };
                    assert!(known.contains(name), "calls.txt: the driver exports no {name}");
                    assert!(table.insert(name, class).is_none(), "calls.txt: {name} twice");
                }
            }
            "none" | "op" | "note" | "unordered" | "uncounted" | "driver" => {}
            number => {
                let op: u16 = number.parse().unwrap_or_else(|_| panic!("calls.txt: {line:?}"));
                assert!(numbers.insert(op), "calls.txt: number {op} twice");
                let (verb, prototype) = rest.split_once(' ').unwrap_or_else(|| panic!("calls.txt: {line:?}"));
                let own_client = verb.ends_with('*');
                let wait = match verb.trim_end_matches('*') {
                    "call" => true,
                    "post" => false,
                    _ => panic!("calls.txt: {line:?}"),
                };
                let (name, params) = prototype
                    .trim()
                    .strip_suffix(')')
                    .and_then(|p| p.split_once('('))
                    .unwrap_or_else(|| panic!("calls.txt: {line:?}"));
                assert!(known.contains(name), "calls.txt: the driver exports no {name}");
                let params = params
                    .split(',')
                    .filter(|p| !p.trim().is_empty())
                    .map(|p| {
                        let (name, kind) = p.split_once(':').unwrap_or_else(|| panic!("calls.txt: {line:?}"));
                        let (kind, role) = kind.split_once('@').unwrap_or((kind, ""));
                        let known = role.strip_prefix("object ").or_else(|| role.strip_prefix("known "));
                        Param {
                            name: name.trim(),
                            kind: Kind::parse(kind.trim()),
                            role: Role::parse(role),
                            known: known.map(str::trim),
                        }
                    })
                    .collect();
                let class = Class::Generated { own_client, op, wait, params };
                assert!(table.insert(name, class).is_none(), "calls.txt: {name} twice");
            }
        }
    }
    let refused: Vec<_> = reasons("none").collect();
    for name in known {
        if table.contains_key(name) {
            continue;
        }
        let reason = refused
            .iter()
            .find(|(pattern, _)| matches(pattern, name))
            .unwrap_or_else(|| panic!("calls.txt says nothing of {name}"))
            .1;
        table.insert(name, Class::None(reason));
    }
    table
}

/// Returns the driver's functions that hand-written code of the worker calls.
///
/// Each has the Rust types of its parameters, of which `server/worker/src/driver.rs` has the names.
///
/// # Panics
/// If a line has another form, a name that the driver does not export, or a name twice.
pub fn driver_functions() -> BTreeMap<&'static str, Vec<&'static str>> {
    let known = exported();
    let mut functions = BTreeMap::new();
    for line in lines().filter_map(|line| line.strip_prefix("driver ")) {
        let (name, types) = line
            .strip_suffix(')')
            .and_then(|line| line.split_once('('))
            .unwrap_or_else(|| panic!("calls.txt: {line:?}"));
        assert!(known.contains(name), "calls.txt: the driver exports no {name}");
        let types = types.split(',').map(str::trim).filter(|kind| !kind.is_empty()).collect();
        assert!(functions.insert(name, types).is_none(), "calls.txt: function {name} twice");
    }
    functions
}

/// An operation that is no driver call of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// Its name in the protocol.
    pub name: &'static str,
    /// Effect of its replay on the worker; none of a frame that the worker sends.
    pub effect: Option<Effect>,
}

/// Effect of a replay on the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Effect {
    /// The executor waits: for the GPU, for bytes of the connection, or for another worker.
    pub waits: bool,
    /// The GPU gets work, or copies; the client counts as active.
    pub works: bool,
}

/// Returns the lines `op NUMBER NAME EFFECT...`.
///
/// # Panics
/// If a line lacks a part, or repeats a number (the table is part of this crate).
pub fn operations() -> BTreeMap<u16, Operation> {
    let mut table = BTreeMap::new();
    for line in lines() {
        let words: Vec<&'static str> = line.split_whitespace().collect();
        let ["op", number, name, ref effect @ ..] = words[..] else { continue };
        let number: u16 = number.parse().unwrap_or_else(|_| panic!("calls.txt: {line:?}"));
        let effect = match effect {
            ["answer"] => None,
            ["brief"] => Some(Effect::default()),
            ["waits"] => Some(Effect { waits: true, works: false }),
            ["works"] => Some(Effect { waits: false, works: true }),
            ["waits", "works"] => Some(Effect { waits: true, works: true }),
            _ => panic!("calls.txt: {line:?}: an effect, see the head of the file"),
        };
        let operation = Operation { name, effect };
        assert!(table.insert(number, operation).is_none(), "calls.txt: operation {number} twice");
    }
    table
}

/// Returns the operations of the lines `unordered`, each with its reason.
pub fn unordered() -> impl Iterator<Item = (&'static str, &'static str)> {
    reasons("unordered")
}

/// Returns the patterns of the lines `uncounted`, each with its reason.
pub fn uncounted() -> impl Iterator<Item = (&'static str, &'static str)> {
    reasons("uncounted")
}

/// Returns the names or patterns of the lines `VERB NAME... | REASON`, each with its reason.
fn reasons(verb: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let rest = move |line: &'static str| line.strip_prefix(verb)?.strip_prefix(' ');
    lines().filter_map(rest).flat_map(move |rest| {
        let (names, reason) = rest.split_once('|').unwrap_or_else(|| panic!("calls.txt: {verb} {rest:?}"));
        names.split_whitespace().map(move |name| (name, reason.trim()))
    })
}

/// Returns the patterns of the lines `note`, each with its text.
///
/// # Panics
/// If a pattern matches no call of the table that is answered (it is part of this crate).
fn notes() -> Vec<(&'static str, &'static str)> {
    let table = calls();
    let notes: Vec<_> = reasons("note").collect();
    for (pattern, _) in &notes {
        let answered =
            |(name, class): (&&str, &Class)| matches(pattern, name) && !matches!(class, Class::None(_));
        assert!(table.iter().any(answered), "calls.txt: a note for {pattern}, which is not answered");
    }
    notes
}

fn lines() -> impl Iterator<Item = &'static str> {
    CALLS.lines().map(|line| line.split('#').next().unwrap_or("").trim()).filter(|line| !line.is_empty())
}

/// Returns the names in `used.tsv`, which real programs were seen to use.
#[cfg(test)]
fn used() -> impl Iterator<Item = &'static str> {
    let lines = include_str!("../used.tsv").lines().filter(|line| !line.starts_with('#'));
    lines.skip(1).map(|line| line.split('\t').next().unwrap_or(line))
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => pattern == name,
    }
}

/// Returns `docs/coverage.md`: the treatment of every call.
pub fn coverage() -> String {
    let calls = calls();
    let count = |f: fn(&Class) -> bool| calls.values().filter(|class| f(class)).count();
    let mut out = String::from(
        "# Driver calls\n\nGenerated from `proto/calls/calls.txt` and `proto/calls/symbols.tsv` \
         (`make docs`). Variants for per-thread default streams (`_ptds`, `_ptsz`) share the row of their call.\n\n",
    );
    writeln!(
        out,
        "{} exported symbols, {} calls: {} answered locally, {} forwarded, {} not supported \
         (`CUDA_ERROR_NOT_SUPPORTED`; `GPUSESSION_TRACE=missing` counts them).\n",
        exported().len(),
        calls.len(),
        count(|c| *c == Class::Local),
        count(|c| matches!(c, Class::Forward | Class::Generated { .. })),
        count(|c| matches!(c, Class::None(_)))
    )
    .unwrap();
    out.push_str("| call | answer |\n|---|---|\n");
    let notes = notes();
    for (name, class) in &calls {
        let answer = match class {
            Class::Local => "local".to_string(),
            Class::Forward | Class::Generated { wait: true, .. } => "forwarded".to_string(),
            Class::Generated { wait: false, .. } => "forwarded, never waits".to_string(),
            Class::None(reason) => format!("not supported: {reason}"),
        };
        let note = notes.iter().find(|(pattern, _)| matches(pattern, name));
        let note = note.map_or(String::new(), |(_, text)| format!("; {text}"));
        writeln!(out, "| `{name}` | {answer}{note} |").unwrap();
    }
    out.push_str(&tables::coverage());
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_table_is_whole() {
        assert!(exported().len() > 720);
        assert_eq!(calls().len(), exported().into_iter().map(call_of).collect::<BTreeSet<_>>().len());
        let generated: BTreeSet<u16> = calls()
            .values()
            .filter_map(|c| if let Class::Generated { op, .. } = c { Some(*op) } else { None })
            .collect();
        assert!(operations().keys().all(|op| !generated.contains(op)), "an operation's number is used twice");
    }

    #[test]
    fn a_none_line_names_only_calls_that_are_not_supported() {
        let calls = calls();
        let names = lines().filter_map(|line| line.strip_prefix("none ")?.split_once('|'));
        for pattern in names.flat_map(|(names, _)| names.split_whitespace()) {
            let matched: Vec<_> = calls.iter().filter(|(name, _)| matches(pattern, name)).collect();
            assert!(!matched.is_empty(), "none {pattern}: the driver exports no such call");
            let unsupported = matched.iter().any(|(_, class)| matches!(class, Class::None(_)));
            assert!(unsupported, "none {pattern}: each such call is supported; remove it from the line");
        }
    }

    #[test]
    fn variants_name_their_call() {
        assert_eq!(per_thread_variant("cuMemcpyHtoD_v2"), Some("cuMemcpyHtoD_v2_ptds"));
        assert_eq!(per_thread_variant("cuInit"), None);
    }

    /// Returns the exported symbol behind a line of `used.tsv`.
    ///
    /// Names with a version follow the rules of `cuGetProcAddress`.
    fn symbol_used(entry: &str) -> Option<Symbol> {
        let Some((base, asked)) = entry.split_once('@') else {
            return symbols().into_iter().find(|s| s.name == entry);
        };
        let (version, flags) = asked.split_once('/').unwrap_or_else(|| panic!("used.tsv: {entry}"));
        assert_eq!(flags, "0", "used.tsv: {entry}: nobody asked for per-thread default streams");
        let version: u32 = version.parse().unwrap_or_else(|_| panic!("used.tsv: {entry}"));
        let known = symbols().into_iter().filter(|s| s.base == base && !s.per_thread);
        known.filter(|s| (1..=version).contains(&s.version)).max_by_key(|s| s.version)
    }

    #[test]
    fn calls_of_real_programs_are_implemented() {
        let calls = calls();
        let called: Vec<_> = used().filter(|entry| !entry.ends_with(']')).collect();
        assert!(called.len() > 100, "used.tsv is whole");
        let missing: Vec<_> = called
            .into_iter()
            .filter(|entry| match symbol_used(entry) {
                Some(symbol) => matches!(calls[symbol.call()], Class::None(_)),
                None => true,
            })
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    /// Collects the words of all files below a folder whose names end so.
    fn words_of(folder: &Path, ends: &[&str], words: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                words_of(&path, ends, words);
            } else if ends.iter().any(|end| path.extension().is_some_and(|found| found == *end)) {
                let text = std::fs::read_to_string(path).unwrap();
                words.extend(text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').map(str::to_owned));
            }
        }
    }

    /// A call that gpusession serves, and that no test or real program is known to use, is in
    /// `unused.txt`, or else its author has forgotten the program.
    #[test]
    fn each_call_that_is_served_is_used_by_a_program() {
        let mut words = BTreeSet::new();
        words_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests"), &["cu", "h", "rs"], &mut words);
        words.extend(used().map(|entry| entry.split('@').next().unwrap_or(entry).to_owned()));
        let is_used = |name: &str| {
            let base = name.rsplit_once("_v").map_or(name, |(base, _)| base);
            // By the driver's name, with or without version, or by that of the runtime library.
            let names = [name, base].map(str::to_owned).into_iter().chain([base.replacen("cu", "cuda", 1)]);
            names.into_iter().any(|name| words.contains(&name))
        };
        let calls = calls();
        let served =
            calls.iter().filter(|(_, class)| !matches!(class, Class::None(_))).map(|(name, _)| *name);
        let unused: Vec<&str> = served.filter(|name| !is_used(name)).collect();
        let lines = include_str!("../unused.txt").lines().filter(|line| !line.starts_with('#'));
        let stated: Vec<&str> = lines.collect();
        let only = |list: &[&str], other: &[&str]| -> Vec<String> {
            list.iter().filter(|name| !other.contains(name)).map(|name| (*name).to_owned()).collect()
        };
        let forgotten = only(&unused, &stated);
        assert!(forgotten.is_empty(), "{forgotten:?}: a program of tests/programs calls it");
        let stale = only(&stated, &unused);
        assert!(stale.is_empty(), "{stale:?}: a program uses it, so no line of unused.txt");
    }

    /// A row `array N COUNT` must name a scalar parameter.
    #[test]
    fn array_counts_are_parameters() {
        for (name, class) in calls() {
            let Class::Generated { params, .. } = class else { continue };
            for (i, p) in params.iter().enumerate() {
                if let Kind::Array(_, count) = p.kind {
                    assert!(
                        params.iter().any(|q| q.name == count && matches!(q.kind, Kind::Scalar(_))),
                        "{name}: parameter {i}"
                    );
                }
            }
        }
    }
}
