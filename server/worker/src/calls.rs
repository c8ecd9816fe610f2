//! Effects of operations: by `EFFECTS` if they are written by hand, else derived by `build.rs`.

use gpusession_proto::frame::op;

mod generated {
    include!(concat!(env!("OUT_DIR"), "/calls.rs"));
}
pub use generated::{takes_away, touches};

/// Effect of the replay of an operation that is written by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// The replay waits for no one, and the GPU gets no work.
    Brief,
    /// The executor waits: for the GPU, for bytes of the connection, or for another worker.
    Waits,
    /// The GPU gets work, or copies; the client counts as active.
    Works,
    /// Both.
    WaitsAndWorks,
}

/// Every operation that `calls.txt` numbers by `op`; a test notices one that is not here.
const EFFECTS: &[(Effect, &[u16])] = &[
    (
        Effect::Waits,
        &[
            op::CTX_SYNC,
            op::EVENT_SYNC,
            op::FREE,
            op::SHARE_IMPORT,
            op::SHARE_OPEN,
            op::SHARE_EVENT_OPEN,
            op::SHARE_POOL_IMPORT,
            op::SHARE_POINTER_IMPORT,
            op::STREAM_SYNC,
        ],
    ),
    (Effect::WaitsAndWorks, &[op::COPY_BOX, op::COPY_FROM_DEVICE]),
    (
        Effect::Works,
        &[
            op::COPY_HOST,
            op::COPY_TO_DEVICE,
            op::DECOMPRESS,
            op::GRAPH_LAUNCH,
            op::HOST_FUNC,
            op::LAUNCH,
            op::STREAM_BATCH,
            op::WRITE_HOST,
        ],
    ),
    (
        Effect::Brief,
        &[
            // Frames of the connection.
            op::HELLO,
            op::LANE,
            op::MEASURE,
            op::MARK,
            op::BODY_PART,
            op::HOST_FUNC_DONE,
            // Contexts, limits and resources.
            op::CTX_CREATE,
            op::CTX_DESTROY,
            op::CTX_EVENT,
            op::CTX_SET_LIMIT,
            op::PRIMARY_RESET,
            op::GREEN_CREATE,
            op::GREEN_DESTROY,
            op::DEV_RESOURCE,
            op::DEV_RESOURCE_SPLIT,
            op::DEV_RESOURCE_DESC,
            op::DEV_RESOURCE_GROUPS,
            op::PEER_ATOMICS,
            op::TPC_TOPOLOGY,
            op::MEM_INFO,
            // Memory.
            op::ALLOC,
            op::MAP_ARRAYS,
            op::MIRROR_HOST,
            op::UNMIRROR_HOST,
            op::SHARE_ADDRESS,
            op::SHARE_EVENT,
            op::SHARE_EXPORT,
            op::SHARE_POINTER,
            op::SHARE_POOL,
            // Streams and events.
            op::STREAM_CREATE,
            op::STREAM_DESTROY,
            op::STREAM_QUERY,
            op::STREAM_WAIT_EVENT,
            op::EVENT_CREATE,
            op::EVENT_DESTROY,
            op::EVENT_ELAPSED,
            op::EVENT_QUERY,
            op::EVENT_RECORD,
            op::CAPTURE_BEGIN,
            op::CAPTURE_END,
            op::CAPTURE_INFO,
            op::CAPTURE_UPDATE,
            // Images, functions and references.
            op::IMAGE_HAVE,
            op::IMAGE_DATA,
            op::MODULE_LOAD,
            op::MODULE_UNLOAD,
            op::LIBRARY_LOAD,
            op::LIBRARY_MODULE,
            op::LIBRARY_UNLOAD,
            op::LINK_CREATE,
            op::LINK_ADD,
            op::LINK_COMPLETE,
            op::LINK_IMAGE,
            op::LINK_DESTROY,
            op::ENUMERATE,
            op::GET_FUNCTION,
            op::GET_GLOBAL,
            op::FUNC_ATTRIBUTE,
            op::FUNC_SET_ATTRIBUTE,
            op::OCCUPANCY,
            op::TENSOR_MAP,
            op::TENSOR_MAP_CHANGE,
            op::REFERENCE_FIND,
            op::TEXREF_CREATE,
            op::TEXREF_DESTROY,
            // Graphs.
            op::GRAPH_ADD,
            op::GRAPH_CHILD,
            op::GRAPH_CLONE,
            op::GRAPH_CREATE,
            op::GRAPH_DESTROY,
            op::GRAPH_DRAW,
            op::GRAPH_EXEC_DESTROY,
            op::GRAPH_EXEC_SET,
            op::GRAPH_INSTANTIATE,
            op::GRAPH_NODES,
            op::GRAPH_NODE_PARAMS,
            op::GRAPH_UPDATE,
            op::USER_OBJECT_CREATE,
        ],
    ),
];

/// [`EFFECTS`] by number, since each frame is looked up; an operation in two rows does not compile.
static BY_NUMBER: [Option<Effect>; op::COUNT] = {
    let mut table = [None; op::COUNT];
    let mut row = 0;
    while row < EFFECTS.len() {
        let (effect, operations) = EFFECTS[row];
        let mut i = 0;
        while i < operations.len() {
            assert!(table[operations[i] as usize].is_none(), "an operation stands twice in EFFECTS");
            table[operations[i] as usize] = Some(effect);
            i += 1;
        }
        row += 1;
    }
    table
};

fn effect(operation: u16) -> Option<Effect> {
    BY_NUMBER.get(usize::from(operation)).copied().flatten()
}

/// Returns `true` for operations whose replay may hold its executor up.
pub fn waits(operation: u16) -> bool {
    matches!(effect(operation), Some(Effect::Waits | Effect::WaitsAndWorks))
}

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

/// Returns `true` for operations that give the GPU work, or copy.
pub fn works(operation: u16) -> bool {
    match effect(operation) {
        Some(effect) => matches!(effect, Effect::Works | Effect::WaitsAndWorks),
        None => generated::works(operation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_by_hand_states_its_effect() {
        let from_worker = |o: &u16| (op::REPLY..=op::RELEASE).contains(o) || *o == op::REPLY_PART;
        let by_hand = |number: &u16| {
            let name = op::name(*number);
            name != "?" && !name.starts_with("cu") && !from_worker(number)
        };
        let forgotten: Vec<_> = (1..op::COUNT as u16)
            .filter(|number| by_hand(number) && effect(*number).is_none())
            .map(op::name)
            .collect();
        assert!(forgotten.is_empty(), "{forgotten:?}: a line of EFFECTS");
    }
}
