//! Tables and times as kubectl writes them, for every program that shows our objects.

use crate::{ObjectMeta, Time};

/// Columns as wide as their longest cell, three spaces between them.
pub fn columns(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{}\n", padded.collect::<Vec<_>>().join("   ").trim_end())
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// A span of seconds with the unit that a person expects.
pub fn span(seconds: i64) -> String {
    let seconds = seconds.max(0);
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// How long an object has existed.
pub fn age(meta: &ObjectMeta, now: i64) -> String {
    meta.creation_timestamp.as_ref().map_or_else(|| "-".to_owned(), |time| since(time, now))
}

/// How long ago something was.
pub fn since(time: &Time, now: i64) -> String {
    span(now - time.0.as_second())
}

/// A moment, to the second.
pub fn moment(time: &Time) -> String {
    let seconds = time.0.as_second();
    k8s_openapi::jiff::Timestamp::from_second(seconds).map_or_else(|_| "-".to_owned(), |t| t.to_string())
}

/// A text, or a dash.
pub fn or_dash(text: Option<&str>) -> String {
    text.filter(|t| !t.is_empty()).unwrap_or("-").to_owned()
}

/// "1 node", "3 nodes".
pub fn count(n: u32, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_longest_cell() {
        let rows = [vec!["a".to_owned(), "long cell".to_owned()], vec!["bbb".to_owned(), String::new()]];
        assert_eq!(columns(&["N", "WHAT"], &rows), "N     WHAT\na     long cell\nbbb\n");
    }

    #[test]
    fn spans_have_the_unit_that_a_person_expects() {
        let wanted = [(-5, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d")];
        for (seconds, text) in wanted {
            assert_eq!(span(seconds), text);
        }
        assert_eq!((count(1, "node"), count(2, "node")), ("1 node".to_owned(), "2 nodes".to_owned()));
    }
}
