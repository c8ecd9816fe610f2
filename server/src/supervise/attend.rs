//! Attendance to one worker: passes messages in both directions, and kills the process if it does
//! not exit in time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::time::Duration;

use gpusession_proto::supervise::{FromWorker, Start, ToWorker};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::debug;

use super::adopt::adopt;
use super::channel::Channel;
use super::images::ImageDesk;
use super::mps;
use super::process::Process;
use super::records::Pace;
use super::stock::WorkerId;
use super::supervisor::Supervisor;
use super::worker::{Command, Queues, hex, stop_request};

/// Time that a worker may take to exit after a stop request. The supervisor then kills it, so that
/// its resources are free again soon.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// As [`STOP_GRACE`], for a worker under MPS; MPS gets the rest of the time (`mps::END_TIMEOUT`).
const MPS_STOP_GRACE: Duration = Duration::from_millis(750);
/// Time until a started worker must be ready. Drivers of many GPUs without persistence take tens of
/// seconds.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Time after which a worker that does not read its channel counts as stuck.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a killed process that still exists counts as stuck in the driver.
pub(super) const REAP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time to read a worker's final messages after it exits.
///
/// Bounded, since another process of its group may keep sending.
const FINAL_MESSAGES_GRACE: Duration = Duration::from_millis(100);
/// Packets that a worker may send in a second; the supervisor kills one that sends more.
///
/// Packets about memory and images count separately, shared memory included, and for all workers of
/// a client: beyond [`RequestRate`](super::request_rate), the channel waits for the next second.
const MAX_PACKETS: u32 = 1000;

/// Progress of a worker's end. Neither the worker's messages nor a full channel prolong it.
#[derive(Default)]
pub(super) struct Ending {
    gone_by: Option<Instant>,
    /// MPS has been asked to end the worker's GPU work.
    pub(super) work_ended: bool,
}

impl Ending {
    pub(super) fn begins(&mut self, takes: Duration) -> Instant {
        *self.gone_by.get_or_insert_with(|| Instant::now() + takes)
    }
}

/// Outcome of attending to a worker.
pub(super) enum End {
    /// The worker exited; the status is known for a child only.
    Ended(Option<ExitStatus>),
    /// The next server attends to it.
    Left,
}

/// State of a worker's task between two events.
struct Attendance<'a> {
    supervisor: &'a Supervisor,
    id: &'a WorkerId,
    client: String,
    channel: &'a Channel,
    ending: &'a mut Ending,
    mps: bool,
    /// Time to exit after a stop request, and in all with the GPU work under MPS.
    grace: (Duration, Duration),
    /// Next deadline, with the reason why the worker ends then; empty: it had to exit by then.
    limit: Option<(Instant, &'static str)>,
    channel_open: bool,
    killed: bool,
    stopping: bool,
    said_end: bool,
    said_ready: bool,
    lent_code: bool,
    received: Received,
    images: ImageDesk,
    records: Pace,
}

/// Messages of a worker in the present second.
struct Received {
    since: Instant,
    packets: u32,
    /// End of the second in which its client asked too often: its messages wait until then.
    paused: Option<Instant>,
}

impl Received {
    /// Counts a message; `exceeds` counts a request, and tells how long its client has sent enough.
    fn count(
        &mut self,
        message: &FromWorker,
        exceeds: impl FnOnce(Instant) -> Option<Instant>,
    ) -> Result<(), String> {
        if self.since.elapsed() >= Duration::from_secs(1) {
            (self.since, self.packets) = (Instant::now(), 0);
        }
        match message {
            FromWorker::MemoryWanted { .. }
            | FromWorker::MemoryReturned { .. }
            | FromWorker::ShareWanted { .. }
            | FromWorker::ShareGiven { .. }
            | FromWorker::ShareDropped { .. }
            | FromWorker::ShareEnded { .. }
            | FromWorker::SharesHeld { .. }
            // A program may load thousands of modules in a second.
            | FromWorker::ImageWanted { .. }
            | FromWorker::ImageOffered { .. } => {
                self.paused = exceeds(Instant::now());
            }
            _ => self.packets += 1,
        }
        match self.packets {
            0..=MAX_PACKETS => Ok(()),
            _ => Err("it floods its supervisor with messages".into()),
        }
    }
}

impl Supervisor {
    /// Attends to a worker until it exits or this server leaves it. `start` is `None` for a worker
    /// of an earlier server.
    pub(super) async fn attend(
        &self,
        id: &WorkerId,
        start: Option<Start>,
        process: &mut Process,
        channel: &Channel,
        queues: &mut Queues,
        ending: &mut Ending,
    ) -> Result<End, String> {
        let Queues { commands, tells, ends } = queues;
        // A worker under MPS does not outlive its server, so an earlier server left none.
        let mps = start.as_ref().is_some_and(|start| start.mps);
        let known = self.state().workers.get(id).map(|w| (w.client.clone(), w.code_of.is_some()));
        let (client, lent_code) = known.unwrap_or_default();
        let mut task = Attendance {
            supervisor: self,
            id,
            client,
            channel,
            ending,
            mps,
            grace: if mps { (MPS_STOP_GRACE, mps::END_TIMEOUT) } else { (STOP_GRACE, STOP_GRACE) },
            limit: None,
            channel_open: true,
            killed: false,
            stopping: false,
            said_end: false,
            said_ready: false,
            // An earlier server did: what the worker's driver has deleted since does not come back.
            lent_code: lent_code && start.is_none(),
            received: Received { since: Instant::now(), packets: 0, paused: None },
            images: ImageDesk::new(self, id),
            records: Pace::default(),
        };
        if let Some(start) = start {
            let by = Instant::now() + START_TIMEOUT;
            let _ = send(channel, &ToWorker::Start(start), None, ends, false, by).await;
            task.limit = Some((by, "it was not ready in time"));
        }
        loop {
            let deadline =
                task.limit.map_or_else(|| Instant::now() + Duration::from_secs(86400), |(at, _)| at);
            let next_second = task.received.paused.unwrap_or(deadline);
            let next_record = task.records.due().unwrap_or(deadline);
            tokio::select! {
                biased;
                // First: of an exited worker, its exit status is reported, not its closed channel.
                status = process.wait() => {
                    task.on_exit().await;
                    return status.map(End::Ended).map_err(|e| e.to_string());
                }
                () = sleep_until(deadline), if task.limit.is_some() => task.on_deadline(process).await?,
                reason = stop_request(ends), if !task.stopping => task.on_stop_request(reason).await,
                () = sleep_until(next_record), if task.records.due().is_some() => task.write_record(),
                Some(command) = tells.recv() => {
                    // First: the next server needs what the worker gets to know.
                    task.write_record();
                    match command {
                        Command::Tell(message) => {
                            send(channel, &message, None, ends, task.stopping, deadline).await?;
                        }
                        Command::Give(message, descriptor) => {
                            let beside = Some(descriptor.as_fd());
                            send(channel, &message, beside, ends, task.stopping, deadline).await?;
                        }
                        Command::Leave => {
                            while let Ok(command) = commands.try_recv() {
                                task.write_record();
                                task.lend_code().await;
                                send_socket(channel, command, ends, task.stopping, deadline).await?;
                            }
                            return Ok(End::Left);
                        }
                        Command::Adopt { .. } => {}
                    }
                },
                () = sleep_until(next_second), if task.received.paused.is_some() => task.received.paused = None,
                Some(command) = commands.recv() => {
                    task.write_record();
                    task.lend_code().await;
                    send_socket(channel, command, ends, task.stopping, deadline).await?;
                }
                // Last, so that a worker that sends much delays nothing above.
                message = channel.recv(), if task.channel_open && task.received.paused.is_none() => match message {
                    Ok(Some((message, descriptor))) => task.on_message(message, descriptor).await?,
                    // It is about to exit, or it closed its channel to evade a stop request.
                    Ok(None) => task.on_closed_channel(),
                    Err(e) if e.raw_os_error().is_some() => task.on_closed_channel(),
                    Err(e) => return Err(e.to_string()),
                },
            }
        }
    }
}

impl Attendance<'_> {
    /// Shortens the time until the worker is killed, unless it is.
    fn exits_by(&mut self, at: Instant) {
        if !self.killed {
            self.limit = Some((self.limit.map_or(at, |(before, _)| before.min(at)), ""));
        }
    }

    /// Ends the GPU work of a worker under MPS, at most once.
    async fn end_gpu_work(&mut self, quiet: bool) -> Instant {
        let by = self.ending.begins(self.grace.1);
        if !std::mem::replace(&mut self.ending.work_ended, true) {
            self.supervisor.end_gpu_work(self.id, quiet, by).await;
        }
        by
    }

    fn write_record(&mut self) {
        self.supervisor.write_record(self.id);
        self.records.written(Instant::now());
    }

    /// Lends its user's compiled code to a worker that gets its first connection.
    async fn lend_code(&mut self) {
        if !std::mem::replace(&mut self.lent_code, true) {
            self.supervisor.lend_code(self.id).await;
        }
    }

    async fn on_exit(&mut self) {
        // A final message tells more than the exit status.
        let by = Instant::now() + FINAL_MESSAGES_GRACE;
        while self.channel_open
            && Instant::now() < by
            && let Ok(Ok(Some((message, descriptor)))) =
                timeout(Duration::from_millis(10), self.channel.recv()).await
        {
            self.said_end |= matches!(message, FromWorker::Ended { .. });
            self.supervisor.heard(self.id, message, descriptor, false);
        }
        if !self.killed && !self.said_end {
            self.supervisor.suspect(self.id);
        }
    }

    async fn on_deadline(&mut self, process: &mut Process) -> Result<(), String> {
        let Some((_, why)) = self.limit.take() else { return Ok(()) };
        if !why.is_empty() {
            return Err(why.into());
        }
        if std::mem::replace(&mut self.killed, true) {
            self.supervisor.stuck(self.id);
            return Ok(());
        }
        debug!(pid = process.pid(), "worker {}: did not exit in time; killed", hex(self.id));
        self.end_gpu_work(false).await;
        process.kill();
        self.limit = Some((Instant::now() + REAP_TIMEOUT, ""));
        Ok(())
    }

    async fn on_stop_request(&mut self, reason: String) {
        self.stopping = true;
        self.ending.begins(self.grace.1);
        let at = Instant::now() + self.grace.0;
        self.exits_by(at);
        let _ = timeout_at(at, self.channel.send(&ToWorker::Stop { reason }, None)).await;
    }

    async fn on_message(&mut self, message: FromWorker, descriptor: Option<OwnedFd>) -> Result<(), String> {
        let rate = &self.supervisor.0.requests;
        self.received.count(&message, |now| rate.exceeds(&self.client, now))?;
        let Some(message) = self.images.take(message) else { return Ok(()) };
        if let FromWorker::Contained { lacking } = &message
            && !self.supervisor.state().workers.get(self.id).is_none_or(|w| w.may_be_contained(lacking))
        {
            return Err("it reported its isolation out of turn".into());
        }
        if matches!(message, FromWorker::Ready { .. }) && std::mem::replace(&mut self.said_ready, true) {
            return Err("it reported that it is ready out of turn".into());
        }
        if matches!(message, FromWorker::Ready { .. }) && self.limit.is_some_and(|(_, why)| !why.is_empty()) {
            self.limit = None;
        }
        let ended = match message {
            FromWorker::Ended { quiet, .. } if self.mps && !std::mem::replace(&mut self.said_end, true) => {
                Some(quiet)
            }
            _ => None,
        };
        // A server that is killed may lose some counters, but not that a client has come.
        let counts = matches!(message, FromWorker::Usage(_) | FromWorker::MemoryWanted { .. });
        let now = Instant::now();
        let write = if counts {
            self.records.changed(now)
        } else {
            self.records.written(now);
            true
        };
        self.supervisor.heard(self.id, message, descriptor, write);
        if let Some(quiet) = ended
            && !self.ending.work_ended
        {
            let by = self.end_gpu_work(quiet).await;
            let _ = timeout_at(by, self.channel.send(&ToWorker::Exit, None)).await;
            if !self.killed {
                self.limit = Some((by, ""));
            }
        }
        Ok(())
    }

    fn on_closed_channel(&mut self) {
        self.channel_open = false;
        self.ending.begins(self.grace.1);
        self.exits_by(Instant::now() + self.grace.0);
    }
}

/// Sends a client's connection.
async fn send_socket(
    channel: &Channel,
    command: Command,
    ends: &mut watch::Receiver<Option<String>>,
    stopping: bool,
    deadline: Instant,
) -> Result<(), String> {
    let Command::Adopt { socket, number, preface, peer } = command else { return Ok(()) };
    let message = adopt(number, preface, peer);
    send(channel, &message, Some(socket.as_fd()), ends, stopping, deadline).await
}

/// Sends a message. Does not wait for a stopping worker to read its channel.
async fn send(
    channel: &Channel,
    message: &ToWorker,
    beside: Option<BorrowedFd<'_>>,
    ends: &mut watch::Receiver<Option<String>>,
    stopping: bool,
    deadline: Instant,
) -> Result<(), String> {
    tokio::select! {
        biased;
        sent = timeout(SEND_TIMEOUT, channel.send(message, beside)) => match sent {
            // It exited; its final messages or its exit status tell more.
            Ok(Err(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Ok(sent) => sent.map_err(|e| format!("its channel failed: {e}")),
            Err(_) => Err("it does not read its channel".into()),
        },
        _ = stop_request(ends), if !stopping => Ok(()),
        () = sleep_until(deadline) => Ok(()),
    }
}
