//! Several expositions become one: each family once, its samples together, one end mark.
//!
//! Invariant: merging keeps every sample; a family's samples stay in the order of the texts.

use std::collections::BTreeMap;

#[derive(Default)]
struct Group<'a> {
    /// HELP, TYPE and UNIT lines, of the first text that has them.
    head: Vec<&'a str>,
    samples: Vec<&'a str>,
}

/// Merges expositions in the OpenMetrics text format (the Prometheus one passes too).
pub fn merge(texts: &[&str]) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut groups: BTreeMap<&str, Group<'_>> = BTreeMap::new();
    for text in texts {
        let mut current = "";
        for line in text.lines().filter(|line| !line.trim().is_empty() && *line != "# EOF") {
            let described = described(line);
            match described {
                Some(name) => current = name,
                None if line.starts_with('#') => continue,
                None if !belongs(line, current) => current = sample_name(line),
                None => {}
            }
            let group = groups.entry(current).or_insert_with(|| {
                order.push(current);
                Group::default()
            });
            if described.is_none() {
                group.samples.push(line);
            } else if !group.head.iter().any(|known| kind(known) == kind(line)) {
                group.head.push(line);
            }
        }
    }
    let mut merged = String::with_capacity(texts.iter().map(|text| text.len()).sum());
    for name in order {
        let group = &groups[name];
        for line in group.head.iter().chain(&group.samples) {
            merged.push_str(line);
            merged.push('\n');
        }
    }
    merged.push_str("# EOF\n");
    merged
}

/// The family that a HELP, TYPE or UNIT line describes.
fn described(line: &str) -> Option<&str> {
    let mut words = line.split_ascii_whitespace();
    let is_head = words.next() == Some("#") && matches!(words.next(), Some("HELP" | "TYPE" | "UNIT"));
    if is_head { words.next() } else { None }
}

fn kind(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().nth(1)
}

fn sample_name(line: &str) -> &str {
    line.split(['{', ' ']).next().unwrap_or_default()
}

fn belongs(line: &str, family: &str) -> bool {
    const SUFFIXES: [&str; 6] = ["", "_total", "_created", "_bucket", "_count", "_sum"];
    let Some(suffix) = sample_name(line).strip_prefix(family) else { return false };
    !family.is_empty() && (SUFFIXES.contains(&suffix) || suffix == "_info")
}

/// Whether a text is a valid exposition: every sample under its family, no family or sample twice, names and
/// values well formed, histograms that add up, one end mark at the end.
#[cfg(test)]
pub(super) fn check(text: &str) -> Result<(), String> {
    use std::collections::BTreeSet;

    let (mut seen, mut samples) = (BTreeSet::new(), BTreeSet::new());
    let (mut current, mut last_bucket) = ("", (String::new(), 0.0));
    let body = text.strip_suffix("# EOF\n").ok_or("no end mark")?;
    for line in body.lines() {
        if line.starts_with('#') {
            let name = described(line).ok_or(format!("a comment: {line}"))?;
            if name != current && !seen.insert(name.to_owned()) {
                return Err(format!("{name} comes twice"));
            }
            current = name;
            continue;
        }
        if !belongs(line, current) {
            return Err(format!("{line} is not under its family {current}"));
        }
        let name = sample_name(line);
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        if !name.chars().all(word) || name.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(format!("a name {name}"));
        }
        let (series, value) = line.rsplit_once(' ').ok_or(format!("no value: {line}"))?;
        let value: f64 = value.parse().map_err(|_| format!("a value: {line}"))?;
        if !samples.insert(series.to_owned()) {
            return Err(format!("{series} comes twice"));
        }
        if let Some((labels, _)) = series.split_once("le=\"").filter(|_| name.ends_with("_bucket")) {
            if last_bucket.0 == labels && value < last_bucket.1 {
                return Err(format!("buckets go down: {line}"));
            }
            last_bucket = (labels.to_owned(), value);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_in_two_texts_is_described_once() {
        let a = "# HELP x A.\n# TYPE x counter\nx_total{pod=\"a\"} 1\n# TYPE y gauge\ny 2\n# EOF\n";
        let b = "# HELP x B.\n# TYPE x counter\nx_total{pod=\"b\"} 3\n# EOF\n";
        let merged = merge(&[a, b]);
        let expected = "# HELP x A.\n# TYPE x counter\nx_total{pod=\"a\"} 1\nx_total{pod=\"b\"} 3\n\
                        # TYPE y gauge\ny 2\n# EOF\n";
        assert_eq!(merged, expected);
        check(&merged).unwrap();
    }

    #[test]
    fn families_whose_names_begin_alike_stay_apart() {
        let text = "# TYPE x gauge\nx 1\n# TYPE x_requests gauge\nx_requests 2\n# EOF\n";
        assert_eq!(merge(&[text]), text);
        check(text).unwrap();
        assert!(check("# TYPE x gauge\nx_requests 2\n# EOF\n").is_err());
        assert!(check("# TYPE x gauge\nx 1\nx 1\n# EOF\n").is_err());
        assert!(check("# TYPE x gauge\nx one\n# EOF\n").is_err());
    }
}
