//! The pool: its authority, join tokens and clients, and the control service.

pub mod administrators;
pub mod authority;
pub mod clients;
pub mod idleness;
pub mod parking;
pub mod readings;
pub mod service;
pub mod tokens;
pub mod watch;
