//! The line of programs that wait for workers of one lease: the user with the fewest comes first.
//!
//! Without it, programs race for each worker that comes free, and a user who starts them in a loop
//! wins nearly all races.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::leases::{Granted, Slot, Waiter};

/// Programs that hold or await workers of leases, by user.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// Workers of each user.
    held: HashMap<(Slot, u32), usize>,
    /// By the waiter's address, which stays its own as long as the entry exists.
    waiting: HashMap<usize, Waiting>,
}

#[derive(Debug)]
struct Waiting {
    user: u32,
    /// Leases of which it has found no worker.
    slots: Vec<Slot>,
    waiter: Weak<()>,
}

impl Line {
    /// Notes that a program of `user` has found no worker of these slots, and of no others.
    pub(super) fn waits(&mut self, waiter: &Waiter, user: u32, slots: Vec<Slot>) {
        let waiting = Waiting { user, slots, waiter: Arc::downgrade(&waiter.0) };
        self.waiting.insert(Arc::as_ptr(&waiter.0).addr(), waiting);
    }

    /// Returns the number of waiting programs of users who have fewer workers than `user`.
    pub(super) fn ahead(&self, slot: Slot, user: u32) -> usize {
        let held = |user| self.held.get(&(slot, user)).copied().unwrap_or(0);
        let mine = held(user);
        if mine == 0 {
            return 0;
        }
        let before = |one: &&Waiting| {
            one.user != user
                && held(one.user) < mine
                && one.slots.contains(&slot)
                && one.waiter.strong_count() > 0
        };
        self.waiting.values().filter(before).count()
    }

    /// Counts a worker of `user`. Forgets programs that gave up or were served: workers come
    /// seldom, and tries often.
    pub(super) fn takes(&mut self, slot: Slot, user: u32) {
        self.waiting.retain(|_, one| one.waiter.strong_count() > 0);
        *self.held.entry((slot, user)).or_default() += 1;
    }

    /// Counts the workers of an exited program no longer.
    pub(super) fn ended(&mut self, granted: &[Granted]) {
        for one in granted {
            let Some(user) = one.user else { continue };
            if let Some(count) = self.held.get_mut(&(one.slot, user)) {
                *count -= 1;
                if *count == 0 {
                    self.held.remove(&(one.slot, user));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;
    const CAROL: u32 = 1002;

    #[test]
    fn a_user_with_fewer_workers_is_ahead_while_a_program_waits() {
        let mut line = Line::default();
        (0..3).for_each(|_| line.takes(7, ALICE));
        line.takes(7, BOB);
        let (bobs, alices) = (Waiter::default(), Waiter::default());
        line.waits(&bobs, BOB, vec![7, 8]);
        line.waits(&alices, ALICE, vec![7]);
        assert_eq!([ALICE, BOB, CAROL].map(|user| line.ahead(7, user)), [1, 0, 0]);
        assert_eq!(line.ahead(8, ALICE), 0, "both have none of the other lease");
        line.waits(&bobs, BOB, vec![8]);
        assert_eq!(line.ahead(7, ALICE), 0, "it found a worker of this lease");
        line.waits(&bobs, BOB, vec![7]);
        let copy = bobs.clone();
        drop(bobs);
        assert_eq!(line.ahead(7, ALICE), 1);
        drop(copy);
        assert_eq!(line.ahead(7, ALICE), 0, "it gave up");
    }

    #[test]
    fn exited_programs_count_no_longer() {
        let mut line = Line::default();
        line.takes(7, ALICE);
        let waiter = Waiter::default();
        line.waits(&waiter, BOB, vec![7]);
        assert_eq!(line.ahead(7, ALICE), 1);
        let one = |user| Granted { slot: 7, lease: "a".into(), worker: [1; 16], user };
        line.ended(&[one(None)]);
        assert_eq!(line.ahead(7, ALICE), 1, "a program of an earlier daemon counts for no user");
        line.ended(&[one(Some(ALICE)), one(Some(CAROL))]);
        assert_eq!(line.ahead(7, ALICE), 0);
        assert!(line.held.is_empty());
    }
}
