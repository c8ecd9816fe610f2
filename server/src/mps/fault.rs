//! Faults that the logs of a daemon report.

use std::time::Duration;

use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::domain::Domain;
use super::log::{self, LogEvent, Tail};

/// Interval at which logs are read.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Reason why the attendance to a daemon ends.
pub(super) enum End {
    Unneeded,
    Died(String),
    Fault { culprits: Vec<u32>, why: String },
}

/// Lines of one log that go to the journal at a time.
const MAX_LINES: usize = 50;

/// Returns the fault that a daemon's logs report, if there was one.
pub(super) async fn fault(domain: &Domain, logs: &mut Vec<Tail>) -> Option<End> {
    let (mut culprits, why) = read_logs(domain, logs).await?;
    if culprits.is_empty() {
        // The next line may name the culprit.
        sleep(POLL_INTERVAL).await;
        culprits.extend(read_logs(domain, logs).await.into_iter().flat_map(|(c, _)| c));
    }
    Some(End::Fault { culprits, why })
}

/// Waits for an answer of the daemon, for any time, unless its logs report a fault meanwhile.
pub(super) async fn unless_fault<T>(
    domain: &Domain,
    logs: &mut Vec<Tail>,
    asked: impl Future<Output = T>,
) -> Result<T, End> {
    let mut asked = std::pin::pin!(asked);
    loop {
        tokio::select! {
            answer = &mut asked => return Ok(answer),
            () = sleep(POLL_INTERVAL) => {
                if let Some(fault) = fault(domain, logs).await {
                    return Err(fault);
                }
            }
        }
    }
}

/// Copies new log lines to the journal. Returns the culprits and the text of a fault, if there was
/// one.
async fn read_logs(domain: &Domain, logs: &mut Vec<Tail>) -> Option<(Vec<u32>, String)> {
    let mut tails = std::mem::take(logs);
    let reading = tokio::task::spawn_blocking(move || {
        let lines: Vec<_> = tails.iter_mut().map(Tail::lines).collect();
        (tails, lines)
    });
    let lines;
    (*logs, lines) = reading.await.unwrap_or_default();
    let mut fault: Option<(Vec<u32>, String)> = None;
    for (log, lines) in logs.iter().zip(lines) {
        let mut left = MAX_LINES;
        for line in lines {
            let said = log::read(&line);
            let (name, text) = (domain.name(), line.split_once("] ").map_or(line.as_str(), |(_, text)| text));
            if left > 0 {
                left -= 1;
                match &said {
                    LogEvent::Chatter => debug!("MPS domain {name}: {line}"),
                    LogEvent::Info => info!("MPS domain {name}: {line}"),
                    LogEvent::Fault(_) | LogEvent::ServerDied => warn!("MPS domain {name}: {line}"),
                }
            }
            let culprit = match said {
                LogEvent::Fault(culprit) => culprit,
                LogEvent::ServerDied => None,
                LogEvent::Info | LogEvent::Chatter => continue,
            };
            let fault = fault.get_or_insert_with(|| (Vec::new(), text.trim().to_string()));
            fault.0.extend(culprit.filter(|c| !fault.0.contains(c)));
        }
        if left == 0 {
            info!("MPS domain {}: more lines in {}", domain.name(), log.path().display());
        }
    }
    fault
}
