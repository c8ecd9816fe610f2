//! Host functions: callbacks that the program puts on a stream or into a graph.
//!
//! The module also tells whether one of them may still run before a copy.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use gpusession_link::lanes::On;
use gpusession_proto::frame::op;

use crate::client::Client;
use crate::positions::{Cover, is_covered};
use crate::status::{OUT_OF_MEMORY, Result};
use crate::stream::Stream;
use crate::{handles, regions, thread};

/// A program's function to call in a stream's order.
#[derive(Clone, Copy)]
pub enum HostFunction {
    /// `cuLaunchHostFunc`
    Plain(extern "C" fn(*mut c_void), usize),
    /// A function of the library's own, which writes no memory of the program.
    Own(extern "C" fn(*mut c_void), usize),
    /// `cuStreamAddCallback`: also receives the stream and a status.
    Callback(extern "C" fn(*mut c_void, i32, *mut c_void), usize, usize),
    /// `cuUserObjectCreate`: runs at the end of the object with this handle.
    Destructor(extern "C" fn(*mut c_void), usize, u64),
}

struct Registered {
    function: HostFunction,
    /// Whether the function stays registered, because a graph may call it again.
    keep: bool,
    client: &'static Client,
}

/// Position of work whose frame is not appended yet.
const NOT_YET: u64 = u64::MAX;

/// Work on a stream that calls host functions.
///
/// It is a function of the stream, or a launch of a graph, which may call some.
struct Calling {
    function: Option<u64>,
    /// Whether the function is the library's own.
    own: bool,
    /// Whether the function has returned, so that its stream may continue.
    returned: bool,
    on: Arc<Stream>,
    /// Position of the first of several launches in one entry; `seq` is that of the last one.
    first: u64,
    seq: u64,
    /// Streams, each up to a position, whose work is complete before the function is called.
    ///
    /// Empty for a launch, see [`launching_graph`].
    after: Vec<Cover>,
}

/// Number of launches on one stream that get entries of their own; later ones join the last entry.
const MAX_LAUNCHES: usize = 64;

struct Host {
    functions: HashMap<u64, Registered>,
    /// Functions to call, each with the status of its stream.
    due: Vec<(u64, i32)>,
    next: u64,
    /// Work that is not known to be complete.
    calling: Vec<Calling>,
}

static HOST: Mutex<Option<Host>> = Mutex::new(None);
/// Number of entries in `calling`: at zero, a copy's check is a single load.
static MAYBE_DUE: AtomicUsize = AtomicUsize::new(0);
/// Number of functions of graphs: at zero, a launch's check is a single load.
static OF_GRAPHS: AtomicUsize = AtomicUsize::new(0);
static HOST_DUE: Condvar = Condvar::new();
/// Functions that run one after the other: the program's, and the library's own, which must not
/// wait for those of the program.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Runner {
    Program,
    Library,
}

impl HostFunction {
    fn runner(&self) -> Runner {
        if matches!(self, Self::Own(..)) { Runner::Library } else { Runner::Program }
    }
}

impl Host {
    fn add(&mut self, function: Option<u64>, stream: &Arc<Stream>, after: Vec<Cover>) {
        let known = function.and_then(|id| self.functions.get(&id));
        let own = known.is_some_and(|known| matches!(known.function, HostFunction::Own(..)));
        let same = |work: &&mut Calling| work.function.is_none() && work.on.on() == stream.on();
        let launches = self.calling.iter_mut().filter(same);
        match launches.enumerate().last() {
            Some((MAX_LAUNCHES.., last)) if function.is_none() => last.seq = NOT_YET,
            _ => {
                let on = stream.clone();
                self.calling.push(Calling {
                    function,
                    own,
                    returned: false,
                    on,
                    first: NOT_YET,
                    seq: NOT_YET,
                    after,
                });
            }
        }
        MAYBE_DUE.store(self.calling.len(), Ordering::Relaxed);
    }

    fn forget(&mut self, over: impl Fn(On, u64) -> bool) {
        // Only the end of a function's run completes it.
        self.calling.retain(|work| {
            work.function.is_some() || !(work.on.done(work.seq) || over(work.on.on(), work.seq))
        });
        MAYBE_DUE.store(self.calling.len(), Ordering::Relaxed);
    }
}

/// Returns `true` if any host function may still run.
#[inline]
pub fn any() -> bool {
    MAYBE_DUE.load(Ordering::Relaxed) > 0
}

fn host() -> MutexGuard<'static, Option<Host>> {
    HOST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes launches of graphs that are complete, or whose context was destroyed.
///
/// `over` reports them by stream and position.
pub fn forget_launches(over: impl Fn(On, u64) -> bool) {
    if any()
        && let Some(host) = host().as_mut()
    {
        host.forget(over);
    }
}

/// Registers a host function for the frame that is appended next to a stream, or for graphs.
///
/// A stream comes with the streams that its next work covers. After that frame the caller calls
/// [`appended`]. A function of graphs stays registered, and a destructor until it has run.
pub fn register(
    client: &'static Client,
    function: HostFunction,
    stream: Option<(&Arc<Stream>, Vec<Cover>)>,
) -> Result<u64> {
    static THREAD: OnceLock<bool> = OnceLock::new();
    client.serve_events()?;
    let start = |name, runner| gpusession_link::threads::spawn(name, move || run_host(runner)).is_ok();
    let start = || start("gpusession-host", Runner::Program) && start("gpusession-own", Runner::Library);
    if !THREAD.get_or_init(start) {
        return Err(OUT_OF_MEMORY);
    }
    let mut host = host();
    let host = host.get_or_insert_with(|| Host {
        functions: HashMap::new(),
        due: Vec::new(),
        next: 1,
        calling: Vec::new(),
    });
    let id = host.next;
    host.next += 1;
    let keep = stream.is_none() && !matches!(function, HostFunction::Destructor(..));
    host.functions.insert(id, Registered { function, keep, client });
    match stream {
        Some((stream, after)) => host.add(Some(id), stream, after),
        None if keep => drop(OF_GRAPHS.fetch_add(1, Ordering::Relaxed)),
        None => {}
    }
    Ok(id)
}

/// Returns a function that a graph may call.
pub fn of_graph(id: u64) -> Option<HostFunction> {
    host().as_ref()?.functions.get(&id).filter(|known| known.keep).map(|known| known.function)
}

/// Forgets a function that the worker does not know.
pub fn unregister(id: u64) {
    if let Some(host) = host().as_mut() {
        host.functions.remove(&id);
    }
}

extern "C" fn nothing(_: *mut c_void) {}

/// Announces that the next frame launches a graph on a stream; [`appended`] follows.
///
/// If copies to the program precede the launch, an empty function comes in front and waits for
/// them, so that the graph's functions find them landed. These cannot wait themselves: a call does
/// not name its launch, and copies that precede one launch may follow another.
pub fn launching_graph(stream: &Arc<Stream>) -> Result {
    let has_functions = || {
        let of_client = |f: &Registered| f.keep && f.client.number == stream.client.number;
        host().as_ref().is_some_and(|host| host.functions.values().any(of_client))
    };
    if OF_GRAPHS.load(Ordering::Relaxed) == 0 || !has_functions() {
        return Ok(());
    }
    let copies = &stream.client.link.down;
    if copies.any() && stream.capture().is_none() {
        let after = stream.covers_so_far();
        if copies.any_of(|copy| is_covered(&after, copy.on, copy.seq)) {
            enqueue(stream, HostFunction::Own(nothing, 0), Some(after))?;
        }
    }
    if let Some(host) = host().as_mut() {
        host.forget(|_, _| false);
        host.add(None, stream, Vec::new());
    }
    Ok(())
}

/// Puts a function on a stream.
///
/// `after` are the streams that the stream's next work covers; `None` stands for a capture, whose
/// graphs keep the function.
pub fn enqueue(stream: &Arc<Stream>, function: HostFunction, after: Option<Vec<Cover>>) -> Result {
    let (client, keep) = (stream.client, after.is_none());
    let callback = matches!(function, HostFunction::Callback(..));
    let id = register(client, function, after.map(|after| (stream, after)))?;
    let seq = client.post(op::HOST_FUNC, |w| {
        w.word(stream.handle);
        w.word(id);
        w.word(u64::from(keep));
        w.word(u64::from(callback));
    })?;
    appended(stream, seq);
    stream.worked(seq);
    Ok(())
}

/// Notes the position of the frame that was announced for the stream.
pub fn appended(stream: &Stream, seq: u64) {
    if any()
        && let Some(host) = host().as_mut()
        && let Some(work) = host.calling.iter_mut().find(|w| w.seq == NOT_YET && w.on.on() == stream.on())
    {
        work.seq = seq;
        work.first = work.first.min(seq);
    }
}

/// Kind of host function that may run before the next work on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Due {
    /// No host function.
    Nothing,
    /// A function on a stream.
    Function,
    /// A graph that may call functions.
    Graph,
}

/// Returns the kind of host function that may still run before a stream's work with these covers.
pub fn due(on: On, covers: &[Cover]) -> Due {
    let mut host = host();
    let Some(host) = host.as_mut() else { return Due::Nothing };
    host.forget(|_, _| false);
    let before = host.calling.iter().filter(|w| w.on.on() == on || is_covered(covers, w.on.on(), w.first));
    before
        .filter(|w| !w.own)
        .map(|w| if w.function.is_some() { Due::Function } else { Due::Graph })
        .max()
        .unwrap_or(Due::Nothing)
}

/// Returns `true` if a function of the program, or a graph that may call one, may still run on any
/// stream.
///
/// The worker's driver may run all functions one after the other, and such a one may wait for the
/// calling thread.
pub fn any_of_program() -> bool {
    any() && host().as_ref().is_some_and(|host| host.calling.iter().any(|work| !work.own))
}

/// Queues a host function that the worker reports as due, with the status of its stream.
pub fn call(id: u64, status: i32) {
    if let Some(host) = host().as_mut() {
        host.due.push((id, status));
        HOST_DUE.notify_all();
    }
}

/// Runs a kind of host functions in the order in which they become due.
///
/// They must not call CUDA, as the driver documents.
fn run_host(runner: Runner) {
    let mut locked = host();
    loop {
        let next = locked.as_mut().and_then(|h| {
            // A function that is not known is skipped, and delays no later one.
            h.due.retain(|(id, _)| h.functions.contains_key(id));
            let mine = |(id, _): &(u64, i32)| h.functions[id].function.runner() == runner;
            let (id, before) = h.due.iter().position(mine).map(|at| h.due.remove(at))?;
            let Registered { function, keep, client } = h.functions.get(&id)?;
            let calls = h.calling.iter().filter(|work| work.function == Some(id));
            let after: Vec<_> = calls.flat_map(|work| &work.after).copied().collect();
            // Work behind another function that has not run comes behind this one, too.
            let later = h.calling.iter().filter(|work| !work.returned);
            let later = later.filter(|work| work.function.is_some_and(|function| function != id));
            let later: Vec<_> = later.map(|work| (work.on.on(), work.first)).collect();
            Some((id, before, *function, *keep, (after, later), *client))
        });
        let Some((id, before, function, keep, (after, later), client)) = next else {
            locked = HOST_DUE.wait(locked).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(locked);
        // Data that was copied to the program before this function must have landed. Behind a fault
        // it never does.
        let landed = client.wait_detached(|t| {
            before == 0
                && is_covered(&after, t.on, t.seq)
                && !later.iter().any(|(on, first)| *on == t.on && *first < t.seq)
        });
        let status = landed.err().unwrap_or(before);
        thread::host_function(|| match function {
            // As natively after an error: the function might read what has not landed.
            HostFunction::Plain(..) | HostFunction::Own(..) if status != 0 => {}
            HostFunction::Plain(f, data) | HostFunction::Own(f, data) => f(data as *mut c_void),
            HostFunction::Callback(f, stream, data) => f(stream as *mut c_void, status, data as *mut c_void),
            HostFunction::Destructor(f, data, _) => f(data as *mut c_void),
        });
        if let HostFunction::Destructor(_, _, object) = function {
            handles::retire(object);
        } else {
            // On a lost link no stream waits for the function's end.
            let _ = regions::upload_after_host_function(client);
            if let Some(host) = self::host().as_mut() {
                host.calling.iter_mut().filter(|w| w.function == Some(id)).for_each(|w| w.returned = true);
            }
            let _ = client.post(op::HOST_FUNC_DONE, |w| w.word(id));
        }
        locked = host();
        if let Some(host) = locked.as_mut().filter(|_| !keep) {
            host.functions.remove(&id);
            host.calling.retain(|work| work.function != Some(id));
            MAYBE_DUE.store(host.calling.len(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use gpusession_link::lanes::HostRange;
    use gpusession_proto::handle;

    use super::*;
    use crate::fake_worker::Program;

    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    /// Two channels: the function sends, then waits for the test's word.
    struct Meeting(Sender<bool>, Receiver<()>);

    extern "C" fn meet(data: *mut c_void) {
        // SAFETY: the test leaked the meeting, which only this function uses.
        let Meeting(here, word) = unsafe { &*data.cast::<Meeting>() };
        here.send(thread::in_host_function()).unwrap();
        word.recv_timeout(TEST_TIMEOUT).unwrap();
    }

    fn stream(program: &Program) -> Arc<Stream> {
        let new = program.client.mint(handle::STREAM);
        Arc::new(Stream::new(program.client, new, program.ctx, 1, 0, 9))
    }

    fn wait(done: impl Fn() -> bool) {
        let since = std::time::Instant::now();
        while !done() {
            assert!(since.elapsed() < TEST_TIMEOUT);
            std::thread::yield_now();
        }
    }

    #[test]
    fn function_is_due_until_it_has_run() {
        let program = Program::new();
        let (mine, other) = (stream(&program), stream(&program));
        let ((here, started), (word, waiting)) = (channel(), channel());
        let data = Box::leak(Box::new(Meeting(here, waiting)));
        let function = HostFunction::Plain(meet, std::ptr::from_ref(data) as usize);
        let id = register(program.client, function, Some((&mine, Vec::new()))).unwrap();
        let seq = program.client.post(op::HOST_FUNC, |w| w.word(id)).unwrap();
        appended(&mine, seq);
        assert_eq!(due(mine.on(), &[]), Due::Function);
        assert_eq!(due(other.on(), &[(mine.on(), seq)]), Due::Nothing, "work before it");
        assert_eq!(due(other.on(), &[(mine.on(), seq + 1)]), Due::Function, "work behind it");
        assert_eq!(due(other.on(), &[]), Due::Nothing);
        mine.synced(seq);
        forget_launches(|_, _| true);
        assert_eq!(due(mine.on(), &[]), Due::Function, "only the end of its run completes it");
        program.frames();
        program.tell(op::CALL_HOST, 0, &[id]);
        assert!(started.recv_timeout(TEST_TIMEOUT).unwrap(), "the function must not call CUDA");
        assert_eq!(due(mine.on(), &[]), Due::Function);
        word.send(()).unwrap();
        wait(|| due(mine.on(), &[]) == Due::Nothing);
    }

    #[test]
    fn only_a_launch_behind_a_copy_to_the_program_gets_a_function_in_front() {
        let program = Program::new();
        let (mine, other) = (stream(&program), stream(&program));
        register(program.client, HostFunction::Plain(meet, 0), None).unwrap();
        let in_front = |stream: &Arc<Stream>| {
            launching_graph(stream).unwrap();
            let seq = program.client.post(op::GRAPH_LAUNCH, |_| {}).unwrap();
            appended(stream, seq);
            program.operations().contains(&op::HOST_FUNC)
        };
        assert!(!in_front(&mine), "no copy");
        let mut target = [0u8; 4];
        let seq = program.client.post(op::COPY_FROM_DEVICE, |_| {}).unwrap();
        // SAFETY: the transfer ends before the array does.
        let range = unsafe { HostRange::new(target.as_mut_ptr() as usize, target.len()) };
        program.client.link.down.expect(seq, range, mine.on(), true, Vec::new());
        assert!(!in_front(&other), "the copy of another stream");
        assert!(in_front(&mine));
        program.client.link.down.cancel(seq);
    }

    #[test]
    fn launched_graph_with_functions_is_due_until_its_launch_is_done() {
        let program = Program::new();
        let mine = stream(&program);
        launching_graph(&mine).unwrap();
        assert_eq!(due(mine.on(), &[]), Due::Nothing, "no graph of this client has a function");
        let never = HostFunction::Plain(meet, 0);
        register(program.client, never, None).unwrap();
        for _ in 0..MAX_LAUNCHES + 3 {
            launching_graph(&mine).unwrap();
            appended(&mine, 7);
        }
        launching_graph(&mine).unwrap();
        appended(&mine, 9);
        let entries =
            || host().as_ref().map_or(0, |h| h.calling.iter().filter(|w| w.on.on() == mine.on()).count());
        assert_eq!(entries(), MAX_LAUNCHES + 1, "later launches join the last entry");
        assert_eq!(due(mine.on(), &[]), Due::Graph);
        mine.synced(8);
        assert_eq!(due(mine.on(), &[]), Due::Graph, "the last launch");
        mine.synced(9);
        assert_eq!(due(mine.on(), &[]), Due::Nothing);
        assert_eq!(entries(), 0);
    }
}
