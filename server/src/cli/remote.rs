//! A server over the network, as an administrator: `--server`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use gpusession_proto::control::AskRequest;
use gpusession_proto::control::administration_client::AdministrationClient;
use gpusession_proto::join;
use serde_json::Value;
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::admin::{self, Ask, MAX_ANSWER, Refusal};
use crate::config;
use crate::net::host_port;

/// Until a connection stands, TLS included.
const CONNECT: Duration = Duration::from_secs(10);
const PORT: u16 = 7601;
const BEGIN: &str = "-----BEGIN CERTIFICATE-----";

/// A server, and who asks it.
pub struct Remote {
    /// HOST:PORT.
    pub address: String,
    identity: PathBuf,
}

/// The administrator's file where none is named.
fn default_identity() -> anyhow::Result<PathBuf> {
    let folder = std::env::var_os("XDG_CONFIG_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    Ok(folder.context("name the administrator's file with --identity")?.join("gpusession/admin.pem"))
}

impl Remote {
    /// The server at HOST[:PORT], asked as the administrator of a file that `gpuserver admin create` wrote.
    pub fn new(server: &str, identity: Option<&Path>) -> anyhow::Result<Self> {
        let address = config::advertised(server)
            .map_err(|m| Refusal::new("usage", format!("--server {server:?}: {m}")))?;
        let identity = identity.map_or_else(default_identity, |path| Ok(path.into()))?;
        Ok(Self { address: host_port(&address.host, address.port.unwrap_or(PORT)), identity })
    }

    /// Asks it.
    pub fn ask(&self, ask: &Ask) -> anyhow::Result<Value> {
        if let Some(refusal) = ask.local() {
            return Err(refusal.into());
        }
        let shown = self.identity.display();
        let bundle = std::fs::read_to_string(&self.identity).map_err(|e| Refusal {
            code: "no-identity".into(),
            message: format!("{shown}: {e}"),
            hint: "`gpuserver admin create NAME` on the server makes such a file; name it with --identity"
                .into(),
        })?;
        // As it is written: certificate, key, the authority's certificate.
        let authority = bundle.rfind(BEGIN).filter(|last| bundle.find(BEGIN) != Some(*last));
        let authority = authority.map(|at| &bundle[at..]).ok_or_else(|| {
            Refusal::new("no-identity", format!("{shown}: this is not what `gpuserver admin create` wrote"))
        })?;
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authority))
            .identity(Identity::from_pem(&bundle, &bundle))
            .domain_name(join::any_server());
        let json = serde_json::to_vec(ask)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let reply = runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("https://{}", self.address))?
                .tls_config(tls)?
                .connect_timeout(CONNECT)
                .timeout(ask.patience());
            let channel = endpoint.connect().await.map_err(|e| self.unreachable(root_cause(&e)))?;
            let mut client = AdministrationClient::new(channel).max_decoding_message_size(MAX_ANSWER);
            let reply = client.ask(AskRequest { json }).await.map_err(|status| match status.code() {
                Code::PermissionDenied | Code::Unauthenticated => {
                    Refusal::new("not-allowed", status.message())
                }
                Code::Unimplemented => Refusal::new(
                    "too-old",
                    format!(
                        "{} cannot be administered over the network: it is older than this gpuserver",
                        self.address
                    ),
                ),
                _ => self.unreachable(status.message().to_string()),
            })?;
            anyhow::Ok(reply.into_inner().json)
        })?;
        Ok(admin::read(&reply).with_context(|| self.address.clone())??)
    }

    fn unreachable(&self, why: String) -> Refusal {
        Refusal {
            code: "not-reachable".into(),
            message: format!("{}: {why}", self.address),
            hint: "is gpuserver running there, is it a server of the pool whose administrator you are, and is its port open?"
                .into(),
        }
    }
}

/// The deepest reason of an error: tonic's own text is "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(next) = deepest.source() {
        deepest = next;
    }
    deepest.to_string()
}
