//! Schedules of the replay: at each lock, a test chooses the thread that runs next.
//!
//! Threads of a program send frames, the reader looks for blocked executors, and executors replay.
//! In every schedule each frame is replayed once, behind those that it depends on, and a frame
//! delays no thread that it would not delay on a local card.

use std::sync::OnceLock;

use gpusession_proto::handle;
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::thread::{self, yield_now};

use super::*;
use crate::order::Touched;
use crate::order::tests::{BLOCKING, OTHER, frame, streams};
use crate::replies::tests::replies;
use crate::supervise::tests::pair;

/// Schedules of each test; `SCHEDULES` in the environment is another number.
const SCHEDULES: usize = 10_000;
/// Frames that each thread of the program sends.
const FRAMES: usize = 7;

/// Frames that have been replayed, with the times of start and end.
#[derive(Default)]
struct Done {
    clock: u64,
    frames: HashMap<u64, (u64, u64)>,
}

/// A program and its operations, which take any time.
struct Program {
    replay: Replay,
    supervisor: Arc<Supervisor>,
    replies: Arc<Replies>,
    activity: Activity,
    streams: Table<Stream>,
    /// All frames that were sent; locked by the thread that plays the reader.
    log: Mutex<Vec<Frame>>,
    done: Mutex<Done>,
    replayed: Condvar,
    /// Frames that do not return before another frame was replayed.
    needs: Mutex<HashMap<u64, u64>>,
}

impl Perform for Program {
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
        true
    }

    fn perform(self: &Arc<Self>, _executor: &mut Executor, frame: &Frame) {
        let seq = frame.header.seq.get();
        let tick = |done: &mut Done| {
            done.clock += 1;
            done.clock
        };
        let start = tick(&mut self.done.lock().unwrap());
        (0..thread_rng().gen_range(0..4)).for_each(|_| yield_now());
        let need = self.needs.lock().unwrap().get(&seq).copied();
        need.into_iter().for_each(|need| self.wait_for(need));
        let mut done = self.done.lock().unwrap();
        let end = tick(&mut done);
        assert!(done.frames.insert(seq, (start, end)).is_none(), "frame {seq} is replayed twice");
        self.replayed.notify_all();
    }

    fn end(&self, reason: &str) -> ! {
        panic!("{reason}")
    }
}

impl Program {
    fn new() -> Arc<Self> {
        // The ends of the other parties, for all schedules.
        static PEERS: OnceLock<(Arc<Supervisor>, Arc<Replies>)> = OnceLock::new();
        let (supervisor, replies) = PEERS.get_or_init(|| {
            let ((supervisor, _), (replies, mut client)) = (pair(), replies());
            std::thread::spawn(move || std::io::copy(&mut client.0, &mut std::io::sink()));
            (supervisor, replies)
        });
        let program = Arc::new(Self {
            replay: Replay::new(),
            supervisor: supervisor.clone(),
            replies: replies.clone(),
            activity: Activity::default(),
            streams: streams(),
            log: Mutex::default(),
            done: Mutex::default(),
            replayed: Condvar::new(),
            needs: Mutex::default(),
        });
        program.replay.executing.never_long(true);
        let mut state = program.replay.lock();
        state.main = program.replay.spare_executor(&mut state, &program).unwrap();
        drop(state);
        program
    }

    fn wait_for(&self, seq: u64) {
        let mut done = self.done.lock().unwrap();
        while !done.frames.contains_key(&seq) {
            done = self.replayed.wait(done).unwrap();
        }
    }

    /// Sends a frame that `make` makes of its number; returns once the program's call would.
    fn send(self: &Arc<Self>, make: impl FnOnce(u64) -> Frame) {
        let mut log = self.log.lock().unwrap();
        let frame = make(log.len() as u64 + 1);
        log.push(frame.clone());
        self.replay.enqueue(self, vec![frame.clone()]).unwrap();
        drop(log);
        if frame.header.flags.get() & gpusession_proto::frame::WAIT != 0 {
            self.wait_for(frame.header.seq.get());
        }
    }

    /// Runs the program's threads, and the reader until every frame is replayed.
    fn run(self: &Arc<Self>, threads: Vec<thread::JoinHandle<()>>) {
        let ended = Arc::new(Mutex::new(false));
        let reader = thread::spawn({
            let (program, ended) = (self.clone(), ended.clone());
            move || loop {
                let log = program.log.lock().unwrap();
                let mut state = program.replay.lock();
                program.replay.relieve(&program, &mut state).unwrap();
                let idle = state.idle();
                drop((state, log));
                if idle && *ended.lock().unwrap() {
                    break program.replay.over(Ok(())).unwrap();
                }
                yield_now();
            }
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        *ended.lock().unwrap() = true;
        reader.join().unwrap();
    }
}

fn explore(test: impl Fn() + Send + Sync + 'static) {
    let number = std::env::var("SCHEDULES").ok().and_then(|number| number.parse().ok());
    shuttle::check_random(test, number.unwrap_or(SCHEDULES));
}

fn launch(thread: u32, seq: u64, stream: u64) -> Frame {
    frame(op::LAUNCH, thread, seq, false, &[100 + seq, 0, 0, 0, 0, stream])
}

/// Returns a random frame, of streams that threads share.
fn any_frame(thread: u32, seq: u64) -> Frame {
    let mut random = thread_rng();
    let stream = [BLOCKING, OTHER, 0, handle::make(handle::STREAM, 0, 1, 9)][random.gen_range(0..4)];
    let event = handle::make(handle::EVENT, 0, 1, random.gen_range(0..3));
    match random.gen_range(0..8) {
        0 => frame(op::EVENT_RECORD, thread, seq, false, &[event, stream]),
        1 => frame(op::STREAM_WAIT_EVENT, thread, seq, false, &[stream, event]),
        2 => frame(op::COPY_TO_DEVICE, thread, seq, false, &[0, 1 << 20, stream, 0]),
        3 => frame(op::COPY_FROM_DEVICE, thread, seq, false, &[0, 8, stream, 0]),
        4 => frame(op::STREAM_SYNC, thread, seq, random.gen_bool(0.5), &[stream]),
        5 => frame(op::WRITE_HOST, thread, seq, false, &[1]),
        _ => launch(thread, seq, stream),
    }
}

/// Returns what each frame of the log touches; a captured one also touches its thread's capture.
fn touched(program: &Program, log: &[Frame]) -> Vec<Touched> {
    let mut state = State::default();
    let mut of = |frame: &Frame| {
        let mut touched = order::touches(&program.streams, frame);
        if state.captures(frame) {
            touched.add_to_capture(frame.thread());
        }
        touched
    };
    log.iter().map(&mut of).collect()
}

fn check_order(program: &Program) {
    let (log, done) = (program.log.lock().unwrap(), program.done.lock().unwrap());
    assert_eq!(done.frames.len(), log.len(), "each frame once");
    let touched = touched(program, &log);
    for (later, frame) in log.iter().enumerate() {
        for earlier in 0..later {
            // A change of shared memory overtakes.
            let depends = touched[later].depends_on(&touched[earlier]) && !order::overtakes(frame);
            let (before, behind) = (&done.frames[&(earlier as u64 + 1)], &done.frames[&(later as u64 + 1)]);
            let ops = || log.iter().map(|frame| (frame.thread(), frame.header.op.get())).collect::<Vec<_>>();
            assert!(!depends || before.1 < behind.0, "{} before {} of {:?}", later + 1, earlier + 1, ops());
        }
    }
}

#[test]
fn a_frame_stays_behind_those_that_it_depends_on() {
    explore(|| {
        let program = Program::new();
        let sends = |number| {
            let program = program.clone();
            thread::spawn(move || (0..FRAMES).for_each(|_| program.send(|seq| any_frame(number, seq))))
        };
        program.run((1..4).map(sends).collect());
        check_order(&program);
    });
}

#[test]
fn a_thread_that_captures_makes_its_nodes_in_order() {
    explore(|| {
        let program = Program::new();
        let captures = |number: u32| {
            let program = program.clone();
            thread::spawn(move || {
                let own = handle::make(handle::STREAM, 0, 1, 20 + number);
                program.send(|seq| frame(op::CAPTURE_BEGIN, number, seq, true, &[own, 0]));
                for node in 0..FRAMES as u32 {
                    let stream = handle::make(handle::STREAM, 0, 1, 20 + 10 * (node % 3) + number);
                    program.send(|seq| launch(number, seq, stream));
                }
                program.send(|seq| frame(op::CAPTURE_END, number, seq, true, &[own, 0]));
            })
        };
        let copies = {
            let program = program.clone();
            thread::spawn(move || (0..FRAMES).for_each(|_| program.send(|seq| any_frame(9, seq))))
        };
        program.run([1, 2].map(captures).into_iter().chain([copies]).collect());
        check_order(&program);
    });
}

/// On a local card, a kernel of one thread may wait for what another thread launches.
#[test]
fn threads_with_streams_of_their_own_wait_for_each_other() {
    explore(|| {
        let program = Program::new();
        let ready = Arc::new(Mutex::new(HashMap::<(u32, usize), u64>::new()));
        let sends = |number: u32| {
            let (program, ready) = (program.clone(), ready.clone());
            thread::spawn(move || {
                let stream = handle::make(handle::STREAM, 0, 1, 20 + number);
                for round in 0..FRAMES {
                    let waits = round % 3 == 2;
                    program.send(|seq| {
                        // In turn, one thread's kernel waits for the other's of the round.
                        let mut ready = ready.lock().unwrap();
                        ready.insert((number, round), seq);
                        if let Some(other) = ready.get(&(3 - number, round)) {
                            program.needs.lock().unwrap().insert(*other, seq);
                        }
                        launch(number, seq, stream)
                    });
                    if waits {
                        program.send(|seq| frame(op::STREAM_SYNC, number, seq, true, &[stream]));
                    }
                }
            })
        };
        program.run([1, 2].map(sends).into_iter().collect());
        check_order(&program);
    });
}
