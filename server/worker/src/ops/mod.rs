//! Operations of the log, replayed on the driver.

pub mod allocations;
mod boxes;
pub mod copy;
mod event;
mod flush;
mod generated;
pub mod graph;
mod graph_params;
mod graph_queries;
mod green;
mod host_function;
pub mod launch;
pub mod link;
pub mod memory;
pub mod mirror;
pub mod module;
mod pool;
mod reference;
mod settle;
pub mod share;
pub mod stream;
mod tensor_map;

use std::sync::Arc;

use gpusession_proto::frame::{WAIT, op};
use gpusession_proto::handle::{CTX, make};

use self::flush::flush_results;
use crate::activity::Activity;
use crate::answer::{Answer, Done, Failure, bounded};
use crate::driver::{check, status};
use crate::execute::{Perform, Replay};
use crate::executor::Executor;
use crate::frame::Frame;
use crate::handles::Table;
use crate::objects::Stream;
use crate::order;
use crate::replies::Replies;
use crate::session::Session;
use crate::supervise::Supervisor;

impl Perform for Session {
    fn replay(&self) -> &Replay {
        &self.replay
    }

    fn supervisor(&self) -> &Supervisor {
        self.supervisor()
    }

    fn replies(&self) -> &Replies {
        &self.replies
    }

    fn activity(&self) -> &Activity {
        &self.activity
    }

    fn streams(&self) -> &Table<Stream> {
        &self.streams
    }

    fn query(&self, executor: &mut Executor) -> bool {
        self.activity.query(self, executor)
    }

    fn perform(self: &Arc<Self>, executor: &mut Executor, frame: &Frame) {
        perform(self, executor, frame);
    }

    fn end(&self, reason: &str) -> ! {
        self.end(reason)
    }
}

/// Replays one frame and answers it.
fn perform(session: &Arc<Session>, executor: &mut Executor, frame: &Frame) {
    let seq = frame.header.seq.get();
    let mut answer = Answer::default();
    let code = match replay(session, executor, frame, &mut answer) {
        Ok(()) => 0,
        Err(Failure::Status(code)) => code,
        Err(Failure::Malformed(bad)) => session.end(&bad.to_string()),
    };
    let waits = frame.header.flags.get() & WAIT != 0;
    if order::is_bulk(frame) {
        if code == 0 {
            session.lanes.forget(seq);
        } else if !session.lanes.discard(seq, order::bulk_len(frame)) {
            session.end("the program does not send the bytes of its copies");
        }
    }
    // A program that does not wait for the answer waits for the bytes.
    if code != 0 && order::is_unawaited_download(frame) {
        session.replies.send_with(op::LANDED, seq, code, |w| w.bytes(&[]));
    }
    if waits {
        session.replies.reply(seq, code, &answer);
        return;
    }
    if !answer.before.is_empty() {
        session.replies.send_frames(answer.before);
    }
    if code != 0 {
        session.replies.late_error(seq, code);
    }
}

/// Replays one frame, with the parts of its body, in its context.
fn replay(session: &Arc<Session>, executor: &mut Executor, frame: &Frame, answer: &mut Answer) -> Done {
    // Before the context, whose failure would leave the parts to the thread's next request.
    let whole = session.long_bodies.joined(frame)?;
    let frame = whole.as_ref().map_or(frame, |whole| &whole.frame);
    if frame.header.op.get() == op::BODY_PART {
        session.long_bodies.add(frame);
        return Ok(());
    }
    session.contexts.enter(session.driver, executor, frame.header.ctx.get())?;
    dispatch(session, executor, frame, answer)
}

#[expect(clippy::too_many_lines, reason = "one `match` over the operations")]
fn dispatch(session: &Arc<Session>, executor: &mut Executor, frame: &Frame, answer: &mut Answer) -> Done {
    let call = &session.driver.call;
    let mut r = frame.reader();
    match frame.header.op.get() {
        op::LAUNCH => launch::launch(session, &mut r),
        op::COPY_TO_DEVICE => copy::to_device(session, frame, &mut r),
        op::COPY_FROM_DEVICE => copy::from_device(session, frame, &mut r, answer),
        op::COPY_HOST => boxes::copy_host(session, &mut r),
        op::cuMemcpyDtoDAsync_v2 if session.contexts.devices.len() > 1 => {
            copy::between_devices(session, executor, frame, &mut r, answer)
        }
        op::COPY_BOX => boxes::copy(session, frame, &mut r, answer),
        op::EVENT_RECORD => event::record(session, &mut r),
        op::STREAM_WAIT_EVENT => event::wait(session, &mut r),
        op::STREAM_SYNC => stream::sync(session, frame, &mut r, answer),
        op::STREAM_QUERY => stream::query(session, &mut r, answer),
        op::STREAM_CREATE => stream::create(session, frame, &mut r),
        op::STREAM_DESTROY => stream::destroy(session, &mut r),
        op::STREAM_BATCH => stream::batch(session, &mut r),
        op::CAPTURE_BEGIN => stream::capture_begin(session, &mut r)
            .inspect_err(|_| session.replay.no_capture(order::word(frame, 0))),
        op::CAPTURE_END => stream::capture_end(session, &mut r, answer),
        op::CAPTURE_UPDATE => stream::capture_update(session, &mut r),
        op::CAPTURE_INFO => stream::capture_info(session, &mut r, answer),
        op::EVENT_CREATE => event::create(session, &mut r),
        op::EVENT_DESTROY => event::destroy(session, &mut r),
        op::EVENT_SYNC => event::sync(session, &mut r, answer),
        op::EVENT_QUERY => event::query(session, &mut r, answer),
        op::EVENT_ELAPSED => event::elapsed(session, &mut r, answer),
        op::HOST_FUNC => stream::host_func(session, frame, &mut r),
        op::HOST_FUNC_DONE => {
            session.host_calls.finished(r.word()?);
            Ok(())
        }
        // The frame does nothing: its thread waits for its position in the log.
        op::MARK => Ok(()),
        op::CTX_SYNC => {
            let synced = settle::context(session, frame.header.ctx.get());
            flush_results(session, answer);
            Ok(synced?)
        }
        op::CTX_CREATE => {
            let (handle, flags, device) = (r.word()?, r.word()? as u32, r.word()?);
            let ordinal = session.contexts.device(device)?;
            allocations::context_created(session, handle, device as u32)?;
            let mut ctx = std::ptr::null_mut();
            // SAFETY: the out pointer is valid.
            check(unsafe { (call.cuCtxCreate_v2)(&mut ctx, of_driver(flags), ordinal) })
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
            reset(session, executor, device, answer)
        }
        op::CORE_DUMP => enable_core_dumps(session, executor, r.word()? as u32, answer),
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
        op::PEER_ATOMICS => memory::peer_atomics(session, &mut r, answer),
        op::MAP_ARRAYS => memory::map_arrays(session, &mut r),
        op::DECOMPRESS => memory::decompress(session, &mut r, answer),
        op::MEM_INFO => memory::info(session, frame, answer),
        op::ALLOC => memory::alloc(session, &mut r),
        op::FREE => memory::free(session, &mut r, answer),
        op::SHARE_EXPORT => share::export(session, &mut r, answer),
        op::SHARE_IMPORT => share::import(session, &mut r, answer),
        op::SHARE_ADDRESS => share::export_address(session, &mut r, answer),
        op::SHARE_OPEN => share::open(session, &mut r),
        op::SHARE_EVENT => event::export(session, frame, &mut r, answer),
        op::SHARE_EVENT_OPEN => event::open(session, &mut r),
        op::SHARE_POOL => pool::export(session, &mut r, answer),
        op::SHARE_POOL_IMPORT => pool::import(session, &mut r, answer),
        op::SHARE_POINTER => pool::export_pointer(session, &mut r, answer),
        op::SHARE_POINTER_IMPORT => pool::import_pointer(session, &mut r, answer),
        op::MIRROR_HOST => mirror::mirror(session, frame, &mut r, answer),
        op::UNMIRROR_HOST => mirror::unmirror(session, &mut r),
        op::WRITE_HOST => mirror::write_host(session, &mut r),
        op::IMAGE_HAVE => module::has_image(session, &mut r, answer),
        op::IMAGE_DATA => module::data(session, &mut r),
        op::MODULE_LOAD => module::load_module(session, executor, frame, &mut r, answer),
        op::LIBRARY_LOAD => module::load_library(session, executor, frame, &mut r, answer),
        op::MODULE_UNLOAD => module::unload_module(session, &mut r),
        op::REFERENCE_FIND => reference::find(session, &mut r),
        op::TEXREF_CREATE => reference::create(session, &mut r),
        op::TEXREF_DESTROY => reference::destroy(session, &mut r),
        op::LIBRARY_UNLOAD => module::unload_library(session, &mut r),
        op::LIBRARY_MODULE => module::library_module(session, &mut r),
        op::LINK_CREATE => link::create(session, &mut r),
        op::LINK_ADD => link::add(session, &mut r, answer),
        op::LINK_COMPLETE => link::complete(session, &mut r, answer),
        op::LINK_IMAGE => link::image(session, &mut r, answer),
        op::LINK_DESTROY => link::destroy(session, &mut r),
        op::GET_FUNCTION => module::get_function(session, executor, &mut r, answer),
        op::GET_GLOBAL => module::get_global(session, &mut r, answer),
        op::ENUMERATE => module::enumerate(session, &mut r, answer),
        op::FUNC_ATTRIBUTE => module::attribute(session, executor, &mut r, answer),
        op::FUNC_SET_ATTRIBUTE => module::set_attribute(session, executor, &mut r),
        op::TENSOR_MAP => tensor_map::encode(session, &mut r, answer),
        op::TENSOR_MAP_CHANGE => tensor_map::change(session, &mut r, answer),
        op::OCCUPANCY => launch::occupancy(session, &mut r, answer),
        op::GRAPH_CREATE => graph::create(session, &mut r),
        op::GRAPH_DESTROY => graph::destroy(session, &mut r),
        op::GRAPH_INSTANTIATE => graph::instantiate(session, &mut r, answer),
        op::GRAPH_EXEC_DESTROY => graph::exec_destroy(session, &mut r),
        op::GRAPH_LAUNCH => {
            graph::launch(session, &mut r)?;
            Ok(allocations::recount_pools(session)?)
        }
        op::GRAPH_NODES => graph_queries::nodes(session, &mut r, answer),
        op::GRAPH_ADD => graph::add(session, &mut r, answer),
        op::GRAPH_CLONE => graph::clone(session, &mut r),
        op::GRAPH_UPDATE => graph::update(session, &mut r, answer),
        op::GRAPH_EXEC_SET => graph::set_params(session, &mut r),
        op::DEV_RESOURCE => green::resource(session, &mut r, answer),
        op::DEV_RESOURCE_SPLIT => green::split(session, &mut r, answer),
        op::DEV_RESOURCE_GROUPS => green::groups(session, &mut r, answer),
        op::DEV_RESOURCE_DESC => green::describe(session, &mut r),
        op::GREEN_CREATE => green::create(session, &mut r),
        op::GREEN_DESTROY => green::destroy(session, executor, &mut r, answer),
        op::CTX_EVENT => green::event(session, &mut r),
        op::GRAPH_NODE_PARAMS => graph_params::read(session, &mut r, answer),
        op::GRAPH_DRAW => graph_queries::draw(session, &mut r, answer),
        op::USER_OBJECT_CREATE => host_function::user_object(session, &mut r),
        op::GRAPH_CHILD => graph::child(session, &mut r),
        op::cuMemFreeAsync => {
            let address = frame.reader().word()?;
            pool::free(session, address, || allocations::generated(session, frame, &mut r, answer))
        }
        op::cuMemPoolDestroy => {
            let handle = frame.reader().word()?;
            pool::destroy(session, handle, || allocations::generated(session, frame, &mut r, answer))?;
            Ok(allocations::recount_pools(session)?)
        }
        op::cuGraphDestroyNode => {
            let node = frame.reader().word()?;
            allocations::generated(session, frame, &mut r, answer)?;
            graph::node_destroyed(session, node);
            Ok(())
        }
        _ => allocations::generated(session, frame, &mut r, answer),
    }
}

/// Returns the flags of a context without those for core dumps.
///
/// The driver would write a dump on this host at a fault, and abort this process.
fn of_driver(flags: u32) -> u32 {
    /// `CU_CTX_COREDUMP_ENABLE | CU_CTX_USER_COREDUMP_ENABLE`
    const DUMPS: u32 = 0x20 | 0x40;
    flags & !DUMPS
}

/// Lets a fault of the program make a dump, before the program has any object.
///
/// A context makes dumps only if they were enabled before its creation, so the worker replaces
/// those that it created at its start. Without one of them it cannot continue.
fn enable_core_dumps(session: &Session, executor: &mut Executor, flags: u32, answer: &mut Answer) -> Done {
    if session.has_objects() {
        return Err(status::NOT_PERMITTED.into());
    }
    let memory = session.contexts.device_memory(session.driver);
    session.core_dump.enable(session.driver, &session.replies, &session.output, flags, memory)?;
    for device in 0..session.contexts.devices.len() as u32 {
        if let Err(Failure::Status(error)) = reset(session, executor, device, answer) {
            session.end(&format!(
                "GPU core dumps: the context of GPU {device} of the lease could not be created again: CUDA \
                 error {error}; start the program again, or without CUDA_ENABLE_COREDUMP_ON_EXCEPTION"
            ));
        }
    }
    Ok(())
}

/// Replaces a device's primary context.
fn reset(session: &Session, executor: &mut Executor, device: u32, answer: &mut Answer) -> Done {
    leave(session, make(CTX, 0, 1, device), answer);
    executor.current = 0;
    session.contexts.reset(session.driver, device)?;
    if device == 0 {
        session.landing.pin_again(session.driver);
        session.lanes.pin_again(session.driver);
        session.shared_events.register_again(session.driver)?;
    }
    Ok(())
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
    allocations::context_gone(session, ctx);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_of_a_program_dumps_nothing_here() {
        const BLOCKING_SYNC: u32 = 4;
        const SYNC_MEMOPS: u32 = 0x80;
        assert_eq!(of_driver(BLOCKING_SYNC | 0x20 | 0x40 | SYNC_MEMOPS), BLOCKING_SYNC | SYNC_MEMOPS);
    }

    #[test]
    fn each_operation_of_a_program_has_an_arm() {
        // Frames of the greeting, of the connection and its lanes, and those that a worker sends.
        const ELSEWHERE: [u16; 19] = [
            op::HELLO,
            op::LANE,
            op::MEASURE,
            op::REPLY,
            op::LATE_ERROR,
            op::OUTPUT,
            op::END,
            op::CHUNK,
            op::CALL_HOST,
            op::HOST_CHANGED,
            op::ACK,
            op::BYE,
            op::CHALLENGE,
            op::RESUME,
            op::WELCOME,
            op::WANTED,
            op::RELEASE,
            op::REPLY_PART,
            op::DUMPED,
        ];
        // No library sends it any more; its number stays taken.
        const UNUSED: [u16; 1] = [op::TPC_TOPOLOGY];
        let arms = include_str!("mod.rs").split("mod tests").next().unwrap();
        let has_arm = |name: &str| {
            let word = format!("op::{name}");
            let mut ends = arms.match_indices(&word).map(|(at, found)| at + found.len());
            ends.any(|end| !arms[end..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
        };
        for number in (0..op::COUNT as u16).filter(|n| !ELSEWHERE.contains(n) && !UNUSED.contains(n)) {
            let name = op::name(number);
            // `generated` replays the calls that the table describes.
            let by_hand = name != "?" && !name.starts_with("cu");
            assert!(!by_hand || has_arm(name), "operation {number}, {name}, has no arm in `dispatch`");
        }
    }
}
