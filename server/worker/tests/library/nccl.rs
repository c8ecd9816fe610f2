//! NCCL's tuner plugin in the library, as NCCL calls it.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use gpusession_test_support::cuda::{Cuda, library};

use crate::{granted, succeeds, worker};

/// `ncclInvalidUsage`
const INVALID_USAGE: c_int = 5;

/// The beginning of `ncclTuner_v5_t`.
#[repr(C)]
struct Tuner {
    name: *const c_char,
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        u64,
        usize,
        usize,
        *const c_void,
        *const c_void,
        *mut c_void,
    ) -> c_int,
}

/// Makes a communicator of two ranks on one machine, then on two; `MADE` says what NCCL gets.
pub fn makes_communicators() {
    let _cuda = Cuda::begin();
    let library = library();
    // SAFETY: the symbol is a table of this layout, which is never freed.
    let tuner = unsafe { &**library.get::<*const Tuner>(b"ncclTunerPlugin_v5").unwrap() };
    let made = [1, 2].map(|machines| {
        let mut context = null_mut();
        // SAFETY: the context is valid; the plugin takes a null logger, and neither structure.
        unsafe { (tuner.init)(&mut context, 7, 2, machines, null(), null(), null_mut()) }
    });
    assert_eq!(format!("{made:?}"), std::env::var("MADE").unwrap());
}

#[test]
fn nccl_refuses_communicators_that_would_hang_and_says_what_helps() {
    let only_ll = [
        ("NCCL_PROTO", "LL"),
        ("NCCL_ALLOC_P2P_NET_LL_BUFFERS", "1"),
        ("NCCL_P2P_LL_THRESHOLD", "1099511627776"),
    ];
    let refused = [0, INVALID_USAGE];
    for (variables, made) in [
        (&[][..], refused),
        (&only_ll[..], [0, 0]),
        (&only_ll[..1], refused),
        (&[("GPUSESSION_WATCHED_MEMORY", "on")], refused),
        (&[("NCCL_P2P_DISABLE", "1")], [INVALID_USAGE; 2]),
        (&[only_ll[0], only_ll[1], only_ll[2], ("GPUSESSION_WATCHED_MEMORY", "off")], refused),
    ] {
        let (_machine, worker) = worker(&[]);
        let mut variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).into())).collect();
        variables.push(("MADE", format!("{made:?}")));
        let said = succeeds("makes_communicators", vec![granted(&worker)], &variables);
        let told = said.contains("NCCL on 2 machines") && said.contains("set NCCL_PROTO=LL, NCCL_ALLOC");
        assert_eq!(told, made[1] != 0, "{said}");
    }
}
