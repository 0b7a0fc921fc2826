//! A row of a heat map: shades and colours in a terminal, numbers elsewhere.

use std::fmt::Write as _;

/// Shades from cold to hot.
const SHADES: [char; 5] = [' ', '░', '▒', '▓', '█'];
/// Colours of the 256-colour palette from cold to hot: blue, cyan, green, yellow, red.
const COLOURS: [u8; 5] = [17, 31, 34, 178, 196];
/// Widest row of a map; more experts than this share cells.
const MAX_CELLS: usize = 128;

/// Which shade a value has between zero and the highest of its row.
fn shade(value: u64, highest: u64) -> usize {
    if value == 0 || highest == 0 {
        return 0;
    }
    let steps = SHADES.len() as u128 - 1;
    let shade = (u128::from(value) * steps).div_ceil(u128::from(highest));
    usize::try_from(shade).unwrap_or(SHADES.len() - 1).clamp(1, SHADES.len() - 1)
}

/// One cell for each expert, or for a few of them.
fn cells(row: &[u64]) -> Vec<u64> {
    let together = row.len().div_ceil(MAX_CELLS).max(1);
    row.chunks(together).map(|chunk| chunk.iter().sum()).collect()
}

/// The row in colour.
pub fn colours(row: &[u64]) -> String {
    let cells = cells(row);
    let highest = cells.iter().copied().max().unwrap_or(0);
    let mut text = String::new();
    for value in cells {
        let shade = shade(value, highest);
        let _ = write!(text, "\x1b[38;5;{}m{}", COLOURS[shade], SHADES[shade]);
    }
    text + "\x1b[0m"
}

/// The row as numbers.
pub fn numbers(row: &[u64]) -> String {
    row.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_blank_and_the_highest_is_full() {
        assert_eq!([0, 1, 25, 26, 75, 76, 100].map(|v| shade(v, 100)), [0, 1, 1, 2, 3, 4, 4]);
        assert_eq!(shade(u64::MAX, u64::MAX), 4);
        assert_eq!(shade(0, 0), 0);
    }

    #[test]
    fn a_row_of_many_experts_fits_into_a_terminal_and_keeps_its_sum() {
        let row: Vec<u64> = (0..384).collect();
        let cells = cells(&row);
        assert_eq!(cells.len(), 128);
        assert_eq!(cells.iter().sum::<u64>(), row.iter().sum::<u64>());
    }
}
