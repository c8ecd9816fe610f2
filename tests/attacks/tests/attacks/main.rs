//! Attacks on real programs: a server, its workers, and the simulated driver.
//!
//! Each test is one attack; `docs/security.md` lists it with its promise.

mod connections;
mod isolation;
mod path;
mod site;
mod table;
