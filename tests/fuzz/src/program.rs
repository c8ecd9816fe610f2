//! A random CUDA program as data: buffers, streams, and the steps of its threads.

use serde::{Deserialize, Serialize};

pub type BufferId = usize;
pub type GraphId = usize;
pub type EventId = usize;
/// A slot of the buffer of signals, which streams write and wait for.
pub type Slot = usize;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub seed: u64,
    pub threads: usize,
    pub streams: Vec<StreamKind>,
    pub buffers: Vec<Buffer>,
    pub events: usize,
    /// In an order in which they could run one after the other.
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamKind {
    Legacy,
    /// The default stream of one of the program's threads.
    PerThread(usize),
    Blocking,
    NonBlocking,
}

impl StreamKind {
    /// Returns `true` if the stream is ordered with the legacy stream.
    pub fn follows_legacy(self) -> bool {
        matches!(self, StreamKind::Blocking | StreamKind::PerThread(_))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Device,
    /// Allocated and freed in a stream's order.
    Pool,
    Managed,
    /// Host memory of the driver, with these flags of `cuMemHostAlloc`.
    Pinned(u32),
    /// Heap memory that the program registers.
    Registered,
    Pageable,
    /// Memory of the first thread's stack.
    Stack,
}

impl Kind {
    /// Returns `true` if kernels can access the memory.
    pub fn on_device(self) -> bool {
        !matches!(self, Kind::Pageable | Kind::Stack)
    }

    /// Returns `true` if the program can access the memory.
    pub fn on_host(self) -> bool {
        !matches!(self, Kind::Device | Kind::Pool)
    }

    /// Returns `true` for host memory that the driver does not know.
    pub fn pageable(self) -> bool {
        matches!(self, Kind::Pageable | Kind::Stack)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Buffer {
    pub kind: Kind,
    /// Bytes, a multiple of 4.
    pub size: usize,
}

/// Bytes of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub buffer: BufferId,
    pub offset: usize,
    pub len: usize,
}

/// Rows of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plane {
    pub buffer: BufferId,
    pub offset: usize,
    pub pitch: usize,
}

impl Plane {
    pub fn span(self, width: usize, height: usize) -> Span {
        Span { buffer: self.buffer, offset: self.offset, len: self.pitch * (height - 1) + width }
    }
}

/// Work that a stream performs, or a node of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// `typed`: by the call for both kinds of memory, as `cuMemcpyHtoD`, else by `cuMemcpy`.
    Copy {
        to: Span,
        from: Span,
        typed: bool,
    },
    Copy2D {
        to: Plane,
        from: Plane,
        width: usize,
        height: usize,
    },
    /// Fills with a value of 1, 2 or 4 bytes.
    Fill {
        to: Span,
        value: u32,
        width: usize,
    },
    /// Word by word: `to = to * K + from ^ salt`. Each thread first spins.
    Mix {
        to: Span,
        from: Span,
        salt: u32,
        spin: u32,
    },
    /// Adds all words of `from` into the words of `to`, of which there are at most 256.
    Fold {
        to: Span,
        from: Span,
        salt: u32,
    },
    /// As `Mix`, by a function of the program, which first sleeps for some microseconds.
    HostMix {
        to: Span,
        from: Span,
        salt: u32,
        sleep: u32,
    },
}

/// A node of a graph. It runs after `after` and after the previous node of its lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub work: Work,
    pub lane: usize,
    pub after: Vec<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Build {
    /// Captured in a mode of `cuStreamBeginCapture`; the first lane is a stream of the program.
    Capture { mode: u32, stream: usize },
    /// Node by node.
    Nodes,
    /// Node by node, then cloned; the original is destroyed.
    Clone,
    /// Node by node, as the only child of another graph.
    Child,
}

/// A call that the driver refuses, without effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Invalid {
    AllocateNothing,
    AllocateTooMuch,
    FreeUnknown,
    FillMisaligned,
    BlockTooLarge,
    TimeOfUnrecorded,
    EndOfNoCapture,
    UnregisterUnknown,
    DevicePointerOfUnknown,
    FunctionUnknown,
    CopyFromNull,
    AttributeOfUnknown,
    NoMode,
    EmptyGrid,
    FillBeyond,
    CopyToBeyond,
    CopyFromBeyond,
    CopyWithinBeyond,
    CopyFromUnknown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    Allocate(BufferId),
    AllocateIn(BufferId, usize),
    Free(BufferId),
    FreeIn(BufferId, usize),
    /// Enqueues work in a stream by an asynchronous call.
    Enqueue(Work, usize),
    /// Performs a copy or a fill by a synchronous call, which uses the legacy stream.
    Call(Work),
    /// The program's thread itself does a `HostMix`.
    Touch(Work),
    Sleep(u32),
    Record(EventId, usize),
    /// Launches a graph that records the event.
    GraphRecord(EventId, usize),
    /// Launches a kernel that records the event by an attribute.
    KernelRecord(EventId, usize),
    WaitEvent(usize, EventId),
    /// Launches a graph that waits for the event, which has been recorded.
    GraphWait(usize, EventId),
    SyncEvent(EventId),
    SyncStream(usize),
    SyncContext,
    /// Asks a stream whether it is done, and ignores the answer.
    Query(usize),
    Signal(usize, Slot),
    WaitSignal(usize, Slot),
    /// Waits until an earlier step of another thread has returned.
    Await(usize),
    Define(GraphId, Build, Vec<Node>),
    /// Replaces parameters: nodes as in the definition, with other spans and values.
    Update(GraphId, Vec<Node>),
    Launch(GraphId, usize),
    Destroy(GraphId),
    Refused(Invalid),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub thread: usize,
    pub op: Op,
}

/// One access of a piece of work.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    pub span: Span,
    pub write: bool,
}

impl Work {
    pub fn accesses(&self) -> Vec<Access> {
        let read = |span| Access { span, write: false };
        let write = |span| Access { span, write: true };
        match *self {
            Work::Copy { to, from, .. } => vec![read(from), write(to)],
            Work::Copy2D { to, from, width, height } => {
                vec![read(from.span(width, height)), write(to.span(width, height))]
            }
            Work::Fill { to, .. } => vec![write(to)],
            Work::Mix { to, from, .. } | Work::Fold { to, from, .. } | Work::HostMix { to, from, .. } => {
                vec![read(from), write(to)]
            }
        }
    }

    /// Returns `true` if host memory that the driver does not know is read or written.
    pub fn names(&self, buffers: &[Buffer], kind: impl Fn(Kind) -> bool) -> bool {
        self.accesses().iter().any(|access| kind(buffers[access.span.buffer].kind))
    }
}

/// The factor of `Mix`.
pub const FACTOR: u32 = 0x9e37_79b1;

/// Returns a word of `Mix`.
pub fn mix(to: u32, from: u32, salt: u32) -> u32 {
    to.wrapping_mul(FACTOR).wrapping_add(from) ^ salt
}
