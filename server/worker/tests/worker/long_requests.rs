//! Requests in several frames, and which operations may have them.

use gpusession_proto::frame::{Header, WAIT, Writer, op};
use gpusession_proto::handle;
use gpusession_test_worker::{CTX, Machine, Raw, Worker};

use crate::INVALID_CONTEXT;

const GRAPH: u64 = handle::make(handle::GRAPH, 0, 1, 1);
/// A context that the worker does not know.
const NO_CONTEXT: u64 = handle::make(handle::CTX, 0, 1, 77);

/// Writes a frame of thread 1 in a context.
fn write(guest: &mut Raw, op: u16, ctx: u64, flags: u16, body: impl FnOnce(&mut Writer<'_>)) {
    guest.seq += 1;
    let mut header = Header::empty();
    (header.op, header.flags, header.thread) = (op.into(), flags.into(), 1.into());
    (header.seq, header.ctx) = (guest.seq.into(), ctx.into());
    let mut frame = Vec::new();
    let mut w = Writer::new(&mut frame, &header);
    body(&mut w);
    w.finish();
    guest.write(&frame);
}

/// Writes the part of a long request whose beginning [`request`] writes.
fn part(guest: &mut Raw, ctx: u64) {
    write(guest, op::BODY_PART, ctx, 0, |w| [0, 10].into_iter().for_each(|word| w.word(word)));
}

/// Asks for nodes of a graph by a request whose last words are those of [`part`].
fn request(guest: &mut Raw, operation: u16, ctx: u64) -> Result<i32, String> {
    write(guest, operation, ctx, WAIT, |w| {
        w.set_continued();
        w.word(GRAPH);
        w.word(16);
    });
    guest.answer(guest.seq)
}

#[test]
fn parts_are_independent_of_the_context() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[GRAPH, 0]), Ok(0));
    part(&mut guest, NO_CONTEXT);
    write(&mut guest, op::GRAPH_NODES, NO_CONTEXT, WAIT, |w| {
        w.set_continued();
        w.word(GRAPH);
        w.word(16);
    });
    let (header, _) = guest.frame().expect("an answer");
    assert_eq!((header.op.get(), header.ctx.get() as i32), (op::REPLY, INVALID_CONTEXT), "one error");
    part(&mut guest, CTX);
    assert_eq!(request(&mut guest, op::GRAPH_NODES, NO_CONTEXT), Ok(INVALID_CONTEXT));
    part(&mut guest, CTX);
    assert_eq!(request(&mut guest, op::GRAPH_NODES, CTX), Ok(0), "no part of the failed one is left");
}

#[test]
fn an_operation_that_waits_has_no_parts() {
    let machine = Machine::new();
    for operation in [op::STREAM_SYNC, op::COPY_TO_DEVICE, op::WRITE_HOST, op::BODY_PART] {
        let mut worker = Worker::start(&machine);
        let mut guest = worker.guest();
        part(&mut guest, CTX);
        let refused = request(&mut guest, operation, CTX).expect_err("the end");
        assert!(refused.contains("no long body"), "{operation}: {refused}");
    }
}
