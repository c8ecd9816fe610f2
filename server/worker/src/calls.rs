//! Effects of operations, handles of generated calls: `build.rs` reads `proto/calls/calls.txt`.

use gpusession_proto::frame::op;

mod generated {
    include!(concat!(env!("OUT_DIR"), "/calls.rs"));
}
pub use generated::{takes_away, touches, waits, works};

/// Returns `true` for operations whose body may come in several frames.
///
/// An operation that waits would hold the body meanwhile. Of copies, and of frames that overtake
/// others, the replay reads the order in their own frame alone.
pub fn may_continue(operation: u16) -> bool {
    !waits(operation)
        && !matches!(
            operation,
            op::COPY_TO_DEVICE | op::WRITE_HOST | op::HOST_FUNC_DONE | op::MARK | op::BODY_PART
        )
}
