//! Output of `GPUSESSION_TRACE=why,missing,errors,summary`, to stderr or `GPUSESSION_TRACE_FILE`.
//!
//! The library prints nothing else of its own.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, Once, OnceLock, PoisonError};

use gpusession_link::grant::privileged;

struct Wanted {
    why: bool,
    missing: bool,
    errors: bool,
    summary: bool,
}

fn wanted() -> &'static Wanted {
    static WANTED: OnceLock<Wanted> = OnceLock::new();
    WANTED.get_or_init(|| {
        let text = std::env::var("GPUSESSION_TRACE").unwrap_or_default();
        let has = |word: &str| text.split(',').any(|w| w.trim() == word);
        Wanted { why: has("why"), missing: has("missing"), errors: has("errors"), summary: has("summary") }
    })
}

/// Number of uses of each unsupported call, by name.
static MISSING: Mutex<BTreeMap<Cow<'static, str>, u64>> = Mutex::new(BTreeMap::new());

/// Returns `true` if the program's end prints the link's numbers.
pub fn summary() -> bool {
    wanted().summary
}

/// Prints why the program has no GPU, lost it, or may not do something with it.
pub fn why(reason: &str) {
    if wanted().why {
        print(&format!("gpusession: {reason}"));
    }
}

/// Counts a use of a call that is not supported.
///
/// The first use of each name prints a line; the program's end prints the counts.
pub fn missing(name: impl Into<Cow<'static, str>>) {
    static AT_END: Once = Once::new();
    if !wanted().missing {
        return;
    }
    // SAFETY: the handler takes no arguments and reads only statics, which are never dropped.
    AT_END.call_once(|| _ = unsafe { libc::atexit(print_missing) });
    let name = name.into();
    let line = format!("gpusession: {name} is not supported (see docs/coverage.md)");
    let mut missing = MISSING.lock().unwrap_or_else(PoisonError::into_inner);
    let count = missing.entry(name).or_default();
    *count += 1;
    if *count == 1 {
        print(&line);
    }
}

extern "C" fn print_missing() {
    for (name, count) in &*MISSING.lock().unwrap_or_else(PoisonError::into_inner) {
        print(&format!("gpusession: not supported: {count} {name}"));
    }
}

/// Prints a call that failed, with its error.
#[cold]
pub fn failed(name: &'static str, status: i32) {
    if wanted().errors {
        let error = crate::errors::find(status)
            .map_or("unknown error", |(name, _)| name.to_str().unwrap_or_default());
        print(&format!("gpusession: {name} -> {error}"));
    }
}

/// Prints one line; a line that cannot be written is lost.
pub fn print(line: &str) {
    static FILE: OnceLock<Option<Mutex<std::fs::File>>> = OnceLock::new();
    let file = FILE.get_or_init(|| {
        // A program with more rights than its user writes no file that the user names.
        let path = std::env::var_os("GPUSESSION_TRACE_FILE").filter(|_| !privileged())?;
        std::fs::OpenOptions::new().append(true).create(true).open(path).ok().map(Mutex::new)
    });
    // No place remains to report a failed write.
    let _ = match file {
        Some(file) => writeln!(file.lock().unwrap_or_else(PoisonError::into_inner), "{line}"),
        None => writeln!(std::io::stderr(), "{line}"),
    };
}
