//! State of the one client process that a worker has admitted.
#![expect(clippy::disallowed_methods, reason = "the end of a process is polled")]

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use gpusession_link::worker_end::WorkerEnd;
use gpusession_proto::child_graphs::ChildGraphs;
use gpusession_proto::supervise::{FromWorker, Start};

use crate::activity::Activity;
use crate::contexts::{Contexts, synchronize};
use crate::core_dump::CoreDump;
use crate::driver::{Driver, Status};
use crate::execute::Replay;
use crate::handles::{Object, Table, kind};
use crate::host_calls::HostCalls;
use crate::image_store::ImageStore;
use crate::lanes::Lanes;
use crate::long_bodies::LongBodies;
use crate::modules::Images;
use crate::objects::allocations::Allocations;
use crate::objects::counters::SharedEvents;
use crate::objects::known::Known;
use crate::objects::links::Links;
use crate::objects::memory::{Memory, lock};
use crate::objects::mirrors::Mirrors;
use crate::objects::settling::Settling;
use crate::objects::shares::Shares;
use crate::objects::{Func, Stream};
use crate::output::Output;
use crate::quota::Quota;
use crate::replies::Replies;
use crate::small_downloads::Landing;
use crate::supervise::Supervisor;

/// State that all executors and lanes of the worker share.
pub struct Session {
    /// Never unloaded, since its threads live as long as the process.
    pub driver: &'static Driver,
    /// Answers and reports to the client.
    pub replies: Arc<Replies>,
    supervisor: Arc<Supervisor>,
    /// Executors that replay the log.
    pub replay: Replay,
    pub contexts: Contexts,
    /// Streams, by the client's handle.
    pub streams: Table<Stream>,
    pub events: Table<Object>,
    pub modules: Table<Object>,
    pub libraries: Table<Object>,
    /// States of the linker.
    pub links: Links,
    /// Kernels and functions.
    pub funcs: Table<Func>,
    pub graphs: Table<Object>,
    /// Graphs inside nodes of other graphs, as far as they have a handle.
    pub child_graphs: Mutex<ChildGraphs>,
    /// User objects that the program or a graph still refers to.
    pub user_objects: Table<Object>,
    /// Green contexts, each with its handle as a context.
    pub greens: Table<(Object, u64)>,
    pub resource_descs: Table<Object>,
    /// References to textures and to surfaces, each with the client's handle of its module or 0.
    pub texrefs: Table<(Object, u64)>,
    #[allow(missing_docs)]
    pub surfrefs: Table<(Object, u64)>,
    /// Resources that the driver has described: only these may come back.
    pub resources: Mutex<HashSet<Vec<u8>>>,
    /// Synchronizations of contexts beside captures.
    pub settling: Settling,
    /// Graphs that captures create, by the stream that each began on.
    pub captures: Mutex<HashMap<u64, u64>>,
    /// Executable graphs.
    pub execs: Table<Object>,
    /// Device memory that the client placed with `ALLOC`.
    pub memory: Memory,
    /// Granted and used bytes of device memory.
    pub quota: Arc<Quota>,
    /// Device memory that other calls allocate.
    pub allocations: Allocations,
    /// Values that the driver returned, and that frames name.
    pub known: Known,
    /// Objects that other processes know.
    pub shares: Shares,
    /// Events that other processes may know.
    pub shared_events: SharedEvents,
    /// Host memory of the client that the device sees.
    pub mirrors: Mirrors,
    /// First parts of requests that one frame cannot hold.
    pub long_bodies: LongBodies,
    /// Images by content.
    pub images: Images,
    /// Small copies from the device that are under way.
    pub landing: Arc<Landing>,
    pub lanes: Lanes,
    /// Output of device code.
    pub output: Arc<Output>,
    /// The dump of a fault.
    pub core_dump: CoreDump,
    /// Host functions of streams.
    pub host_calls: HostCalls,
    /// Time of the last GPU work.
    pub activity: Activity,
    /// Secret that a further lane must prove to know.
    pub lane_secret: [u8; 32],
    /// Whether the supervisor received the reason for the end.
    ending: OnceLock<bool>,
    /// Whether the worker may exit; under MPS only after the supervisor has stopped its GPU work.
    may_exit: Arc<AtomicBool>,
}

/// Time for the client to receive the reason for the end.
const FINAL_MESSAGE_GRACE: Duration = Duration::from_secs(1);
/// Time for the GPU to finish its work before the end, under MPS.
const DRAIN_GRACE: Duration = Duration::from_millis(500);
/// Time for the server to take the last images; a later program would have to send them again.
const IMAGES_GRACE: Duration = Duration::from_millis(300);
/// Time for the supervisor to stop the worker's GPU work, under MPS.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

impl Session {
    /// Creates the state of a process that the worker is about to admit.
    pub fn new(
        driver: &'static Driver,
        start: Start,
        end: WorkerEnd,
        contexts: Contexts,
        output: Arc<Output>,
        quota: Arc<Quota>,
        lane_secret: [u8; 32],
    ) -> Self {
        Self {
            driver,
            images: Images::new(
                start.images.then(|| Arc::new(ImageStore::new(quota.supervisor.clone()))),
                start.staging_bytes,
            ),
            long_bodies: LongBodies::default(),
            mirrors: Mirrors::new(start.staging_bytes),
            memory: Memory::new(&start.devices),
            allocations: Allocations::new(&start.devices),
            known: Known::default(),
            shares: Shares::new(quota.clone(), start.worker, start.mps),
            shared_events: SharedEvents::new(&start.worker),
            supervisor: quota.supervisor.clone(),
            quota,
            lanes: Lanes::new(end.returns()),
            replies: Arc::new(Replies::new(end)),
            replay: Replay::new(),
            contexts,
            streams: Table::new(kind::STREAM),
            events: Table::new(kind::EVENT),
            modules: Table::new(kind::MODULE),
            libraries: Table::new(kind::LIBRARY),
            links: Links::default(),
            funcs: Table::new(kind::FUNC),
            graphs: Table::new(kind::GRAPH),
            child_graphs: Mutex::default(),
            user_objects: Table::new(kind::USER_OBJECT),
            greens: Table::new(kind::GREEN),
            resource_descs: Table::new(kind::RESOURCE_DESC),
            texrefs: Table::new(kind::TEXREF),
            surfrefs: Table::new(kind::SURFREF),
            resources: Mutex::default(),
            settling: Settling::default(),
            captures: Mutex::default(),
            execs: Table::new(kind::EXEC),
            landing: Arc::default(),
            output,
            core_dump: CoreDump::new(start.mps),
            host_calls: HostCalls::default(),
            activity: Activity::default(),
            lane_secret,
            ending: OnceLock::new(),
            may_exit: Arc::new(AtomicBool::new(!start.mps)),
        }
    }

    /// Returns the channel to the supervisor.
    pub fn supervisor(&self) -> &Supervisor {
        &self.supervisor
    }

    /// Returns the driver's stream behind a handle.
    ///
    /// CUDA itself names default streams by 0, 1 and 2.
    pub fn stream(&self, handle: u64) -> Result<crate::driver::Handle, Status> {
        match handle {
            0..=2 => Ok(handle as usize as crate::driver::Handle),
            _ => Ok(self.streams.get(handle)?.object.0),
        }
    }

    /// Lets the worker exit, since the supervisor has stopped its GPU work.
    pub fn may_exit(&self) {
        self.may_exit.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if the program has an object that a reset of the contexts would take.
    pub fn has_objects(&self) -> bool {
        let Self { streams, events, modules, libraries, funcs, graphs, greens, .. } = self;
        let Self { user_objects, resource_descs, texrefs, surfrefs, execs, .. } = self;
        let objects = [events, modules, libraries, graphs, user_objects, resource_descs, execs];
        objects.iter().any(|table| !table.is_empty())
            || [texrefs, surfrefs, greens].iter().any(|table| !table.is_empty())
            || !(streams.is_empty() && funcs.is_empty() && self.links.is_empty())
            || self.contexts.has_created()
            || self.allocations.lock().has_objects()
            || !lock(&self.memory.allocations).is_empty()
            || !self.mirrors.lock().mirrors.is_empty()
    }

    /// Ends the worker, after it has sent the reason to the supervisor and the client.
    ///
    /// Device memory goes with the process.
    pub fn end(&self, reason: &str) -> ! {
        let reason = &format!("{reason}{}", self.core_dump.note());
        let exits = || self.may_exit.load(Ordering::Relaxed);
        // Bounds the time to send the reason: a client that does not read must not keep its worker.
        let may_exit = self.may_exit.clone();
        let patience = move || {
            let since = Instant::now();
            std::thread::sleep(FINAL_MESSAGE_GRACE);
            while !may_exit.load(Ordering::Relaxed) && since.elapsed() < DRAIN_GRACE + EXIT_TIMEOUT {
                std::thread::sleep(Duration::from_millis(2));
            }
            // SAFETY: as below.
            unsafe { libc::_exit(0) }
        };
        if std::thread::Builder::new().name("end".into()).spawn(patience).is_err() {
            // SAFETY: as below.
            unsafe { libc::_exit(0) }
        }
        // A second thread waits until the first one has sent the reason.
        let told = *self.ending.get_or_init(|| {
            // The exit of an MPS client in the middle of its work is a fault for other clients.
            let quiet = !exits() && self.drain();
            // The interval's report may be a second old; a short program has none with its work.
            self.supervisor.report(&FromWorker::Usage(self.activity.usage(self)));
            let told = self.supervisor.report(&FromWorker::Ended { reason: reason.into(), quiet });
            self.replies.send_end(reason);
            if let Some(store) = self.images.store() {
                store.settle(Instant::now() + IMAGES_GRACE);
            }
            told
        });
        let since = Instant::now();
        while told && !exits() && since.elapsed() < EXIT_TIMEOUT {
            std::thread::sleep(Duration::from_millis(2));
        }
        // SAFETY: exits the process without running the driver's exit handlers, which may wait for
        // kernels that never end.
        unsafe { libc::_exit(0) }
    }

    /// Stops feeding the GPU and waits briefly; returns `true` if all its work is done.
    fn drain(&self) -> bool {
        let deadline = Instant::now() + DRAIN_GRACE;
        let halted = self.replay.halt(deadline) && self.lanes.idle();
        // In a thread of its own: a kernel may never end.
        let (tell, told) = std::sync::mpsc::channel();
        let (driver, contexts) = (self.driver, self.contexts.all());
        let wait = move || {
            let _ = tell.send(synchronize(driver, contexts).is_ok());
        };
        let waits = std::thread::Builder::new().name("drain".into()).spawn(wait).is_ok();
        let left = deadline.saturating_duration_since(Instant::now());
        waits && told.recv_timeout(left) == Ok(true) && halted
    }
}
