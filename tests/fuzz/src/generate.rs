//! From a seed to a valid program.

use crate::order::{Conflict, Order};
use crate::program::{
    Buffer, BufferId, Build, Invalid, Kind, Node, Op, Plane, Program, Span, Step, StreamKind, Work,
};
use fastrand::Rng;

/// Bytes of the buffers: around the sizes at which the library takes another way.
const SIZES: [usize; 12] =
    [64, 256, 1024, 4096, 16 << 10, 40_000, 65_532, 65_536, 65_540, 200_000, 1 << 20, 5 << 20];
/// Kernels and functions of the program touch at most these bytes.
const MAX_MIX: usize = 16 << 10;
const INVALID: [Invalid; 19] = [
    Invalid::AllocateNothing,
    Invalid::AllocateTooMuch,
    Invalid::FreeUnknown,
    Invalid::FillMisaligned,
    Invalid::BlockTooLarge,
    Invalid::TimeOfUnrecorded,
    Invalid::EndOfNoCapture,
    Invalid::UnregisterUnknown,
    Invalid::DevicePointerOfUnknown,
    Invalid::FunctionUnknown,
    Invalid::CopyFromNull,
    Invalid::AttributeOfUnknown,
    Invalid::NoMode,
    Invalid::EmptyGrid,
    Invalid::FillBeyond,
    Invalid::CopyToBeyond,
    Invalid::CopyFromBeyond,
    Invalid::CopyWithinBeyond,
    Invalid::CopyFromUnknown,
];
pub const SIGNALS: usize = 64;

/// Generates the program of a seed.
pub fn program(seed: u64) -> Program {
    let mut rng = Rng::with_seed(seed);
    let threads = [1, 1, 1, 2, 2, 3][rng.usize(..6)];
    let mut streams = vec![StreamKind::Legacy];
    streams.extend((0..threads).map(StreamKind::PerThread));
    for _ in 0..rng.usize(2..6) {
        streams.push(if rng.bool() { StreamKind::NonBlocking } else { StreamKind::Blocking });
    }
    let kinds = kinds(&mut rng);
    let mut large = 0;
    let buffers: Vec<Buffer> = (0..rng.usize(5..13))
        .map(|_| {
            let most = if large < 2 { SIZES.len() } else { SIZES.len() - 3 };
            let size = SIZES[rng.usize(..most).min(rng.usize(..most))];
            large += usize::from(size >= 200_000);
            let kind = kinds[rng.usize(..kinds.len())];
            let size = if kind == Kind::Stack { size.min(16 << 10) } else { size };
            Buffer { kind, size }
        })
        .collect();
    let events = 6;
    let weights = weights(&mut rng);
    let length = rng.usize(20..120);
    let mut generator = Generator {
        order: Order::new(threads, &streams, &buffers, events),
        rng,
        threads,
        streams: &streams,
        buffers: &buffers,
        events,
        steps: Vec::new(),
        signals: 0,
        thread: 0,
    };
    for buffer in 0..buffers.len() {
        if buffer < 4 || generator.rng.bool() {
            generator.allocate(buffer);
        }
    }
    let mut tries = 0;
    while generator.steps.len() < length && tries < 10 * length {
        tries += 1;
        generator.random(&weights);
    }
    let steps = generator.steps;
    Program { seed, threads, streams, buffers, events, steps }
}

/// A seed uses some kinds of memory and not others, so that each meets each other often.
fn kinds(rng: &mut Rng) -> Vec<Kind> {
    let all = [
        Kind::Pool,
        Kind::Managed,
        Kind::Pinned(0),
        Kind::Pinned(1 | 2),
        Kind::Pinned(2 | 4),
        Kind::Registered,
        Kind::Pageable,
        Kind::Stack,
    ];
    let mut kinds = vec![Kind::Device];
    kinds.extend(all.into_iter().filter(|_| rng.u8(..3) > 0));
    kinds
}

#[derive(Clone, Copy, PartialEq)]
enum Choice {
    Copy,
    Copy2D,
    Fill,
    Mix,
    Fold,
    HostFunction,
    Call,
    Touch,
    Sync,
    Event,
    Sleep,
    Graph,
    Launch,
    Free,
    Allocate,
    Refused,
}

const CHOICES: [(Choice, u32); 16] = [
    (Choice::Copy, 12),
    (Choice::Copy2D, 3),
    (Choice::Fill, 5),
    (Choice::Mix, 10),
    (Choice::Fold, 5),
    (Choice::HostFunction, 5),
    (Choice::Call, 6),
    (Choice::Touch, 7),
    (Choice::Sync, 2),
    (Choice::Event, 4),
    (Choice::Sleep, 1),
    (Choice::Graph, 3),
    (Choice::Launch, 9),
    (Choice::Free, 1),
    (Choice::Allocate, 1),
    (Choice::Refused, 2),
];

/// Each choice has its weight, or none in a third of the seeds.
fn weights(rng: &mut Rng) -> Vec<Choice> {
    let mut weights = Vec::new();
    for (choice, weight) in CHOICES {
        if choice == Choice::Copy || rng.u8(..3) > 0 {
            weights.extend(std::iter::repeat_n(choice, weight as usize));
        }
    }
    weights
}

struct Generator<'p> {
    order: Order<'p>,
    rng: Rng,
    threads: usize,
    streams: &'p [StreamKind],
    buffers: &'p [Buffer],
    events: usize,
    steps: Vec<Step>,
    signals: usize,
    thread: usize,
}

impl Generator<'_> {
    fn add(&mut self, op: Op) -> bool {
        self.add_by(self.thread, op, 0)
    }

    /// Adds a step, after others that order it with the steps that it would race with.
    fn add_by(&mut self, thread: usize, op: Op, depth: usize) -> bool {
        let step = Step { thread, op };
        for _ in 0..12 {
            let fixed = match self.order.apply(&step) {
                Ok(()) => {
                    self.steps.push(step);
                    return true;
                }
                Err(Conflict::Impossible | Conflict::Nodes(..)) => false,
                Err(_) if depth > 4 => false,
                Err(Conflict::Thread(stamp)) => match self.order.thread_of(stamp) {
                    Some(_) => self.add_by(thread, Op::Await(self.order.step_of(stamp)), depth + 1),
                    None => {
                        let stream = self.order.stream_of(stamp).expect("an agent is a thread or a stream");
                        self.wait_for(thread, stream, depth + 1)
                    }
                },
                Err(Conflict::Stream(stream, stamp)) => match self.order.thread_of(stamp) {
                    Some(_) => self.add_by(thread, Op::Await(self.order.step_of(stamp)), depth + 1),
                    None => {
                        let other = self.order.stream_of(stamp).expect("an agent is a thread or a stream");
                        self.order_streams(thread, other, stream, depth + 1)
                    }
                },
            };
            if !fixed {
                return false;
            }
        }
        false
    }

    /// Lets a thread wait for a stream.
    fn wait_for(&mut self, thread: usize, stream: usize, depth: usize) -> bool {
        if let StreamKind::PerThread(owner) = self.streams[stream]
            && owner != thread
        {
            // Only its own thread can name the stream.
            return self.add_by(owner, Op::SyncStream(stream), depth)
                && self.add_by(thread, Op::Await(self.steps.len() - 1), depth);
        }
        let event = self.rng.usize(..self.events);
        match self.rng.u8(..8) {
            0..3 => self.add_by(thread, Op::SyncStream(stream), depth),
            3..6 => {
                let record = self.record(event, stream);
                self.add_by(thread, record, depth) && self.add_by(thread, Op::SyncEvent(event), depth)
            }
            _ if self.threads == 1 => self.add_by(thread, Op::SyncContext, depth),
            _ => self.add_by(thread, Op::SyncStream(stream), depth),
        }
    }

    /// Orders a stream behind another one.
    fn order_streams(&mut self, thread: usize, before: usize, after: usize, depth: usize) -> bool {
        if let StreamKind::PerThread(owner) = self.streams[before]
            && owner != thread
        {
            return self.wait_for(thread, before, depth);
        }
        let event = self.rng.usize(..self.events);
        match self.rng.u8(..8) {
            0 => self.wait_for(thread, before, depth),
            1 | 2 if self.signals < SIGNALS => {
                let slot = self.signals;
                self.signals += 1;
                // CUDA wants the order expressed by an event, too: a wait at the head of a hardware
                // queue may hold up the work that would end it.
                self.add_by(thread, Op::Signal(before, slot), depth)
                    && self.add_by(thread, Op::Record(event, before), depth)
                    && self.add_by(thread, Op::WaitEvent(after, event), depth)
                    && self.add_by(thread, Op::WaitSignal(after, slot), depth)
            }
            _ => {
                let (record, wait) = (self.record(event, before), self.wait(after, event));
                self.add_by(thread, record, depth) && self.add_by(thread, wait, depth)
            }
        }
    }

    /// Draws a way to record an event.
    fn record(&mut self, event: usize, stream: usize) -> Op {
        match self.rng.u8(..8) {
            0 => Op::GraphRecord(event, stream),
            1 => Op::KernelRecord(event, stream),
            _ => Op::Record(event, stream),
        }
    }

    /// Draws a way to wait for a recorded event.
    fn wait(&mut self, stream: usize, event: usize) -> Op {
        if self.rng.u8(..8) == 0 { Op::GraphWait(stream, event) } else { Op::WaitEvent(stream, event) }
    }

    fn stream(&mut self) -> usize {
        loop {
            let stream = self.rng.usize(..self.streams.len());
            match self.streams[stream] {
                StreamKind::PerThread(owner) if owner != self.thread => {}
                // The default streams order everything, so they are rarer.
                StreamKind::Legacy | StreamKind::PerThread(_) if self.rng.u8(..3) > 0 => {}
                _ => return stream,
            }
        }
    }

    /// Allocates a buffer and gives it contents.
    fn allocate(&mut self, buffer: BufferId) {
        let Buffer { kind, size } = self.buffers[buffer];
        let stream = self.stream();
        let allocated = if kind == Kind::Pool {
            self.add(Op::AllocateIn(buffer, stream))
        } else {
            self.add(Op::Allocate(buffer))
        };
        if !allocated {
            return;
        }
        let to = Span { buffer, offset: 0, len: size };
        let fill = Work::Fill { to, value: self.rng.u32(..), width: 4 };
        let from = (0..self.buffers.len()).find(|other| {
            *other != buffer
                && self.order.is_defined(*other)
                && self.buffers[*other].size >= size
                && self.rng.bool()
        });
        let defined = match from {
            Some(from) => {
                let from = Span { buffer: from, offset: 0, len: size };
                let stream = self.stream();
                self.add(Op::Enqueue(Work::Copy { to, from, typed: true }, stream))
            }
            None if !kind.on_device() => {
                // The executor clears host memory that it allocates.
                let salt = self.rng.u32(..);
                self.add(Op::Touch(Work::HostMix { to, from: to, salt, sleep: 0 }))
            }
            None if self.rng.bool() => self.add(Op::Call(fill)),
            None => {
                let stream = self.stream();
                self.add(Op::Enqueue(fill, stream))
            }
        };
        if !defined && kind.on_device() {
            self.add(Op::Call(fill));
        }
    }

    fn buffer(&mut self, fit: impl Fn(Kind) -> bool) -> Option<BufferId> {
        let found: Vec<BufferId> = (0..self.buffers.len())
            .filter(|buffer| self.order.is_defined(*buffer) && fit(self.buffers[*buffer].kind))
            .collect();
        (!found.is_empty()).then(|| found[self.rng.usize(..found.len())])
    }

    fn length(&mut self, most: usize) -> usize {
        match self.rng.u8(..6) {
            0 | 1 => most,
            2 => self.rng.usize(1..=most.min(64)),
            3 => most - self.rng.usize(..most.min(16)),
            _ => self.rng.usize(1..=most),
        }
    }

    fn place(&mut self, buffer: BufferId, len: usize, unit: usize) -> Span {
        let room = (self.buffers[buffer].size - len) / unit;
        let offset = if self.rng.bool() { 0 } else { unit * self.rng.usize(..=room) };
        Span { buffer, offset, len }
    }

    fn copy(&mut self) -> Option<Work> {
        let to = self.buffer(|_| true)?;
        let from = self.buffer(|_| true)?;
        let most = self.buffers[to].size.min(self.buffers[from].size);
        let len = self.length(if to == from { most / 2 } else { most });
        let unit = if self.rng.bool() { 4 } else { 1 };
        let (to, from) = (self.place(to, len, unit), self.place(from, len, unit));
        Some(Work::Copy { to, from, typed: self.rng.u8(..4) > 0 })
    }

    fn copy_2d(&mut self) -> Option<Work> {
        let to = self.buffer(|_| true)?;
        let from = self.buffer(|_| true)?;
        let most = self.buffers[to].size.min(self.buffers[from].size);
        let height = self.rng.usize(1..=8);
        let width = self.length((most / height / 2).max(1));
        let plane = |generator: &mut Self, buffer: usize| {
            let pitch = width + generator.rng.usize(..=generator.buffers[buffer].size / height - width);
            let used = pitch * (height - 1) + width;
            let offset = generator.rng.usize(..=generator.buffers[buffer].size - used);
            Plane { buffer, offset, pitch }
        };
        let (to, from) = (plane(self, to), plane(self, from));
        Some(Work::Copy2D { to, from, width, height })
    }

    fn fill(&mut self) -> Option<Work> {
        let to = self.buffer(Kind::on_device)?;
        let width = [1, 2, 4][self.rng.usize(..3)];
        let len = (self.length(self.buffers[to].size) / width).max(1) * width;
        let to = self.place(to, len, width);
        let value = self.rng.u32(..) & (u32::MAX >> (32 - 8 * width));
        Some(Work::Fill { to, value, width })
    }

    fn mix(&mut self) -> Option<Work> {
        let to = self.buffer(Kind::on_device)?;
        let from = self.buffer(Kind::on_device)?;
        let most = self.buffers[to].size.min(self.buffers[from].size).min(MAX_MIX);
        let len = self.words(if to == from { most / 2 } else { most })?;
        let (to, from) = (self.place(to, len, 4), self.place(from, len, 4));
        let spin = if self.rng.u8(..4) == 0 { self.rng.u32(..2000) } else { 0 };
        Some(Work::Mix { to, from, salt: self.rng.u32(..), spin })
    }

    fn fold(&mut self) -> Option<Work> {
        let to = self.buffer(Kind::on_device)?;
        let from = self.buffer(Kind::on_device)?;
        let size = self.buffers[from].size;
        let len = self.words(if to == from { size / 2 } else { size.min(64 << 10) })?;
        let from = self.place(from, len, 4);
        let len = self.words(self.buffers[to].size.min(1024))?;
        let to = self.place(to, len, 4);
        Some(Work::Fold { to, from, salt: self.rng.u32(..) })
    }

    fn host_mix(&mut self, managed: bool) -> Option<Work> {
        let fit = |kind: Kind| kind.on_host() && (managed || kind != Kind::Managed);
        let to = self.buffer(fit)?;
        let from = self.buffer(fit)?;
        let most = self.buffers[to].size.min(self.buffers[from].size).min(MAX_MIX);
        let len = self.words(if to == from { most / 2 } else { most })?;
        let (to, from) = (self.place(to, len, 4), self.place(from, len, 4));
        let sleep = if self.rng.u8(..3) == 0 { self.rng.u32(..1500) } else { 0 };
        Some(Work::HostMix { to, from, salt: self.rng.u32(..), sleep })
    }

    fn words(&mut self, most: usize) -> Option<usize> {
        (most >= 4).then(|| (self.length(most) / 4).max(1) * 4)
    }

    fn work(&mut self) -> Option<Work> {
        match self.rng.u8(..12) {
            0..4 => self.copy(),
            4 => self.copy_2d(),
            5 => self.fill(),
            6..9 => self.mix(),
            9 => self.fold(),
            _ => self.host_mix(false),
        }
    }

    /// Copies of graphs must not name overlapping parts of pageable memory, a limit of gpusession.
    fn names_whole(&self, work: &Work) -> bool {
        let whole = |span: Span| {
            let Buffer { kind, size } = self.buffers[span.buffer];
            !kind.pageable() || span.len == size
        };
        match work {
            Work::Copy { .. } | Work::Copy2D { .. } => {
                work.accesses().iter().all(|access| whole(access.span))
            }
            _ => true,
        }
    }

    fn nodes(&mut self) -> Option<Vec<Node>> {
        let lanes = self.rng.usize(1..4);
        let mut nodes: Vec<Node> = Vec::new();
        for number in 0..self.rng.usize(1..9) {
            let Some(work) = self.work().filter(|work| self.names_whole(work)) else { continue };
            let mut after = Vec::new();
            if number > 0 && self.rng.bool() && !nodes.is_empty() {
                after.push(self.rng.usize(..nodes.len()));
            }
            nodes.push(Node { work, lane: self.rng.usize(..lanes), after });
        }
        (!nodes.is_empty()).then_some(nodes)
    }

    /// Adds a step with nodes, and the edges that they need.
    fn add_graph(&mut self, mut nodes: Vec<Node>, make: impl Fn(Vec<Node>) -> Op) -> bool {
        for _ in 0..64 {
            let step = Step { thread: self.thread, op: make(nodes.clone()) };
            match self.order.clone().apply(&step) {
                Err(Conflict::Nodes(before, after)) => nodes[after].after.push(before),
                _ => return self.add(step.op),
            }
        }
        false
    }

    fn define(&mut self) {
        let graph = self.order.graphs.len();
        let alone = self.threads == 1;
        let build = match self.rng.u8(..6) {
            0..3 => Build::Capture {
                mode: if alone { self.rng.u32(..3) } else { self.rng.u32(1..3) },
                stream: self.stream(),
            },
            3 => Build::Nodes,
            4 => Build::Clone,
            _ => Build::Child,
        };
        let Some(nodes) = self.nodes() else { return };
        self.add_graph(nodes, |nodes| Op::Define(graph, build, nodes));
    }

    fn update(&mut self, graph: usize) {
        let Some(Some(old)) = self.order.graphs.get(graph) else { return };
        let mut nodes = old.nodes.clone();
        for node in &mut nodes {
            match &mut node.work {
                Work::Fill { value, width, .. } => {
                    *value = self.rng.u32(..) & (u32::MAX >> (32 - 8 * *width))
                }
                Work::Mix { salt, to, .. } | Work::HostMix { salt, to, .. } | Work::Fold { salt, to, .. } => {
                    *salt = self.rng.u32(..);
                    let room = (self.buffers[to.buffer].size - to.len) / 4;
                    to.offset = 4 * self.rng.usize(..=room);
                }
                Work::Copy { .. } | Work::Copy2D { .. } => {}
            }
        }
        let op = Op::Update(graph, nodes);
        self.add(op);
    }

    fn graph(&mut self) -> Option<usize> {
        let live: Vec<usize> =
            (0..self.order.graphs.len()).filter(|graph| self.order.graphs[*graph].is_some()).collect();
        (!live.is_empty()).then(|| live[self.rng.usize(..live.len())])
    }

    fn random(&mut self, choices: &[Choice]) {
        if self.rng.u8(..4) == 0 {
            self.thread = self.rng.usize(..self.threads);
        }
        let stream = self.stream();
        let enqueue = |work| Op::Enqueue(work, stream);
        let op = match choices[self.rng.usize(..choices.len())] {
            Choice::Copy => self.copy().map(enqueue),
            Choice::Copy2D => self.copy_2d().map(enqueue),
            Choice::Fill => self.fill().map(enqueue),
            Choice::Mix => self.mix().map(enqueue),
            Choice::Fold => self.fold().map(enqueue),
            Choice::HostFunction => self.host_mix(false).map(enqueue),
            Choice::Call => match self.rng.u8(..5) {
                0 => self.fill(),
                1 => self.copy_2d(),
                _ => self.copy(),
            }
            .map(Op::Call),
            Choice::Touch => self.host_mix(self.threads == 1).map(Op::Touch),
            Choice::Sync => Some(match self.rng.u8(..3) {
                0 if self.threads == 1 => Op::SyncContext,
                _ => Op::SyncStream(stream),
            }),
            Choice::Event => {
                let event = self.rng.usize(..self.events);
                Some(match self.rng.u8(..4) {
                    0 => Op::Query(stream),
                    1 => Op::WaitEvent(stream, event),
                    _ => self.record(event, stream),
                })
            }
            Choice::Sleep => Some(Op::Sleep(self.rng.u32(..1000))),
            Choice::Graph => {
                match self.graph() {
                    Some(graph) if self.rng.bool() => self.update(graph),
                    _ => self.define(),
                }
                None
            }
            Choice::Launch => self.graph().map(|graph| match self.rng.u8(..10) {
                0 => Op::Destroy(graph),
                _ => Op::Launch(graph, stream),
            }),
            Choice::Free => {
                let buffer = self.rng.usize(..self.buffers.len());
                Some(match self.buffers[buffer].kind {
                    Kind::Pool => Op::FreeIn(buffer, stream),
                    _ => Op::Free(buffer),
                })
            }
            Choice::Allocate => {
                let new: Vec<usize> =
                    (0..self.buffers.len()).filter(|buffer| self.order.is_new(*buffer)).collect();
                if !new.is_empty() {
                    let buffer = new[self.rng.usize(..new.len())];
                    self.allocate(buffer);
                }
                None
            }
            Choice::Refused => Some(Op::Refused(INVALID[self.rng.usize(..INVALID.len())])),
        };
        if let Some(op) = op {
            self.add(op);
        }
    }
}
