//! Results that must reach the client before an answer.

use super::allocations;
use crate::answer::Answer;
use crate::session::Session;

/// Sends output and arrived copies before the answer, after the driver has synchronised.
pub fn flush_results(session: &Session, answer: &mut Answer) {
    session.landing.sweep(session.driver, &session.replies, &mut answer.before);
    session.mirrors.write_back(session, false);
    session.output.collect(&session.replies, &mut answer.before);
    // A pool that has shrunk counts less from now on; the call that let it grow noticed the growth.
    let _ = allocations::recount_pools(session);
}
