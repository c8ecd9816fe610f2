//! Tests of the units: the fixture, the manuals, and formats.

use super::*;

const FIXTURE: &str = include_str!("fixture.txt");
const MANUALS: [&str; 2] = [
    include_str!("../../../../docs/man/gpusession.toml.5"),
    include_str!("../../../../docs/man/gpuserver.toml.5"),
];

/// Parses a text and formats the result as the fixture has it.
fn outcome(kind: &str, text: &str) -> Result<String, String> {
    Ok(match kind {
        "size" => parse_size(text)?.to_string(),
        "duration" => parse_duration(text)?.as_nanos().to_string(),
        "memory" => match Memory::parse(text)? {
            Memory::Percent(percent) => format!("{percent}%"),
            Memory::Bytes(bytes) => bytes.to_string(),
        },
        other => panic!("fixture: no kind {other}"),
    })
}

#[test]
fn each_text_of_the_fixture_is_read_or_refused() {
    let lines = FIXTURE.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
    let mut count = 0;
    for line in lines {
        let parts: Vec<_> = line.split('"').collect();
        let [kind, text, expected] = parts[..] else { panic!("{line}") };
        let outcome = outcome(kind.trim(), text);
        match expected.trim() {
            "refused" => assert!(outcome.is_err(), "{line}: {outcome:?}"),
            expected => assert_eq!(outcome.as_deref(), Ok(expected), "{line}"),
        }
        count += 1;
    }
    assert!(count > 100, "the fixture has {count} texts");
    let words: Vec<_> = FIXTURE.split(|c: char| !c.is_alphabetic()).collect();
    for name in TIMES.iter().flat_map(|(_, names)| names.iter()).chain(SIZES.iter().map(|(_, name)| name)) {
        assert!(words.contains(name), "{name} is missing");
    }
}

#[test]
fn both_manuals_state_the_syntax() {
    for manual in MANUALS {
        for sentence in SYNTAX {
            assert!(manual.contains(sentence), "missing in {}: {sentence}", manual.lines().next().unwrap());
        }
    }
}

/// The syntax as the manuals state it.
const SYNTAX: [&str; 3] = [
    "A size is a number with KiB, MiB, GiB or TiB, as in 1.5GiB, or a number of bytes; MB and the like are errors.",
    "A duration is a number of seconds, or numbers with units, as in \\(dq90s\\(dq, \\(dq10min\\(dq, \\(dq1.5h\\(dq or \\(dq1h 30min\\(dq.",
    "Units are ns, us, ms, s, min (or m), h, d, w, month (30.44 days) and year (365.25 days).",
];

#[test]
fn errors_say_what_to_write() {
    assert_eq!(parse_size("4000MB").unwrap_err(), "`4000MB` is not a size: write MiB");
    assert_eq!(parse_size("4 g").unwrap_err(), "`4 g` is not a size: write GiB");
    assert_eq!(
        parse_size("12 apples").unwrap_err(),
        "`12 apples` is not a size: use KiB, MiB, GiB, TiB or plain bytes"
    );
    assert_eq!(parse_size("1.5").unwrap_err(), "`1.5` is not a size in whole bytes");
    assert_eq!(parse_duration("soon").unwrap_err(), "`soon` is not a duration: write 30s, 10min, 24h or 7d");
}

#[test]
fn a_lease_has_some_memory() {
    assert_eq!("50%".parse(), Ok(Memory::Percent(50.0)));
    assert_eq!("1.5 GiB".parse(), Ok(Memory::Bytes(3 << 29)));
    for bad in ["0%", "-0%", "0", "0MiB", ""] {
        assert!(bad.parse::<Memory>().is_err(), "{bad}");
    }
    let json = |text: &str| serde_json::from_str::<Memory>(text);
    for (memory, text) in
        [(Memory::Percent(31.4), "\"31.4%\""), (Memory::Bytes(u64::MAX), "18446744073709551615")]
    {
        assert_eq!(serde_json::to_string(&memory).unwrap(), text);
        assert_eq!(json(text).unwrap(), memory);
    }
    for bad in ["0", "-1", "1.5", "true"] {
        assert!(json(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_part_of_a_card_is_rounded_down_to_mib() {
    assert_eq!(Memory::Percent(100.0).of(12_345), 12_345);
    assert_eq!(Memory::Percent(50.0).of(5 << 20), 2 << 20);
    assert_eq!(Memory::Bytes(7).of(5 << 20), 7);
}

#[test]
fn durations_are_shown_as_they_are_read() {
    for (seconds, text) in
        [(0, "0"), (1, "1s"), (600, "10m"), (5400, "1h 30m"), (86_400, "1day"), (2 * 86_400 + 5, "2days 5s")]
    {
        let duration = Duration::from_secs(seconds);
        assert_eq!(show_duration(duration), text);
        assert_eq!(parse_duration(text), Ok(duration));
    }
    let long = Duration::new(31_557_600 + 2 * 2_630_016, 1_002_003);
    assert_eq!(show_duration(long), "426days 3h 7m 12s 1ms 2us 3ns");
    assert_eq!(parse_duration(&show_duration(long)), Ok(long));
}

#[test]
fn people_read_rounded_values() {
    assert_eq!(human_bytes(16 << 30), "16 GiB");
    assert_eq!(human_bytes((3 << 29) + 1), "1.5 GiB");
    assert_eq!(human_bytes(1023), "1023 B");
    assert_eq!(human_duration(Duration::from_secs(12_000)), "3 h 20 min");
    assert_eq!(human_duration(Duration::from_secs(90_061)), "1 d 1 h");
}

#[test]
fn the_nearest_word_is_near() {
    assert_eq!(nearest("gpuss", ["memory", "gpus"]), Some("gpus"));
    assert_eq!(nearest("zzzzzzzzzz", ["name"]), None);
}
