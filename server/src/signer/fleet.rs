//! Refusals of join tokens that are derived from a fleet key.
//!
//! A provisioning system derives a token for each machine offline, as
//! [`gpusession_proto::join::FleetKey`] does. The signer derives it again from the key's record,
//! for the name that the client gives.

/// Reason why a token of a fleet key is not accepted, or not derived.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// The token is for another name, or of another key.
    #[error(
        "the join token is derived for another name than {0:?}, or not from a fleet key of this pool; join with --name, or \
         ask for one by `gpuserver fleet token --name {0}`"
    )]
    NotDerived(String),
    /// The key is for clients with other names.
    #[error(
        "the fleet key is for clients named {pattern:?}, not for {name:?}; use another name, or another key"
    )]
    WrongName {
        /// Pattern of the acceptable names.
        pattern: String,
        /// Name of the client.
        name: String,
    },
    /// The number of joins with the key is exhausted.
    #[error(
        "the fleet key of the join token is used up; ask for a token of a new key (`gpuserver fleet create --uses N` makes \
         one for N joins)"
    )]
    UsedUp,
    /// The key's validity has ended.
    #[error(
        "the fleet key of the join token has expired; ask for a token of a new key, made by `gpuserver fleet create`"
    )]
    Expired,
    /// The key pins an authority that the pool has replaced.
    #[error(
        "the fleet key of the join token is of before the rotation of the pool's authority; ask for a token of a new key, \
         made by `gpuserver fleet create`"
    )]
    Rotated,
    /// The key is for clients at other addresses.
    #[error(
        "the fleet key of the join token is not for clients at {0}; join from an address that it is for, or ask for a token \
         of a key made by `gpuserver fleet create --from`"
    )]
    WrongAddress(String),
}

#[cfg(test)]
mod tests {
    use gpusession_proto::join::{FleetKey, JoinToken, ServerToken};
    use proptest::prelude::*;

    use super::super::tokens::{NotAdmitted, Terms, TokenError, TokenFacts, TokenKind, Tokens, matches};
    use super::*;
    use crate::clock::testing::Counting;

    const AUTHORITY: [u8; 32] = [1; 32];

    fn fleet(tokens: &mut Tokens, pattern: &str, from: &[&str]) -> FleetKey {
        let from = from.iter().map(|network| network.parse().unwrap()).collect();
        let terms = Terms { pattern: pattern.into(), uses: 2, ttl: 60, from, per_address: 0 };
        let (of_tokens, record) =
            tokens.create(TokenKind::Fleet, AUTHORITY, &terms, 1000, &Counting::default());
        assert_eq!(TokenFacts::new("x", &record).name_pattern, format!("fleet {pattern}"));
        FleetKey { of_tokens, pattern: pattern.into() }
    }

    fn stored(tokens: &Tokens) -> Tokens {
        serde_json::from_str(&serde_json::to_string(tokens).unwrap()).unwrap()
    }

    #[test]
    fn each_refusal_of_a_fleet_key_has_its_reason() {
        let mut tokens = Tokens::default();
        let key = fleet(&mut tokens, "vm-*", &[]);
        let mut tokens = stored(&tokens);
        let check = |tokens: &Tokens, token: &JoinToken, name: &str, unix| {
            tokens.check(token, name, None, &AUTHORITY, unix)
        };
        let token = key.token("vm-7");
        assert_eq!(check(&tokens, &token, "vm-7", 1059), Ok(()));
        let not_derived = |name: &str| Err(FleetError::NotDerived(name.into()).into());
        assert_eq!(check(&tokens, &token, "vm-8", 1000), not_derived("vm-8"));
        assert_eq!(check(&tokens, &key.of_tokens, "vm-7", 1000), not_derived("vm-7"), "the key itself");
        // A changed pattern in the key's text deceives the derivation alone.
        let (pattern, name) = ("vm-*".to_owned(), "db-1".to_owned());
        let wrong_name = FleetError::WrongName { pattern, name };
        assert_eq!(check(&tokens, &key.token("db-1"), "db-1", 1000), Err(wrong_name.into()));
        assert_eq!(check(&tokens, &token, "vm-7", 1060), Err(FleetError::Expired.into()));
        let rotated = tokens.check(&token, "vm-7", None, &[2; 32], 1000);
        assert_eq!(rotated, Err(FleetError::Rotated.into()));
        for name in ["vm-7", "vm-8"] {
            tokens.consume(&key.token(name), name, None);
        }
        assert_eq!(check(&tokens, &token, "vm-7", 1000), Err(FleetError::UsedUp.into()));

        let proof = ServerToken(key.of_tokens.clone()).proof("vm-7", "csr");
        let (shown, asked) = ((&token.id, &proof), ("vm-7", "csr"));
        let admitted = tokens.check_server(shown, asked, None, &AUTHORITY, 1000);
        assert_eq!(admitted, Err(NotAdmitted::Unknown("vm-7".into())), "it admits no server");

        let id = data_encoding::HEXLOWER.encode(&token.id);
        assert_eq!((tokens.revoke(&id[..8]), tokens.revoke(&id)), (Some(id), None));
        assert!(tokens.list("", 9).is_empty());
        let tokens = stored(&tokens);
        assert_eq!(check(&tokens, &token, "vm-7", 1000), Err(TokenError::Revoked));
    }

    #[test]
    fn a_fleet_key_is_good_from_its_networks_alone() {
        let mut tokens = Tokens::default();
        let token = fleet(&mut tokens, "vm-*", &["10.1.0.0/16"]).token("vm-7");
        let check = |from: &str| {
            let from = Some(from.parse().unwrap());
            tokens.check(&token, "vm-7", from, &AUTHORITY, 1000)
        };
        assert_eq!(check("10.1.0.1"), Ok(()));
        assert_eq!(check("10.2.0.1"), Err(FleetError::WrongAddress("10.2.0.1".into()).into()));
        let unknown = tokens.check(&token, "vm-7", None, &AUTHORITY, 1000);
        assert!(matches!(unknown, Err(TokenError::Fleet(FleetError::WrongAddress(_)))), "{unknown:?}");
    }

    proptest! {
        #[test]
        fn a_derived_token_is_good_for_its_own_name_within_the_pattern_alone(
            pattern in "[ab*?-]{0,8}",
            of in "[ab-]{1,6}",
            name in "[ab-]{1,6}",
        ) {
            let mut tokens = Tokens::default();
            let token = fleet(&mut tokens, &pattern, &[]).token(&of);
            for name in [&name, &of] {
                let good = tokens.check(&token, name, None, &AUTHORITY, 1000).is_ok();
                prop_assert_eq!(good, *name == of && matches(&pattern, name));
            }
        }
    }
}
