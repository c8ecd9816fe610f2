//! Parsers that read bytes of another party, each as a target for hostile bytes.
//!
//! A target panics if its parser panics, reads outside of its input, or returns a value that does
//! not read back as itself. `tests/parsers/tests/replay.rs` gives each target its seeds, the files
//! of `corpus`, and changes of both; the program `fuzz-parser` searches further, guided by
//! coverage.

mod images;
mod links;
mod local;
mod seeds;
mod wire;

/// One parser, or several that read the same bytes.
pub struct Target {
    /// Name of the target, and of its folder in `corpus`.
    pub name: &'static str,
    /// Gives the parser some bytes.
    pub run: fn(&[u8]),
    /// Returns inputs that the parser accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

macro_rules! targets {
    ($($name:ident: $run:path, $seeds:path;)*) => {
        /// All targets.
        pub const TARGETS: &[Target] =
            &[$(Target { name: stringify!($name), run: $run, seeds: $seeds }),*];
    };
}

targets! {
    frame: wire::frame, seeds::frames;
    preface: wire::preface, seeds::prefaces;
    link: links::link, links::seeds;
    grant: wire::grant, seeds::grants;
    supervise: wire::supervise, seeds::supervision;
    readings: wire::readings, seeds::readings;
    ticket: wire::ticket, seeds::tickets;
    join_token: wire::join_token, seeds::join_tokens;
    statement: wire::statement, seeds::statements;
    image: images::image, seeds::images;
    ptx: images::ptx, seeds::ptx;
    login: local::login, seeds::logins;
    variables: local::variables, seeds::variables;
    certificate: local::certificate, seeds::certificates;
    request: local::request, seeds::requests;
    admin: local::admin, seeds::admin;
    signer: local::signer, seeds::signer;
    starter: local::starter, seeds::starter;
    units: local::units, seeds::units;
    trail: local::trail, seeds::trails;
    server_config: local::server_config, seeds::server_configs;
    client_config: local::client_config, seeds::client_configs;
}

/// Returns the target of a name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
