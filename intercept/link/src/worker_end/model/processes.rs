//! The same model with processes that crash: program and worker, the server's control process and
//! the daemon.
//!
//! A connection waits at the listening socket, which outlives the server's process in systemd's
//! store. The server accepts it, adopts it if its attempt is the highest so far, notes that in the
//! worker's record and passes the connection to the worker, in any order. A crash closes the
//! connections that it has accepted and not passed. The daemon reports a program's end to the
//! server, and tells a program that asks whether its worker has ended. These steps repeat `adopt`,
//! `data`, `handover` and `grant`, of other crates; the ends of the log are the real ones.
//!
//! Time is no part of a state. The end of a grace is a step, which a waiting worker takes once no
//! program is left, and by a fault before.

use super::*;

/// More attempts than faults, crashes and two refusals explain.
const ATTEMPTS: usize = 10;

/// The rule that ends the worker of a dead program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Ender {
    /// Its grace: `gpusession run --server` has no daemon.
    Grace,
    /// The daemon's report, long before its grace ends.
    Daemon,
}

/// A connection that the server has accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Accepted {
    attempt: u32,
    adopted: bool,
    noted: bool,
    passed: bool,
}

/// The server's control process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Server {
    up: bool,
    accepted: Vec<Accepted>,
    /// Highest attempt that it has adopted.
    latest: u32,
    /// It has reaped the worker: the lease has its memory back.
    reaped: bool,
}

/// The worker's record, which outlives the server's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Record {
    latest: u32,
    /// The server stops the worker, because the daemon has reported its program's end.
    ending: bool,
}

struct Site {
    log: Log,
    crashes: u8,
    ender: Ender,
    /// The program's process has exited.
    dead: bool,
    /// The worker's process has exited.
    exited: bool,
    server: Server,
    /// Connections that a server has accepted, in order; the next ones wait at the socket.
    accepted: u32,
    record: Record,
    /// Connections that the worker has got, in order.
    passed: Vec<u32>,
    /// Always `false` for [`Ender::Grace`].
    daemon: bool,
    /// The daemon's process knows that the worker has ended.
    daemon_knows: bool,
    /// The server has confirmed the daemon's report, which no daemon repeats then.
    reported: bool,
}

#[derive(Debug, Clone, Copy)]
enum Happens {
    Log(Step),
    Accept,
    Adopt(u32),
    Note(u32),
    Pass(u32),
    Refuse(u32),
    Reap,
    DaemonReports,
    WorkerStops,
    GraceEnds,
    DaemonLearns,
    DaemonAnswers,
    ServerStarts,
    DaemonStarts,
    /// Faults.
    Impatience,
    ProgramGivesUp,
    ProgramDies,
    WorkerDies,
    ServerDies,
    DaemonDies,
}

impl Site {
    fn new(ender: Ender, faults: u8, crashes: u8) -> Self {
        let server = Server { up: true, latest: 1, ..Server::default() };
        Self {
            log: Log { faults, ..Log::new() },
            crashes,
            ender,
            dead: false,
            exited: false,
            server,
            accepted: 1,
            record: Record { latest: 1, ending: false },
            passed: vec![1],
            daemon: ender == Ender::Daemon,
            daemon_knows: false,
            reported: false,
        }
    }

    /// Returns `true` if no program will come back.
    fn left(&self) -> bool {
        self.dead || self.log.program.lost
    }

    /// Returns `true` if the worker has no connection and may wait for one.
    fn waits(&self) -> bool {
        !self.exited && self.log.threads.ended
    }

    /// Closes the worker's end of a connection.
    fn close(&mut self, attempt: u32) {
        self.log.net.end(attempt as usize - 1, 1);
    }

    fn exit_worker(&mut self) {
        self.exited = true;
        for attempt in std::mem::take(&mut self.passed) {
            self.close(attempt);
        }
    }

    fn leave_program(&mut self) {
        for connection in 0..self.log.net.connections.len() {
            self.log.net.end(connection, 0);
        }
    }

    /// Lets the grace end: the worker's reader asks the real end whether to wait on.
    fn end_grace(&mut self) -> Result<(), String> {
        let Log { worker, threads, net, .. } = &mut self.log;
        NET.set(std::mem::take(net));
        let since = Instant::now().checked_sub(worker.grace).ok_or("the machine has just started")?;
        let next = worker.next(&threads.line, since, Duration::ZERO);
        *net = NET.take();
        match next {
            Next::Line(line) => {
                (threads.line, threads.ended) = (line, false);
                threads.buf.clear();
            }
            Next::Over(_) => self.exit_worker(),
            Next::Later => return Err("the worker waits on after its grace".into()),
        }
        Ok(())
    }

    /// Returns the steps of the two ends whose processes live.
    fn log_steps(&self) -> impl Iterator<Item = Step> + '_ {
        self.log.steps().into_iter().filter(|step| match step {
            Step::Post
            | Step::Read
            | Step::Part
            | Step::Attempt
            | Step::Welcomed
            | Step::SendRest
            | Step::GiveUp => !self.left(),
            Step::WorkerReads | Step::WorkerTakes | Step::WorkerLooks | Step::WorkerSays => !self.exited,
            Step::CarryOn(_) => !self.exited,
            Step::Fence(attempt) => self.passed.contains(attempt),
            Step::Notice { .. } | Step::Cut { .. } => true,
        })
    }

    fn server_steps(&self, steps: &mut Vec<Happens>) {
        let Server { accepted, reaped, .. } = &self.server;
        if (self.accepted as usize) < self.log.net.connections.len() {
            steps.push(Happens::Accept);
        }
        for Accepted { attempt, adopted, noted, passed } in accepted {
            match adopted {
                false if *reaped => steps.push(Happens::Refuse(*attempt)),
                // The server has not noticed the exit. Each time the program tries again.
                false if self.exited && self.log.faults == 0 => {}
                false => steps.push(Happens::Adopt(*attempt)),
                true if !passed => steps.push(Happens::Pass(*attempt)),
                true => {}
            }
            if *adopted && !noted {
                steps.push(Happens::Note(*attempt));
            }
        }
        if self.exited && !reaped {
            steps.push(Happens::Reap);
        }
        if self.record.ending && !self.exited {
            steps.push(Happens::WorkerStops);
        }
        if self.daemon && self.dead && !self.reported {
            steps.push(Happens::DaemonReports);
        }
        if self.daemon && *reaped && !self.daemon_knows {
            steps.push(Happens::DaemonLearns);
        }
    }

    /// Takes a step of the server with a connection that it has accepted.
    fn serve(&mut self, step: Happens) {
        let (Happens::Adopt(attempt)
        | Happens::Note(attempt)
        | Happens::Pass(attempt)
        | Happens::Refuse(attempt)) = step
        else {
            return;
        };
        let at = self.server.accepted.iter().position(|accepted| accepted.attempt == attempt);
        let mut own = self.server.accepted.swap_remove(at.unwrap());
        match step {
            Happens::Adopt(_) if attempt > self.server.latest => {
                self.log.faults -= u8::from(self.exited);
                (own.adopted, self.server.latest) = (true, attempt);
            }
            Happens::Adopt(_) => return self.refuse(attempt, Code::Other),
            Happens::Refuse(_) => return self.refuse(attempt, Code::Gone),
            Happens::Note(_) => (own.noted, self.record.latest) = (true, self.record.latest.max(attempt)),
            _ if self.exited => {
                self.close(attempt);
                own.passed = true;
            }
            _ => {
                self.passed.push(attempt);
                own.passed = true;
            }
        }
        if !(own.noted && own.passed) {
            self.server.accepted.push(own);
            self.server.accepted.sort_unstable_by_key(|own| own.attempt);
        }
    }

    fn refuse(&mut self, attempt: u32, code: Code) {
        NET.set(std::mem::take(&mut self.log.net));
        let _ = line(attempt, 1).transport.send(&refusal(code, "refused"));
        self.log.net = NET.take();
        self.close(attempt);
    }

    fn server_dies(&mut self) {
        for Accepted { attempt, passed, .. } in std::mem::take(&mut self.server.accepted) {
            if !passed {
                self.close(attempt);
            }
        }
        self.server = Server::default();
    }
}

impl Model for Site {
    type Step = Happens;

    fn copy(&self) -> Self {
        let Self { log, server, passed, .. } = self;
        Self { log: log.copy(), server: server.clone(), passed: passed.clone(), ..*self }
    }

    fn hash(&self, hasher: &mut impl Hasher) {
        self.log.hash(hasher);
        (self.crashes, self.ender, self.dead, self.exited, self.accepted, self.record).hash(hasher);
        (&self.server, &self.passed, self.daemon, self.daemon_knows, self.reported).hash(hasher);
    }

    fn steps(&self) -> Vec<Happens> {
        let mut steps: Vec<Happens> = self.log_steps().map(Happens::Log).collect();
        if self.server.up {
            self.server_steps(&mut steps);
        }
        let Log { program, faults, .. } = &self.log;
        let mut may = |possible: bool, step| {
            if possible {
                steps.push(step);
            }
        };
        let unreported = self.dead && self.ender == Ender::Grace;
        may((program.lost || unreported) && self.waits(), Happens::GraceEnds);
        let asks = program.outage && !self.left();
        may(asks && self.daemon && self.daemon_knows, Happens::DaemonAnswers);
        may(!self.server.up, Happens::ServerStarts);
        may(self.ender == Ender::Daemon && !self.daemon, Happens::DaemonStarts);
        let fault = *faults > 0;
        may(fault && !self.left() && self.waits(), Happens::Impatience);
        may(fault && !self.left() && program.outage, Happens::ProgramGivesUp);
        let crash = self.crashes > 0;
        may(crash && !self.left(), Happens::ProgramDies);
        may(crash && !self.exited, Happens::WorkerDies);
        may(crash && self.server.up, Happens::ServerDies);
        may(crash && self.daemon, Happens::DaemonDies);
        steps
    }

    fn take(&mut self, step: Happens) -> Result<(), String> {
        use Happens::{DaemonDies, Impatience, ProgramDies, ProgramGivesUp, ServerDies, WorkerDies};
        self.crashes -= u8::from(matches!(step, ProgramDies | WorkerDies | ServerDies | DaemonDies));
        self.log.faults -= u8::from(matches!(step, Impatience | ProgramGivesUp));
        match step {
            Happens::Log(step) => {
                let lost = self.log.program.lost;
                self.log.take(step)?;
                if self.log.net.connections.len() > ATTEMPTS {
                    return Err("the program tries again and again".into());
                }
                if self.log.program.lost && !lost {
                    if !self.exited {
                        return Err("the program gives up a worker that waits for it".into());
                    }
                    self.leave_program();
                }
            }
            Happens::Accept => {
                self.accepted += 1;
                let own = Accepted { attempt: self.accepted, adopted: false, noted: false, passed: false };
                self.server.accepted.push(own);
            }
            Happens::Adopt(_) | Happens::Note(_) | Happens::Pass(_) | Happens::Refuse(_) => self.serve(step),
            Happens::Reap => self.server.reaped = true,
            // The server confirms the report after it has written the record.
            Happens::DaemonReports => (self.record.ending, self.reported) = (true, true),
            Happens::WorkerStops | WorkerDies => self.exit_worker(),
            Happens::GraceEnds | Impatience => self.end_grace()?,
            Happens::DaemonLearns => self.daemon_knows = true,
            Happens::DaemonAnswers | ProgramGivesUp => {
                self.log.program.lost = true;
                self.leave_program();
            }
            Happens::ServerStarts => {
                self.server = Server { up: true, latest: self.record.latest, ..Server::default() }
            }
            Happens::DaemonStarts => self.daemon = true,
            ProgramDies => {
                self.dead = true;
                self.leave_program();
            }
            ServerDies => self.server_dies(),
            DaemonDies => (self.daemon, self.daemon_knows) = (false, false),
        }
        Ok(())
    }

    fn is_fault(step: Happens) -> bool {
        use Happens::{DaemonDies, Impatience, ProgramDies, ProgramGivesUp, ServerDies, WorkerDies};
        match step {
            Happens::Log(step) => Log::is_fault(step),
            Impatience | ProgramGivesUp | ProgramDies | WorkerDies | ServerDies | DaemonDies => true,
            _ => false,
        }
    }

    /// The work is done; or the program is dead or has the sticky error, and the server nothing of
    /// it any more.
    fn is_done(&self) -> bool {
        if !self.left() {
            return !self.exited && self.log.is_done();
        }
        let closed = self.log.net.connections.iter().all(|connection| connection.ended[1]);
        self.exited && self.server.up && self.server.reaped && closed
    }
}

#[test]
fn crashed_processes_lose_no_work_that_can_continue_and_leave_nothing_behind() {
    for (ender, faults, crashes) in [(Ender::Grace, 1, 2), (Ender::Daemon, 1, 1), (Ender::Daemon, 0, 3)] {
        let site = Site::new(ender, faults, crashes);
        let searched = search(site).unwrap_or_else(|broken| panic!("{ender:?}: {broken}"));
        println!("{ender:?}, faults {faults}, crashes {crashes}: {searched:?}");
        assert!(searched.states > 10_000 && searched.done > 1_000, "{searched:?}");
    }
}
