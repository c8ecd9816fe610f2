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
/// NCCL's protocols. Under `LL` alone each word of 8 bytes has its own flag, so that no order among
/// words counts.
const PROTOCOLS: &str = "NCCL_PROTO";

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
        _ => variable(PROTOCOLS).is_some_and(|protocols| protocols.trim().eq_ignore_ascii_case("LL")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_protocols_and_the_programs_own_word_count() {
        let with = |own: Option<&str>, nccl: Option<&str>| {
            decide(|name| if name == VARIABLE { own } else { nccl }.map(str::to_owned))
        };
        assert!(!with(None, None));
        for (nccl, wanted) in
            [("LL", true), ("ll", true), ("LL128", false), ("LL,Simple", false), ("^LL", false)]
        {
            assert_eq!(with(None, Some(nccl)), wanted, "{nccl}");
        }
        assert!(with(Some("on"), Some("Simple")) && !with(Some("off"), Some("LL")));
        assert!(!with(Some("maybe"), None));
    }
}
