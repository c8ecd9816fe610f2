//! Output of `GPUSESSION_TRACE=why,missing,errors`, to stderr or `GPUSESSION_TRACE_FILE`.
//!
//! The library prints nothing else.

use std::io::Write;

use gpusession_link::grant::privileged;

fn wanted(word: &str) -> bool {
    std::env::var("GPUSESSION_TRACE").is_ok_and(|t| t.split(',').any(|w| w.trim() == word))
}

/// Prints why the process has no GPU, or lost it.
pub fn why(reason: &str) {
    if wanted("why") {
        print(&format!("gpusession: {reason}"));
    }
}

/// Prints a call that is not supported, with the table's reason.
pub fn missing(name: &str, reason: &str) {
    if wanted("missing") {
        print(&format!("gpusession: {name}: {reason} (see docs/coverage-nvml.md)"));
    }
}

/// Prints a call that failed, with its `nvmlReturn_t`.
pub fn failed(name: &str, status: u32) {
    if wanted("errors") {
        print(&format!("gpusession: {name} -> {status}"));
    }
}

fn print(line: &str) {
    // A program with more rights than its user writes no file that the user names.
    let file = std::env::var_os("GPUSESSION_TRACE_FILE")
        .filter(|_| !privileged())
        .and_then(|path| std::fs::OpenOptions::new().append(true).create(true).open(path).ok());
    // No place remains to report a failed write.
    let _ = match file {
        Some(mut file) => writeln!(file, "{line}"),
        None => writeln!(std::io::stderr(), "{line}"),
    };
}
