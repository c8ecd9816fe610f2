//! Clients that send without end, to make their worker's tables grow.

use std::time::Instant;

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::{no_wait, stream};
use gpusession_test_worker::{MIB, Machine, Raw, Worker, event, frame};

const GRAPH: u64 = handle::make(handle::GRAPH, 0, 1, 0);
const EXEC: u64 = handle::make(handle::EXEC, 0, 1, 0);
/// Kind of a node that calls a host function.
const HOST: u64 = 7;

/// Returns the next frame, without a reply.
fn next(guest: &mut Raw, operation: u16, words: &[u64]) -> Vec<u8> {
    guest.seq += 1;
    let mut bytes = frame(operation, guest.seq, |w| words.iter().for_each(|word| w.word(*word)));
    no_wait(&mut bytes);
    bytes
}

fn post(guest: &mut Raw, operation: u16, words: &[u64]) {
    let bytes = next(guest, operation, words);
    guest.write(&bytes);
}

/// Sends frames without a reply, and waits now and then until the worker has done them.
fn send_many(guest: &mut Raw, count: u64, operation: u16, words: impl Fn(u64) -> Vec<u64>) {
    const AT_ONCE: u64 = 5000;
    let mut all = Vec::new();
    for number in 0..count {
        all.extend_from_slice(&next(guest, operation, &words(number)));
        if (number + 1).is_multiple_of(AT_ONCE) {
            guest.write(&std::mem::take(&mut all));
            assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0), "the worker continues");
        }
    }
    guest.write(&all);
}

/// Waits until the worker asks for a function, and answers that it has run.
fn run_function(guest: &mut Raw, id: u64) {
    loop {
        let (header, body) = guest.frame().expect("a frame");
        if header.op.get() == op::CALL_HOST {
            assert_eq!(body[..8], id.to_le_bytes());
            return post(guest, op::HOST_FUNC_DONE, &[id]);
        }
    }
}

#[test]
fn answers_and_nodes_without_end_take_no_memory() {
    const ANSWERS: u64 = 1_000_000;
    const NODES: u64 = 100_000;
    const MOST: u64 = 64 * MIB;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[GRAPH, 0]), Ok(0));
    let node =
        guest.ask_answer(op::GRAPH_ADD, |w| [GRAPH, 0, HOST, 1].into_iter().for_each(|word| w.word(word)))[0];
    assert_eq!(guest.ask_words(op::GRAPH_INSTANTIATE, &[EXEC, GRAPH, 0]), Ok(0));
    let (before, _) = worker.memory();
    let mut sent = |name: &str, count, operation, words: &dyn Fn(u64) -> Vec<u64>| {
        let begun = Instant::now();
        send_many(&mut guest, count, operation, words);
        let grown = worker.memory().0.saturating_sub(before);
        println!("{name}: {} KiB more, {:?}", grown >> 10, begun.elapsed());
        assert!(grown < MOST, "{name}: {grown} bytes");
        grown
    };
    sent("answers to no question", ANSWERS, op::HOST_FUNC_DONE, &|id| vec![id]);
    // The first ones fill buffers.
    let warm = sent("nodes", NODES, op::GRAPH_EXEC_SET, &|id| vec![EXEC, node, HOST, id]);
    sent("nodes of an executable graph", NODES, op::GRAPH_EXEC_SET, &|id| vec![EXEC, node, HOST, id]);
    let grown = sent("nodes of a graph", NODES, op::GRAPH_EXEC_SET, &|id| vec![0, node, HOST, id]);
    assert!(grown < warm + 2 * NODES * 32, "{NODES} nodes twice: from {warm} to {grown} bytes");
    // The graph calls the last function that was set.
    assert_eq!(guest.ask_words(op::GRAPH_NODE_PARAMS, &[node, 3]), Ok(0));
    assert_eq!(guest.words, [NODES - 1]);
    post(&mut guest, op::GRAPH_LAUNCH, &[EXEC, 0]);
    run_function(&mut guest, NODES - 1);
    assert_eq!(guest.ask_words(op::STREAM_SYNC, &[0]), Ok(0));
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
}

#[test]
fn a_captured_call_that_the_client_does_not_announce_is_made_once() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(1), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::CAPTURE_BEGIN, &[stream(1), 0, 0, GRAPH]), Ok(0));
    // A call of a stream, and one of a graph.
    assert_eq!(guest.ask_words(op::HOST_FUNC, &[stream(1), 5, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::HOST_FUNC, &[stream(1), 6, 1]), Ok(0));
    assert_eq!(guest.ask_words(op::CAPTURE_END, &[stream(1), GRAPH]), Ok(0));
    assert_eq!(guest.ask_words(op::GRAPH_INSTANTIATE, &[EXEC, GRAPH, 0]), Ok(0));
    for launch in 0..50 {
        post(&mut guest, op::GRAPH_LAUNCH, &[EXEC, stream(1)]);
        if launch == 0 {
            run_function(&mut guest, 5);
        }
        run_function(&mut guest, 6);
        assert_eq!(guest.ask_words(op::STREAM_SYNC, &[stream(1)]), Ok(0));
    }
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
}
