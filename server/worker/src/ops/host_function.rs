//! Host functions: the stream waits in a callback here while the client runs the function.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use gpusession_proto::frame::{Reader, op};

use crate::answer::Done;
use crate::driver::{Handle, Status, check, status};
use crate::frame::Frame;
use crate::handles::Object;
use crate::host_calls::{HostCalls, Position, Queued};
use crate::session::Session;

/// The session whose functions the driver calls: a worker serves one.
///
/// The driver copies and replaces nodes of graphs without the worker's knowledge. So a node refers
/// to no memory of the worker: its data is the client's number of the function.
static SESSION: OnceLock<Arc<Session>> = OnceLock::new();

/// `CUDA_HOST_NODE_PARAMS`
#[repr(C)]
pub struct HostNode {
    run: extern "C" fn(*mut c_void),
    data: *mut c_void,
}

impl HostNode {
    /// Returns the structure as words: function, then data.
    pub fn words(&self) -> [u64; 2] {
        [self.run as usize as u64, self.data as u64]
    }
}

/// Runs a call that a stream makes once.
extern "C" fn run(data: *mut c_void) {
    call_queued(data, 0);
}

/// As [`run`], for a callback: the driver calls it behind a fault, too, and reports that.
extern "C" fn run_callback(_stream: Handle, status: Status, data: *mut c_void) {
    call_queued(data, status);
}

/// Runs a call that a graph may repeat.
extern "C" fn run_of_graph(data: *mut c_void) {
    run_callback_of_graph(std::ptr::null_mut(), 0, data);
}

/// As [`run_of_graph`], for a callback.
extern "C" fn run_callback_of_graph(_stream: Handle, status: Status, data: *mut c_void) {
    if let Some(session) = SESSION.get() {
        call_client(session, data as u64, None, status);
    }
}

/// A client may have captured a call that it did not announce as a graph's: only the first launch
/// finds it.
fn call_queued(data: *mut c_void, status: Status) {
    if let Some(session) = SESSION.get()
        && let Some(Queued { id, at }) = session.host_calls.begin(data as u64)
    {
        call_client(session, id, Some(at), status);
    }
}

/// Lets the client run a function, and waits until it has.
fn call_client(session: &Session, id: u64, at: Option<Position>, status: Status) {
    // Data copied before this point must reach the client before the function runs.
    let mut frames = Vec::new();
    if status == 0 {
        if let Some(Position { ctx, stream, seq }) = at {
            session.landing.reached(&session.replies, ctx, stream as Handle, seq, &mut frames);
        }
        write_back(session);
    }
    session.replies.append(&mut frames, op::CALL_HOST, 0, 0, |w| {
        w.word(id);
        w.word(status as u32 as u64);
    });
    let number = session.host_calls.ask(id, || session.replies.send_frames(frames));
    session.host_calls.wait(id, number);
}

/// A user object of the client, which a graph may keep alive.
struct UserObject {
    session: Arc<Session>,
    handle: u64,
    id: u64,
}

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`
const NO_DESTRUCTOR_SYNC: u32 = 1;

/// Lets the client run an object's destructor; the driver calls it after the last reference.
extern "C" fn destroyed(data: *mut c_void) {
    // SAFETY: `data` came from `Box::into_raw` in `user_object`, and the driver calls this once.
    let object = unsafe { Box::from_raw(data.cast::<UserObject>()) };
    let UserObject { session, handle, id } = *object;
    let _ = session.user_objects.take(handle);
    session.replies.send_with(op::CALL_HOST, 0, 0, |w| w.word(id));
}

/// `USER_OBJECT_CREATE`: new handle, the client's number of the destructor, references.
pub fn user_object(session: &Arc<Session>, r: &mut Reader<'_>) -> Done {
    let (handle, id, references) = (r.word()?, r.word()?, r.word()? as u32);
    let data = Box::into_raw(Box::new(UserObject { session: session.clone(), handle, id }));
    let mut object = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; `destroyed` takes ownership of the box.
    let made = check(unsafe {
        (session.driver.call.cuUserObjectCreate)(
            &mut object,
            data.cast(),
            destroyed,
            references,
            NO_DESTRUCTOR_SYNC,
        )
    });
    if let Err(status) = made {
        // SAFETY: the driver refused, so `destroyed` is never called.
        drop(unsafe { Box::from_raw(data) });
        return Err(status.into());
    }
    Ok(session.user_objects.put(handle, Object(object))?)
}

/// Sends the client what the device has changed in shared memory.
///
/// This runs in the driver's own thread, which must not call the driver: meanwhile, another thread
/// reads device memory.
fn write_back(session: &Session) {
    if !session.mirrors.any_in_device_memory() {
        session.mirrors.write_back(session, true);
        return;
    }
    std::thread::scope(|scope| {
        let read = || session.mirrors.write_back(session, false);
        let reader = std::thread::Builder::new().name("host-call".into()).spawn_scoped(scope, read);
        // Without that thread the function would see old data: end the worker rather than return
        // wrong numbers.
        let done = reader.is_ok_and(|reader| reader.join().is_ok());
        if !done {
            session.end("cannot start the thread that reads managed memory for a host function");
        }
    });
}

impl HostCalls {
    /// Queues a call of the client's function `id` on a stream.
    ///
    /// The driver makes the call of a callback behind a fault, too. The worker makes it if the
    /// driver refuses it: the program's call has returned success. A call that a graph may repeat
    /// is for no position of the log.
    pub fn enqueue(
        session: &Arc<Session>,
        frame: &Frame,
        stream: Handle,
        id: u64,
        of_graph: bool,
        callback: bool,
    ) -> Result<(), Status> {
        let call = &session.driver.call;
        SESSION.get_or_init(|| session.clone());
        if of_graph {
            // SAFETY: the functions take any number for their data.
            return check(unsafe {
                match callback {
                    true => (call.cuStreamAddCallback)(stream, run_callback_of_graph, id as *mut c_void, 0),
                    false => (call.cuLaunchHostFunc)(stream, run_of_graph, id as *mut c_void),
                }
            });
        }
        let at =
            Position { ctx: frame.header.ctx.get(), stream: stream as usize, seq: frame.header.seq.get() };
        let number = session.host_calls.queue(Queued { id, at }).ok_or(status::OUT_OF_MEMORY)?;
        // SAFETY: as above.
        let queued = check(unsafe {
            match callback {
                true => (call.cuStreamAddCallback)(stream, run_callback, number as *mut c_void, 0),
                false => (call.cuLaunchHostFunc)(stream, run, number as *mut c_void),
            }
        });
        if let Err(status) = queued {
            // The driver refused, so it calls nothing.
            session.host_calls.begin(number);
            if callback {
                session.replies.send_with(op::CALL_HOST, 0, 0, |w| {
                    w.word(id);
                    w.word(status as u32 as u64);
                });
            }
        }
        queued
    }

    /// Returns the client's number of the function that a node calls.
    pub fn of_node([function, data]: [u64; 2]) -> Option<u64> {
        let own: extern "C" fn(*mut c_void) = run_of_graph;
        (function == own as usize as u64).then_some(data)
    }

    /// Returns the parameters of a graph node that calls the client's function `id`.
    pub fn node(session: &Arc<Session>, id: u64) -> HostNode {
        SESSION.get_or_init(|| session.clone());
        HostNode { run: run_of_graph, data: id as *mut c_void }
    }
}
