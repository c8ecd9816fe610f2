//! Connections that break at places which a seed draws.

use gpusession_test_support::relay::{Cut, Fate, Place};
use gpusession_test_worker::Random;

/// Fate of each connection under a seed: more than half of the first ones break.
pub fn fate(seed: u64, connection: u32) -> Fate {
    const CUT_CONNECTIONS: u32 = 90;
    let mut random = Random::new(seed << 16 | u64::from(connection) | 1 << 40);
    for _ in 0..8 {
        random.draw();
    }
    let place = Place::ALL[random.below(Place::ALL.len() as u64) as usize];
    let unit = random.below(7) as u32;
    let cut = |least: u32| Some(Cut { unit: unit.max(least), place, reset: unit.is_multiple_of(2) });
    match (connection, random.below(5)) {
        // Preface, greeting, acknowledgement of the greeting's reply.
        (0, 0..3) => Fate { up: cut(3), ..Fate::default() },
        (0, _) => Fate { down: cut(1), ..Fate::default() },
        (CUT_CONNECTIONS.., _) | (_, 0) => Fate::default(),
        (_, 1..3) => Fate { up: cut(0), ..Fate::default() },
        (_, _) => Fate { down: cut(0), ..Fate::default() },
    }
}
