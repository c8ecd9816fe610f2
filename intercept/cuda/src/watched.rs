//! Whether the program watches host memory while kernels write to it.
//!
//! Its memory and the device's are compared, and no comparison shows in which order words were
//! written. So a program may see a flag before data that look like flags, too. Only programs for
//! which this is harmless, or that ask for it, exchange memory while the GPU works.

use std::sync::OnceLock;

use gpusession_proto::frame::ability;

use crate::client::Client;

/// `on` or `off`; without it NCCL's protocol decides.
const VARIABLE: &str = "GPUSESSION_WATCHED_MEMORY";
/// Variables under which NCCL uses its protocol `LL` for everything: for collectives, and for
/// sends, whose protocol `NCCL_PROTO` does not set. In it each word of 8 bytes has its own flag, so
/// that no order among words counts.
pub const REMEDY: &str =
    "NCCL_PROTO=LL, NCCL_ALLOC_P2P_NET_LL_BUFFERS=1 and NCCL_P2P_LL_THRESHOLD=1099511627776";
/// Least bytes of `NCCL_P2P_LL_THRESHOLD`: no send is longer.
const LONGEST_SEND: u64 = 1 << 40;

/// Returns `true` if memory is to be exchanged while the GPU works.
#[inline]
pub fn wanted(client: &Client) -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    client.abilities & ability::WATCHED_MEMORY != 0
        && *WANTED.get_or_init(|| decide(|name| std::env::var(name).ok()))
}

fn decide(variable: impl Fn(&str) -> Option<String>) -> bool {
    match variable(VARIABLE).as_deref().map(str::trim) {
        Some("on" | "1") => true,
        Some("off" | "0") => false,
        _ => only_flagged_words(variable),
    }
}

/// Returns `true` if [`REMEDY`] is set.
pub fn only_flagged_words(variable: impl Fn(&str) -> Option<String>) -> bool {
    let is =
        |name: &str, right: &dyn Fn(&str) -> bool| variable(name).is_some_and(|value| right(value.trim()));
    is("NCCL_PROTO", &|protocols| protocols.eq_ignore_ascii_case("LL"))
        && is("NCCL_ALLOC_P2P_NET_LL_BUFFERS", &|buffers| buffers == "1")
        && is("NCCL_P2P_LL_THRESHOLD", &|bytes| bytes.parse().is_ok_and(|bytes: u64| bytes >= LONGEST_SEND))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_protocols_and_the_programs_own_word_count() {
        const BYTES: &str = "1099511627776";
        let with = |own: Option<&str>, protocols: Option<&str>, buffers: &str, bytes: &str| {
            decide(|name| {
                let value = match name {
                    VARIABLE => own,
                    "NCCL_PROTO" => protocols,
                    "NCCL_ALLOC_P2P_NET_LL_BUFFERS" => Some(buffers),
                    _ => Some(bytes),
                };
                value.map(str::to_owned)
            })
        };
        assert!(!with(None, None, "1", BYTES));
        for (nccl, wanted) in
            [("LL", true), ("ll", true), ("LL128", false), ("LL,Simple", false), ("^LL", false)]
        {
            assert_eq!(with(None, Some(nccl), "1", BYTES), wanted, "{nccl}");
        }
        assert!(!with(None, Some("LL"), "0", BYTES), "sends have no such buffers");
        for bytes in ["16384", "", "all", "-1"] {
            assert!(!with(None, Some("LL"), "1", bytes), "{bytes}");
        }
        assert!(with(Some("on"), Some("Simple"), "0", "") && !with(Some("off"), Some("LL"), "1", BYTES));
        assert!(!with(Some("maybe"), None, "0", ""));
        let set: Vec<_> = REMEDY.split([' ', ',']).filter_map(|word| word.split_once('=')).collect();
        assert!(only_flagged_words(|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        }));
    }
}
