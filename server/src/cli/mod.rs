//! The command line.

mod accounting;
mod admin;
mod clients;
mod config;
mod pool;
mod remote;
mod run;
pub mod show;
mod target;
mod token;
mod verbs;

pub use self::run::run;
pub use self::target::{config_file, load_config};
pub use self::verbs::{
    AccountingOptions, AdminVerb, Cli, ClientsVerb, ConfigVerb, PoolVerb, TokenVerb, Verb,
};
