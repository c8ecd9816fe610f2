//! Exported functions that the table describes completely.
#![allow(missing_docs)]

include!(concat!(env!("OUT_DIR"), "/exports.rs"));
