//! Addresses of a server's data port: a server names them, and programs connect there.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use gpusession_proto::place::is_nearby;
use tokio::net::lookup_host;
use tokio::time::timeout;

/// Most addresses of a server that a client uses.
pub const MAX_ADDRESSES: usize = 16;
/// Time for the resolver to answer about a name.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Addresses that a server named, as far as programs may connect to them.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    /// HOST:PORT, tried in order.
    pub usable: Vec<String>,
    /// The first one that leads to this machine or its link, while the server is elsewhere.
    pub refused: Option<String>,
}

/// Sorts the addresses that a server named, whose control port answered at the address `reached`.
///
/// A server on another machine may not lead programs to services of this machine or of its links.
/// Whether a name does so, the program's library sees when it connects. For a server on this
/// machine, the answer has addresses in place of names, because the library refuses such names.
pub async fn named(announced: Vec<String>, reached: IpAddr) -> Named {
    let is_here = is_nearby(reached);
    let mut named = Named { usable: Vec::new(), refused: None };
    for address in announced.into_iter().take(MAX_ADDRESSES) {
        match address.parse::<SocketAddr>() {
            Ok(socket) if !is_here && is_nearby(socket.ip()) => {
                named.refused.get_or_insert_with(|| socket.to_string());
            }
            Err(_) if is_here => match found(&address).await {
                Some(found) => named.usable.extend(found),
                // The error appears where a program connects.
                None => named.usable.push(address),
            },
            _ => named.usable.push(address),
        }
    }
    named.usable.truncate(MAX_ADDRESSES);
    named
}

/// Returns the addresses of a name; `None`: the resolver has no answer in time.
async fn found(name: &str) -> Option<Vec<String>> {
    let found = timeout(RESOLVE_TIMEOUT, lookup_host(name)).await.ok()?.ok()?;
    Some(found.map(|socket| socket.to_string()).collect())
}

/// Explains why none of a server's addresses is usable.
pub fn refusal(named: &str, reached: IpAddr) -> String {
    format!(
        "the server names {named} as its data port, which leads to this machine or its link, and its control port \
         answers at {reached}; set `advertise` in gpuserver.toml there"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn of(announced: &[&str], reached: &str) -> (Vec<String>, Option<String>) {
        let Named { usable, refused } =
            named(announced.iter().map(|a| (*a).into()).collect(), reached.parse().unwrap()).await;
        (usable, refused)
    }

    #[tokio::test]
    async fn another_machine_leads_programs_to_no_service_of_this_one() {
        let announced = ["127.0.0.1:22", "169.254.169.254:80", "10.0.0.5:7602", "[::1]:22", "gpu1:7602"];
        let (usable, refused) = of(&announced, "10.0.0.5").await;
        assert_eq!(
            (usable, refused.as_deref()),
            (vec!["10.0.0.5:7602".into(), "gpu1:7602".into()], Some("127.0.0.1:22"))
        );
        assert_eq!(of(&["0.0.0.0:22"], "2001:db8::1").await, (vec![], Some("0.0.0.0:22".into())));
        assert_eq!(of(&["10.0.0.5:1"; 40], "10.0.0.5").await.0.len(), MAX_ADDRESSES);
    }

    #[tokio::test]
    async fn a_server_on_this_machine_is_reached_by_its_own_names() {
        let (usable, refused) = of(&["127.0.0.1:7602", "10.0.0.5:7602"], "127.0.0.1").await;
        assert_eq!((usable.len(), refused), (2, None));
        let (usable, _) = of(&["localhost:7602"], "::1").await;
        assert!(
            usable.iter().all(|a| a.parse::<SocketAddr>().is_ok_and(|a| a.ip().is_loopback())),
            "{usable:?}"
        );
        assert!(!usable.is_empty());
        assert_eq!(of(&["no.such.name.invalid:7602"], "::1").await.0, ["no.such.name.invalid:7602"]);
    }
}
