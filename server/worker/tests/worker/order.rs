//! The order in which a worker replays frames of several streams and threads.

use std::time::Duration;

use gpusession_proto::frame::{FIRST_UP_LANE, op};
use zerocopy::IntoBytes;

use crate::{lane, no_wait, pattern, send_chunk};
use gpusession_test_worker::{MIB, Machine, Raw, WINDOW, Worker, frame_of, stream};

/// `CUstreamBatchMemOpParams`: a wait until the window's first word is at least 1, and its write.
const WAIT_FOR_FLAG: [u64; 6] = [1, WINDOW, 1, 0, 0, 0];
const WRITE_FLAG: [u64; 6] = [2, WINDOW, 1, 0, 0, 0];

fn batch(slot: u32, item: [u64; 6]) -> impl Fn(&mut gpusession_proto::frame::Writer<'_>) {
    move |w| {
        w.word(stream(slot));
        w.word(0);
        w.bytes(item.as_bytes());
    }
}

/// Creates streams 1 and 2, the flag (0) and data memory; returns the address of the data.
fn two_streams_and_a_flag(guest: &mut Raw) -> u64 {
    let data = WINDOW + 2 * MIB;
    for address in [WINDOW, data] {
        assert_eq!(guest.ask_words(op::ALLOC, &[address, 2 * MIB, 0]), Ok(0));
    }
    for slot in [1, 2] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
    }
    assert_eq!(guest.ask_words(300, &[WINDOW, 0, 8, stream(1)]), Ok(0));
    assert_eq!(guest.ask_words(op::STREAM_SYNC, &[stream(1)]), Ok(0));
    data
}

#[test]
fn small_copies_on_a_stream_that_stands_still_hold_up_no_other() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let data = two_streams_and_a_flag(&mut guest);
    let mut seq = guest.seq;
    let mut frames = Vec::new();
    let mut push = |operation, waits: bool, body: &dyn Fn(&mut gpusession_proto::frame::Writer<'_>)| {
        seq += 1;
        let mut frame = frame_of(1, operation, seq, body);
        if !waits {
            no_wait(&mut frame);
        }
        frames.extend_from_slice(&frame);
        seq
    };
    push(op::STREAM_BATCH, false, &batch(1, WAIT_FOR_FLAG));
    // More copies than slots, all of one thread, which then copies and releases them by another
    // stream.
    let small: Vec<u64> = (0..100)
        .map(|_| {
            push(op::COPY_FROM_DEVICE, false, &|w| {
                [data, 8, stream(1), 0].into_iter().for_each(|word| w.word(word));
            })
        })
        .collect();
    let read = push(op::COPY_FROM_DEVICE, true, &|w| {
        [data, 8, stream(2), 1].into_iter().for_each(|word| w.word(word));
    });
    let released = push(op::STREAM_BATCH, true, &batch(2, WRITE_FLAG));
    let synced = push(op::STREAM_SYNC, true, &|w| w.word(stream(1)));
    guest.seq = seq;
    guest.write(&frames);
    let (mut landed, mut answered) = (Vec::new(), Vec::new());
    while answered.len() < 3 || landed.len() < small.len() {
        let (header, _) = guest.frame().expect("an answer");
        assert_eq!(header.ctx.get(), 0, "{}", header.seq.get());
        match header.op.get() {
            op::LANDED => landed.push(header.seq.get()),
            _ => answered.push(header.seq.get()),
        }
    }
    assert_eq!(answered, [read, released, synced]);
    landed.sort_unstable();
    assert_eq!(landed, small);
}

#[test]
fn a_free_waits_for_the_copies_of_a_blocked_thread() {
    const COPIES: u64 = 1200; // more than a stream's queue takes
    const BLOCKED: u32 = 1;
    const FREEING: u32 = 2;
    const RELEASING: u32 = 3;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let data = two_streams_and_a_flag(&mut guest);
    let mut seq = guest.seq;
    let mut frames = Vec::new();
    let mut push = |thread, operation, body: &dyn Fn(&mut gpusession_proto::frame::Writer<'_>)| {
        seq += 1;
        frames.extend_from_slice(&frame_of(thread, operation, seq, body));
        seq
    };
    let mut copies = vec![push(BLOCKED, op::STREAM_BATCH, &batch(1, WAIT_FOR_FLAG))];
    for _ in 0..COPIES {
        copies.push(push(BLOCKED, op::COPY_TO_DEVICE, &|w| {
            [data, 8, stream(1), 1].into_iter().for_each(|word| w.word(word));
            w.bytes(&[7; 8]);
        }));
    }
    let freed = push(FREEING, op::FREE, &|w| w.word(data));
    let released = push(RELEASING, op::STREAM_BATCH, &batch(2, WRITE_FLAG));
    guest.seq = seq;
    guest.write(&frames);
    // Answers arrive as the frames are done, from more than one thread.
    let mut done = Vec::new();
    while done.len() < copies.len() + 2 {
        let (header, _) = guest.frame().expect("an answer");
        assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0), "{}", header.seq.get());
        done.push(header.seq.get());
    }
    assert!(done.contains(&released));
    let at = |seq: u64| done.iter().position(|s| *s == seq).expect("answered");
    assert!(copies.iter().all(|copy| at(*copy) < at(freed)), "the free is behind the copies");
}

#[test]
fn later_frames_stay_behind_a_synchronisation_without_waiter() {
    const LEN: usize = 200_000;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    for slot in [1, 2] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
    }
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // One thread copies and has synchronised. Another one then reads by another stream, before the
    // bytes arrive.
    let first = guest.seq + 1;
    let words =
        |words: [u64; 4]| move |w: &mut gpusession_proto::frame::Writer<'_>| w.words(words.as_bytes());
    let copy = frame_of(1, op::COPY_TO_DEVICE, first, words([WINDOW, LEN as u64, stream(1), 0]));
    let mut sync = frame_of(1, op::STREAM_SYNC, first + 1, |w| w.word(stream(1)));
    let flags = std::mem::offset_of!(gpusession_proto::frame::Header, flags);
    sync[flags..flags + 2].fill(0);
    let read =
        frame_of(2, op::COPY_FROM_DEVICE, first + 2, words([WINDOW + LEN as u64 - 8, 8, stream(2), 1]));
    guest.seq = first + 2;
    guest.write(&[copy, sync, read].concat());
    // Time for a wrong overtaking to happen.
    std::thread::sleep(Duration::from_millis(20));
    let bytes = pattern(LEN, 5);
    send_chunk(&mut up, first, 0, &bytes);
    let (header, _) = guest.frame().expect("an answer");
    assert_eq!((header.seq.get(), header.ctx.get()), (first, 0));
    let (header, body) = guest.frame().expect("an answer");
    assert_eq!((header.seq.get(), header.ctx.get()), (first + 2, 0));
    assert_eq!(body[8..16], bytes[LEN - 8..]);
}
