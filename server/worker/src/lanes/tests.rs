use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::thread::JoinHandle;

use gpusession_proto::handle::{CTX, make};

use super::*;
use crate::driver::{Handle, fake};
use crate::replies::tests::{Peer, replies, transport};

const CTX_0: u64 = make(CTX, 0, 1, 0);
const CTX_1: u64 = make(CTX, 0, 1, 1);

struct Lab {
    driver: &'static Driver,
    contexts: Arc<Contexts>,
    lanes: Arc<Lanes>,
}

impl Lab {
    fn new() -> Self {
        let driver = fake::driver();
        let contexts = Arc::new(Contexts::warm(driver, &fake::devices()).unwrap());
        Self { driver, contexts, lanes: Arc::default() }
    }

    /// Waits for a chunk of a transfer that its stream has reached.
    fn next(&self, transfer: u64) -> Result<Chunk, Status> {
        self.lanes.next_chunk(self.driver, transfer, || Ok(true))
    }

    /// Serves a lane, and returns the client's end of it.
    fn open(&self, lane: u16) -> (Peer, JoinHandle<io::Result<()>>) {
        let (transport, peer) = transport();
        let transport = Arc::new(transport);
        assert!(self.lanes.claim(lane, 1, &transport));
        let (driver, contexts, lanes) = (self.driver, self.contexts.clone(), self.lanes.clone());
        (peer, std::thread::spawn(move || lanes.serve(driver, &contexts, lane, 1, &transport)))
    }
}

/// Sends the chunk with this number on its lane.
fn send(peer: &mut Peer, number: u64, transfer: u64, offset: u64, bytes: &[u8]) {
    let padding = [0; 8];
    let padded = bytes.len().next_multiple_of(8) - bytes.len();
    let header = chunk_header(number, transfer, offset, bytes.len(), 0);
    for part in [header.as_bytes(), bytes, &padding[..padded]] {
        peer.0.write_all(part).unwrap();
    }
}

#[test]
fn lane_exists_and_has_one_connection() {
    let lanes = Lanes::default();
    let transport = Arc::new(transport().0);
    let claim = |lane| lanes.claim(lane, 1, &transport);
    for lane in [0, UP_LANES + DOWN_LANES + 1, 63, u16::MAX] {
        assert!(!claim(lane), "{lane}");
    }
    for lane in 1..=UP_LANES + DOWN_LANES {
        assert!(claim(lane) && !claim(lane), "{lane}");
    }
}

#[test]
fn frame_finds_the_chunks_of_its_transfer() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(1);
    send(&mut peer, 1, 7, 0, b"first");
    send(&mut peer, 2, 8, 100, b"of another frame");
    let other = lab.next(8).unwrap();
    let mut chunk = lab.next(7).unwrap();
    assert_eq!((other.offset, other.len, chunk.offset, chunk.len), (100, 16, 0, 5));
    // SAFETY: the slot holds the chunk's bytes.
    assert_eq!(unsafe { std::slice::from_raw_parts(chunk.memory.address(), 5) }, b"first");
    assert_eq!(lab.lanes.bytes_to_device(), 21, "without the padding");
}

/// Chooses the event for a chunk's copy, which is under way from now on.
fn begin(lab: &Lab, slot: &mut Slot, ctx: u64) -> Handle {
    slot.enter(lab.driver, &lab.contexts, ctx).unwrap();
    fake::happen(slot.event, status::NOT_READY);
    slot.event
}

/// Takes a transfer's chunk and begins its copy; returns slot and event.
fn copy(lab: &Lab, transfer: u64) -> (usize, Handle) {
    let mut chunk = lab.next(transfer).unwrap();
    let address = chunk.memory.address() as usize;
    let Memory::Slot(slot) = &mut chunk.memory else { panic!("no slot for {transfer}") };
    let event = begin(lab, slot, CTX_0);
    lab.lanes.copied(chunk);
    (address, event)
}

#[test]
fn slot_is_free_once_the_device_has_read_it() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(1);
    let mut held = Vec::new();
    for transfer in 1..=UP_SLOTS as u64 {
        send(&mut peer, transfer, transfer, 0, &[transfer as u8; 8]);
        held.push(copy(&lab, transfer));
    }
    let (address, event) = held[1];
    fake::happen(event, 0);
    send(&mut peer, 3, 3, 0, &[91; 8]);
    assert_eq!(copy(&lab, 3).0, address);
}

#[test]
fn lane_whose_streams_stand_still_has_more_slots() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(1);
    let mut held = std::collections::BTreeSet::new();
    for transfer in 1..=4 * UP_SLOTS as u64 {
        send(&mut peer, transfer, transfer, 0, &[transfer as u8; 8]);
        held.insert(copy(&lab, transfer).0);
    }
    assert_eq!(held.len(), 4 * UP_SLOTS);
    let (mut other, _serving) = lab.open(2);
    send(&mut other, 1, 99, 0, &[9; 8]);
    assert!(!held.contains(&copy(&lab, 99).0), "each lane has its own");
}

/// Fills all slots of lane 1 with copies that stand still; returns their events.
fn fill(lab: &Lab, peer: &mut Peer) -> Vec<Handle> {
    let copies = (1..=MAX_UP_SLOTS as u64).map(|transfer| {
        send(peer, transfer, transfer, 0, &[transfer as u8; 8]);
        copy(lab, transfer).1
    });
    copies.collect()
}

/// Receives the acknowledgement of a chunk; returns the number of the hold.
fn acknowledged(peer: &mut Peer, number: u64) -> u64 {
    let (header, _) = peer.next();
    assert_eq!((header.op.get(), header.ack.get()), (op::ACK, number));
    header.ctx.get()
}

#[test]
fn program_is_held_back_while_streams_that_stand_still_have_all_slots() {
    const AHEAD: u64 = 70;
    const WANTED: u64 = 80;
    const FAILED: u64 = 60;
    let lab = Lab { lanes: Arc::new(Lanes::new(true)), ..Lab::new() };
    let (replies, mut program) = replies();
    lab.lanes.program_holds(replies);
    let (mut peer, _serving) = lab.open(1);
    let events = fill(&lab, &mut peer);
    let first = MAX_UP_SLOTS as u64 + 1;
    assert!((1..first).all(|number| acknowledged(&mut peer, number) == 0));
    assert!(lab.lanes.discard(FAILED, 8));
    // It was under way.
    send(&mut peer, first, AHEAD, 0, &[7; 8]);
    let told = |program: &mut Peer| {
        let (header, _) = program.next();
        (header.op.get(), header.seq.get(), header.ctx.get())
    };
    assert_eq!(told(&mut program), (op::WANTED, FAILED, 1), "its source may go");
    assert_eq!(acknowledged(&mut peer, first), 1);
    let mut asked = 0;
    let mut reached = || {
        asked += 1;
        // The second time its stream has reached the copy.
        if asked == 2 {
            send(&mut peer, first + 1, WANTED, 0, &[8; 8]);
        }
        Ok(asked == 2)
    };
    let chunk = lab.lanes.next_chunk(lab.driver, WANTED, &mut reached).unwrap();
    assert!(matches!(&chunk.memory, Memory::Heap(spill) if spill.bytes == [8; 8]));
    lab.lanes.copied(chunk);
    assert_eq!(told(&mut program), (op::WANTED, WANTED, 1));
    lab.lanes.forget(WANTED);
    // The slots are free again.
    events.iter().for_each(|event| fake::happen(*event, 0));
    let chunk = lab.next(AHEAD).unwrap();
    assert!(matches!(&chunk.memory, Memory::Heap(spill) if spill.bytes == [7; 8]));
    lab.lanes.copied(chunk);
    let waiting = {
        let lanes = lab.lanes.clone();
        std::thread::spawn(move || lanes.next_chunk(fake::driver(), 90, || Ok(false)).is_ok())
    };
    assert_eq!(told(&mut program), (op::RELEASE, 0, 1), "although its stream has not reached the copy");
    send(&mut peer, first + 2, 90, 0, &[9; 8]);
    assert!(waiting.join().unwrap());
    assert_eq!((acknowledged(&mut peer, first + 1), acknowledged(&mut peer, first + 2)), (1, 0));
    send(&mut peer, first + 3, 91, 0, &[9; 8]);
    copy(&lab, 91);
}

#[test]
fn program_that_cannot_be_held_back_waits_for_a_slot() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(1);
    let events = fill(&lab, &mut peer);
    // A chunk of a failed frame blocks no lane.
    assert!(lab.lanes.discard(60, 8));
    send(&mut peer, MAX_UP_SLOTS as u64 + 1, 60, 0, &[6; 8]);
    send(&mut peer, MAX_UP_SLOTS as u64 + 2, 70, 0, &[7; 8]);
    lab.lanes.hold();
    assert_eq!(lock(&lab.lanes.arrived).hold.in_force(), 0);
    fake::happen(events[3], 0);
    copy(&lab, 70);
}

#[test]
fn failed_frame_leaves_its_lane_free() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(1);
    send(&mut peer, 1, 5, 0, &[0; 8]);
    lab.lanes.copied(lab.next(5).unwrap());
    // More chunks than there are slots.
    const CHUNKS: u64 = 2 * MAX_UP_SLOTS as u64;
    assert!(lab.lanes.discard(5, 8 + 8 * CHUNKS));
    for offset in 1..=CHUNKS {
        send(&mut peer, 1 + offset, 5, 8 * offset, &[0; 8]);
    }
    send(&mut peer, 2 + CHUNKS, 6, 0, &[6; 8]);
    assert_eq!(lab.next(6).unwrap().len, 8);
    assert!(lock(&lab.lanes.arrived).unwanted.is_empty(), "all of its bytes have come");
    assert!(lab.lanes.discard(6, 8) && lock(&lab.lanes.arrived).unwanted.is_empty(), "taken whole");
}

#[test]
fn frame_gives_up_when_a_lane_fails() {
    let lab = Lab::new();
    let (mut peer, serving) = lab.open(2);
    let waiting = {
        let lanes = lab.lanes.clone();
        std::thread::spawn(move || lanes.next_chunk(fake::driver(), 1, || Ok(true)))
    };
    let mut header = chunk_header(1, 1, 0, 8, 0);
    header.op = op::LAUNCH.into();
    peer.0.write_all(header.as_bytes()).unwrap();
    assert!(serving.join().unwrap().is_err());
    assert_eq!(waiting.join().unwrap().err(), Some(LANE_GONE));
}

#[test]
fn frame_gives_up_when_its_stream_has_failed() {
    const ILLEGAL_ADDRESS: Status = 700;
    let lab = Lab::new();
    let mut asked = 0;
    let mut reached = || {
        asked += 1;
        if asked < 3 { Ok(asked == 2) } else { Err(ILLEGAL_ADDRESS) }
    };
    assert_eq!(lab.lanes.next_chunk(lab.driver, 1, &mut reached).err(), Some(ILLEGAL_ADDRESS));
    assert_eq!(asked, 3);
}

#[test]
fn closed_lane_to_the_device_is_no_error() {
    let lab = Lab::new();
    let (peer, serving) = lab.open(1);
    peer.0.shutdown(Shutdown::Write).unwrap();
    assert!(serving.join().unwrap().is_ok());
    assert_eq!(lab.next(1).err(), Some(LANE_GONE));
}

/// Queues a chunk from the device with this value on a stream of its own; returns its event.
fn queue(lab: &Lab, transfer: u64, ctx: u64, value: u8) -> Handle {
    queue_on(lab, 0x5000 + transfer, transfer, ctx, value)
}

fn queue_on(lab: &Lab, name: u64, transfer: u64, ctx: u64, value: u8) -> Handle {
    let mut event = std::ptr::null_mut();
    let stream = std::ptr::null_mut();
    let source = Source { driver: lab.driver, contexts: &lab.contexts, stream, name };
    let queued = lab.lanes.send(transfer, 3, Some(source), |_, len, slot| {
        event = begin(lab, slot, ctx);
        // SAFETY: the slot has room for a chunk.
        unsafe { std::ptr::write_bytes(slot.address, value, len) };
        Ok(())
    });
    queued.unwrap();
    event
}

#[test]
fn blocked_stream_delays_no_other_copy_to_the_client() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(FIRST_DOWN_LANE);
    let (first, second) = (queue(&lab, 1, CTX_0, 1), queue(&lab, 2, CTX_1, 2));
    fake::happen(second, 0);
    let (header, body) = peer.next();
    assert_eq!((header.seq.get(), header.ack.get(), &body[..3]), (2, 3, &[2; 3][..]));
    assert!(!lab.lanes.idle());
    fake::happen(first, 700);
    let (header, body) = peer.next();
    assert_eq!(
        (header.seq.get(), header.thread.get(), body.len()),
        (1, 700, 0),
        "its error instead of bytes"
    );
    assert!(lab.lanes.idle());
    assert_eq!(lab.lanes.bytes_from_device(), 6);
}

#[test]
fn a_stream_is_asked_for_its_oldest_chunk_alone() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(FIRST_DOWN_LANE);
    let first = queue_on(&lab, 0x5000, 1, CTX_0, 1);
    let second = queue_on(&lab, 0x5000, 2, CTX_0, 2);
    let elsewhere = queue_on(&lab, 0x5000, 3, CTX_1, 3);
    // No device fills the second one first.
    fake::happen(second, 0);
    fake::happen(elsewhere, 0);
    assert_eq!(peer.next().0.seq.get(), 3, "the same handle in another context");
    fake::happen(first, 0);
    assert_eq!([peer.next().0.seq.get(), peer.next().0.seq.get()], [1, 2]);
}

#[test]
fn streams_that_hold_all_slots_delay_no_other_copy_to_the_client() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(FIRST_DOWN_LANE);
    let most = (MAX_DOWN_SLOTS - RESERVED) as u64;
    let events: Vec<Handle> = (1..=most).map(|transfer| queue(&lab, transfer, CTX_0, 1)).collect();
    // A copy on an idle stream takes a reserved slot, as does one of the processor.
    fake::happen(queue(&lab, 99, CTX_0, 9), 0);
    let (header, body) = peer.next();
    assert_eq!((header.seq.get(), &body[..3]), (99, &[9; 3][..]));
    let queued = lab.lanes.send(98, 3, None, |_, len, slot| {
        // SAFETY: the slot has room for a chunk.
        unsafe { std::ptr::write_bytes(slot.address, 8, len) };
        Ok(())
    });
    queued.unwrap();
    assert_eq!(peer.next().0.seq.get(), 98);
    fake::happen(events[3], 0);
    assert_eq!(peer.next().0.seq.get(), 4);
    assert!(!queue(&lab, 100, CTX_0, 1).is_null(), "a slot is free again");
}

#[test]
fn refused_copy_ends_its_transfer_with_the_error() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(FIRST_DOWN_LANE);
    let queued = lab.lanes.send(4, 3 * CHUNK, None, |offset, _, _| if offset == 0 { Err(1) } else { Ok(()) });
    assert_eq!(queued, Err(1));
    let (header, body) = peer.next();
    assert_eq!((header.seq.get(), header.thread.get(), body.len()), (4, 1, 0));
    peer.0.set_nonblocking(true).unwrap();
    assert!(peer.0.read(&mut [0]).is_err(), "no further chunk");
}

#[test]
fn context_ends_after_the_lanes_left_it() {
    let lab = Lab::new();
    let (mut peer, _serving) = lab.open(FIRST_DOWN_LANE);
    let (mine, other) = (queue(&lab, 1, CTX_1, 1), queue(&lab, 2, CTX_0, 2));
    let leaving = {
        let lanes = lab.lanes.clone();
        std::thread::spawn(move || lanes.leave(CTX_1))
    };
    std::thread::sleep(Duration::from_millis(20));
    assert!(!leaving.is_finished(), "a piece still has an event of the context");
    fake::happen(mine, 0);
    leaving.join().unwrap();
    assert_eq!(peer.next().0.seq.get(), 1);
    fake::happen(other, 0);
    assert_eq!(peer.next().0.seq.get(), 2);
}
