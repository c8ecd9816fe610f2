//! `cuGetProcAddress`: finds the newest variant of a call whose prototype the program's CUDA
//! version knows.

use crate::client::NEWEST;

/// One variant of a call.
pub struct ProcAddress {
    /// Name without version suffix, as programs request it.
    pub base: &'static str,
    /// First CUDA version with this prototype, as 1000 * major + 10 * minor.
    pub version: u32,
    /// Whether it is the variant for per-thread default streams.
    pub per_thread: bool,
    pub function: unsafe extern "C" fn(),
}

include!(concat!(env!("OUT_DIR"), "/proc_addresses.rs"));

/// Reason why no variant fits.
#[derive(Debug, PartialEq, Eq)]
pub enum Missing {
    /// No call has this name.
    Symbol,
    /// Only newer CUDA versions than the program's have the call.
    Version,
}

/// Finds a call for a program of CUDA version `version` (1000 * major + 10 * minor).
pub fn find(name: &[u8], version: i32, per_thread: bool) -> Result<unsafe extern "C" fn(), Missing> {
    let start = PROC_ADDRESSES.partition_point(|row| row.base.as_bytes() < name);
    // Rows above NEWEST stay hidden, because a driver of the reported version would not have them.
    let rows = PROC_ADDRESSES[start..]
        .iter()
        .take_while(|row| row.base.as_bytes() == name)
        .filter(|row| row.version <= NEWEST as u32);
    let mut best = None;
    let mut known = false;
    for row in rows {
        known = true;
        if i64::from(row.version) > i64::from(version) || (row.per_thread && !per_thread) {
            continue;
        }
        // Rows are sorted by version. Within a version the per-thread variant is last and wins if
        // requested.
        if best.is_none_or(|b: &ProcAddress| row.version > b.version || row.per_thread || !b.per_thread) {
            best = Some(row);
        }
    }
    match best {
        Some(row) => Ok(row.function),
        None if known => Err(Missing::Version),
        None => Err(Missing::Symbol),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(found: Result<unsafe extern "C" fn(), Missing>, function: &str) -> bool {
        let row = |f: &&ProcAddress| found.as_ref().is_ok_and(|g| std::ptr::fn_addr_eq(f.function, *g));
        PROC_ADDRESSES.iter().filter(row).any(|r| {
            let suffixed =
                if r.per_thread { function.ends_with("_ptsz") || function.ends_with("_ptds") } else { true };
            suffixed && function.starts_with(r.base)
        })
    }

    #[test]
    fn versions_choose_prototypes() {
        assert_eq!(find(b"cuNoSuchCall", 13000, false).unwrap_err(), Missing::Symbol);
        assert_eq!(find(b"", 0, false).unwrap_err(), Missing::Symbol);
        assert_eq!(find(b"cuGraphAddNode", 11000, false).unwrap_err(), Missing::Version);
        assert!(is(find(b"cuStreamSynchronize", 2000, false), "cuStreamSynchronize"));
        assert!(is(find(b"cuStreamSynchronize", 7000, true), "cuStreamSynchronize_ptsz"));
        // A version before the per-thread variant's first gets the ordinary one.
        assert!(find(b"cuStreamSynchronize", 2000, true).is_ok());
        let one = find(b"cuCtxSynchronize", 2000, false).unwrap();
        let two = find(b"cuCtxSynchronize", 13000, false).unwrap();
        assert!(!std::ptr::fn_addr_eq(one, two), "cuCtxSynchronize of 13.0 takes a context");
    }

    #[test]
    fn functions_newer_than_the_driver_are_not_found() {
        let function = |row: &ProcAddress| row.function;
        let younger: Vec<_> = PROC_ADDRESSES.iter().filter(|row| row.version > NEWEST as u32).collect();
        assert!(younger.iter().any(|row| row.base == "cuLaunchHostFunc"));
        for row in younger {
            let name = row.base.as_bytes();
            let known = PROC_ADDRESSES
                .iter()
                .filter(|r| r.base == row.base && r.version <= NEWEST as u32 && !r.per_thread)
                .max_by_key(|r| r.version)
                .map(function);
            match (find(name, 99_000, false), known) {
                (Ok(found), Some(known)) => assert!(std::ptr::fn_addr_eq(found, known), "{}", row.base),
                (found, known) => {
                    assert_eq!(
                        (found.err(), known.is_some()),
                        (Some(Missing::Symbol), false),
                        "{}",
                        row.base
                    );
                }
            }
        }
    }
}
