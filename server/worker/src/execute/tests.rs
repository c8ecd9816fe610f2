use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::order::tests::{BLOCKING, OTHER, frame, streams};
use crate::replies::tests::{Peer as ClientPeer, replies};
use crate::supervise::tests::{Peer, pair};

/// Longer than any executor needs to take a frame.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Long enough that a frame which may start has started.
const SETTLE: Duration = Duration::from_millis(30);

/// Operations that note their frames, and block on those that a test names.
struct Fake {
    replay: Replay,
    supervisor: Arc<Supervisor>,
    replies: Arc<Replies>,
    activity: Activity,
    streams: Table<Stream>,
    /// Frames that block until the test takes them out.
    blocked: Mutex<HashSet<u64>>,
    unblocked: Condvar,
    quiet: Mutex<bool>,
    /// Time of the last start or end of a frame.
    clock: AtomicU64,
    started: Mutex<Sender<u64>>,
    ended: Mutex<HashMap<u64, (u64, u64)>>,
}

impl Perform for Fake {
    fn replay(&self) -> &Replay {
        &self.replay
    }

    fn supervisor(&self) -> &Supervisor {
        &self.supervisor
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

    fn query(&self, _executor: &mut Executor) -> bool {
        *self.quiet.lock().unwrap()
    }

    fn perform(self: &Arc<Self>, _executor: &mut Executor, frame: &Frame) {
        let seq = frame.header.seq.get();
        let start = self.clock.fetch_add(1, Ordering::SeqCst);
        self.started.lock().unwrap().send(seq).unwrap();
        let mut blocked = self.blocked.lock().unwrap();
        while blocked.contains(&seq) {
            blocked = self.unblocked.wait(blocked).unwrap();
        }
        drop(blocked);
        let end = self.clock.fetch_add(1, Ordering::SeqCst);
        self.ended.lock().unwrap().insert(seq, (start, end));
    }

    fn end(&self, reason: &str) -> ! {
        panic!("{reason}")
    }
}

/// A replay with its first executor, and the supervisor's end.
struct Lab {
    fake: Arc<Fake>,
    started: Receiver<u64>,
    supervisor: Peer,
    /// Keeps the client's end open.
    client: ClientPeer,
}

impl Lab {
    fn new(blocked: &[u64]) -> Self {
        let (supervisor, peer) = pair();
        let (sender, started) = channel();
        let (replies, client) = replies();
        let fake = Arc::new(Fake {
            replay: Replay::new(),
            supervisor,
            replies,
            activity: Activity::default(),
            streams: streams(),
            blocked: Mutex::new(blocked.iter().copied().collect()),
            unblocked: Condvar::new(),
            quiet: Mutex::new(true),
            clock: AtomicU64::new(0),
            started: Mutex::new(sender),
            ended: Mutex::default(),
        });
        let mut state = fake.replay.lock();
        state.main = fake.replay.spare_executor(&mut state, &fake).unwrap();
        drop(state);
        Self { fake, started, supervisor: peer, client }
    }

    fn send(&self, frame: Frame) {
        self.fake.replay.enqueue(&self.fake, vec![frame]).unwrap();
    }

    /// Waits until a frame starts; meanwhile hands over to another executor, as the reader does.
    fn next(&self) -> u64 {
        let since = Instant::now();
        while since.elapsed() < TEST_TIMEOUT {
            if let Ok(seq) = self.started.recv_timeout(BLOCKED_TIMEOUT) {
                return seq;
            }
            self.relieve();
        }
        panic!("no frame starts");
    }

    fn relieve(&self) {
        self.fake.replay.relieve(&self.fake, &mut self.fake.replay.lock()).unwrap();
    }

    /// Returns `true` if no further frame starts now.
    fn still(&self) -> bool {
        let since = Instant::now();
        while since.elapsed() < SETTLE {
            self.relieve();
            if self.started.recv_timeout(BLOCKED_TIMEOUT).is_ok() {
                return false;
            }
        }
        true
    }

    fn unblock(&self, seq: u64) {
        self.fake.blocked.lock().unwrap().remove(&seq);
        self.fake.unblocked.notify_all();
    }

    /// Waits until every frame is done.
    fn finish(&self) {
        self.fake.blocked.lock().unwrap().clear();
        self.fake.unblocked.notify_all();
        let since = Instant::now();
        while !self.fake.replay.lock().idle() {
            assert!(since.elapsed() < TEST_TIMEOUT, "frames stay behind");
            self.relieve();
            std::thread::sleep(BLOCKED_TIMEOUT);
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.fake.blocked.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.fake.unblocked.notify_all();
        self.fake.replay.lock().ended = true;
        self.fake.replay.changed.notify_all();
    }
}

fn launch(thread: u32, seq: u64, stream: u64) -> Frame {
    frame(op::LAUNCH, thread, seq, false, &[100 + seq, 0, 0, 0, 0, stream])
}

fn sync(thread: u32, seq: u64, stream: u64) -> Frame {
    frame(op::STREAM_SYNC, thread, seq, true, &[stream])
}

fn event(slot: u32) -> u64 {
    gpusession_proto::handle::make(gpusession_proto::handle::EVENT, 0, 1, slot)
}

#[test]
fn blocked_thread_holds_up_no_other() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::EVENT_CREATE, 1, 2, false, &[event(1)]));
    lab.send(launch(2, 3, OTHER));
    assert_eq!(lab.next(), 3, "the other thread's frame");
    assert!(lab.still(), "the blocked thread's own frames wait");
    lab.unblock(1);
    assert_eq!(lab.next(), 2);
}

/// With a look at each kept frame for each new one, a program's burst of launches cost seconds.
#[test]
fn burst_behind_a_blocked_launch_delays_no_other_thread() {
    const FRAMES: u64 = 40_000;
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    let burst = (2..FRAMES).map(|seq| launch(1, seq, BLOCKING)).collect();
    lab.fake.replay.enqueue(&lab.fake, burst).unwrap();
    let since = Instant::now();
    lab.send(frame(op::EVENT_CREATE, 2, FRAMES, false, &[event(1)]));
    assert_eq!(lab.next(), FRAMES);
    assert!(since.elapsed() < TEST_TIMEOUT / 10, "{:?} for {FRAMES} frames", since.elapsed());
    lab.finish();
    assert_eq!(lab.fake.activity.calls.load(Ordering::Relaxed), FRAMES);
}

#[test]
fn dependent_frames_of_other_threads_wait_in_the_order_of_the_log() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::EVENT_RECORD, 2, 2, false, &[event(1), BLOCKING]));
    lab.send(frame(op::STREAM_WAIT_EVENT, 3, 3, false, &[OTHER, event(1)]));
    lab.send(launch(4, 4, OTHER));
    lab.send(frame(op::EVENT_CREATE, 5, 5, false, &[event(2)]));
    assert_eq!(lab.next(), 5, "no order with the blocked stream");
    assert!(lab.still(), "the event's order reaches over two streams");
    lab.unblock(1);
    assert_eq!([lab.next(), lab.next(), lab.next()], [2, 3, 4]);
}

#[test]
fn frame_waits_for_the_executors_of_both_its_streams() {
    let lab = Lab::new(&[1, 2]);
    lab.send(frame(op::EVENT_RECORD, 1, 1, false, &[event(1), BLOCKING]));
    lab.send(launch(2, 2, OTHER));
    assert_eq!([lab.next(), lab.next()], [1, 2]);
    lab.send(frame(op::STREAM_WAIT_EVENT, 3, 3, false, &[OTHER, event(1)]));
    assert!(lab.still());
    lab.unblock(2);
    assert!(lab.still(), "its event is not recorded");
    lab.unblock(1);
    assert_eq!(lab.next(), 3);
}

#[test]
fn thread_continues_while_its_bulk_copy_waits_for_bytes() {
    let lab = Lab::new(&[1]);
    lab.send(frame(op::COPY_TO_DEVICE, 1, 1, false, &[0, 1 << 20, BLOCKING, 0]));
    assert_eq!(lab.next(), 1);
    lab.send(launch(1, 2, OTHER));
    lab.send(launch(1, 3, BLOCKING));
    assert_eq!(lab.next(), 2, "another stream of the thread");
    assert!(lab.still(), "the copy's own stream waits");
    lab.unblock(1);
    assert_eq!(lab.next(), 3);
    assert_eq!(lab.fake.activity.calls.load(Ordering::Relaxed), 3, "kept frames count, too");
}

#[test]
fn query_of_a_stream_whose_copy_waits_for_bytes_is_not_ready() {
    let mut lab = Lab::new(&[1]);
    lab.send(frame(op::COPY_TO_DEVICE, 1, 1, false, &[0, 1 << 20, OTHER, 0]));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::EVENT_RECORD, 1, 2, false, &[event(1), OTHER]));
    let queries = [(op::STREAM_QUERY, OTHER), (op::EVENT_QUERY, event(1))];
    for (seq, (query, object)) in (3..).zip(queries) {
        lab.send(frame(query, 1, seq, true, &[object]));
        let header = lab.client.next().0;
        assert_eq!((header.op.get(), header.seq.get()), (op::REPLY, seq));
        assert_eq!(header.ctx.get() as i32, status::NOT_READY);
    }
    assert!(lab.still(), "the driver is not asked");
    lab.unblock(1);
    assert_eq!(lab.next(), 2);
    // Until the record is done, the answer is the same.
    lab.finish();
    for (seq, (query, object)) in (5..).zip(queries) {
        lab.send(frame(query, 1, seq, true, &[object]));
        assert_eq!(lab.next(), seq);
    }
    lab.finish();
}

#[test]
fn thread_continues_while_a_kept_copy_waits_for_its_stream() {
    let lab = Lab::new(&[1, 2]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::COPY_FROM_DEVICE, 1, 2, false, &[0, 8, BLOCKING, 0]));
    lab.send(launch(1, 3, BLOCKING));
    lab.send(launch(1, 4, OTHER));
    assert!(lab.still(), "a blocked launch holds its thread up, as natively");
    lab.unblock(1);
    assert_eq!(lab.next(), 2);
    assert_eq!(lab.next(), 4, "the program waits for no copy");
    lab.send(launch(1, 5, OTHER));
    assert_eq!(lab.next(), 5);
    assert!(lab.still(), "the copy's own stream waits");
    lab.unblock(2);
    assert_eq!(lab.next(), 3);
    lab.finish();
}

#[test]
fn thread_that_captures_makes_its_nodes_in_order() {
    let of = |function, thread, seq, stream| {
        frame(op::LAUNCH, thread, seq, false, &[function, 0, 0, 0, 0, stream])
    };
    let lab = Lab::new(&[1]);
    lab.send(of(7, 1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::CAPTURE_BEGIN, 2, 2, true, &[OTHER, 0]));
    assert_eq!(lab.next(), 2);
    // The function of the blocked launch, and then another stream and function.
    lab.send(of(7, 2, 3, OTHER));
    lab.send(of(8, 2, 4, event(9)));
    lab.send(of(9, 3, 5, event(8)));
    assert_eq!(lab.next(), 5, "another thread");
    assert!(lab.still(), "an update of the graph pairs nodes by their order");
    lab.unblock(1);
    assert_eq!([lab.next(), lab.next()], [3, 4]);
    lab.send(frame(op::CAPTURE_END, 2, 6, true, &[OTHER, 0]));
    assert_eq!(lab.next(), 6);
    lab.finish();
    assert!(lab.fake.replay.lock().capturing.is_empty());
}

#[test]
fn capture_lasts_until_its_stream_ends_it_whoever_asks() {
    let mut state = State::default();
    let mut captures = |op, thread, word| state.captures(&frame(op, thread, 1, false, &[word]));
    // Two captures of one thread; another thread ends the first one.
    assert!(captures(op::CAPTURE_BEGIN, 1, BLOCKING) && captures(op::CAPTURE_BEGIN, 1, OTHER));
    assert!(!captures(op::CAPTURE_END, 2, BLOCKING));
    assert!(captures(op::LAUNCH, 1, 0) && !captures(op::LAUNCH, 2, 0));
    assert!(captures(op::STREAM_DESTROY, 1, OTHER));
    assert!(!captures(op::LAUNCH, 1, 0));
    assert!(captures(op::CAPTURE_BEGIN, 1, BLOCKING) && captures(op::PRIMARY_RESET, 1, 0));
    assert!(!captures(op::LAUNCH, 1, 0));
}

#[test]
fn changes_of_shared_memory_overtake_blocked_frames() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    lab.send(frame(op::WRITE_HOST, 1, 2, false, &[1]));
    assert_eq!(lab.next(), 2);
}

#[test]
fn every_frame_stays_behind_a_blocked_change_of_shared_memory() {
    let lab = Lab::new(&[2]);
    lab.send(frame(op::WRITE_HOST, 1, 2, false, &[1]));
    assert_eq!(lab.next(), 2);
    // A later change of the same bytes, the end of the function that made them, a launch.
    lab.send(frame(op::WRITE_HOST, 2, 3, false, &[1]));
    lab.send(frame(op::HOST_FUNC_DONE, 1, 4, false, &[9]));
    lab.send(launch(3, 5, OTHER));
    assert!(lab.still());
    lab.unblock(2);
    assert_eq!([lab.next(), lab.next(), lab.next()], [3, 4, 5]);
}

#[test]
fn end_of_a_host_function_overtakes_frames_that_wait_for_it() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    // A barrier, which every later frame stays behind.
    lab.send(frame(op::STREAM_SYNC, 2, 2, false, &[BLOCKING]));
    lab.send(launch(3, 3, OTHER));
    assert!(lab.still(), "the barrier waits for the stream");
    lab.send(frame(op::HOST_FUNC_DONE, 4, 4, false, &[9]));
    assert_eq!(lab.next(), 4);
    lab.unblock(1);
    assert_eq!([lab.next(), lab.next()], [2, 3]);
}

#[test]
fn mark_stays_behind_a_thread_with_many_kept_bytes() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    // Frames of thread 2 that depend on the blocked one.
    let frames = (KEPT_BYTES / size_of::<Frame>()) as u64;
    lab.send(launch(2, 2, BLOCKING));
    lab.send(frame(op::MARK, 2, 3, true, &[]));
    assert_eq!(lab.next(), 3, "few kept bytes: the thread may continue elsewhere");
    (0..=frames).for_each(|i| lab.send(launch(2, 10 + i, BLOCKING)));
    let mark = 11 + frames;
    lab.send(frame(op::MARK, 2, mark, true, &[]));
    lab.send(frame(op::MARK, 3, mark + 1, true, &[]));
    assert_eq!(lab.next(), mark + 1, "another thread's mark");
    assert!(lab.still());
    lab.unblock(1);
    let rest: Vec<u64> = (0..frames + 3).map(|_| lab.next()).collect();
    assert_eq!((rest.first(), rest.last()), (Some(&2), Some(&mark)));
}

#[test]
fn pause_waits_for_no_work_and_frames_end_it() {
    let lab = Lab::new(&[1]);
    let Lab { fake, supervisor, .. } = &lab;
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    fake.replay.pause(&fake.supervisor);
    assert_eq!(supervisor.next(), FromWorker::Paused { quiet: false }, "a frame is under way");
    lab.unblock(1);
    lab.finish();
    *fake.quiet.lock().unwrap() = false;
    fake.replay.pause(&fake.supervisor);
    assert_eq!(supervisor.next(), FromWorker::Paused { quiet: false }, "the GPU works");
    *fake.quiet.lock().unwrap() = true;
    fake.replay.pause(&fake.supervisor);
    assert_eq!(supervisor.next(), FromWorker::Paused { quiet: true });
    lab.send(launch(1, 2, BLOCKING));
    lab.send(launch(1, 3, BLOCKING));
    assert_eq!(supervisor.next(), FromWorker::Wanted);
    assert!(lab.still() && supervisor.silent(), "the supervisor receives one message");
    fake.replay.resume();
    assert_eq!([lab.next(), lab.next()], [2, 3]);
}

#[test]
fn halted_worker_calls_the_driver_no_more() {
    let lab = Lab::new(&[1]);
    lab.send(launch(1, 1, BLOCKING));
    assert_eq!(lab.next(), 1);
    assert!(!lab.fake.replay.halt(Instant::now()), "a call has not returned");
    lab.unblock(1);
    assert!(lab.fake.replay.halt(Instant::now() + TEST_TIMEOUT));
    lab.send(launch(1, 2, BLOCKING));
    lab.fake.replay.resume();
    assert!(lab.still());
    // The executors never take the frame, so the test's end needs no wait for it.
    lab.fake.replay.lock().queue.clear();
}

/// Returns a random frame of thread 1 to 4 on a few streams and events.
fn any_frame(random: &mut impl FnMut(u64) -> u64, seq: u64) -> Frame {
    let thread = 1 + random(4) as u32;
    let stream = [BLOCKING, OTHER, 0, gpusession_proto::handle::make(0x12, 0, 1, 9)][random(4) as usize];
    let event = event(random(3) as u32);
    match random(7) {
        0 => frame(op::EVENT_RECORD, thread, seq, false, &[event, stream]),
        1 => frame(op::STREAM_WAIT_EVENT, thread, seq, false, &[stream, event]),
        2 => frame(op::COPY_TO_DEVICE, thread, seq, false, &[0, 1 << 20, stream, 0]),
        3 => sync(thread, seq, stream),
        4 => frame(op::STREAM_SYNC, thread, seq, false, &[stream]),
        _ => launch(thread, seq, stream),
    }
}

#[test]
fn dependent_frames_never_overlap_whatever_blocks() {
    const FRAMES: u64 = 60;
    let mut state = 7u64;
    let mut random = move |bound: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    for round in 0..12 {
        let blocked: Vec<u64> = (1..=FRAMES).filter(|_| random(6) == 0).collect();
        let lab = Lab::new(&blocked);
        let frames: Vec<Frame> = (1..=FRAMES).map(|seq| any_frame(&mut random, seq)).collect();
        let mut left = blocked;
        for frame in &frames {
            lab.send(frame.clone());
            if random(3) == 0 {
                std::thread::sleep(Duration::from_millis(2));
                lab.relieve();
            }
            if random(4) == 0 && !left.is_empty() {
                let at = random(left.len() as u64) as usize;
                lab.unblock(left.swap_remove(at));
            }
        }
        lab.finish();
        let ended = lab.fake.ended.lock().unwrap();
        assert_eq!(ended.len(), FRAMES as usize, "round {round}: each frame once");
        let touched: Vec<_> = frames.iter().map(|frame| order::touches(&lab.fake.streams, frame)).collect();
        for (later, frame) in frames.iter().enumerate() {
            for earlier in 0..later {
                let (seq, before) = (frame.header.seq.get(), frames[earlier].header.seq.get());
                let ordered = ended[&before].1 < ended[&seq].0;
                assert!(
                    ordered || !touched[later].depends_on(&touched[earlier]),
                    "round {round}: {before} before {seq}"
                );
            }
        }
    }
}
