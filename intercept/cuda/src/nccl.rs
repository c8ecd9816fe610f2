//! NCCL's tuner plugin: refuses communicators that would hang.
//!
//! NCCL loads `libnccl-tuner.so` by itself, which needs this library and contains nothing (see the
//! Makefile), and calls `init` for each communicator. NCCL's network, and its memory shared by GPUs
//! that do not reach each other, need [watched memory](crate::watched). Without it a kernel would
//! wait forever; the refusal names the remedy instead, also in PyTorch's exception.
//!
//! Structures as in NCCL's `src/include/plugin/tuner/`: version 5 for NCCL 2.28 and later, 4 for
//! 2.24 to 2.27.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::panic::catch_unwind;
use std::ptr::null_mut;

use crate::devices::Peer;
use crate::{clients, trace, watched};

/// `ncclResult_t`
type NcclResult = c_int;
const SUCCESS: NcclResult = 0;
/// `ncclInvalidUsage`
const INVALID_USAGE: NcclResult = 5;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format and its arguments.
type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// Leaves NCCL's choices as they are: communicator, collective, bytes, operations, table of costs
/// with its sides, registered buffers, channels.
type CollectiveInfo = extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> NcclResult;

/// `ncclTuner_v5_t`
#[repr(C)]
pub struct TunerV5 {
    name: *const c_char,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        usize,
        usize,
        Option<Logger>,
        *const c_void,
        *mut c_void,
    ) -> NcclResult,
    get_coll_info: CollectiveInfo,
    finalize: extern "C" fn(*mut c_void) -> NcclResult,
}

/// `ncclTuner_v4_t`
#[repr(C)]
pub struct TunerV4 {
    name: *const c_char,
    init: unsafe extern "C" fn(usize, usize, Option<Logger>, *mut *mut c_void) -> NcclResult,
    get_coll_info: CollectiveInfo,
    destroy: extern "C" fn(*mut c_void) -> NcclResult,
}

// SAFETY: the names are constants, and nothing writes the tables.
unsafe impl Sync for TunerV5 {}
// SAFETY: as above.
unsafe impl Sync for TunerV4 {}

const NAME: &CStr = c"gpusession";

/// The plugin for NCCL 2.28 and later.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v5: TunerV5 =
    TunerV5 { name: NAME.as_ptr(), init: init_v5, get_coll_info: keep, finalize: end };

/// The plugin for NCCL 2.24 to 2.27.
#[unsafe(no_mangle)]
pub static ncclTunerPlugin_v4: TunerV4 =
    TunerV4 { name: NAME.as_ptr(), init: init_v4, get_coll_info: keep, destroy: end };

extern "C" fn keep(
    _: *mut c_void,
    _: c_int,
    _: usize,
    _: c_int,
    _: *mut *mut f32,
    _: c_int,
    _: c_int,
    _: c_int,
    _: *mut c_int,
) -> NcclResult {
    SUCCESS
}

extern "C" fn end(_: *mut c_void) -> NcclResult {
    SUCCESS
}

/// # Safety
/// As NCCL calls it: `context` is null or valid for a pointer.
unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _: u64,
    ranks: usize,
    machines: usize,
    logger: Option<Logger>,
    _: *const c_void,
    _: *mut c_void,
) -> NcclResult {
    // SAFETY: by this function's contract.
    unsafe { init(context, ranks, machines, logger) }
}

/// # Safety
/// As NCCL calls it: `context` is null or valid for a pointer.
unsafe extern "C" fn init_v4(
    ranks: usize,
    machines: usize,
    logger: Option<Logger>,
    context: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: by this function's contract.
    unsafe { init(context, ranks, machines, logger) }
}

/// # Safety
/// `context` is null or valid for a pointer.
unsafe fn init(
    context: *mut *mut c_void,
    ranks: usize,
    machines: usize,
    logger: Option<Logger>,
) -> NcclResult {
    if !context.is_null() {
        // SAFETY: by this function's contract.
        unsafe { context.write(null_mut()) };
    }
    let refused = catch_unwind(|| {
        // Before `cuInit` no client exists: the program uses another libcuda.so.1.
        let client = clients::all().ok()?.next()?;
        let variable = |name: &str| std::env::var(name).ok();
        let works = watched::wanted(client) && watched::only_flagged_words(variable);
        // With fewer ranks, NCCL may use a part of the GPUs whose members reach each other.
        let part = ranks < client.devices.len();
        let peers = part || all_reached(client.devices.iter().map(|device| device.peers.as_slice()));
        refusal(ranks, machines, peers && !peers_disabled(variable), works)
    });
    let Some(reason) = refused.ok().flatten() else { return SUCCESS };
    trace::why(&reason);
    if let (Some(logger), Ok(reason)) = (logger, CString::new(reason)) {
        const WARN: c_int = 2;
        const ALL_SUBSYSTEMS: c_ulong = c_ulong::MAX;
        // SAFETY: NCCL's logger takes a format as `printf` does, here with its one argument.
        unsafe {
            logger(WARN, ALL_SUBSYSTEMS, c"gpusession".as_ptr(), 0, c"%s".as_ptr(), reason.as_ptr());
        }
    }
    INVALID_USAGE
}

/// Returns why a communicator would hang.
fn refusal(ranks: usize, machines: usize, peers: bool, works: bool) -> Option<String> {
    if ranks < 2 || works || machines < 2 && peers {
        return None;
    }
    let place = if machines < 2 {
        "NCCL on GPUs without peer access".to_owned()
    } else {
        format!("NCCL on {machines} machines")
    };
    Some(format!(
        "gpusession: {place}: communicator refused, it would hang: host memory travels at synchronizations \
         only; set {} for every process, or use GPUs of one lease that reach each other",
        watched::REMEDY
    ))
}

/// Returns `true` if all devices reach each other's memory; each has an entry for every device.
fn all_reached<'a>(peers: impl Iterator<Item = &'a [Peer]>) -> bool {
    peers
        .enumerate()
        .all(|(device, others)| others.iter().enumerate().all(|(i, other)| i == device || other.reached))
}

/// Returns `true` if the program forbids NCCL the access between GPUs.
fn peers_disabled(variable: impl Fn(&str) -> Option<String>) -> bool {
    let level = variable("NCCL_P2P_LEVEL");
    let disabled = variable("NCCL_P2P_DISABLE").is_some_and(|value| !matches!(value.trim(), "" | "0"));
    disabled || level.is_some_and(|level| matches!(level.trim(), "LOC" | "0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_that_would_hang_are_refused() {
        for (ranks, machines, peers, works, refused) in [
            (1, 1, false, false, false),
            (2, 1, true, false, false),
            (2, 1, false, false, true),
            (2, 1, false, true, false),
            (2, 2, true, false, true),
            (16, 2, true, true, false),
        ] {
            let reason = refusal(ranks, machines, peers, works);
            assert_eq!(reason.is_some(), refused, "{ranks} {machines} {peers} {works}: {reason:?}");
        }
        let reason = refusal(4, 2, true, false).unwrap();
        assert!(reason.contains("on 2 machines") && reason.contains("NCCL_PROTO=LL"), "{reason}");
    }

    #[test]
    fn variables_that_forbid_peer_access_count() {
        let with = |name: &'static str, value: &'static str| {
            peers_disabled(move |asked| (asked == name).then(|| value.to_owned()))
        };
        assert!(with("NCCL_P2P_DISABLE", "1") && with("NCCL_P2P_LEVEL", "LOC"));
        assert!(!with("NCCL_P2P_DISABLE", "0") && !with("NCCL_P2P_LEVEL", "SYS") && !with("OTHER", "1"));
    }

    #[test]
    fn devices_without_a_way_to_another_one_count() {
        let peers = |reached: [bool; 4]| reached.map(|reached| Peer { reached, ..Peer::default() });
        let both = |reached| all_reached(peers(reached).chunks(2));
        assert!(both([false, true, true, false]) && all_reached([&[Peer::default()][..]].into_iter()));
        assert!(!both([true, false, true, true]) && !both([true, true, false, true]));
    }

    #[test]
    fn nccl_finds_both_versions_and_a_context() {
        assert_eq!((ncclTunerPlugin_v4.name, ncclTunerPlugin_v5.name), (NAME.as_ptr(), NAME.as_ptr()));
        // Without a client of the process nothing is refused.
        let mut context = std::ptr::dangling_mut::<c_void>();
        // SAFETY: the context is valid.
        let made = unsafe { (ncclTunerPlugin_v4.init)(2, 2, None, &mut context) };
        assert_eq!((made, context), (SUCCESS, null_mut()));
        assert_eq!((ncclTunerPlugin_v5.finalize)(context), SUCCESS);
        let info = ncclTunerPlugin_v5.get_coll_info;
        let mut channels = 0;
        assert_eq!(info(context, 4, 1 << 20, 1, null_mut(), 7, 3, 0, &mut channels), SUCCESS);
        assert_eq!(channels, 0);
    }
}
