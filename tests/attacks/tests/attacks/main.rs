//! Attacks on real programs: a server, its workers, and the simulated driver.
//!
//! Each test is one attack; `docs/security.md` lists it with its promise.

#[path = "../../../../server/tests/server/common.rs"]
#[expect(dead_code, reason = "a part of it serves other tests")]
mod common;
mod isolation;
mod table;
