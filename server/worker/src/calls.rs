//! Properties of the calls whose form the table describes completely (see `build.rs`).

include!(concat!(env!("OUT_DIR"), "/calls.rs"));
