//! Rules that order work: a program is valid if every two accesses of the same memory,
//! of which one writes, are ordered by the rules of CUDA.
//!
//! Each thread and each stream has a vector clock: how much of each thread and stream is certain to
//! have happened before its next step. Memory is tracked in cells, sixteen for each buffer, so that
//! neighbours in one cell count as the same memory.

use crate::program::{Access, Buffer, Build, Kind, Node, Op, Program, Span, Step, StreamKind, Work};

type Clock = Vec<u32>;

/// The step of an agent, counted from one. Threads are agents, then streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub agent: usize,
    pub at: u32,
}

/// The reason why a step is not valid now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Conflict {
    /// The step's thread has to know that `stamp` has happened.
    Thread(Stamp),
    /// The stream has to know that `stamp` has happened.
    Stream(usize, Stamp),
    /// Two nodes of a graph need an edge.
    Nodes(usize, usize),
    Impossible,
}

const CELLS: usize = 16;

#[derive(Clone, Default)]
struct Cell {
    write: Option<Stamp>,
    reads: Vec<Stamp>,
}

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Never,
    /// Allocated by this step; the contents are undefined until the whole buffer is written.
    Live {
        since: Stamp,
        defined: bool,
    },
    Freed,
}

#[derive(Clone)]
struct Memory {
    life: Life,
    /// The host step that allocated it, which knows the address.
    allocated: Option<Stamp>,
    /// The host steps since which a graph does not name it any more.
    unnamed: Vec<Stamp>,
    cells: Vec<Cell>,
}

/// Steps that are certain to have happened before the next entry of a stream.
#[derive(Clone, Default)]
struct Known {
    /// By all rules.
    all: Clock,
    /// By the calls of the program alone: without the order between the legacy stream and the
    /// streams that follow it.
    explicit: Clock,
}

#[derive(Clone)]
struct Queue {
    known: Known,
    /// The clock of the last kernel, copy or fill. The legacy stream and the streams that follow it
    /// wait for each other's device work; for a host function they do not, as seen on an H100.
    device: Clock,
    count: u32,
    /// The host step that last touched the stream.
    touched: Option<Stamp>,
}

#[derive(Clone, Default)]
struct Event {
    known: Option<Known>,
    touched: Option<Stamp>,
}

#[derive(Clone)]
pub struct Graph {
    pub nodes: Vec<Node>,
    build: Build,
    touched: Stamp,
    /// The last launch, so that updates and destruction come after it.
    launched: Option<Stamp>,
}

#[derive(Clone)]
pub struct Order<'p> {
    buffers: &'p [Buffer],
    kinds: &'p [StreamKind],
    threads: Vec<Clock>,
    /// For each thread, the program's number of each of its steps.
    steps: Vec<Vec<usize>>,
    /// For each thread, its clock after each of its steps.
    history: Vec<Vec<Clock>>,
    queues: Vec<Queue>,
    events: Vec<Event>,
    memory: Vec<Memory>,
    pub graphs: Vec<Option<Graph>>,
    signals: Vec<Option<(Known, Stamp)>>,
    count: usize,
}

fn join(to: &mut Clock, from: &Clock) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = (*to).max(*from);
    }
}

fn knows(clock: &Clock, stamp: Stamp) -> bool {
    clock[stamp.agent] >= stamp.at
}

impl Known {
    fn new(agents: usize) -> Known {
        Known { all: vec![0; agents], explicit: vec![0; agents] }
    }

    fn join(&mut self, other: &Known) {
        join(&mut self.all, &other.all);
        join(&mut self.explicit, &other.explicit);
    }

    /// Joins the clock of a thread, which has seen all that it knows.
    fn join_host(&mut self, host: &Clock) {
        join(&mut self.all, host);
        join(&mut self.explicit, host);
    }
}

impl<'p> Order<'p> {
    pub fn new(threads: usize, kinds: &'p [StreamKind], buffers: &'p [Buffer], events: usize) -> Order<'p> {
        let agents = threads + kinds.len();
        let memory = |_: &Buffer| Memory {
            life: Life::Never,
            allocated: None,
            unnamed: Vec::new(),
            cells: vec![Cell::default(); CELLS],
        };
        Order {
            buffers,
            kinds,
            threads: vec![vec![0; agents]; threads],
            steps: vec![Vec::new(); threads],
            history: vec![Vec::new(); threads],
            queues: vec![
                Queue { known: Known::new(agents), device: vec![0; agents], count: 0, touched: None };
                kinds.len()
            ],
            events: vec![Event::default(); events],
            memory: buffers.iter().map(memory).collect(),
            graphs: Vec::new(),
            signals: Vec::new(),
            count: 0,
        }
    }

    /// Checks a whole program.
    pub fn check(program: &Program) -> Result<(), (usize, Conflict)> {
        let mut order = Order::new(program.threads, &program.streams, &program.buffers, program.events);
        for (number, step) in program.steps.iter().enumerate() {
            order.apply(step).map_err(|conflict| (number, conflict))?;
        }
        Ok(())
    }

    pub fn thread_of(&self, stamp: Stamp) -> Option<usize> {
        (stamp.agent < self.threads.len()).then_some(stamp.agent)
    }

    pub fn stream_of(&self, stamp: Stamp) -> Option<usize> {
        stamp.agent.checked_sub(self.threads.len())
    }

    /// Returns the program's number of a thread's step.
    pub fn step_of(&self, stamp: Stamp) -> usize {
        self.steps[stamp.agent][stamp.at as usize - 1]
    }

    pub fn is_defined(&self, buffer: usize) -> bool {
        matches!(self.memory[buffer].life, Life::Live { defined: true, .. })
    }

    pub fn is_new(&self, buffer: usize) -> bool {
        self.memory[buffer].life == Life::Never
    }

    fn agent(&self, stream: usize) -> usize {
        self.threads.len() + stream
    }

    fn cells(&self, span: Span) -> std::ops::Range<usize> {
        let size = self.buffers[span.buffer].size.div_ceil(CELLS).next_multiple_of(4);
        span.offset / size..(span.offset + span.len).div_ceil(size)
    }

    /// Returns the first stamp that `clock` would have to know before these accesses.
    fn missing(&self, clock: &Clock, accesses: &[Access]) -> Result<Option<Stamp>, Conflict> {
        for access in accesses {
            let memory = &self.memory[access.span.buffer];
            let Life::Live { since, defined } = memory.life else { return Err(Conflict::Impossible) };
            let whole = access.span.len == self.buffers[access.span.buffer].size;
            let defines = access.write && whole;
            if !(defined || defines) {
                return Err(Conflict::Impossible);
            }
            if !knows(clock, since) {
                return Ok(Some(since));
            }
            for cell in &memory.cells[self.cells(access.span)] {
                let before = cell.write.iter().chain(if access.write { cell.reads.as_slice() } else { &[] });
                if let Some(stamp) = before.into_iter().find(|stamp| !knows(clock, **stamp)) {
                    return Ok(Some(*stamp));
                }
            }
        }
        Ok(None)
    }

    fn record(&mut self, stamp: Stamp, accesses: &[Access]) {
        for access in accesses {
            let cells = self.cells(access.span);
            let whole = access.span.len == self.buffers[access.span.buffer].size;
            let memory = &mut self.memory[access.span.buffer];
            for cell in &mut memory.cells[cells] {
                if access.write {
                    *cell = Cell { write: Some(stamp), reads: Vec::new() };
                } else {
                    cell.reads.push(stamp);
                }
            }
            if let Life::Live { defined, .. } = &mut memory.life
                && access.write
                && whole
            {
                *defined = true;
            }
        }
    }

    /// Accesses of work whose two sides overlap, or whose buffer has the wrong kind, are not valid.
    fn fits(&self, work: &Work) -> Result<(), Conflict> {
        let inside = |span: Span| span.len > 0 && span.offset + span.len <= self.buffers[span.buffer].size;
        let accesses = work.accesses();
        if !accesses.iter().all(|access| inside(access.span)) {
            return Err(Conflict::Impossible);
        }
        if let [a, b] = accesses[..]
            && a.span.buffer == b.span.buffer
            && a.span.offset < b.span.offset + b.span.len
            && b.span.offset < a.span.offset + a.span.len
            && !(a.span == b.span && matches!(work, Work::Mix { .. } | Work::HostMix { .. }))
        {
            return Err(Conflict::Impossible);
        }
        let buffers = self.buffers;
        let kind =
            |kind: fn(Kind) -> bool| accesses.iter().all(|access| kind(buffers[access.span.buffer].kind));
        let right = match work {
            Work::Copy { .. } | Work::Copy2D { .. } => true,
            Work::Fill { .. } | Work::Mix { .. } | Work::Fold { .. } => kind(Kind::on_device),
            // Managed memory is the host's only while the whole device is idle.
            Work::HostMix { .. } => kind(|kind| kind.on_host() && kind != Kind::Managed),
        };
        if right { Ok(()) } else { Err(Conflict::Impossible) }
    }

    /// An entry of a stream that is no work, from a thread.
    ///
    /// Returns what the stream knows before it.
    ///
    /// Such an entry does not wait for the work that the legacy stream's order puts before it: the
    /// driver can skip it in an idle stream.
    fn enqueue(&self, thread: usize, stream: usize) -> Result<Known, Conflict> {
        let host = &self.threads[thread];
        let kind = self.kinds[stream];
        if let StreamKind::PerThread(owner) = kind
            && owner != thread
        {
            return Err(Conflict::Impossible);
        }
        let mut known = self.queues[stream].known.clone();
        known.join_host(host);
        for queue in self.tied(stream) {
            if let Some(touched) = queue.touched.filter(|touched| !knows(host, *touched)) {
                return Err(Conflict::Thread(touched));
            }
        }
        Ok(known)
    }

    /// Work of a stream, from a thread, which also waits for that of the streams tied to it.
    fn enqueue_work(&self, thread: usize, stream: usize) -> Result<Known, Conflict> {
        let mut known = self.enqueue(thread, stream)?;
        for queue in self.tied(stream) {
            join(&mut known.all, &queue.device);
        }
        Ok(known)
    }

    /// The stream, and those that the legacy stream's order ties to it.
    fn tied(&self, stream: usize) -> impl Iterator<Item = &Queue> {
        let kind = self.kinds[stream];
        self.queues.iter().enumerate().filter_map(move |(other, queue)| {
            let tied = other == stream
                || kind == StreamKind::Legacy && self.kinds[other].follows_legacy()
                || self.kinds[other] == StreamKind::Legacy && kind.follows_legacy();
            tied.then_some(queue)
        })
    }

    /// Adds an entry to a stream: `known` is the stream's clock before it.
    fn push(&mut self, thread: usize, stream: usize, mut known: Known, device: bool) -> Stamp {
        let agent = self.agent(stream);
        let touched = Some(self.now(thread));
        let queue = &mut self.queues[stream];
        queue.count += 1;
        queue.touched = touched;
        known.all[agent] = queue.count;
        known.explicit[agent] = queue.count;
        if device {
            queue.device.clone_from(&known.all);
        }
        queue.known = known;
        Stamp { agent, at: queue.count }
    }

    /// The stamp of the step that a thread is about to do.
    fn now(&self, thread: usize) -> Stamp {
        Stamp { agent: thread, at: self.threads[thread][thread] + 1 }
    }

    /// Applies a step if it is valid; otherwise nothing changes.
    #[expect(clippy::too_many_lines, reason = "one `match` over the actions")]
    pub fn apply(&mut self, step: &Step) -> Result<(), Conflict> {
        let thread = step.thread;
        let now = self.now(thread);
        match &step.op {
            Op::Allocate(buffer) => {
                if self.buffers[*buffer].kind == Kind::Pool || !self.is_new(*buffer) {
                    return Err(Conflict::Impossible);
                }
                // The program clears its host memory.
                let defined = !matches!(self.buffers[*buffer].kind, Kind::Device | Kind::Managed);
                self.memory[*buffer].life = Life::Live { since: now, defined };
                self.memory[*buffer].allocated = Some(now);
            }
            Op::AllocateIn(buffer, stream) => {
                if self.buffers[*buffer].kind != Kind::Pool || !self.is_new(*buffer) {
                    return Err(Conflict::Impossible);
                }
                let known = self.enqueue(thread, *stream)?;
                let since = self.push(thread, *stream, known, false);
                self.memory[*buffer].life = Life::Live { since, defined: false };
                self.memory[*buffer].allocated = Some(now);
            }
            Op::Free(buffer) => {
                let buffer = *buffer;
                if self.buffers[buffer].kind == Kind::Pool || self.named_by_graph(buffer) {
                    return Err(Conflict::Impossible);
                }
                self.known_unnamed(thread, buffer)?;
                self.all_known(buffer, &self.threads[thread])
                    .map_err(|missing| missing.map_or(Conflict::Impossible, Conflict::Thread))?;
                self.memory[buffer].life = Life::Freed;
            }
            Op::FreeIn(buffer, stream) => {
                let (buffer, stream) = (*buffer, *stream);
                if self.buffers[buffer].kind != Kind::Pool || self.named_by_graph(buffer) {
                    return Err(Conflict::Impossible);
                }
                self.known_touch(thread, self.memory[buffer].allocated)?;
                self.known_unnamed(thread, buffer)?;
                let known = self.enqueue(thread, stream)?;
                self.all_known(buffer, &known.all).map_err(|missing| {
                    missing.map_or(Conflict::Impossible, |stamp| Conflict::Stream(stream, stamp))
                })?;
                self.push(thread, stream, known, false);
                self.memory[buffer].life = Life::Freed;
            }
            Op::Enqueue(work, stream) => self.work(thread, work, *stream, false)?,
            Op::Call(work) => {
                if !matches!(work, Work::Copy { .. } | Work::Copy2D { .. } | Work::Fill { .. }) {
                    return Err(Conflict::Impossible);
                }
                let legacy = self
                    .kinds
                    .iter()
                    .position(|kind| *kind == StreamKind::Legacy)
                    .ok_or(Conflict::Impossible)?;
                self.work(thread, work, legacy, true)?;
            }
            Op::Touch(work) => self.touch(thread, work)?,
            Op::Sleep(_) | Op::Refused(_) => {}
            Op::Query(stream) => {
                // Another thread may capture the stream, which forbids the call.
                self.enqueue(thread, *stream)?;
                self.queues[*stream].touched = Some(now);
            }
            Op::Record(event, stream) | Op::GraphRecord(event, stream) | Op::KernelRecord(event, stream) => {
                self.known_touch(thread, self.events[*event].touched)?;
                let known = self.enqueue(thread, *stream)?;
                self.push(thread, *stream, known, false);
                self.events[*event] =
                    Event { known: Some(self.queues[*stream].known.clone()), touched: Some(now) };
            }
            Op::GraphWait(_, event) if self.events[*event].known.is_none() => {
                return Err(Conflict::Impossible);
            }
            Op::WaitEvent(stream, event) | Op::GraphWait(stream, event) => {
                self.known_touch(thread, self.events[*event].touched)?;
                let mut known = self.enqueue(thread, *stream)?;
                // Of an event that was never recorded, the wait does nothing.
                if let Some(recorded) = &self.events[*event].known {
                    known.join(recorded);
                    self.push(thread, *stream, known, false);
                } else {
                    self.queues[*stream].touched = Some(now);
                }
                self.events[*event].touched = Some(now);
            }
            Op::SyncEvent(event) => {
                self.known_touch(thread, self.events[*event].touched)?;
                let known = self.events[*event].known.clone();
                self.events[*event].touched = Some(now);
                if let Some(known) = known {
                    join(&mut self.threads[thread], &known.all);
                }
            }
            Op::SyncStream(stream) => {
                // Adds no entry, but must not race with one.
                self.enqueue(thread, *stream)?;
                self.queues[*stream].touched = Some(now);
                join(&mut self.threads[thread], &self.queues[*stream].known.all);
            }
            Op::SyncContext => {
                // While another thread captures, the call is refused.
                if self.threads.len() > 1 {
                    return Err(Conflict::Impossible);
                }
                for queue in &self.queues {
                    self.known_touch(thread, queue.touched)?;
                }
                for queue in &self.queues {
                    join(&mut self.threads[thread], &queue.known.all);
                }
            }
            Op::Signal(stream, slot) => {
                let known = self.enqueue(thread, *stream)?;
                if self.signals.get(*slot).is_some_and(Option::is_some) {
                    return Err(Conflict::Impossible);
                }
                self.push(thread, *stream, known, false);
                self.signals.resize(self.signals.len().max(slot + 1), None);
                self.signals[*slot] = Some((self.queues[*stream].known.clone(), now));
            }
            Op::WaitSignal(stream, slot) => {
                let mut known = self.enqueue(thread, *stream)?;
                let Some(Some((signal, sent))) = self.signals.get(*slot) else {
                    return Err(Conflict::Impossible);
                };
                self.known_touch(thread, Some(*sent))?;
                known.join(signal);
                self.push(thread, *stream, known, false);
            }
            Op::Await(number) => {
                let found = self.steps.iter().enumerate().find_map(|(agent, steps)| {
                    steps.iter().position(|step| step == number).map(|at| (agent, at + 1))
                });
                let Some((agent, at)) = found.filter(|(agent, _)| *agent != thread) else {
                    return Err(Conflict::Impossible);
                };
                let known = self.history[agent][at - 1].clone();
                join(&mut self.threads[thread], &known);
            }
            Op::Define(graph, build, nodes) => {
                if *graph != self.graphs.len() {
                    return Err(Conflict::Impossible);
                }
                self.nodes(thread, nodes)?;
                self.capture(thread, *build)?;
                let graph = Graph { build: *build, nodes: nodes.clone(), touched: now, launched: None };
                self.graphs.push(Some(graph));
            }
            Op::Update(graph, nodes) => {
                let Some(Some(old)) = self.graphs.get(*graph) else { return Err(Conflict::Impossible) };
                // Only while no launch runs: which one sees the change is not the question here.
                self.known_touch(thread, Some(old.touched))?;
                self.known_touch(thread, old.launched)?;
                if !alike(&old.nodes, nodes) || self.fills_host(nodes) {
                    return Err(Conflict::Impossible);
                }
                let build = old.build;
                self.nodes(thread, nodes)?;
                self.capture(thread, build)?;
                self.unname(*graph, now);
                let graph = self.graphs[*graph].as_mut().expect("looked up above");
                graph.nodes.clone_from(nodes);
                graph.touched = now;
            }
            Op::Launch(graph, stream) => {
                let Some(Some(found)) = self.graphs.get(*graph) else { return Err(Conflict::Impossible) };
                let (touched, launched) = (found.touched, found.launched);
                let device = found.nodes.iter().all(|node| !matches!(node.work, Work::HostMix { .. }));
                let accesses: Vec<Access> =
                    found.nodes.iter().flat_map(|node| node.work.accesses()).collect();
                let early: Vec<Access> =
                    found.nodes.iter().flat_map(|node| self.reads_early(&node.work)).collect();
                self.known_touch(thread, Some(touched))?;
                if let Some(before) = self.missing(&self.threads[thread], &early)? {
                    return Err(Conflict::Thread(before));
                }
                let known = self.enqueue_work(thread, *stream)?;
                // The driver orders launches of one graph itself, but here they must be ordered.
                if let Some(before) = launched.filter(|before| !knows(&known.all, *before)) {
                    return Err(Conflict::Stream(*stream, before));
                }
                if let Some(before) = self.missing(&known.all, &accesses)? {
                    return Err(Conflict::Stream(*stream, before));
                }
                let stamp = self.push(thread, *stream, known, device);
                self.record(stamp, &accesses);
                let graph = self.graphs[*graph].as_mut().expect("looked up above");
                graph.touched = now;
                graph.launched = Some(stamp);
            }
            Op::Destroy(graph) => {
                let Some(Some(old)) = self.graphs.get(*graph) else { return Err(Conflict::Impossible) };
                self.known_touch(thread, Some(old.touched))?;
                self.known_touch(thread, old.launched)?;
                self.unname(*graph, now);
                self.graphs[*graph] = None;
            }
        }
        self.threads[thread][thread] += 1;
        let known = self.threads[thread].clone();
        self.steps[thread].push(self.count);
        self.history[thread].push(known);
        self.count += 1;
        Ok(())
    }

    fn known_touch(&self, thread: usize, touched: Option<Stamp>) -> Result<(), Conflict> {
        match touched.filter(|touched| !knows(&self.threads[thread], *touched)) {
            Some(touched) => Err(Conflict::Thread(touched)),
            None => Ok(()),
        }
    }

    fn named_by_graph(&self, buffer: usize) -> bool {
        let mut nodes = self.graphs.iter().flatten().flat_map(|graph| &graph.nodes);
        nodes.any(|node| node.work.accesses().iter().any(|access| access.span.buffer == buffer))
    }

    /// Notes a step after which a graph may not name its buffers any more.
    fn unname(&mut self, graph: usize, now: Stamp) {
        let nodes = self.graphs[graph].iter().flat_map(|graph| &graph.nodes);
        for span in nodes.flat_map(|node| node.work.accesses()).map(|access| access.span) {
            self.memory[span.buffer].unnamed.push(now);
        }
    }

    /// A graph reads its buffers' addresses in the step that makes or changes it.
    fn known_unnamed(&self, thread: usize, buffer: usize) -> Result<(), Conflict> {
        self.memory[buffer].unnamed.iter().try_for_each(|stamp| self.known_touch(thread, Some(*stamp)))
    }

    /// Returns `Err(None)` if the buffer is not live, and the first access that `clock` misses.
    fn all_known(&self, buffer: usize, clock: &Clock) -> Result<(), Option<Stamp>> {
        let Life::Live { since, .. } = self.memory[buffer].life else { return Err(None) };
        let cells = self.memory[buffer].cells.iter().flat_map(|cell| cell.write.iter().chain(&cell.reads));
        match std::iter::once(&since).chain(cells).find(|stamp| !knows(clock, **stamp)) {
            Some(stamp) => Err(Some(*stamp)),
            None => Ok(()),
        }
    }

    fn touch(&mut self, thread: usize, work: &Work) -> Result<(), Conflict> {
        let Work::HostMix { .. } = work else { return Err(Conflict::Impossible) };
        let accesses = work.accesses();
        let managed = work.names(self.buffers, |kind| kind == Kind::Managed);
        if managed {
            // A device without concurrent access: the host has managed memory while all is idle.
            if self.threads.len() > 1 {
                return Err(Conflict::Impossible);
            }
            for stream in 0..self.queues.len() {
                let last = Stamp { agent: self.agent(stream), at: self.queues[stream].count };
                if !knows(&self.threads[thread], last) {
                    return Err(Conflict::Thread(last));
                }
            }
            let inside = accesses.iter().all(|access| self.buffers[access.span.buffer].kind.on_host());
            if !inside {
                return Err(Conflict::Impossible);
            }
            if let [a, b] = accesses[..]
                && a.span.buffer == b.span.buffer
            {
                return Err(Conflict::Impossible);
            }
        } else {
            self.fits(work)?;
        }
        if let Some(before) = self.missing(&self.threads[thread], &accesses)? {
            return Err(Conflict::Thread(before));
        }
        self.record(self.now(thread), &accesses);
        Ok(())
    }

    fn work(&mut self, thread: usize, work: &Work, stream: usize, waits: bool) -> Result<(), Conflict> {
        self.fits(work)?;
        let known = self.enqueue_work(thread, stream)?;
        let now = self.now(thread);
        let accesses = work.accesses();
        for access in &accesses {
            self.known_touch(thread, self.memory[access.span.buffer].allocated)?;
        }
        // The host has what a copy writes to pageable memory.
        let copies = matches!(work, Work::Copy { .. } | Work::Copy2D { .. });
        let pageable = |access: &Access| copies && self.buffers[access.span.buffer].kind.pageable();
        let early = self.reads_early(work);
        let late: Vec<Access> =
            accesses.iter().filter(|access| access.write || !pageable(access)).copied().collect();
        // An idle stream reads little pinned memory during the call, even if the legacy stream, for
        // which it should wait, has not written it yet: seen on an H100.
        let pinned: Vec<Access> =
            late.iter().filter(|access| copies && !access.write && self.host_only(access)).copied().collect();
        let fills = matches!(work, Work::Fill { .. });
        let returns = accesses.iter().any(|access| pageable(access) && access.write)
            || waits && fills && accesses.iter().all(|access| self.host_only(access))
            || waits && copies && accesses.iter().all(|access| self.host_only(access))
            || waits && copies && accesses.iter().any(|access| access.write && self.host_only(access));
        if let Some(before) = self.missing(&self.threads[thread], &early)? {
            return Err(Conflict::Thread(before));
        }
        if let Some(before) = self.missing(&known.all, &late)?.or(self.missing(&known.explicit, &pinned)?) {
            return Err(Conflict::Stream(stream, before));
        }
        let stamp = self.push(thread, stream, known, !matches!(work, Work::HostMix { .. }));
        self.record(stamp, &late);
        self.record(now, &early);
        if returns {
            join(&mut self.threads[thread], &self.queues[stream].known.all);
        }
        Ok(())
    }

    /// Returns what a copy reads during the call that enqueues it, or that launches its graph:
    /// pageable memory. Of graphs that was seen on an H200, up to 16 KiB.
    fn reads_early(&self, work: &Work) -> Vec<Access> {
        let copies = matches!(work, Work::Copy { .. } | Work::Copy2D { .. });
        let early =
            |access: &Access| copies && !access.write && self.buffers[access.span.buffer].kind.pageable();
        work.accesses().into_iter().filter(early).collect()
    }

    fn host_only(&self, access: &Access) -> bool {
        let kind = self.buffers[access.span.buffer].kind;
        kind.on_host() && kind != Kind::Managed
    }

    /// Makes a graph, which may capture a stream of the program.
    ///
    /// A capture of a stream that the legacy stream follows forbids the legacy stream to others.
    fn capture(&mut self, thread: usize, build: Build) -> Result<(), Conflict> {
        let Build::Capture { stream, .. } = build else { return Ok(()) };
        let alone = self.threads.len() == 1;
        match self.kinds[stream] {
            StreamKind::NonBlocking => {}
            StreamKind::Blocking if alone => {}
            _ => return Err(Conflict::Impossible),
        }
        self.enqueue(thread, stream)?;
        self.queues[stream].touched = Some(self.now(thread));
        Ok(())
    }

    /// Nodes of a graph that touch the same memory have to be ordered by edges.
    fn nodes(&self, thread: usize, nodes: &[Node]) -> Result<(), Conflict> {
        let mut before: Vec<Vec<bool>> = Vec::new();
        for (number, node) in nodes.iter().enumerate() {
            self.fits(&node.work)?;
            for access in node.work.accesses() {
                if !self.is_defined(access.span.buffer) {
                    return Err(Conflict::Impossible);
                }
                self.known_touch(thread, self.memory[access.span.buffer].allocated)?;
            }
            let mut mine = vec![false; nodes.len()];
            let previous = nodes[..number].iter().rposition(|other| other.lane == node.lane);
            for dependency in node.after.iter().copied().chain(previous) {
                if dependency >= number {
                    return Err(Conflict::Impossible);
                }
                mine[dependency] = true;
                for (mine, theirs) in mine.iter_mut().zip(&before[dependency]) {
                    *mine |= *theirs;
                }
            }
            for other in (0..number).rev() {
                if !mine[other] && self.collide(&node.work, &nodes[other].work) {
                    return Err(Conflict::Nodes(other, number));
                }
                // No edge orders them.
                let writes = |access: &Access| access.write;
                let written: Vec<Access> = nodes[other].work.accesses().into_iter().filter(writes).collect();
                if mine[other] && self.overlap(&self.reads_early(&node.work), &written) {
                    return Err(Conflict::Impossible);
                }
            }
            before.push(mine);
        }
        Ok(())
    }

    /// The driver refuses some updates of fills of host memory.
    fn fills_host(&self, nodes: &[Node]) -> bool {
        let host = |node: &Node| node.work.names(self.buffers, Kind::on_host);
        nodes.iter().any(|node| matches!(node.work, Work::Fill { .. }) && host(node))
    }

    fn collide(&self, a: &Work, b: &Work) -> bool {
        self.overlap(&a.accesses(), &b.accesses())
    }

    /// Returns `true` if two accesses touch the same memory, and one of them writes.
    fn overlap(&self, a: &[Access], b: &[Access]) -> bool {
        a.iter().any(|a| {
            b.iter().any(|b| {
                let (x, y) = (self.cells(a.span), self.cells(b.span));
                a.span.buffer == b.span.buffer && (a.write || b.write) && x.start < y.end && y.start < x.end
            })
        })
    }
}

/// Returns `true` if the driver accepts an update from one list of nodes to the other: same kinds,
/// edges, memory and sizes, and no copies of several rows.
fn alike(old: &[Node], new: &[Node]) -> bool {
    let span = |a: Span, b: Span| a.buffer == b.buffer && a.len == b.len;
    old.len() == new.len()
        && old.iter().zip(new).all(|(a, b)| {
            a.lane == b.lane
                && a.after == b.after
                && match (a.work, b.work) {
                    (Work::Copy { to: a, from: b, .. }, Work::Copy { to: c, from: d, .. }) => {
                        span(a, c) && span(b, d)
                    }
                    (Work::Fill { to: a, width: w, .. }, Work::Fill { to: b, width: v, .. }) => {
                        span(a, b) && w == v
                    }
                    (Work::Mix { .. }, Work::Mix { .. })
                    | (Work::Fold { .. }, Work::Fold { .. })
                    | (Work::HostMix { .. }, Work::HostMix { .. }) => true,
                    _ => false,
                }
        })
}

#[cfg(test)]
mod tests;
