//! Words of the configuration, which files, D-Bus, gRPC and the state files write alike.

/// Defines an enumeration of words: parser, formatter, and serde by the same table.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$about])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// All variants, in the order of their definition.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the word.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    other => Err(format!("`{other}` is none of {}", [$($text),+].join(", "))),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

words! {
    /// Way in which leases share a GPU.
    #[derive(Default)]
    Sharing {
        /// Programs of several leases take turns.
        #[default]
        TimeSlice = "time-slice",
        /// Programs of several leases run at the same time, by NVIDIA's MPS.
        Mps = "mps",
        /// One lease has the GPU alone.
        Exclusive = "exclusive",
    }
}
words! {
    /// Order among waiting requests, and of a lease's work on a shared GPU.
    #[derive(Default)]
    Priority {
        /// Served first.
        #[default]
        Normal = "normal",
        /// Served after every request of normal priority.
        BelowNormal = "below-normal",
    }
}
words! {
    /// Lifetime of a lease.
    Class {
        /// From boot to shutdown, for all users with access.
        Boot = "boot",
        /// From login to logout of one session.
        Session = "session",
        /// While a user needs it, or on request.
        User = "user",
        /// While GPUs are free: it yields to the other classes.
        Background = "background",
    }
}
words! {
    /// Action on an idle lease, within the server's policy.
    OnIdle {
        /// Device memory moves to the server's host memory until the next call.
        Park = "park",
        /// The server takes the lease back.
        Release = "release",
        /// No action.
        Keep = "keep",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_is_read_as_it_is_written() {
        fn check<T>(all: &[T], as_str: fn(T) -> &'static str, words: &[&str])
        where
            T: Copy + PartialEq + std::fmt::Debug + std::str::FromStr<Err = String>,
            T: serde::Serialize + serde::de::DeserializeOwned,
        {
            assert_eq!(all.iter().map(|w| as_str(*w)).collect::<Vec<_>>(), words);
            for word in all {
                assert_eq!(as_str(*word).parse(), Ok(*word));
                let json = serde_json::to_string(word).unwrap();
                assert_eq!(json, format!("{:?}", as_str(*word)));
                assert_eq!(serde_json::from_str::<T>(&json).unwrap(), *word);
            }
        }
        check(Sharing::ALL, Sharing::as_str, &["time-slice", "mps", "exclusive"]);
        check(Priority::ALL, Priority::as_str, &["normal", "below-normal"]);
        check(Class::ALL, Class::as_str, &["boot", "session", "user", "background"]);
        check(OnIdle::ALL, OnIdle::as_str, &["park", "release", "keep"]);
        assert_eq!("high".parse::<Priority>(), Err("`high` is none of normal, below-normal".into()));
    }
}
