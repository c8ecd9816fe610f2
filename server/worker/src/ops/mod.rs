//! Operations of the log, replayed on the driver.

pub mod allocations;
pub mod copy;
pub mod graph;
pub mod launch;
pub mod memory;
pub mod mirror;
pub mod module;
pub mod stream;

use std::sync::Arc;

use gpusession_proto::frame::{Reader, WAIT, op};
use gpusession_proto::handle::{CTX, make};

use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::check;
use crate::executor::Executor;
use crate::frame::Frame;
use crate::session::Session;

/// Replays one frame and answers it.
pub fn perform(session: &Arc<Session>, executor: &mut Executor, frame: &Frame) {
    let seq = frame.header.seq.get();
    let mut answer = Answer::default();
    let result = session
        .contexts
        .enter(session.driver, executor, frame.header.ctx.get())
        .map_err(Failure::from)
        .and_then(|()| dispatch(session, executor, frame, &mut answer));
    let code = match result {
        Ok(()) => 0,
        Err(Failure::Status(code)) => code,
        Err(Failure::Malformed(bad)) => session.end(&bad.to_string()),
    };
    let waits = frame.header.flags.get() & WAIT != 0;
    match frame.header.op.get() {
        op::COPY_TO_DEVICE | op::COPY_BOX if code != 0 => session.lanes.discard(seq),
        // A program that does not wait for the answer waits for the bytes.
        op::COPY_FROM_DEVICE if code != 0 && !waits => {
            session.send_with(op::LANDED, seq, code, |w| w.bytes(&[]));
        }
        _ => {}
    }
    if waits {
        session.reply(seq, code, &answer);
        return;
    }
    if !answer.before.is_empty() {
        session.send_frames(&answer.before);
    }
    if code != 0 {
        session.late_error(seq, code);
    }
}

fn dispatch(session: &Arc<Session>, executor: &mut Executor, frame: &Frame, answer: &mut Answer) -> Done {
    let call = &session.driver.call;
    let mut r = frame.reader();
    match frame.header.op.get() {
        op::LAUNCH => launch::launch(session, &mut r),
        op::COPY_TO_DEVICE => copy::to_device(session, frame, &mut r),
        op::COPY_FROM_DEVICE => copy::from_device(session, frame, &mut r, answer),
        op::COPY_HOST => copy::copy_host(session, &mut r),
        op::cuMemcpyDtoDAsync_v2 if session.contexts.devices.len() > 1 => {
            copy::between_devices(session, executor, frame, &mut r, answer)
        }
        op::COPY_BOX => copy::copy_box(session, frame, &mut r, answer),
        op::EVENT_RECORD => stream::event_record(session, &mut r),
        op::STREAM_WAIT_EVENT => stream::wait_event(session, &mut r),
        op::STREAM_SYNC => stream::sync(session, frame, &mut r, answer),
        op::STREAM_QUERY => stream::query(session, &mut r, answer),
        op::STREAM_CREATE => stream::create(session, frame, &mut r),
        op::STREAM_DESTROY => stream::destroy(session, &mut r),
        op::STREAM_BATCH => stream::batch(session, &mut r),
        op::CAPTURE_BEGIN => stream::capture_begin(session, &mut r),
        op::CAPTURE_END => stream::capture_end(session, &mut r, answer),
        op::CAPTURE_INFO => stream::capture_info(session, &mut r, answer),
        op::EVENT_CREATE => stream::event_create(session, &mut r),
        op::EVENT_DESTROY => stream::event_destroy(session, &mut r),
        op::EVENT_SYNC => stream::event_sync(session, &mut r, answer),
        op::EVENT_QUERY => stream::event_query(session, &mut r, answer),
        op::EVENT_ELAPSED => stream::event_elapsed(session, &mut r, answer),
        op::HOST_FUNC => stream::host_func(session, frame, &mut r),
        op::HOST_FUNC_DONE => {
            session.host_calls.finished(r.word()?);
            Ok(())
        }
        // The frame does nothing: its thread waits for its position in the log.
        op::MARK => Ok(()),
        op::CTX_SYNC => {
            // SAFETY: the frame's context is current.
            let synced = check(unsafe { (call.cuCtxSynchronize)() });
            flush_results(session, answer);
            Ok(synced?)
        }
        op::CTX_CREATE => {
            let (handle, flags, device) = (r.word()?, r.word()? as u32, r.word()?);
            let ordinal = session.contexts.device(device)?;
            allocations::context_created(session, handle, device as u32)?;
            let mut ctx = std::ptr::null_mut();
            // SAFETY: the out pointer is valid.
            check(unsafe { (call.cuCtxCreate_v2)(&mut ctx, flags, ordinal) })
                .inspect_err(|_| allocations::context_gone(session, handle))?;
            executor.current = 0;
            Ok(session.contexts.put(handle, ctx, device as u32)?)
        }
        op::CTX_DESTROY => {
            let handle = r.word()?;
            leave(session, handle, answer);
            let ctx = session.contexts.take(handle)?;
            executor.current = 0;
            // SAFETY: a context that this worker created.
            Ok(check(unsafe { (call.cuCtxDestroy_v2)(ctx) })?)
        }
        op::PRIMARY_RESET => {
            let device = bounded(r.word()?, session.contexts.devices.len())? as u32;
            leave(session, make(CTX, 0, 1, device), answer);
            executor.current = 0;
            session.contexts.reset(session.driver, device)?;
            if device == 0 {
                session.landing.pin_again(session.driver);
                session.lanes.pin_again(session.driver);
            }
            Ok(())
        }
        op::CTX_SET_LIMIT => {
            let (limit, value) = (r.word()? as i32, r.word()? as usize);
            allocations::limit(session, frame, limit, value as u64)?;
            // SAFETY: the frame's context is current.
            check(unsafe { (call.cuCtxSetLimit)(limit, value) })?;
            let mut now = 0;
            // SAFETY: the out pointer is valid.
            check(unsafe { (call.cuCtxGetLimit)(&mut now, limit) })?;
            answer.word(now as u64);
            Ok(())
        }
        op::MEM_INFO => memory::info(session, frame, answer),
        op::ALLOC => memory::alloc(session, &mut r),
        op::FREE => memory::free(session, &mut r, answer),
        op::MIRROR_HOST => mirror::mirror(session, frame, &mut r, answer),
        op::UNMIRROR_HOST => mirror::unmirror(session, &mut r),
        op::WRITE_HOST => mirror::write_host(session, &mut r),
        op::IMAGE_HAVE => module::have(session, &mut r, answer),
        op::IMAGE_DATA => module::data(session, &mut r),
        op::MODULE_LOAD => module::load_module(session, frame, &mut r, answer),
        op::LIBRARY_LOAD => module::load_library(session, frame, &mut r, answer),
        op::MODULE_UNLOAD => module::unload_module(session, &mut r),
        op::LIBRARY_UNLOAD => module::unload_library(session, &mut r),
        op::LIBRARY_MODULE => module::library_module(session, &mut r),
        op::GET_FUNCTION => module::get_function(session, executor, &mut r, answer),
        op::GET_GLOBAL => module::get_global(session, &mut r, answer),
        op::ENUMERATE => module::enumerate(session, &mut r, answer),
        op::FUNC_ATTRIBUTE => module::attribute(session, executor, &mut r, answer),
        op::FUNC_SET_ATTRIBUTE => module::set_attribute(session, executor, &mut r),
        op::TENSOR_MAP => launch::tensor_map(session, &mut r, answer),
        op::OCCUPANCY => launch::occupancy(session, &mut r, answer),
        op::GRAPH_CREATE => graph::create(session, &mut r),
        op::GRAPH_DESTROY => graph::destroy(session, &mut r),
        op::GRAPH_INSTANTIATE => graph::instantiate(session, &mut r),
        op::GRAPH_EXEC_DESTROY => graph::exec_destroy(session, &mut r),
        op::GRAPH_LAUNCH => {
            graph::launch(session, &mut r)?;
            Ok(allocations::recount_pools(session)?)
        }
        op::GRAPH_NODES => graph::nodes(session, &mut r, answer),
        op::GRAPH_ADD => graph::add(session, &mut r, answer),
        op::GRAPH_CLONE => graph::clone(session, &mut r),
        op::GRAPH_UPDATE => graph::update(session, &mut r, answer),
        op::GRAPH_EXEC_SET => graph::set_params(session, &mut r),
        op::GRAPH_CHILD => graph::child(session, &mut r),
        op::cuGraphDestroyNode => {
            let node = frame.reader().word()?;
            allocations::generated(session, frame, &mut r, answer)?;
            graph::node_destroyed(session, node);
            Ok(())
        }
        _ => allocations::generated(session, frame, &mut r, answer),
    }
}

/// Ends the use of a context that is about to be destroyed or reset.
fn leave(session: &Session, ctx: u64, answer: &mut Answer) {
    // An error in the context goes with it.
    let _ = session.contexts.synchronize_one(session.driver, ctx);
    if ctx == make(CTX, 0, 1, 0) {
        // The reset unpins memory that the data of all contexts passes through.
        let _ = session.contexts.synchronize(session.driver);
    }
    flush_results(session, answer);
    session.lanes.leave(ctx);
    session.streams.forget(|stream| stream.ctx == ctx);
    session.mirrors.forget_context(ctx);
    allocations::context_gone(session, ctx);
}

/// Sends output and arrived copies before the answer, after the driver has synchronised.
pub fn flush_results(session: &Session, answer: &mut Answer) {
    session.landing.sweep(session, &mut answer.before);
    session.mirrors.write_back(session, false);
    session.output.collect(session, &mut answer.before);
    // A pool that has shrunk counts less from now on; the call that let it grow noticed the growth.
    let _ = allocations::recount_pools(session);
}

/// Returns `true` if the replay waits for the GPU, or for bytes that are still on their way.
pub fn may_block(frame: &Frame) -> bool {
    match frame.header.op.get() {
        // A client sends one without reply when little is left to wait for; it is a barrier.
        op::STREAM_SYNC => frame.header.flags.get() & WAIT != 0,
        op::CTX_SYNC | op::EVENT_SYNC | op::COPY_FROM_DEVICE | op::COPY_BOX | op::FREE => true,
        _ => false,
    }
}

/// Returns `true` for a copy to the device whose bytes arrive on the lanes.
///
/// Its replay waits for them.
pub fn is_bulk(frame: &Frame) -> bool {
    const INLINE: usize = 3;
    frame.header.op.get() == op::COPY_TO_DEVICE
        && frame.body.get(INLINE * 8).is_some_and(|inline| *inline == 0)
}

/// Returns `true` for a copy that the replay waits for and the program does not.
///
/// The other streams of its thread need not wait for it either.
pub fn nobody_waits(frame: &Frame) -> bool {
    is_bulk(frame) || frame.header.op.get() == op::COPY_FROM_DEVICE && frame.header.flags.get() & WAIT == 0
}

/// Objects of a frame, as far as the order between client threads depends on them.
#[derive(Debug, Default)]
pub struct Touched {
    /// Handles, without generation: a frame that reuses a slot stays behind the one that freed it.
    objects: Vec<u64>,
    /// Destroys what others may use without naming it, or waits for all streams.
    ///
    /// It stays behind every frame.
    everything: bool,
    /// Works on a default stream, which is ordered with every other stream.
    every_stream: bool,
    some_stream: bool,
    /// Only waits: it must stay behind earlier frames, but no later frame needs to stay behind it.
    only_waits: bool,
    /// Every later frame stays behind it.
    barrier: bool,
}

impl Touched {
    fn object(&mut self, handle: u64) {
        const GENERATION: u64 = 0xffff << 32;
        self.objects.push(handle & !GENERATION);
    }

    fn stream(&mut self, session: &Session, handle: u64) {
        if handle <= 2 {
            self.every_stream = true;
            self.some_stream = true;
        } else {
            self.object(handle);
            // A stream that does not synchronise with the default stream is ordered by its own
            // frames only.
            self.some_stream |= !session.streams.get(handle).is_ok_and(|s| s.non_blocking);
        }
    }

    /// Returns `true` if a frame that touches these must stay behind one that touches `earlier`.
    pub fn depends_on(&self, earlier: &Self) -> bool {
        earlier.barrier
            || !earlier.only_waits
                && (self.everything
                    || (self.every_stream && earlier.some_stream)
                    || (self.some_stream && earlier.every_stream)
                    || self.objects.iter().any(|h| earlier.objects.contains(h)))
    }
}

/// Determines the objects of a frame that matter for the order between client threads.
pub fn touches(session: &Session, frame: &Frame) -> Touched {
    let mut touched = Touched::default();
    let mut r = Reader::new(&frame.body);
    let mut words = [0; 6];
    for word in &mut words {
        match r.word() {
            Ok(value) => *word = value,
            Err(_) => break,
        }
    }
    match frame.header.op.get() {
        op::LAUNCH => {
            touched.object(words[0]);
            touched.stream(session, words[5]);
        }
        op::COPY_TO_DEVICE | op::COPY_FROM_DEVICE => touched.stream(session, words[2]),
        op::COPY_BOX => touched.stream(session, copy::box_stream(frame)),
        op::STREAM_SYNC | op::STREAM_QUERY => {
            touched.stream(session, words[0]);
            touched.only_waits = true;
            // The program did not wait for this frame, and assumes that the work before it is
            // complete.
            touched.barrier = frame.header.flags.get() & WAIT == 0;
        }
        op::EVENT_SYNC | op::EVENT_QUERY => {
            touched.object(words[0]);
            touched.only_waits = true;
        }
        op::EVENT_ELAPSED => {
            touched.object(words[0]);
            touched.object(words[1]);
            touched.only_waits = true;
        }
        op::CTX_SYNC
        | op::FREE
        | op::UNMIRROR_HOST
        | op::MODULE_UNLOAD
        | op::LIBRARY_UNLOAD
        | op::CTX_DESTROY
        | op::PRIMARY_RESET => {
            touched.everything = true;
            touched.only_waits = true;
        }
        op::EVENT_RECORD => {
            touched.object(words[0]);
            touched.stream(session, words[1]);
        }
        op::STREAM_WAIT_EVENT => {
            touched.stream(session, words[0]);
            touched.object(words[1]);
        }
        op::STREAM_BATCH
        | op::COPY_HOST
        | op::STREAM_CREATE
        | op::STREAM_DESTROY
        | op::CAPTURE_BEGIN
        | op::HOST_FUNC => touched.stream(session, words[0]),
        op::CAPTURE_END => {
            touched.stream(session, words[0]);
            touched.object(words[1]);
        }
        op::GRAPH_LAUNCH => {
            touched.object(words[0]);
            touched.stream(session, words[1]);
        }
        op::GRAPH_INSTANTIATE | op::GRAPH_CLONE | op::GRAPH_UPDATE => {
            touched.object(words[0]);
            touched.object(words[1]);
        }
        op::EVENT_CREATE
        | op::EVENT_DESTROY
        | op::GRAPH_CREATE
        | op::GRAPH_DESTROY
        | op::GRAPH_NODES
        | op::GRAPH_ADD
        | op::GRAPH_EXEC_SET
        | op::GRAPH_EXEC_DESTROY => touched.object(words[0]),
        other if crate::generated::takes_away(other) => {
            touched.everything = true;
            touched.only_waits = true;
        }
        other => crate::generated::touches(other, &words, &mut |handle, stream| {
            if stream { touched.stream(session, handle) } else { touched.object(handle) }
        }),
    }
    touched
}
