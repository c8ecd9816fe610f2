//! The command line.

mod accounting;
mod admin;
mod audit;
mod clients;
mod config;
mod diagnosis;
mod fleet;
mod isolation;
mod member;
mod pool;
mod remote;
mod rotate;
mod several;
mod statements;
mod stats;
mod target;
mod token;
mod verbs;

pub use self::accounting::AccountingOptions;
pub use self::admin::AdminVerb;
pub use self::audit::{AuditOptions, AuditVerb};
pub use self::clients::ClientsVerb;
pub use self::config::ConfigVerb;
pub use self::diagnosis::{HealthOptions, ReportOptions};
pub use self::fleet::FleetVerb;
pub use self::pool::PoolVerb;
pub use self::rotate::RotateVerb;
pub use self::stats::StatsOptions;
pub use self::target::{config_file, load_config};
pub use self::token::TokenVerb;
pub use self::verbs::{Cli, Verb, run};
