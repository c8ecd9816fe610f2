//! Host functions: the stream waits in a callback here while the client runs the function.

use std::ffi::c_void;
use std::sync::Arc;

use gpusession_proto::frame::{Reader, op};

use crate::answer::Done;
use crate::driver::{Handle, Status, check};
use crate::frame::Frame;
use crate::handles::Object;
use crate::host_calls::HostCalls;
use crate::session::Session;

struct Call {
    session: Arc<Session>,
    id: u64,
    /// Context, stream and position of the frame that queued the call; `None` for a graph's.
    at: Option<(u64, Object, u64)>,
    /// A graph may repeat the call, so it is kept.
    keep: bool,
}

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

extern "C" fn run(data: *mut c_void) {
    call_client(data, 0);
}

/// As [`run`], for a callback: the driver calls it behind a fault, too, and reports that.
extern "C" fn run_callback(_stream: Handle, status: Status, data: *mut c_void) {
    call_client(data, status);
}

/// Lets the client run a function, and waits until it has.
fn call_client(data: *mut c_void, status: Status) {
    let call = data.cast::<Call>();
    // SAFETY: `data` came from `Box::into_raw` in `enqueue` or `node`; a call that is not kept runs
    // once.
    let (session, id, at, keep) = unsafe { ((*call).session.clone(), (*call).id, (*call).at, (*call).keep) };
    if !keep {
        // SAFETY: as above; no code uses it after this.
        drop(unsafe { Box::from_raw(call) });
    }
    // Data copied before this point must reach the client before the function runs.
    let mut frames = Vec::new();
    if status == 0 {
        if let Some((ctx, stream, seq)) = at {
            session.landing.reached(&session.replies, ctx, stream.0, seq, &mut frames);
        }
        write_back(&session);
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
    /// The driver makes the call of a callback behind a fault, too.
    pub fn enqueue(
        session: &Arc<Session>,
        frame: &Frame,
        stream: Handle,
        id: u64,
        keep: bool,
        callback: bool,
    ) -> Result<(), Status> {
        let at = (frame.header.ctx.get(), Object(stream), frame.header.seq.get());
        let at = (!keep).then_some(at);
        let data = Box::into_raw(Box::new(Call { session: session.clone(), id, at, keep }));
        // SAFETY: the function that the driver calls takes ownership of the box.
        let queued = check(unsafe {
            if callback {
                (session.driver.call.cuStreamAddCallback)(stream, run_callback, data.cast(), 0)
            } else {
                (session.driver.call.cuLaunchHostFunc)(stream, run, data.cast())
            }
        });
        if queued.is_err() {
            // SAFETY: the driver refused, so it calls nothing.
            drop(unsafe { Box::from_raw(data) });
        }
        queued
    }

    /// Returns the client's number of the function that a node calls.
    ///
    /// # Safety
    /// The words are those of a node of this worker, as the driver returned them.
    pub unsafe fn of_node([function, data]: [u64; 2]) -> Option<u64> {
        let own: extern "C" fn(*mut c_void) = run;
        if function != own as usize as u64 {
            return None;
        }
        // SAFETY: the worker gave this function only with a call of its own, which a graph keeps.
        Some(unsafe { (*(data as *const Call)).id })
    }

    /// Returns the parameters of a graph node that calls the client's function `id`.
    ///
    /// The graph, its copies and its executable forms share the call, so it lives as long as the
    /// worker.
    pub fn node(session: &Arc<Session>, id: u64) -> HostNode {
        let data = Box::into_raw(Box::new(Call { session: session.clone(), id, at: None, keep: true }));
        HostNode { run, data: data.cast() }
    }
}
