//! The supervisor's word on whether a process with a good ticket is served: it counts what a user has over all workers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::{ClientProcess, FromWorker};

use crate::supervise::Supervisor;

/// A supervisor that says nothing for so long, though another one may have taken over meanwhile, is not waited for.
const PATIENCE: Duration = Duration::from_secs(30);

/// A question that is asked once.
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
    /// Waits for the answer; `Err` says why the process is not served.
    pub fn ask(&self, supervisor: &Supervisor, process: ClientProcess) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        supervisor.tell(&FromWorker::Presented(process.clone()));
        state.asked = Some(process);
        let unanswered = |state: &mut State| state.answer.is_none();
        let waited = self.changed.wait_timeout_while(state, PATIENCE, unanswered);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.asked = None;
        match state.answer.take() {
            Some(None) => Ok(()),
            Some(Some(reason)) => Err(reason),
            None => Err("the GPU server does not say whether it serves this program".into()),
        }
    }

    /// Another supervisor may not have heard the question.
    pub fn ask_again(&self, supervisor: &Supervisor) {
        if let Some(process) = &self.state.lock().unwrap_or_else(PoisonError::into_inner).asked {
            supervisor.tell(&FromWorker::Presented(process.clone()));
        }
    }

    /// The supervisor has answered.
    pub fn answer(&self, refused: Option<String>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answer = Some(refused);
        self.changed.notify_all();
    }
}
