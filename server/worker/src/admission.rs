//! The supervisor's consent to serve a process that has shown a good ticket.
//!
//! The supervisor counts the processes of a user over all workers, which one worker cannot.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, FromWorker};

use crate::supervise::Supervisor;

/// Longest wait for the supervisor's answer, a change of the supervisor included.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(30);

/// A question to the supervisor, asked once per worker.
#[derive(Default)]
pub struct Admission {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    asked: Option<ClientProcess>,
    answer: Option<Option<String>>,
}

impl Admission {
    /// Asks and waits for the answer; `Err` holds the reason for a refusal.
    pub fn ask(&self, supervisor: &Supervisor, process: ClientProcess) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        supervisor.tell(&FromWorker::Presented(process.clone()));
        state.asked = Some(process);
        let unanswered = |state: &mut State| state.answer.is_none();
        let waited = self.changed.wait_timeout_while(state, ADMISSION_TIMEOUT, unanswered);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.asked = None;
        match state.answer.take() {
            Some(None) => Ok(()),
            Some(Some(reason)) => Err(reason),
            None => Err("the GPU server did not answer whether it serves this program".into()),
        }
    }

    /// Repeats an open question to a new supervisor, which may not have received it.
    pub fn ask_again(&self, supervisor: &Supervisor) {
        if let Some(process) = &self.state.lock().unwrap_or_else(PoisonError::into_inner).asked {
            supervisor.tell(&FromWorker::Presented(process.clone()));
        }
    }

    /// Records the supervisor's answer; `None` admits the process.
    pub fn answer(&self, refused: Option<String>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answer = Some(refused);
        self.changed.notify_all();
    }
}
