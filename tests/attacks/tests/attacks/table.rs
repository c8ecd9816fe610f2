//! The page of attacks names tests that exist.

use std::path::Path;

/// Returns the cells of the table below `heading`.
fn table(page: &str, heading: &str) -> Vec<Vec<String>> {
    let part = page.split_once(heading).expect(heading).1;
    let part = part.split("\n## ").next().unwrap_or(part);
    let rows = part.lines().filter(|line| line.starts_with('|') && !line.starts_with("|---")).skip(1);
    let cells = |row: &str| row.trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect();
    rows.map(cells).collect()
}

#[test]
fn each_attack_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/security.md")).unwrap();
    let rows = table(&page, "\n## Attacks\n");
    assert!(rows.len() >= 10, "{rows:?}");
    for row in rows {
        let cell = row.last().unwrap();
        let names: Vec<_> = cell.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test: {row:?}");
        for name in names {
            // FILE::TEST
            let (file, test) =
                name.split_once("::").unwrap_or_else(|| panic!("{name}: FILE::TEST is wanted"));
            let text = std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
            assert!(text.contains(&format!("fn {test}(")), "{file} has no test {test}");
        }
    }
}
