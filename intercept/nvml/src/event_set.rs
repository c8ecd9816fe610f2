//! A set of events of one program, which its session keeps.

use std::collections::HashMap;

/// Event types that a program waits for, by device, with the number of the last known fault.
#[derive(Default)]
pub struct Set {
    pub devices: HashMap<usize, (u64, u64)>,
}
