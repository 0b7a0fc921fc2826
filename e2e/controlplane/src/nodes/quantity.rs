//! Quantities of Kubernetes as numbers.

/// `2Gi`, `1500m`, `8` or `1e3` as a number; None if it is none of these.
pub(crate) fn parse(text: &str) -> Option<f64> {
    const SUFFIXES: &[(&str, f64)] = &[
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
    ];
    let suffix = SUFFIXES.iter().find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)));
    let (number, factor) = suffix.unwrap_or((text, 1.0));
    Some(number.parse::<f64>().ok().filter(|n| n.is_finite())? * factor)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn suffixes_are_those_of_kubernetes() {
        for (text, want) in [
            ("8", Some(8.0)),
            ("1500m", Some(1.5)),
            ("2Ki", Some(2048.0)),
            ("1e3", Some(1000.0)),
            ("x", None),
        ] {
            assert_eq!(parse(text), want, "{text}");
        }
    }
}
