//! Data connections that a worker has not admitted yet.
//!
//! The worker's id travels in clear, so that anyone who has seen a packet can name it. Such
//! connections count against no limit of the client; each worker has bounds for them instead.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::clock::Moment;
use crate::peer_slots::machine;

/// Connections that may wait at a time: of the program's machine, and of all other machines.
const MAX_WAITING: usize = 32;
/// A worker decides sooner. An older connection is closed, or its worker lies and gains descriptors
/// of its own process only.
const WAITING_TTL: Duration = Duration::from_secs(30);
/// New connections in one second: of the program's machine, and of all others. Each costs the
/// worker a thread and a message.
const MAX_PER_SECOND: u32 = 64;

/// Connections that no worker has admitted yet.
#[derive(Debug, Default)]
pub struct Unadmitted {
    connections: HashMap<u64, (IpAddr, Moment)>,
    /// The machine whose connection the worker admitted first.
    home: Option<IpAddr>,
    /// The second and the number of connections in it: of other machines, of the program's.
    rates: [(u64, u32); 2],
}

impl Unadmitted {
    /// Lets a connection of `peer` wait under a number; `false` if too many do.
    pub fn enter(&mut self, number: u64, peer: IpAddr, now: Moment) -> bool {
        let peer = machine(peer);
        let at_home = |machine: &IpAddr| Some(*machine) == self.home;
        let mine = at_home(&peer);
        self.connections.retain(|_, (_, since)| now.saturating_sub(*since) < WAITING_TTL);
        let waiting = self.connections.values().filter(|(machine, _)| at_home(machine) == mine).count();
        let (second, count) = &mut self.rates[usize::from(mine)];
        if *second != now.as_secs() {
            (*second, *count) = (now.as_secs(), 0);
        }
        if waiting >= MAX_WAITING || *count >= MAX_PER_SECOND {
            return false;
        }
        *count += 1;
        self.connections.insert(number, (peer, now));
        true
    }

    /// The worker has admitted a connection; its machine is the program's if it is the first one.
    pub fn admitted(&mut self, number: u64) {
        if let Some((peer, _)) = self.connections.remove(&number) {
            self.home.get_or_insert(peer);
        }
    }

    /// A connection was refused, or closed before it was admitted.
    pub fn refused(&mut self, number: u64) {
        self.connections.remove(&number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Moment = Duration::from_secs(1000);

    fn ip(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn strangers_leave_room_for_the_program() {
        let mut waiting = Unadmitted::default();
        assert!(waiting.enter(0, ip(1), T));
        waiting.admitted(0);
        let strangers = (1..1000).filter(|n| waiting.enter(*n, ip((*n % 200) as u8 + 2), T)).count();
        assert_eq!(strangers, MAX_WAITING);
        let lanes = (2000..2016).filter(|n| waiting.enter(*n, ip(1), T)).count();
        assert_eq!(lanes, 16, "all lanes of the program");
    }

    #[test]
    fn a_refused_connection_frees_its_place_but_not_its_second() {
        let mut waiting = Unadmitted::default();
        let quick = |waiting: &mut Unadmitted, now| {
            (0..1000)
                .filter(|n| {
                    let entered = waiting.enter(*n, ip(2), now);
                    waiting.refused(*n);
                    entered
                })
                .count()
        };
        assert_eq!(quick(&mut waiting, T), MAX_PER_SECOND as usize);
        assert_eq!(quick(&mut waiting, T + Duration::from_secs(1)), MAX_PER_SECOND as usize);
    }

    #[test]
    fn a_connection_that_is_never_decided_on_is_forgotten() {
        let mut waiting = Unadmitted::default();
        (0..MAX_WAITING as u64).for_each(|n| assert!(waiting.enter(n, ip(2), T)));
        assert!(!waiting.enter(99, ip(3), T + Duration::from_secs(1)));
        assert!(waiting.enter(99, ip(3), T + WAITING_TTL));
    }
}
