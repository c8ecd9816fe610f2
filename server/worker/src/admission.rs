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
        supervisor.report(&FromWorker::Presented(process.clone()));
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
            supervisor.report(&FromWorker::Presented(process.clone()));
        }
    }

    /// Records the supervisor's answer; `None` admits the process.
    pub fn answer(&self, refused: Option<String>) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).answer = Some(refused);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::supervise::tests::pair;

    fn process(pid: u32) -> ClientProcess {
        let (user, program, executable) = ("ada".into(), "train".into(), "/usr/bin/python3".into());
        ClientProcess { uid: 1000, user, pid, program, executable, encrypted: false }
    }

    #[test]
    fn process_waits_for_the_supervisors_word() {
        let (supervisor, peer) = pair();
        let admission = Arc::new(Admission::default());
        for (word, expected) in [(None, Ok(())), (Some("too many"), Err("too many".to_string()))] {
            let (asking, supervisor) = (admission.clone(), supervisor.clone());
            let asked = std::thread::spawn(move || asking.ask(&supervisor, process(7)));
            assert_eq!(peer.next(), FromWorker::Presented(process(7)));
            assert!(!asked.is_finished());
            admission.answer(word.map(str::to_string));
            assert_eq!(asked.join().unwrap(), expected);
        }
    }

    #[test]
    fn new_supervisor_gets_only_an_open_question_again() {
        let (supervisor, peer) = pair();
        let admission = Arc::new(Admission::default());
        admission.ask_again(&supervisor);
        assert!(peer.silent());
        let (asking, old) = (admission.clone(), supervisor.clone());
        let asked = std::thread::spawn(move || asking.ask(&old, process(8)));
        assert_eq!(peer.next(), FromWorker::Presented(process(8)));
        admission.ask_again(&supervisor);
        assert_eq!(peer.next(), FromWorker::Presented(process(8)));
        admission.answer(None);
        assert_eq!(asked.join().unwrap(), Ok(()));
        admission.ask_again(&supervisor);
        assert!(peer.silent());
    }
}
