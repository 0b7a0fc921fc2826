//! What the user may have meant.
//! Invariant: a hint names only what the schema has; ties go to the name that sorts first.

use serde_json::Value;

/// Deepest level that is searched for a field of the same name elsewhere.
const SEARCH_DEPTH: usize = 8;
/// Longest name that is compared: anything longer is no slip of the pen.
const NAME_MAX: usize = 64;

/// A hint for a field that its place does not have: the nearest name here, or where a field of this name is.
pub fn for_unknown(root: &Value, schema: &Value, name: &str) -> String {
    let here = schema.get("properties").and_then(Value::as_object);
    let names = here.into_iter().flat_map(|p| p.keys().map(String::as_str));
    if let Some(near) = nearest(name, names) {
        return format!("; did you mean {near}?");
    }
    let mut places = Vec::new();
    elsewhere(root, name, "", 0, &mut places);
    match places.as_slice() {
        [] => String::new(),
        [one] => format!("; there is {one}"),
        [one, other, ..] => format!("; there are {one} and {other}"),
    }
}

fn elsewhere(schema: &Value, name: &str, path: &str, depth: usize, found: &mut Vec<String>) {
    if depth >= SEARCH_DEPTH || found.len() >= 2 {
        return;
    }
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return };
    for (key, below) in properties {
        // What the operator writes is no advice for what a user writes.
        if depth == 0 && key != "spec" {
            continue;
        }
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        if key == name && found.len() < 2 {
            found.push(path.clone());
        }
        elsewhere(below, name, &path, depth + 1, found);
    }
}

/// The name nearest to a misspelt one, if one is near enough.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if name.len() > NAME_MAX {
        return None;
    }
    let folded = fold(name);
    let allowed = (folded.len() / 3).clamp(1, 3);
    let scored = known.map(|k| (distance(&folded, &fold(k)), k)).filter(|(d, _)| *d <= allowed);
    scored.min().map(|(_, k)| k)
}

/// Case and separators are the most frequent slips.
fn fold(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Edits between two words: insert, delete, replace, swap of neighbours.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    for (j, cell) in rows[0].iter_mut().enumerate() {
        *cell = j;
    }
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let change = usize::from(a[i - 1] != b[j - 1]);
            let mut best = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + change);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[a.len()][b.len()]
}

/// What belongs into a missing field, for the message.
pub fn what_to_write(schema: &Value) -> String {
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
        let names: Vec<&str> = allowed.iter().filter_map(Value::as_str).collect();
        return format!(": {}", names.join(", "));
    }
    let wanted = schema.get("type").and_then(Value::as_str);
    wanted.map(|w| format!(": {}", super::scalars::article(w))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_finds_its_name() {
        let known = ["replicas", "rollout", "recovery", "extraArgs", "experts"];
        let find = |n| nearest(n, known.iter().copied());
        assert_eq!(find("replica"), Some("replicas"));
        assert_eq!(find("repilcas"), Some("replicas"));
        assert_eq!(find("extra_args"), Some("extraArgs"));
        assert_eq!(find("Rollout"), Some("rollout"));
        assert_eq!(find("colour"), None);
        assert_eq!(find(&"x".repeat(10_000)), None);
    }
}
