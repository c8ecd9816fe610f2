//! The supervisor's consent to serve a process: whether its ticket is genuine, and within limits.
//!
//! The supervisor has the key of the tickets, and counts the processes of a user over all workers.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use gpusession_proto::supervise::FromWorker;

use crate::supervise::Supervisor;

/// Longest wait for the supervisor's answer, a change of the supervisor included.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A question to the supervisor; one thread at a time asks it.
#[derive(Default)]
pub struct Question {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    asked: Option<FromWorker>,
    answer: Option<Option<String>>,
}

impl Question {
    /// Asks and waits for the answer; `Err` holds the reason for a refusal.
    pub fn ask(&self, supervisor: &Supervisor, question: FromWorker) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The answer to an earlier question may have come too late.
        state.answer = None;
        supervisor.report(&question);
        state.asked = Some(question);
        let unanswered = |state: &mut State| state.answer.is_none();
        let waited = self.changed.wait_timeout_while(state, ANSWER_TIMEOUT, unanswered);
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
        if let Some(question) = &self.state.lock().unwrap_or_else(PoisonError::into_inner).asked {
            supervisor.report(question);
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

    use gpusession_proto::supervise::ClientProcess;

    use super::*;
    use crate::supervise::tests::pair;

    fn presented(pid: u32) -> FromWorker {
        let (user, program, executable) = ("ada".into(), "train".into(), "/usr/bin/python3".into());
        FromWorker::Presented(ClientProcess { uid: 1000, user, pid, program, executable, encrypted: false })
    }

    #[test]
    fn process_waits_for_the_supervisors_word() {
        let (supervisor, peer) = pair();
        let admission = Arc::new(Question::default());
        for (word, expected) in [(None, Ok(())), (Some("too many"), Err("too many".to_string()))] {
            let (asking, supervisor) = (admission.clone(), supervisor.clone());
            let asked = std::thread::spawn(move || asking.ask(&supervisor, presented(7)));
            assert_eq!(peer.next(), presented(7));
            assert!(!asked.is_finished());
            admission.answer(word.map(str::to_string));
            assert_eq!(asked.join().unwrap(), expected);
        }
    }

    #[test]
    fn new_supervisor_gets_only_an_open_question_again() {
        let (supervisor, peer) = pair();
        let admission = Arc::new(Question::default());
        admission.ask_again(&supervisor);
        assert!(peer.silent());
        let (asking, old) = (admission.clone(), supervisor.clone());
        let asked = std::thread::spawn(move || asking.ask(&old, presented(8)));
        assert_eq!(peer.next(), presented(8));
        admission.ask_again(&supervisor);
        assert_eq!(peer.next(), presented(8));
        admission.answer(None);
        assert_eq!(asked.join().unwrap(), Ok(()));
        admission.ask_again(&supervisor);
        assert!(peer.silent());
    }
}
