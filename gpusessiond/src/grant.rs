//! The grant socket: `libcuda.so.1` uses it to request GPUs, `libnvidia-ml.so.1` to query them.
//!
//! Callers are untrusted: the kernel names their uid, the size and time of a message are bounded,
//! and so is the number of connections per user; subordinate uids count as their owner's.
//!
//! The connection stays open while the process lives. A pidfd of the process reports its exit, even
//! if a child has inherited the connection.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use gpusession_proto::grant::{
    Denial, MAX_OUTCOME, MAX_OUTCOMES, MAX_REASON, Outage, Outcome, PROGRAM_THREAD, Reply, Request, VERSION,
    Want,
};
use gpusession_proto::journal::Event;
use gpusession_proto::log_throttle::LogThrottle;
use gpusession_proto::message;
use gpusession_proto::readings::MAX_QUERIES;
use gpusession_proto::ticket;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::access::Gate;
use crate::handover::{Kept, Store};
use crate::leases::{Answer, Caller, Failure, Granted, Interruption, Leases, Waiter, WorkerRequest};
use crate::login::Sessions;
use crate::peer::{Peer, control_groups, has_thread, is_contained, peer, watched};

/// Bounds on the resources that callers may use.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections of one user, including those of running programs.
    pub per_uid: usize,
    /// Connections of all users together.
    pub total: usize,
    /// Time to send a request, and to accept the answer.
    pub io_timeout: Duration,
    /// Largest request in bytes.
    pub request_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { per_uid: 512, total: 4096, io_timeout: Duration::from_secs(5), request_bytes: 16 << 10 }
    }
}

/// Most driver variables that a request may name, and the longest name or value in bytes.
const MAX_VARIABLES: usize = 32;
const MAX_VARIABLE: usize = 4096;
/// Time that a program refused by a limit waits for another program to exit.
const LIMIT_WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a program waits for a worker of a held lease: a move of 64 GiB from or to a parked
/// lease takes half of it.
const WORKER_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause between tries of a request for a cold worker, since each is a call to the server; and of
/// one behind others, who may give up without a sign.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time to read a process's final outcome messages after it exits.
const REPLY_GRACE: Duration = Duration::from_millis(100);
/// Interval between polls of a process's threads.
const THREAD_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Longest program name in tickets, in characters.
const MAX_PROGRAM: usize = 64;

/// Pause between grants of one user beyond the first [`MAX_BURST`].
const TURN_INTERVAL: Duration = Duration::from_millis(50);
const MAX_BURST: u32 = 40;
/// Time after its last request for which a user counts as one of several.
const SEEN_WINDOW: Duration = Duration::from_secs(60);
/// Connections that a user always may have; more only while half of all are free.
const GUARANTEED_CONNECTIONS: usize = 64;

/// Turns of users who share this machine's leases.
///
/// A user's loop of short programs thus leaves warm workers and the server's rate to others.
#[derive(Debug, Default)]
struct Turns(Mutex<HashMap<u32, Turn>>);

#[derive(Debug)]
struct Turn {
    /// Time of the next turn without the burst.
    next: Instant,
    seen: Instant,
}

impl Turns {
    /// Takes a turn, and returns how long the program waits for it.
    fn take(&self, user: u32, now: Instant) -> Duration {
        let mut turns = self.0.lock().unwrap_or_else(|e| e.into_inner());
        turns.retain(|_, turn| now.saturating_duration_since(turn.seen) < SEEN_WINDOW || turn.next > now);
        let turn = turns.entry(user).or_insert(Turn { next: now, seen: now });
        turn.seen = now;
        let due = turn.next.max(now);
        let ahead = due.duration_since(now).saturating_sub(TURN_INTERVAL * (MAX_BURST - 1));
        turn.next = due + TURN_INTERVAL;
        let several = turns
            .iter()
            .any(|(other, turn)| *other != user && now.saturating_duration_since(turn.seen) < SEEN_WINDOW);
        if several && user != 0 {
            return ahead;
        }
        if let Some(turn) = turns.get_mut(&user) {
            // A user alone does not pay later for its present programs.
            turn.next = turn.next.min(now + TURN_INTERVAL * MAX_BURST);
        }
        Duration::ZERO
    }
}

/// Serves a grant socket.
pub struct Server {
    leases: Arc<dyn Leases>,
    gate: Arc<Gate>,
    wait: RwLock<Duration>,
    limits: Limits,
    places: Arc<Places>,
    turns: Turns,
    programs: Arc<Programs>,
    sessions: Option<Arc<Sessions>>,
    store: Option<Store>,
    /// Throttles log lines about malformed requests.
    quiet: LogThrottle,
    /// Throttles log lines about connections that are back.
    returns: LogThrottle,
}

/// Number of connections of each user.
#[derive(Debug, Default)]
struct Places(Mutex<HashMap<u32, usize>>);

impl Places {
    /// Takes a place for a user; with `fair_share`, many places only while half of all are free.
    fn take(self: &Arc<Self>, user: u32, limits: &Limits, fair_share: bool) -> Option<Place> {
        let mut connections = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let total: usize = connections.values().sum();
        let mine = connections.entry(user).or_default();
        // root always gets a connection, to diagnose problems.
        let crowded = fair_share && total >= limits.total / 2 && *mine >= GUARANTEED_CONNECTIONS;
        if (crowded || *mine >= limits.per_uid || total >= limits.total) && user != 0 || *mine >= limits.total
        {
            return None;
        }
        *mine += 1;
        Some(Place { user, places: self.clone() })
    }
}

/// A slot among the connections of a user; released when dropped.
#[derive(Debug)]
struct Place {
    user: u32,
    places: Arc<Places>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut connections = self.places.0.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(count) = connections.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                connections.remove(&self.user);
            }
        }
    }
}

impl Server {
    /// Creates a server that grants workers from `leases`; a first CUDA call waits up to `wait`.
    pub fn new(leases: Arc<dyn Leases>, gate: Arc<Gate>, wait: Duration, limits: Limits) -> Self {
        let wait = RwLock::new(wait);
        Self {
            leases,
            gate,
            wait,
            limits,
            places: Arc::default(),
            turns: Turns::default(),
            programs: Arc::default(),
            sessions: None,
            store: None,
            quiet: LogThrottle::default(),
            returns: LogThrottle::default(),
        }
    }

    /// Sets the login sessions that callers may belong to.
    pub fn with_sessions(self, sessions: Arc<Sessions>) -> Self {
        Self { sessions: Some(sessions), ..self }
    }

    /// Sets the store that hands the served processes to the next daemon.
    pub fn with_store(self, store: Store) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Sets how long a first CUDA call waits from now on.
    pub fn set_wait(&self, wait: Duration) {
        *self.wait.write().unwrap_or_else(|e| e.into_inner()) = wait;
    }

    /// Watches processes that an earlier daemon served, given as (lease id, worker, pidfd).
    pub async fn resume(&self, processes: Vec<(String, [u8; 16], OwnedFd)>) {
        for (lease, worker, fd) in processes {
            let pidfd = watched(fd);
            let (Some(granted), Ok(pidfd)) = (self.leases.resume(&lease, worker).await, pidfd) else {
                if let Some(store) = self.store {
                    store.remove(&Kept::Process { lease, worker }.name());
                }
                continue;
            };
            let guard = self.guard(vec![granted]);
            tokio::spawn(async move {
                process_end(Some(&pidfd)).await;
                drop(guard);
            });
        }
    }

    /// Serves until the future is dropped.
    pub async fn serve(self: Arc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.clone().admit(stream),
                Err(error) => {
                    // Probably out of descriptors: present connections continue, new ones wait.
                    warn!("grant socket: cannot accept a connection: {error}; retrying");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn admit(self: Arc<Self>, stream: UnixStream) {
        let peer = match peer(&stream) {
            Ok(peer) => peer,
            Err(error) => {
                debug!("grant socket: connection dropped: caller has no credentials: {error}");
                return;
            }
        };
        let user = self.gate.account(peer.uid);
        let Some(place) = self.places.take(user, &self.limits, self.gate.fair_share()) else {
            // A loop of connections leaves the journal's room to other lines.
            if let Some(more) = self.quiet.may() {
                warn!(
                    gpusession_user = peer.uid,
                    "grant socket: uid {}: refused: too many connections{more}", peer.uid
                );
            }
            let reply = Reply::Denied {
                denial: Denial::NotReady,
                reason: "too many connections of this user to the daemon".into(),
            };
            // The reply fits into the empty buffer of a new socket, so this does not block.
            let _ = stream.try_write(&message::encode(&reply));
            return;
        };
        tokio::spawn(async move {
            let uid = peer.uid;
            if let Err(error) = self.talk(stream, peer, user).await {
                debug!("grant socket: uid {uid}: {error}");
            }
            drop(place);
        });
    }

    async fn talk(&self, mut stream: UnixStream, peer: Peer, user: u32) -> io::Result<()> {
        let pidfd = match peer.pidfd {
            Some(fd) => Some(watched(fd)?),
            None => None,
        };
        let request = self.receive(&mut stream, peer.uid, peer.pid).await?;
        if let Want::Outage(outage) = request.want {
            let program = printable(&request.program, MAX_PROGRAM);
            let (uid, pid, number) = (peer.uid, peer.pid, outage.number);
            let interruption = Interruption { uid, pid, program, since: None, number };
            let reply = self.state_of(&outage, interruption).await;
            return self.answer(&mut stream, &reply).await;
        }
        let person = self.gate.person(peer.uid).await;
        let sessions = self.sessions.as_ref();
        let session = sessions.and_then(|s| s.for_process(peer.uid, peer.pid, request.session.as_deref()));
        let caller = Caller {
            uid: peer.uid,
            pid: peer.pid,
            user: person.name,
            principal: person.principal,
            access: person.access,
            session: session.map(|s| s.id.clone()),
            control_groups: control_groups(peer.pid, pidfd.as_ref().map(AsyncFd::get_ref)),
            // Only root has rights to lose.
            contained: peer.uid == 0 && is_contained(pidfd.as_ref().map(AsyncFd::get_ref)),
        };
        let program = printable(&request.program, MAX_PROGRAM);
        let executable = printable(&request.executable, usize::MAX);
        let mut wish = WorkerRequest {
            lease: request.lease.filter(|named| !named.trim().is_empty()),
            program,
            executable: ticket::shortened(&executable).to_owned(),
            environment: request.environment.into_iter().collect(),
            waiter: self.gate.fair_share().then(Waiter::default),
        };
        if request.want == Want::Version {
            let reply = match self.leases.cuda_version(caller, wish).await {
                Ok(version) => Reply::Version(version),
                Err((denial, reason)) => Reply::Denied { denial, reason },
            };
            return self.answer(&mut stream, &reply).await;
        }
        if let Want::Readings(queries) = request.want {
            let reply = match self.leases.readings(caller, wish, queries).await {
                Ok(view) => Reply::Readings(view),
                Err((denial, reason)) => Reply::Denied { denial, reason },
            };
            return self.answer(&mut stream, &reply).await;
        }
        let turn = match self.gate.fair_share() {
            true => self.turns.take(user, Instant::now()),
            false => Duration::ZERO,
        };
        let Some(answer) = self.ask(&caller, &wish, turn, caller_disconnected(&stream, pidfd.as_ref())).await
        else {
            return Ok(());
        };
        wish.waiter = None;
        let (denial, reason) = match answer {
            Answer::Granted(endpoints, granted) => {
                let guard = self.guard(granted);
                guard.keep(pidfd.as_ref());
                info!(
                    gpusession_lease = guard.granted.first().map(|g| g.lease.as_str()).unwrap_or_default(),
                    gpusession_user = caller.uid,
                    "process {} ({}) of uid {}: granted workers",
                    caller.pid,
                    wish.program,
                    caller.uid
                );
                self.answer(&mut stream, &Reply::Granted(endpoints)).await?;
                self.follow(stream, pidfd, guard, &caller, &wish.program).await;
                debug!("process {}: exited", caller.pid);
                return Ok(());
            }
            Answer::Later(reason) | Answer::Behind(reason) => (Denial::NotReady, reason),
            Answer::Wait(denial, reason) | Answer::Denied(denial, reason) => (denial, reason),
        };
        let event = match denial {
            Denial::NoDevice => Event::AccessDenied,
            Denial::ProtocolMismatch => Event::ProtocolMismatch,
            Denial::Quota | Denial::OutOfMemory => Event::LimitRefuses,
            Denial::NotReady => Event::LeaseWaits,
        };
        info!(
            message_id = event.id(),
            gpusession_user = caller.uid,
            gpusession_reason = reason,
            "process {} ({}) of uid {}: no GPU: {reason}",
            caller.pid,
            wish.program,
            caller.uid
        );
        self.answer(&mut stream, &Reply::Denied { denial, reason }).await?;
        Ok(())
    }

    fn guard(&self, granted: Vec<Granted>) -> Guard {
        self.programs.enter(&granted);
        let (leases, programs) = (self.leases.clone(), self.programs.clone());
        Guard { leases, programs, granted, store: self.store }
    }

    /// Answers a program whose connection to a worker broke.
    ///
    /// Only the program knows the worker's id, so strangers learn nothing.
    async fn state_of(&self, outage: &Outage, interruption: Interruption) -> Reply {
        let Some(granted) = self.programs.granted(outage) else { return Reply::Awaited };
        if outage.over
            && let Some(more) = self.returns.may()
        {
            let Interruption { uid, pid, program, .. } = &interruption;
            info!(
                message_id = Event::ProgramBack.id(),
                gpusession_lease = granted.lease,
                gpusession_user = uid,
                gpusession_reason = format!("{} ms without a connection", outage.ms),
                "process {pid} ({program}) of uid {uid}: is back after {} ms without a connection{more}",
                outage.ms
            );
        }
        let for_time = (!outage.over).then(|| Duration::from_millis(outage.ms));
        let ended = self.leases.interrupted(granted, interruption, for_time).await;
        ended.map_or(Reply::Awaited, Reply::Ended)
    }

    /// Reads the request; a library of another version gets an answer that it can show.
    async fn receive(&self, stream: &mut UnixStream, uid: u32, pid: u32) -> io::Result<Request> {
        let request =
            tokio::time::timeout(self.limits.io_timeout, read_request(stream, self.limits.request_bytes))
                .await
                .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no request within the time limit"))?;
        if let Err(error) = &request
            && error.kind() == io::ErrorKind::InvalidData
        {
            let reason = format!("the library and the daemon do not speak the same protocol: {error}");
            if let Some(more) = self.quiet.may() {
                warn!(
                    message_id = Event::ProtocolMismatch.id(),
                    gpusession_user = uid,
                    gpusession_reason = reason,
                    "process {pid} of uid {uid}: no GPU: {reason}{more}"
                );
            }
            let denied = Reply::Denied { denial: Denial::ProtocolMismatch, reason };
            let _ = self.answer(stream, &denied).await;
        }
        request
    }

    /// Asks, after `turn`, until there is a final answer or the waiting time is over.
    ///
    /// `None` if the caller `disconnected` meanwhile. It awaits each answer of the lease manager,
    /// since a dropped answer would leave its workers counted.
    async fn ask(
        &self,
        caller: &Caller,
        wish: &WorkerRequest,
        turn: Duration,
        disconnected: impl Future<Output = ()>,
    ) -> Option<Answer> {
        tokio::pin!(disconnected);
        if !turn.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(turn) => {}
                () = &mut disconnected => return None,
            }
        }
        let wait = *self.wait.read().unwrap_or_else(|e| e.into_inner());
        let begun = Instant::now();
        let deadline = begun + wait;
        let (mut refused_since, mut asked_at_deadline) = (None, false);
        let mut snapshot = self.leases.snapshot();
        loop {
            snapshot.mark_unchanged();
            let answer = self.leases.grant(caller.clone(), wish.clone()).await;
            let (until, pause) = match &answer {
                Answer::Wait(Denial::NotReady, _) => (deadline, None),
                Answer::Later(_) => (deadline.max(begun + WORKER_TIMEOUT), None),
                // Those ahead may give up without a change of a lease.
                Answer::Behind(_) => (deadline.max(begun + WORKER_TIMEOUT), Some(ACCEPT_RETRY_INTERVAL)),
                Answer::Wait(..) => {
                    let since = *refused_since.get_or_insert_with(Instant::now);
                    // Each try asks the server for a worker that starts for this program.
                    let pause = (!wish.environment.is_empty()).then_some(ACCEPT_RETRY_INTERVAL);
                    (deadline.min(since + LIMIT_WAIT_TIMEOUT), pause)
                }
                _ => return Some(answer),
            };
            let cold = !wish.environment.is_empty();
            let again = async {
                match pause {
                    Some(pause) if cold => tokio::time::sleep(pause).await,
                    Some(pause) => {
                        let _ = tokio::time::timeout(pause, snapshot.changed()).await;
                    }
                    None => snapshot.changed().await?,
                }
                Ok::<_, tokio::sync::watch::error::RecvError>(())
            };
            tokio::select! {
                waited = tokio::time::timeout_at(until, again) => match waited {
                    Ok(Ok(())) => {}
                    // Not every change of a lease makes a snapshot.
                    Err(_) if !asked_at_deadline => asked_at_deadline = true,
                    _ => return Some(answer),
                },
                () = &mut disconnected => return None,
            }
        }
    }

    /// Returns when the process exits or reports that it does not use its workers.
    ///
    /// A process that only closed its connection (as `closefrom` does) still runs; one that
    /// replaced its program by `exec` has no use for its workers.
    async fn follow(
        &self,
        stream: UnixStream,
        pidfd: Option<AsyncFd<OwnedFd>>,
        guard: Guard,
        caller: &Caller,
        program: &str,
    ) {
        let mut granted = guard.granted.clone();
        let mut outcomes = Outcomes::default();
        let mut served = false;
        loop {
            tokio::select! {
                biased;
                outcome = outcomes.next(&stream) => match outcome {
                    Some(outcome) => {
                        served |= outcome == Outcome::Served;
                        if !self.report_outcome(outcome, &mut granted, caller, program) {
                            break;
                        }
                    },
                    None => {
                        // A process that exits closes its connection first.
                        match &pidfd {
                            Some(_) => tokio::select! {
                                biased;
                                () = process_end(pidfd.as_ref()) => {}
                                true = replaced(caller.pid), if served => info!(
                                    gpusession_user = caller.uid,
                                    "process {} ({program}) of uid {}: runs another program now; its workers exit",
                                    caller.pid,
                                    caller.uid
                                ),
                            },
                            None => caller_disconnected(&stream, None).await,
                        }
                        break;
                    }
                },
                () = process_end(pidfd.as_ref()) => break,
            }
        }
        drop(guard);
        // Final messages may still be in the socket; a child that inherited the connection is not
        // awaited.
        let rest = async {
            while let Some(outcome) = outcomes.next(&stream).await {
                self.report_outcome(outcome, &mut granted, caller, program);
            }
        };
        let _ = tokio::time::timeout(REPLY_GRACE, rest).await;
    }

    /// Records an outcome that a process reports, one failure per worker; returns whether it
    /// continues.
    fn report_outcome(
        &self,
        outcome: Outcome,
        granted: &mut Vec<Granted>,
        caller: &Caller,
        program: &str,
    ) -> bool {
        let (lease, reason, running, again) = match outcome {
            Outcome::Served => {
                granted.iter().for_each(|one| self.leases.report_outcome(one.slot, caller.uid, None));
                return true;
            }
            Outcome::Unserved { lease, reason, again } => (lease, reason, false, again),
            Outcome::Lost { lease, reason } => (lease, reason, true, false),
        };
        if let Some(at) = granted.iter().position(|one| one.lease == lease) {
            let slot = granted.swap_remove(at).slot;
            let (uid, pid, program) = (caller.uid, caller.pid, program.to_owned());
            let user = caller.user.clone().unwrap_or_default();
            let reason = printable(&reason, MAX_REASON);
            let failure = Failure { uid, user, pid, program, reason, running, again };
            self.leases.report_outcome(slot, uid, Some(failure));
        }
        running
    }

    async fn answer(&self, stream: &mut UnixStream, reply: &Reply) -> io::Result<()> {
        tokio::time::timeout(self.limits.io_timeout, stream.write_all(&message::encode(reply)))
            .await
            .map_err(|_| {
                io::Error::new(io::ErrorKind::TimedOut, "answer not accepted within the time limit")
            })?
    }
}

/// Workers of a process; dropping it reports the process's exit, however the connection's task
/// ends.
struct Guard {
    leases: Arc<dyn Leases>,
    programs: Arc<Programs>,
    granted: Vec<Granted>,
    store: Option<Store>,
}

/// Workers of the programs that run, by their ids.
#[derive(Debug, Default)]
struct Programs(Mutex<HashMap<[u8; 16], Granted>>);

impl Programs {
    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; 16], Granted>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn enter(&self, granted: &[Granted]) {
        // Zeros stand for no worker.
        let workers = granted.iter().filter(|one| one.worker != [0; 16]);
        self.lock().extend(workers.map(|one| (one.worker, one.clone())));
    }

    fn leave(&self, granted: &[Granted]) {
        let mut programs = self.lock();
        for one in granted {
            programs.remove(&one.worker);
        }
    }

    /// Returns the worker that an outage concerns.
    fn granted(&self, outage: &Outage) -> Option<Granted> {
        self.lock().get(&outage.worker).filter(|one| one.lease == outage.lease).cloned()
    }
}

impl Guard {
    fn names(&self) -> impl Iterator<Item = String> {
        self.granted.iter().map(|g| Kept::Process { lease: g.lease.clone(), worker: g.worker }.name())
    }

    /// Puts the pidfd into the store, so that the next daemon watches the process.
    fn keep(&self, pidfd: Option<&AsyncFd<OwnedFd>>) {
        let (Some(store), Some(pidfd)) = (self.store, pidfd) else { return };
        for name in self.names() {
            store.put(&name, pidfd.get_ref().as_fd());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(store) = self.store {
            self.names().for_each(|name| store.remove(&name));
        }
        self.programs.leave(&self.granted);
        self.leases.ended(std::mem::take(&mut self.granted));
    }
}

/// Sanitizes untrusted text for display: at most `most` characters, no control or direction
/// characters.
fn printable(text: &str, most: usize) -> String {
    let moves = |c: char| {
        c.is_control()
            || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}'..='\u{200f}' | '\u{61c}')
    };
    text.chars().filter(|c| !moves(*c)).take(most).collect()
}

async fn read_request(stream: &mut UnixStream, limit: usize) -> io::Result<Request> {
    let malformed =
        |what: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::InvalidData, what.to_string());
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).await?;
    let length = message::body_len(prefix).map_err(|e| malformed(&e))?;
    if length > limit {
        return Err(malformed(&message::Malformed::TooLong(length)));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let request: Request = message::decode(&body).map_err(|e| malformed(&e))?;
    if request.version != VERSION {
        return Err(malformed(&format!("version {}, this daemon speaks {VERSION}", request.version)));
    }
    let long = |(key, value): &(String, String)| key.len() > MAX_VARIABLE || value.len() > MAX_VARIABLE;
    if request.environment.len() > MAX_VARIABLES || request.environment.iter().any(long) {
        return Err(malformed(&"too many or too long environment variables"));
    }
    if matches!(&request.want, Want::Readings(queries) if queries.len() > MAX_QUERIES) {
        return Err(malformed(&"too many queries"));
    }
    Ok(request)
}

/// Returns when the caller no longer waits: it exited, or closed its side.
async fn caller_disconnected(stream: &UnixStream, pidfd: Option<&AsyncFd<OwnedFd>>) {
    let closed = async {
        loop {
            if stream.readable().await.is_err() {
                return;
            }
            let mut byte = [0; 64];
            match stream.try_read(&mut byte) {
                Ok(0) => return,
                // No data may follow the request; any such data is discarded.
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    };
    tokio::select! {
        () = closed => {}
        () = process_end(pidfd) => {}
    }
}

/// Reads a process's outcome messages; a partial message stays for the next call.
#[derive(Default)]
struct Outcomes {
    bytes: Vec<u8>,
    read: usize,
}

impl Outcomes {
    /// Returns the next outcome; `None` at the end of the connection, or if the data is malformed
    /// or too long.
    async fn next(&mut self, stream: &UnixStream) -> Option<Outcome> {
        while self.read < MAX_OUTCOMES {
            if let Some(prefix) = self.bytes.first_chunk() {
                let length = message::body_len(*prefix).ok().filter(|length| *length <= MAX_OUTCOME)?;
                if let Some(body) = self.bytes.get(4..4 + length) {
                    let outcome = message::decode(body).ok()?;
                    self.bytes.drain(..4 + length);
                    self.read += 1;
                    return Some(outcome);
                }
            }
            stream.readable().await.ok()?;
            let mut bytes = [0; 1024];
            match stream.try_read(&mut bytes) {
                Ok(0) => return None,
                Ok(n) => self.bytes.extend_from_slice(&bytes[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        None
    }
}

/// Returns whether a process has replaced the program that the library ran in.
///
/// `exec` ends the library's threads; a process that closes its descriptors keeps them. A new
/// thread has its name only once it runs, so a second look follows.
async fn replaced(pid: u32) -> bool {
    for look in 0..2 {
        if look > 0 {
            tokio::time::sleep(THREAD_POLL_INTERVAL).await;
        }
        if has_thread(pid, PROGRAM_THREAD).unwrap_or(true) {
            return false;
        }
    }
    true
}

async fn process_end(pidfd: Option<&AsyncFd<OwnedFd>>) {
    match pidfd {
        // A pidfd becomes readable when its process exits.
        Some(fd) => drop(fd.readable().await),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_many_places_leaves_half_of_them_to_others() {
        let (places, limits) = (Arc::new(Places::default()), Limits { total: 400, ..Limits::default() });
        let take = |user| places.take(user, &limits, true);
        let held: Vec<_> = (0..400).map_while(|_| take(1000)).collect();
        assert_eq!(held.len(), 200);
        let others: Vec<_> = (0..100).map_while(|_| take(1001)).collect();
        assert_eq!(others.len(), GUARANTEED_CONNECTIONS);
        assert!(take(0).is_some(), "root");
        drop(held);
        assert!(take(1001).is_some());
    }

    #[test]
    fn a_users_loop_waits_in_line_while_others_start_programs_and_never_alone() {
        let (turns, now) = (Turns::default(), Instant::now());
        for _ in 0..1000 {
            assert_eq!(turns.take(1000, now), Duration::ZERO, "alone");
        }
        let later = now + SEEN_WINDOW;
        assert_eq!(turns.take(1001, later), Duration::ZERO);
        let waits: Vec<_> = (0..200).map(|_| turns.take(1000, later)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_zero()).count(), MAX_BURST as usize);
        assert_eq!(waits[199], TURN_INTERVAL * (200 - MAX_BURST), "20 a second");
        for _ in 0..10 {
            assert_eq!(turns.take(1001, later), Duration::ZERO, "the other user");
            assert_eq!(turns.take(0, later), Duration::ZERO, "root");
        }
        let alone = later + SEEN_WINDOW;
        assert_eq!(turns.take(1000, alone), Duration::ZERO);
        assert_eq!(turns.0.lock().unwrap().len(), 1, "others are forgotten");
    }
}
