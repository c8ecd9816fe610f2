//! The work behind each request of an administrator.

mod administrators;
mod clients;
mod config;
mod gpus;
mod leases;
mod status;
mod tokens;

pub use self::administrators::not_issued;
pub use self::clients::a_name;
pub use self::tokens::{no_token, token_ttl};
use super::ask::{Ask, Refusal};
use crate::pool::Pool;

pub(super) async fn answer(ask: Ask, pool: &Pool) -> Result<serde_json::Value, Refusal> {
    match ask {
        Ask::Status => status::status(pool).await,
        Ask::Ps => status::ps(pool).await,
        Ask::Threads => status::threads(pool).await,
        Ask::Leases => leases::leases(pool).await,
        Ask::Gpus => gpus::gpus(pool).await,
        Ask::Clients => clients::clients(pool).await,
        Ask::Revoke { name } => clients::revoke(pool, name).await,
        Ask::Forget { name } => clients::forget(pool, name).await,
        Ask::Kill { worker } => leases::kill(pool, worker).await,
        Ask::Park { lease } => leases::park(pool, lease).await,
        Ask::Unpark { lease } => leases::unpark(pool, lease).await,
        Ask::Off { gpu, reason } => gpus::off(pool, gpu, reason).await,
        Ask::On { gpu } => gpus::on(pool, gpu).await,
        Ask::Drop { gpu } => gpus::drop(pool, gpu).await,
        Ask::Drain { end, reason } => status::drain(pool, end, reason).await,
        Ask::Stop { force } => status::stop(pool, force),
        Ask::Mps => gpus::mps(pool).await,
        Ask::Queue => leases::queue(pool).await,
        Ask::Limits { client, user } => config::limits(pool, client, user),
        Ask::Accounting { wanted } => status::accounting(pool, wanted).await,
        Ask::Config => config::config(pool),
        Ask::ConfigSet { key, value } => config::set(pool, key, value).await,
        Ask::Reload => config::reload(pool).await,
        Ask::TokenCreate { pattern, uses, ttl } => tokens::create(pool, pattern, uses, ttl).await,
        Ask::AdministratorCreate { name, csr_pem } => administrators::create(pool, name, csr_pem).await,
        Ask::Administrators => administrators::list(pool),
        Ask::AdministratorRevoke { name } => administrators::revoke(pool, name).await,
        Ask::Tokens => tokens::list(pool),
        Ask::TokenRevoke { id } => tokens::revoke(pool, id).await,
    }
}

fn internal(e: &dyn std::fmt::Display) -> Refusal {
    Refusal::new("internal", e.to_string())
}

fn show(value: Result<serde_json::Value, serde_json::Error>) -> Result<serde_json::Value, Refusal> {
    value.map_err(|e| internal(&e))
}
